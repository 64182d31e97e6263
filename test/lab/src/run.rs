// SPDX-License-Identifier: Apache-2.0
//! The main job: a real guest on a disk served by the daemon, then the same on QEMU's own device.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::accel::{Accel, AccelChoice};
use crate::cache::Cache;
use crate::disk;
use crate::emulator::again_if_lost;
use crate::guest::{Guest, GuestBase, GuestDisk, GuestReport, GuestSpec};
use crate::image::RootImage;
use crate::job::Job;
use crate::kernel::GuestKernel;
use crate::qemu::Qemu;
use crate::report::Comparison;
use crate::server::{Server, ServerCommand};
use kit::interrupt;

/// Time limit of each stage: a stage takes seconds, even under emulation; a loaded machine gets
/// more.
pub const GUEST_PATIENCE: Duration = Duration::from_secs(90);

/// QEMU's I/O engines for its own virtio-blk.
const QEMU_AIO: [&str; 2] = ["io_uring", "native"];

/// The prerequisites of guests, ready to boot.
#[derive(Debug, Clone)]
pub struct Lab {
    /// The directory of downloaded and generated files.
    pub cache: Cache,
    /// QEMU, kernel and root image.
    pub base: GuestBase,
    /// KVM or emulation.
    pub choice: AccelChoice,
}

impl Lab {
    /// Opens the lab. The first time it fetches a QEMU, if needed, and the kernel, and makes the
    /// root image.
    pub fn open() -> Result<Self> {
        let cache = Cache::open()?;
        let qemu = Qemu::cached(&cache)?;
        let kernel = GuestKernel::cached(&cache)?;
        let image = RootImage::cached(&cache, &kernel)?;
        let base = GuestBase { qemu, kernel, image };
        let choice = AccelChoice::cached(&cache, &base)?;
        Ok(Self { cache, base, choice })
    }

    /// Boots a guest on these disks and waits until its job has succeeded.
    /// `watch` gets the word and the value of each of its reports.
    fn run_guest(
        &self,
        vcpus: u32,
        disks: Vec<GuestDisk>,
        job: Job,
        watch: impl FnMut(&str, &str),
    ) -> Result<GuestReport> {
        let spec = GuestSpec { accel: self.choice.accel, vcpus, disks, job };
        Guest::boot(&self.base, &spec)?.finish_watched(GUEST_PATIENCE, watch)
    }
}

/// Options of the main job.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// The disk; without it the lab makes one in its cache.
    pub disk: Option<PathBuf>,
    /// The disk may be formatted even if it has content.
    pub format: bool,
    /// The server of the disk.
    pub server: ServerCommand,
    /// Repetitions of the comparison, in alternating order.
    pub rounds: u32,
    /// Seconds for each load.
    pub seconds: u32,
}

/// The end of a main job whose data was verified.
#[derive(Debug)]
pub enum Outcome {
    /// The comparison was measured, too.
    Measured,
    /// The measurement failed, for this reason.
    NotMeasured(anyhow::Error),
}

/// Runs the main job and prints its results. An error means that the data was not verified.
pub fn run(options: &RunOptions) -> Result<Outcome> {
    let started = Instant::now();
    let lab = Lab::open()?;
    let (disk, _lock) = claim_disk(&lab.cache, options)?;
    println!("guest:       Linux {}", lab.base.kernel.release());
    println!("emulator:    {}", lab.base.qemu);
    println!("accelerator: {}: {}", lab.choice.accel, lab.choice.reason);
    println!("disk:        {}", disk.display());

    println!("guest on {}: format, mount, write, verify, unmount ...", options.server.name());
    let verified = again_if_lost("verify", || verify(&lab, options, &disk))?;
    println!("  ok, {verified}");
    let measured = again_if_lost("measure", || compare(&lab, options, &disk));
    // An interrupted run prints no summary.
    interrupt::check()?;
    let outcome = match measured {
        Ok(comparison) => {
            disk::check_ext4(&disk).context("after the measurement")?;
            println!("\n{comparison}");
            Outcome::Measured
        }
        // The guest may have left the file system mounted, so it cannot be checked.
        Err(error) => Outcome::NotMeasured(error),
    };
    print_summary(&lab, options, &verified, &outcome);
    println!("  disk:                   {}", disk.display());
    println!("  whole run:              {:.0} s", started.elapsed().as_secs_f64());
    Ok(outcome)
}

