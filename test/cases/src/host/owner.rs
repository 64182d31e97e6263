// SPDX-License-Identifier: Apache-2.0
//! SIGKILL for a process that owns `/dev/vhost-blk` and loads it: nothing hangs, nothing leaks, and
//! the module can be reloaded.

use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, NullBlkOptions, Userfault, null_blk, wait_until};
use crate::host::integrity::Setup;
use crate::host::load::{stamp, under_load};
use crate::host::module;
use crate::host::target::{self, Target, check_serves, need_module};
use crate::host::visibility::fdinfo_of;
use anyhow::{Context, Result, ensure};
use driver::kernel::abi::MemoryRegion;
use driver::kernel::{KernelOptions, regions_of};
use driver::{Device, Options, Placed, Segment, Session};
use kit::outcome::skip;
use kit::rng::Rng;
use kit::set::Set::{Full, Gating, Plain};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

cases! { Host;
    "owner-sigkill", Gating,
        "the owner of a loaded device is killed; the module can be exchanged after",
        |env| kill_owners(env, 3);
    "owner-sigkill-50", Full,
        "the same fifty times",
        |env| kill_owners(env, 50);
    "owner-fault", Plain,
        "the owner is killed while a transfer waits for a page that its own userfaultfd holds back: its exit ends",
        |env| kill_faulting(env, "own-faulting", NullBlkOptions::USUAL);
    "owner-fault-pause", Plain,
        "the same while another ioctl of the owner waits for the requests in flight",
        |env| kill_faulting(env, "own-pausing", SLOW);
}

/// Line that the owner prints when its load runs.
const RUNNING: &str = "running";

/// Owns a device and loads it without end; the case kills this process.
pub(crate) fn own(env: &Env) -> Result<()> {
    let setup = Setup::usual(0);
    let env = Env { plane: Plane::Direct, ..env.clone() };
    let disk = Disk::given(&env)?.context("own needs --disk")?;
    let specs = setup.specs(&env, &disk);
    let options = setup.options(&specs);
    let Target { device, .. } = target::serve_with(&env, &disk, &options, &setup.kernel())?;
    under_load(device, specs, |handles| {
        handles.wait_for_progress(1)?;
        println!("{RUNNING}");
        std::io::stdout().flush()?;
        loop {
            handles.wait_for_progress(1000)?;
        }
    })?;
    Ok(())
}

/// A transfer that a workqueue moves: no signal ends its wait for a page.
const LARGE_BYTES: u64 = 48 << 20;
/// Address of the memory whose pages never come.
const HELD_GPA: u64 = 1 << 30;

/// The first piece of it, which the module moves before the rest.
const PIECE_BYTES: u64 = 32 << 20;
/// A disk that answers late enough for another ioctl to begin meanwhile.
const SLOW: NullBlkOptions =
    NullBlkOptions { irqmode: 2, completion_ns: 300_000_000, ..NullBlkOptions::USUAL };

/// Owns a device that reads into memory whose pages wait for a userfaultfd of this process; the case kills it.
pub(crate) fn own_faulting(env: &Env) -> Result<()> {
    own_held(env, 1, |_, _| Ok(()))
}

/// The same, where the pages of the rest wait, and another thread waits in an ioctl for the requests in flight.
pub(crate) fn own_pausing(env: &Env) -> Result<()> {
    own_held(env, 2, |session, regions| {
        let device = session.kernel().context("the kernel's device")?.device().try_clone()?;
        std::thread::spawn(move || device.set_mem_table(&regions));
        wait_until("the pause of the queue", || {
            Ok(fdinfo_of(session)?.contains("paused").then_some(()))
        })
    })
}

