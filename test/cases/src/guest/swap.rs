// SPDX-License-Identifier: Apache-2.0
//! Swapping to the disk.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use kit::rng::Rng;
use kit::system::{run, run_quietly};

use crate::case::cases;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::Mode;
use crate::guest::system::read;
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-swap", Modes::of(Mode::ALL),
        "processes that use several times the memory they may have live on the disk as swap, and find what they wrote",
        swap;
}

const GROUP: &str = "/sys/fs/cgroup/cases";
/// Memory limit of all processes together, and memory of each, in MiB.
const MAY_HAVE_MIB: usize = 48;
const WANTS_MIB: usize = 64;
const PROCESSES: usize = 2;

const PAGE: usize = 4096;

struct SwapOn(String);

impl SwapOn {
    fn new(device: &str) -> Result<Self> {
        run("mkswap", &[device])?;
        run("swapon", &[device])?;
        Ok(Self(device.to_owned()))
    }
}

impl Drop for SwapOn {
    fn drop(&mut self) {
        run_quietly("swapoff", &[&self.0]);
    }
}

struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self> {
        let path = Path::new(GROUP);
        crate::guest::system::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory")?;
        std::fs::create_dir(path).context(GROUP)?;
        let group = Self(path.to_owned());
        crate::guest::system::write(path.join("memory.max"), &format!("{}M", MAY_HAVE_MIB))?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(why) = std::fs::remove_dir(&self.0) {
            eprintln!("clean-up: {}: {why}", self.0.display());
        }
    }
}

fn swap(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(512))?;
    let on = SwapOn::new(&disk.path()?)?;
    let group = Group::new()?;
    let program = std::env::current_exe()?;
    let into = format!("echo $$ >{GROUP}/cgroup.procs && exec \"$0\" eat {WANTS_MIB}");
    let mut eaters = Vec::new();
    for _ in 0..PROCESSES {
        let program = program.to_string_lossy();
        eaters.push(Command::new("sh").args(["-c", &into, &program]).spawn()?);
    }
    let mut failed = Vec::new();
    for mut eater in eaters {
        let status = eater.wait()?;
        if !status.success() {
            failed.push(status);
        }
    }
    let events = read(group.0.join("memory.events"))?;
    drop((group, on));
    ensure!(failed.is_empty(), "a process that swaps: {failed:?}; {events}");
    let swapped_mib = disk.stat()?.written_sectors >> 11;
    println!("{swapped_mib} MiB were written to swap");
    let least = (PROCESSES * WANTS_MIB - MAY_HAVE_MIB) as u64;
    ensure!(swapped_mib >= least, "only {swapped_mib} MiB went to the disk");
    Ok(())
}

/// The process: writes each page, then checks all pages twice.
pub(crate) fn eat(mib: usize) -> Result<()> {
    let mut memory = vec![0_u8; mib << 20];
    let seed = u64::from(std::process::id());
    for (index, page) in memory.chunks_mut(PAGE).enumerate() {
        Rng::new(seed ^ (index as u64) << 32).fill(page);
    }
    let mut expected = vec![0; PAGE];
    for _ in 0..2 {
        for (index, page) in memory.chunks(PAGE).enumerate() {
            Rng::new(seed ^ (index as u64) << 32).fill(&mut expected);
            if page != expected {
                bail!("page {index} came back from swap with something else in it");
            }
        }
    }
    Ok(())
}
