// SPDX-License-Identifier: Apache-2.0
//! The effect of each event. An event ends when the disk has its new state; the load goes on.

use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::plan::Kind;
use super::served::{Device, Served, Successor};
use super::{Machine, Soak, moment};
use crate::rng::Rng;
use crate::wait::wait_until_so;

/// Longest time until the disk or the guest has a new state; emulation needs a part of it.
const STATE_LIMIT: Duration = Duration::from_secs(120);

/// Size of a module of memory: a block of x86-64.
const MODULE_BYTES: u64 = 128 << 20;

/// Tries to replace a daemon whose disk may halt at any moment.
const UPGRADES_MAX: usize = 50;

impl<M: Machine> Soak<'_, M> {
    pub(super) fn carry_out(&mut self, kind: Kind, rng: &mut Rng) -> Result<()> {
        match kind {
            Kind::Quiet => Ok(()),
            Kind::Kill => self.served.replace(Successor::AfterKill),
            Kind::Restart => self.served.replace(Successor::AfterStop),
            Kind::Upgrade => self.served.replace(Successor::ByUpgrade),
            Kind::Switch => self.switch(),
            Kind::Resize => self.resize(rng),
            Kind::Limit => self.limit(rng),
            Kind::Unlimit => self.set_limit(&["--none"]),
            Kind::Pause => self.pause(rng),
            Kind::VmStop => self.stop_vm(rng),
            Kind::Memory => self.plug_memory(),
            Kind::Stall => self.stall(rng),
            Kind::Fail => self.fail(rng),
            Kind::Cache => self.set_cache(),
            Kind::Snapshot => self.snapshot(),
            Kind::Commit => self.commit(),
            Kind::Backup => self.back_up(),
            Kind::Mirror => self.mirror(rng),
        }
    }

    fn switch(&mut self) -> Result<()> {
        let other = match self.served.status("data_plane")? == "kernel" {
            true => "uring",
            false => "kernel",
        };
        if other == "kernel" {
            self.be_fit_for_kernel()?;
        }
        self.served.ctl(&["switch", other])?;
        let now = self.served.status("data_plane")?;
        ensure!(now == other, "the data plane is {now} after a switch to {other}");
        Ok(())
    }

    /// The kernel plane serves raw images, and notes no changes. It refuses other disks.
    fn be_fit_for_kernel(&mut self) -> Result<()> {
        let has_bitmap = self.served.has_bitmap()?;
        if has_bitmap || !self.served.is_raw() {
            let refused = self.served.ctl(&["switch", "kernel"]);
            ensure!(refused.is_err(), "the kernel plane has a disk of qcow2 or with bitmaps");
        }
        if has_bitmap {
            self.served.remove_bitmap()?;
        }
        self.served.commit_all()?;
        if !self.served.is_raw() {
            self.copy(|served| served.mirror(false))?;
        }
        Ok(())
    }

    /// The guest goes on in another image; the old one has the content of one moment.
    fn mirror(&mut self, rng: &mut Rng) -> Result<()> {
        let is_qcow2 = rng.one_in(2);
        self.copy(|served| served.mirror(is_qcow2))
    }

    /// The guest goes on in an overlay; the old image has the content of one moment.
    fn snapshot(&mut self) -> Result<()> {
        self.copy(Served::snapshot)
    }

    fn commit(&mut self) -> Result<()> {
        if !self.served.has_overlays() {
            self.snapshot()?;
            self.writer.wait_for_more(self.machine, 2)?;
        }
        self.served.commit_all()
    }

    fn back_up(&mut self) -> Result<()> {
        if !self.served.may_back_up_more()? {
            self.copy(Served::back_up_fully)?;
            self.writer.wait_for_more(self.machine, 2)?;
        }
        ensure!(self.served.may_back_up_more()?, "there is no bitmap after a full backup");
        self.copy(Served::back_up_more)
    }

    /// Makes a copy, and checks that it has the content of one moment since this call.
    fn copy(&mut self, make: impl FnOnce(&mut Served) -> Result<PathBuf>) -> Result<()> {
        let first = self.writer.count(self.machine)?;
        let copy = make(self.served)?;
        // A write may have ended that is not counted yet.
        let last = self.writer.count(self.machine)? + 1;
        moment::check(&copy, &(first..=last))
    }

    fn resize(&mut self, rng: &mut Rng) -> Result<()> {
        let now = self.served.status("capacity_bytes")?.as_u64().unwrap_or_default();
        let bytes = (now + ((1 + rng.below(8)) << 20)).to_string();
        self.served.ctl(&["resize", &bytes])?;
        let command = format!("blockdev --getsize64 {}", self.node);
        wait_until_so(STATE_LIMIT, "the new size in the guest", || {
            Ok(self.machine.ok(&command)?.trim() == bytes)
        })
    }

    fn limit(&mut self, rng: &mut Rng) -> Result<()> {
        let iops = (100 + rng.below(400)).to_string();
        let mib = format!("{}M", 1 + rng.below(16));
        self.set_limit(&["--iops", &iops, "--bandwidth", &mib])
    }

    /// Sets a limit that stays during the next events.
    fn set_limit(&mut self, words: &[&str]) -> Result<()> {
        self.limit = words.iter().map(|word| (*word).to_owned()).collect();
        self.served.ctl(&[&["limit"], words].concat()).map(drop)
    }

    fn pause(&mut self, rng: &mut Rng) -> Result<()> {
        self.served.ctl(&["pause"])?;
        sleep(moment(rng));
        self.others_go_on()?;
        self.served.ctl(&["resume"]).map(drop)
    }

    fn stop_vm(&mut self, rng: &mut Rng) -> Result<()> {
        self.machine.monitor("stop", json!({}))?;
        sleep(moment(rng));
        self.machine.monitor("cont", json!({})).map(drop)
    }

    fn plug_memory(&mut self) -> Result<()> {
        let total = "awk '/^MemTotal/ { print $2 }' /proc/meminfo";
        let before = self.machine.ok(total)?;
        let (memory, module) = (format!("memory{}", self.modules), format!("dimm{}", self.modules));
        self.modules += 1;
        let object = json!({
            "qom-type": "memory-backend-memfd", "id": memory, "size": MODULE_BYTES, "share": true
        });
        self.machine.monitor("object-add", object)?;
        let device = json!({ "driver": "pc-dimm", "id": module, "memdev": memory });
        self.machine.monitor("device_add", device)?;
        wait_until_so(STATE_LIMIT, "the new memory in the guest", || {
            self.machine
                .ok("echo online_movable >/sys/devices/system/memory/auto_online_blocks")?;
            Ok(self.machine.ok(total)? != before)
        })
    }

    /// The storage answers so late that the daemon tells it; then it is fast again.
    fn stall(&mut self, rng: &mut Rng) -> Result<()> {
        if let Some(device) = self.served.device() {
            device.suspend()?;
            let stalled = self.wait_for_stall().and_then(|()| self.others_go_on());
            sleep(moment(rng));
            // A suspended device would hold the daemon, and the end of the case.
            self.device()?.resume().and(stalled)?;
            return self.wait_for("the end of a stall", "stalled_queues", is_empty);
        }
        let us = 1_500_000 + rng.below(500_000);
        self.served
            .configure(&format!("wrap = ['delay:us={us},ops=read+write']\nio-timeout = 0.3\n"))?;
        self.begin_trouble(rng)?;
        self.wait_for_stall()?;
        self.end_trouble(rng)
    }

    fn wait_for_stall(&mut self) -> Result<()> {
        self.wait_for("a stall", "stalled_queues", |queues| !is_empty(queues))
    }

    fn device(&self) -> Result<&dyn Device> {
        self.served.device().context("the disk is no device")
    }

    /// Some requests fail for a time. The operator resumes the disk, some times in vain.
    fn fail_device(&mut self, rng: &mut Rng) -> Result<()> {
        self.device()?.fail()?;
        let halted = self.resume_in_vain(rng);
        self.device()?.mend().and(halted)?;
        self.served.ctl(&["resume"])?;
        self.wait_for("the end of a halt", "halted", Value::is_null)
    }

    fn resume_in_vain(&mut self, rng: &mut Rng) -> Result<()> {
        for _ in 0..=rng.below(3) {
            self.wait_for("a halt", "halted", |halt| !halt.is_null())?;
            self.others_go_on()?;
            self.served.ctl(&["resume"])?;
        }
        self.wait_for("a halt", "halted", |halt| !halt.is_null())
    }

    /// Some requests fail, and halt the disk. The operator resumes it, some times in vain.
    fn fail(&mut self, rng: &mut Rng) -> Result<()> {
        if self.served.device().is_some() {
            return self.fail_device(rng);
        }
        let every = 5 + rng.below(30);
        let (policy, errno) = *rng.pick(&[("stop", "EIO"), ("enospc", "ENOSPC")]);
        let operations = *rng.pick(&["read+write", "write"]);
        self.served.configure(&format!(
            "wrap = ['fault:ops={operations},every={every},errno={errno}']\non-error = '{policy}'\n"
        ))?;
        self.begin_trouble(rng)?;
        self.resume_in_vain(rng)?;
        self.end_trouble(rng)
    }

    /// Starts the program with the troublesome options. Only the io_uring plane can have them, so
    /// that a disk of the kernel plane needs a new start.
    fn begin_trouble(&mut self, rng: &mut Rng) -> Result<()> {
        let successors = [Successor::AfterKill, Successor::AfterStop, Successor::ByUpgrade];
        let possible = match self.served.status("data_plane")? == "kernel" {
            true => &successors[..2],
            false => &successors[..],
        };
        self.served.replace(*rng.pick(possible))
    }

    /// Starts the program without them. An upgrade is refused while the disk is halted. With a low
    /// limit, hardly more than the requests that had failed are tried again after a resume, so that
    /// the disk is not halted again by others before the upgrade.
    fn end_trouble(&mut self, rng: &mut Rng) -> Result<()> {
        self.served.configure("")?;
        if rng.one_in(2) {
            return self.served.replace(Successor::AfterKill);
        }
        self.served.ctl(&["limit", "--iops", "1"])?;
        for _ in 0..UPGRADES_MAX {
            self.served.ctl(&["resume"])?;
            match self.served.replace(Successor::ByUpgrade) {
                Err(why) if format!("{why:#}").contains("halted") => {}
                Err(why) => return Err(why),
                Ok(()) => {
                    let limit: Vec<&str> = self.limit.iter().map(String::as_str).collect();
                    return self.served.ctl(&[&["limit"], &limit[..]].concat()).map(drop);
                }
            }
        }
        bail!("the disk was halted at each of {UPGRADES_MAX} upgrades")
    }

    fn wait_for(&mut self, what: &str, member: &str, is_so: fn(&Value) -> bool) -> Result<()> {
        wait_until_so(STATE_LIMIT, what, || Ok(is_so(&self.served.status(member)?)))
    }

    /// Write-through at once; back only without a front-end, so that a connected one is refused.
    fn set_cache(&mut self) -> Result<()> {
        if self.served.status("writeback")? == true {
            self.served.ctl(&["set-cache", "writethrough"])?;
            ensure!(self.served.status("writeback")? == false, "the cache mode did not change");
            return Ok(());
        }
        let refused = self.served.ctl(&["set-cache", "writeback"]).err();
        let why = refused.context("write-back was not refused to a connected front-end")?;
        let why = format!("{why:#}");
        ensure!(why.contains("started in write-through mode"), "write-back was refused: {why}");
        ensure!(self.served.status("writeback")? == false, "a refusal changed the cache mode");
        Ok(())
    }
}

fn is_empty(queues: &Value) -> bool {
    queues.as_array().is_none_or(Vec::is_empty)
}

/// The length of an intended pause.
fn moment(rng: &mut Rng) -> Duration {
    Duration::from_millis(rng.below(300))
}