fn print_summary(lab: &Lab, options: &RunOptions, verified: &str, outcome: &Outcome) {
    println!("  verified in the guest:  {verified}");
    println!("  e2fsck from outside:    clean");
    match outcome {
        Outcome::Measured => {
            let (rounds, seconds) = (options.rounds, options.seconds);
            println!("  measured:               {rounds} rounds of {seconds} s a load");
        }
        Outcome::NotMeasured(_) => println!("  measured:               no, the measurement FAILED"),
    }
    println!("  accelerator:            {}", lab.choice.accel);
    if lab.choice.accel == Accel::Tcg {
        println!("  Emulated guest: its CPU is the limit. Read the ratios, not the speeds.");
    }
}

/// The disk of this run, and the lock that keeps a second run off the lab's own disk.
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
    disk::check_room(&path)?;
    Ok((path, Some(lock)))
}

/// A guest formats the served disk and reads back the data it wrote; then e2fsck checks it from
/// outside.
fn verify(lab: &Lab, options: &RunOptions, disk: &Path) -> Result<String> {
    let job = Job::format_and_verify();
    let report = on_daemon(lab, options, disk, (2, Vec::new()), job, |_, _| ())?;
    disk::check_ext4(disk)?;
    Ok(report.value("verified").context("the guest did not say what it verified")?.to_owned())
}

/// Measures by turns on the served disk and on QEMU's own devices over the same disk, in one guest.
fn compare(lab: &Lab, options: &RunOptions, disk: &Path) -> Result<Comparison> {
    // One virtual CPU under emulation: the host's other CPUs are for the device.
    let vcpus = if lab.choice.accel == Accel::Kvm { 2 } else { 1 };
    let own = QEMU_AIO.map(|aio| GuestDisk::VirtioBlk { path: disk.to_owned(), aio }).to_vec();
    let mut comparison = Comparison::new(&options.server.name(), &QEMU_AIO);
    let turns: Vec<usize> = (0..options.rounds).flat_map(order).collect();
    let names = comparison.names();
    let mut done = 0;
    let progress = |word: &str, number: &str| {
        if word == "turn" {
            let name = number.parse().ok().and_then(|number: usize| names.get(number));
            let (round, name) = (done / names.len() + 1, name.map_or("?", String::as_str));
            println!("round {round} of {}: measure on {name} ...", options.rounds);
            done += 1;
        }
    };
    let job = Job::measure(options.seconds, &turns);
    let report = on_daemon(lab, options, disk, (vcpus, own), job, progress)?;
    comparison.add(&report)?;
    Ok(comparison)
}

/// The order of the disks in a round: each round is the reverse of the one before it.
fn order(round: u32) -> Vec<usize> {
    let disks = 0..1 + QEMU_AIO.len();
    if round.is_multiple_of(2) { disks.collect() } else { disks.rev().collect() }
}

/// Starts the daemon, runs one guest on it and on the `others`, stops the daemon.
fn on_daemon(
    lab: &Lab,
    options: &RunOptions,
    disk: &Path,
    (vcpus, others): (u32, Vec<GuestDisk>),
    job: Job,
    watch: impl FnMut(&str, &str),
) -> Result<GuestReport> {
    let mut server = Server::start(&options.server, disk, vcpus)?;
    let served = GuestDisk::VhostUser { socket: server.socket() };
    let guest = lab.run_guest(vcpus, [vec![served], others].concat(), job, watch);
    // An interrupted run prints no logs.
    interrupt::check()?;
    let report = guest.map_err(|error| server.with_log(error))?;
    server.stop()?;
    Ok(report)
}
