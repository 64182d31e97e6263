// SPDX-License-Identifier: Apache-2.0
//! SIGKILL for a process that owns `/dev/vhost-blk` and loads it: nothing hangs, nothing leaks, and
//! the module can be reloaded.

use crate::case::cases;
use crate::host::env::{Env, Plane};
use crate::host::fixture::{Disk, NullBlkOptions, null_blk};
use crate::host::integrity::Setup;
use crate::host::load::{stamp, under_load};
use crate::host::module;
use crate::host::target::{self, Target, check_serves, need_module};
use anyhow::{Context, Result, ensure};
use kit::rng::Rng;
use kit::set::Set::{Full, Gating};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

cases! { Host;
    "owner-sigkill", Gating,
        "the owner of a loaded device is killed; the module can be exchanged after",
        |env| kill_owners(env, 3);
    "owner-sigkill-50", Full,
        "the same fifty times",
        |env| kill_owners(env, 50);
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
    let mut owner = Command::new(std::env::current_exe()?)
        .args(["own", "--disk"])
        .arg(&disk.path)
        .args(["--seed", &(env.seed() + rng.below(1000)).to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(owner.stdout.take().context("its output")?).lines();
    let mut running = false;
    for line in lines {
        running = line? == RUNNING;
        if running {
            break;
        }
    }
    std::thread::sleep(Duration::from_micros(rng.below(50_000)));
    owner.kill()?;
    owner.wait()?;
    ensure!(running, "the owner ended before its load ran");
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
