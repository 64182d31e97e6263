// SPDX-License-Identifier: Apache-2.0
//! I/O is charged to the control group of the device's owner.

use crate::case::cases;
use crate::host::disks::usual;
use crate::host::env::Env;
use crate::host::fixture::Disk;
use crate::host::integrity::disk_of;
use crate::host::target::{self, Target, options};
use anyhow::{Context, Result, ensure};
use driver::Request;
use kit::outcome::skip;
use kit::set::Set::Gating;
use kit::system::run;
use std::path::{Path, PathBuf};
use virtio_spec::blk::{RangeSegment, S_OK};

cases! { Host;
    "charge", Gating,
        "reads, writes and discards are counted for the owner's control group",
        |env| to_the_owner(env, usual());
}

/// Bytes of each kind of request.
const BYTES: u64 = 1 << 20;

/// A control group that contains this process until dropped.
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

    /// A counter of the group for a disk, by name: `rbytes`, `wbytes`, `dbytes`.
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
        kit::system::run_quietly("umount", &[&self.mount.path().to_string_lossy()]);
    }
}

fn join(group: &Path) -> Result<()> {
    Ok(std::fs::write(group.join("cgroup.procs"), std::process::id().to_string())?)
}

/// Checks the charge of the worker's reads and writes, and of the workqueue's discards.
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