/// Owns a device that reads into memory whose region `held` waits for a userfaultfd. Calls `meanwhile` after the kick.
fn own_held(
    env: &Env,
    held: usize,
    meanwhile: impl FnOnce(&mut Session, Vec<MemoryRegion>) -> Result<()>,
) -> Result<()> {
    // An exit ends the file with the lowest descriptor last.
    let faults = Userfault::new()?;
    let disk = Disk::given(env)?.context("this owner needs --disk")?;
    let rest = (HELD_GPA + PIECE_BYTES, LARGE_BYTES - PIECE_BYTES);
    let regions = vec![(0, 16 << 20), (HELD_GPA, PIECE_BYTES), rest];
    let options = Options { regions, ..target::options() };
    let mut device = Device::open_kernel(disk.open()?, &options, &KernelOptions::default())?;
    let memory = device.memory().clone();
    faults.hold(&memory.regions()[held])?;
    let header = memory.alloc(16, 16);
    memory.write(header, &[0; 16]);
    let data = Segment::writable(HELD_GPA, LARGE_BYTES as u32);
    let status = Segment::writable(memory.alloc(1, 1), 1);
    let segments = vec![Segment::readable(header, 16), data, status];
    device.queue(0).add_placed(Placed { segments }, true)?;
    device.queue(0).queue().publish();
    device.queue(0).queue().kick();
    meanwhile(device.session(), regions_of(&memory))?;
    faults.wait()?;
    println!("{RUNNING}");
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}

fn kill_faulting(env: &Env, command: &str, options: NullBlkOptions) -> Result<()> {
    need_module()?;
    if Userfault::new().is_err_and(|why| why.kind() == ErrorKind::Unsupported) {
        return Err(skip("this kernel has no userfaultfd"));
    }
    let (disk, _) = null_blk(NullBlkOptions { mib: 64, ..options })?;
    let refs = module::references()?;
    let mut owner = start(command, &disk, env.seed())?;
    owner.kill()?;
    wait_until("the exit of the owner", || Ok(owner.try_wait()?))?;
    module::wait_for_references(refs)?;
    check_serves(env, &disk)
}

/// Starts a process that owns a device, and waits until its load runs.
fn start(command: &str, disk: &Disk, seed: u64) -> Result<Child> {
    let mut owner = Command::new(std::env::current_exe()?)
        .args([command, "--disk"])
        .arg(&disk.path)
        .args(["--seed", &seed.to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(owner.stdout.take().context("its output")?).lines();
    let runs = lines.any(|line| line.is_ok_and(|line| line == RUNNING));
    ensure!(runs, "the owner ended before its load ran");
    Ok(owner)
}

/// Starts and kills `kills` owners.
pub(crate) fn kill_owners(env: &Env, kills: u64) -> Result<()> {
    need_module()?;
    // Some latency, so that requests are in flight at any time. A small disk, because each owner
    // fills it and the case then reads it completely.
    let slow =
        NullBlkOptions { mib: 32, irqmode: 2, completion_ns: 2_000_000, ..NullBlkOptions::USUAL };
    let (disk, _) = null_blk(slow)?;
    let mut rng = Rng::new(env.seed());
    let refs = module::references()?;
    for kill in 0..env.rounds(kills) {
        one(env, &disk, &mut rng).with_context(|| format!("kill {kill}"))?;
        module::wait_for_references(refs).with_context(|| format!("after kill {kill}"))?;
        whole_sectors(&disk).with_context(|| format!("the disk after kill {kill}"))?;
    }
    check_serves(env, &disk)?;
    module::reload(env)?;
    check_serves(env, &disk).context("after the module was exchanged")
}

fn one(env: &Env, disk: &Disk, rng: &mut Rng) -> Result<()> {
    let mut owner = start("own", disk, env.seed() + rng.below(1000))?;
    std::thread::sleep(Duration::from_micros(rng.below(50_000)));
    owner.kill()?;
    owner.wait()?;
    Ok(())
}

/// Checks that each sector is whole and comes from a load that wrote it there.
fn whole_sectors(disk: &Disk) -> Result<()> {
    let mut file = disk.open_as(false, true)?;
    let mut bytes = vec![0; 1 << 20];
    let mut sector = 0;
    while sector < disk.sectors() {
        file.read_exact(&mut bytes)?;
        for sector_bytes in bytes.chunks_exact(512) {
            let whole = stamp::generation_of(sector_bytes, sector).is_some();
            ensure!(whole, "sector {sector} is torn: {:02x?}", &sector_bytes[..16]);
            sector += 1;
        }
    }
    Ok(())
}
