// SPDX-License-Identifier: Apache-2.0
//! Whose I/O it is: the control group of the device's owner is charged.

use crate::env::Env;
use crate::fixture::Disk;
use crate::integrity::disk_of;
use crate::target::{self, Target, options};
use anyhow::{Context, Result, ensure};
use driver::Request;
use lab_case::outcome::skip;
use lab_case::system::run;
use std::path::{Path, PathBuf};
use virtio_spec::blk::{RangeSegment, S_OK};

/// Bytes of each kind.
const BYTES: u64 = 1 << 20;

/// A control group with this process in it, until dropped.
struct Group {
    /// The hierarchy, mounted for this case.
    mount: tempfile::TempDir,
    path: PathBuf,
}

impl Group {
    fn enter() -> Result<Self> {
        let mount = tempfile::tempdir()?;
        run("mount", &["-t", "cgroup2", "none", &mount.path().to_string_lossy()])?;
        let group = Self { path: mount.path().join("vhost-blk-charge"), mount };
        let known = std::fs::read_to_string(group.mount.path().join("cgroup.controllers"))?;
        if !known.split_whitespace().any(|name| name == "io") {
            return Err(skip("this kernel's control groups do not count I/O"));
        }
        std::fs::write(group.mount.path().join("cgroup.subtree_control"), "+io")?;
        std::fs::create_dir(&group.path)?;
        join(&group.path)?;
        Ok(group)
    }

    /// What was counted for a disk, by name: `rbytes`, `wbytes`, `dbytes`.
    fn count(&self, number: &str, name: &str) -> Result<u64> {
        let text = std::fs::read_to_string(self.path.join("io.stat"))?;
        let line = text.lines().find_map(|line| line.strip_prefix(number)?.strip_prefix(' '));
        let Some(line) = line else { return Ok(0) };
        let mut pairs = line.split_whitespace().filter_map(|word| word.split_once('='));
        let value = pairs.find_map(|(key, value)| (key == name).then_some(value));
        value.with_context(|| format!("no {name} in: {line}"))?.parse().context("a count")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(why) =
            join(self.mount.path()).and_then(|()| Ok(std::fs::remove_dir(&self.path)?))
        {
            eprintln!("clean-up: {why:#}");
        }
        lab_case::system::run_quietly("umount", &[&self.mount.path().to_string_lossy()]);
    }
}

fn join(group: &Path) -> Result<()> {
    Ok(std::fs::write(group.join("cgroup.procs"), std::process::id().to_string())?)
}

/// Reads and writes of the queue's worker, discards of the workqueue.
pub(crate) fn to_the_owner(env: &Env, disk: Result<Disk>) -> Result<()> {
    let disk = disk_of(env, disk)?;
    let number = std::fs::read_to_string(disk.sysfs()?.join("dev"))?.trim().to_owned();
    let group = Group::enter()?;
    let Target { mut device, daemon: _daemon } = target::serve(env, &disk, &options())?;
    let before = |name| group.count(&number, name);
    let (reads, writes, discards) = (before("rbytes")?, before("wbytes")?, before("dbytes")?);
    let mut data = vec![1; BYTES as usize];
    device.write(0, &data)?;
    device.read(0, &mut data)?;
    let range = RangeSegment { sector: 0, num_sectors: (BYTES / 512) as u32, flags: 0 };
    let layout = device.layout();
    let discard = device.queue(0).execute(&Request::discard(&[range]), &layout)?;
    ensure!(discard.status == Some(S_OK), "the discard ended with {:?}", discard.status);
    for (name, before) in [("rbytes", reads), ("wbytes", writes), ("dbytes", discards)] {
        let counted = group.count(&number, name)? - before;
        println!("{name}: {counted}");
        ensure!(counted == BYTES, "{counted} bytes instead of {BYTES} were counted as {name}");
    }
    Ok(())
}
