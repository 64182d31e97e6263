// SPDX-License-Identifier: Apache-2.0
//! The main job: a real guest on a disk served by the daemon, then the same on QEMU's own device.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::accel::{Accel, AccelChoice};
use crate::cache::Cache;
use crate::disk;
use crate::guest::{Guest, GuestBase, GuestDisk, GuestReport, GuestSpec};
use crate::image::RootImage;
use crate::interrupt;
use crate::job::Job;
use crate::kernel::GuestKernel;
use crate::report::{Comparison, Measurement};
use crate::server::{Server, ServerCommand};

/// Each stage of a guest's job takes seconds, also under emulation; a loaded machine gets more.
pub const GUEST_PATIENCE: Duration = Duration::from_secs(90);

/// QEMU's ways to do the I/O of its own virtio-blk.
const QEMU_AIO: [&str; 2] = ["io_uring", "native"];

/// What guests need, ready to boot.
#[derive(Debug, Clone)]
pub struct Lab {
    /// Where expensive things are kept.
    pub cache: Cache,
    /// Kernel and root image.
    pub base: GuestBase,
    /// KVM or emulation.
    pub choice: AccelChoice,
}

impl Lab {
    /// Opens the lab; the first time it fetches the kernel and makes the root image.
    pub fn open() -> Result<Self> {
        let cache = Cache::open()?;
        let kernel = GuestKernel::cached(&cache)?;
        let image = RootImage::cached(&cache, &kernel)?;
        let base = GuestBase { kernel, image };
        let choice = AccelChoice::cached(&cache, &base)?;
        Ok(Self { cache, base, choice })
    }

    /// Boots a guest on a served disk and waits until its job has ended well.
    pub fn run_guest(&self, vcpus: u32, disk: GuestDisk, job: Job) -> Result<GuestReport> {
        let spec = GuestSpec { accel: self.choice.accel, vcpus, disk: Some(disk), job };
        Guest::boot(&self.base, &spec)?.finish(GUEST_PATIENCE)
    }
}

/// Options of the main job.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// The disk; without it the lab makes one in its cache.
    pub disk: Option<PathBuf>,
    /// The disk may be formatted even if it has content.
    pub format: bool,
    /// What serves the disk.
    pub server: ServerCommand,
    /// How often the comparison is repeated, in alternating order.
    pub rounds: u32,
    /// Seconds for each load.
    pub seconds: u32,
}

/// Runs the main job and prints what it finds.
pub fn run(options: &RunOptions) -> Result<()> {
    let started = Instant::now();
    let lab = Lab::open()?;
    let (disk, _lock) = claim_disk(&lab.cache, options)?;
    println!("guest:       Linux {}", lab.base.kernel.release());
    println!("accelerator: {}: {}", lab.choice.accel, lab.choice.reason);
    println!("disk:        {}", disk.display());

    println!("guest on {}: format, mount, write, verify, unmount ...", options.server.name());
    let verified = verify(&lab, options, &disk)?;
    println!("  ok, {verified}");
    let comparison = compare(&lab, options, &disk)?;
    disk::check_ext4(&disk)?;

    println!("\n{comparison}");
    println!("  verified in the guest:  {verified}");
    println!("  e2fsck from outside:    clean");
    println!("  accelerator:            {}", lab.choice.accel);
    println!("  disk:                   {}", disk.display());
    println!(
        "  rounds:                 {} of {} s a load, medians",
        options.rounds, options.seconds
    );
    if lab.choice.accel == Accel::Tcg {
        println!("  Emulated guest: its CPU is the limit. Read the ratios, not the speeds.");
    }
    println!("  whole run:              {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// The disk of this run, and the lock that keeps a second run off the lab's own one.
fn claim_disk(cache: &Cache, options: &RunOptions) -> Result<(PathBuf, Option<File>)> {
    if let Some(path) = &options.disk {
        disk::claim(path, options.format)?;
        let path = path.canonicalize().with_context(|| path.display().to_string())?;
        return Ok((path, None));
    }
    let lock = File::create(cache.dir().join(".lock-run"))?;
    if lock.try_lock().is_err() {
        bail!("another run is using the lab's disk: wait for it, or give this one DISK=path");
    }
    let path = cache.dir().join("run.img");
    disk::create(&path, disk::DISK_BYTES)?;
    Ok((path, Some(lock)))
}

/// A guest formats the served disk and reads back what it wrote.
fn verify(lab: &Lab, options: &RunOptions, disk: &Path) -> Result<String> {
    let vcpus = 2;
    let report = on_daemon(lab, options, disk, vcpus, Job::format_and_verify())?;
    Ok(report.value("verified").context("the guest did not say what it verified")?.to_owned())
}

/// Measures by turns on the served disk and on QEMU's own device over the same disk.
fn compare(lab: &Lab, options: &RunOptions, disk: &Path) -> Result<Comparison> {
    let name = options.server.name();
    let mut comparison = Comparison { server: name.clone(), ..Comparison::default() };
    // One virtual CPU under emulation: the host's other CPUs are for the device.
    let vcpus = if lab.choice.accel == Accel::Kvm { 2 } else { 1 };
    for round in 0..options.rounds {
        let mut turns = [None, Some(QEMU_AIO[0]), Some(QEMU_AIO[1])];
        if round % 2 == 1 {
            turns.reverse();
        }
        for turn in turns {
            let turn_name = turn.map_or(name.clone(), |aio| format!("QEMU virtio-blk aio={aio}"));
            println!("round {} of {}: measure on {turn_name} ...", round + 1, options.rounds);
            let job = Job::measure(options.seconds);
            match turn {
                None => {
                    let report = on_daemon(lab, options, disk, vcpus, job)?;
                    comparison.ours.push(Measurement::from_report(&report)?);
                }
                Some(aio) => {
                    let own = GuestDisk::VirtioBlk { path: disk.to_owned(), aio };
                    let report = lab.run_guest(vcpus, own, job)?;
                    let measurement = Measurement::from_report(&report)?;
                    comparison.qemu.entry(aio).or_default().push(measurement);
                }
            }
        }
    }
    Ok(comparison)
}

/// Starts the daemon, runs one guest on it, stops the daemon.
fn on_daemon(
    lab: &Lab,
    options: &RunOptions,
    disk: &Path,
    vcpus: u32,
    job: Job,
) -> Result<GuestReport> {
    let server = Server::start(&options.server, disk, vcpus)?;
    let guest = lab.run_guest(vcpus, GuestDisk::VhostUser { socket: server.socket() }, job);
    // Whoever interrupts the run wants no logs.
    interrupt::check()?;
    let report =
        guest.map_err(|error| anyhow!("{error:#}\nthe server's log:\n{}", server.log()))?;
    server.stop()?;
    Ok(report)
}
