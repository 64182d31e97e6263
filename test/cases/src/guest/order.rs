// SPDX-License-Identifier: Apache-2.0
//! Flushes come in time: after a power cut at any point, all data that was reported durable is
//! there, and the file system is sound.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kit::file_system::FileSystem;
use kit::rng::Rng;
use kit::system::run;

use super::file_ops::FileOps;
use super::file_systems::Mounted;
use crate::case::cases;
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::Mode;
use crate::guest::{Context, Modes};
use kit::disks::Ask;

cases! { Guest;
    "guest-power-cut-ext4", Modes::of(Mode::ALL).at_every_change(&[Mode::Bio]).and_long(),
        "after a power cut at any point ext4 is whole, and all is there that fdatasync said was durable",
        |context| power_cut(context, FileSystem::Ext4);
    "guest-power-cut-xfs", Modes::of(Mode::ALL),
        "after a power cut at any point XFS is whole, and all is there that fdatasync said was durable",
        |context| power_cut(context, FileSystem::Xfs);
}

const RECORD: usize = 4096;
const LOG: &str = "log";

/// A record, with the number of journal entries at the time when it was durable.
struct Durable {
    record: u64,
    entries: u64,
}

fn power_cut(context: &Context, kind: FileSystem) -> Result<()> {
    let bytes = kind.disk_mib() << 20;
    let physical_block_bytes = kind.physical_block_bytes();
    let journal = Backing::Journal { bytes, physical_block_bytes };
    let disk = Disk::plug(&context.machine, &Plug::of(journal))?;
    let journal = disk.served()?.to_owned();
    let count = || context.machine.ask_count(&Ask::Count { journal: journal.clone() });
    let path = disk.path()?;
    kind.make(&path)?;
    let begin = count()?;
    let durable = work(context, &path, kind, &count)?;
    let end = count()?;
    println!("{} entries, {} records", end - begin, durable.len());
    let mut rng = Rng::new(context.seed);
    for _ in 0..(context.effort.steps / 33).min(30) {
        let at = begin + rng.below(end - begin + 1);
        let (image, seed) = (format!("cut-{at}"), rng.number());
        let ask = Ask::Cut { journal: journal.clone(), image: image.clone(), at, seed };
        let cut = context.machine.ask_path(&ask)?;
        let last = durable.iter().rev().find(|durable| durable.entries <= at);
        let seen = look(context, &cut, kind, last.map_or(0, |durable| durable.record));
        context.machine.ask(&Ask::RemoveImage { name: image })?;
        seen.with_context(|| format!("a power cut after {at} of {end} entries, seed {seed}"))?;
    }
    Ok(())
}

/// Appends records and makes each durable, while other files change.
fn work(
    context: &Context,
    path: &str,
    kind: FileSystem,
    count: &dyn Fn() -> Result<u64>,
) -> Result<Vec<Durable>> {
    let mounted = Mounted::new(path, kind, "rw")?;
    let log = OpenOptions::new().create(true).append(true).open(mounted.file(LOG))?;
    let mut others = [
        FileOps::new(&mounted.file("one"), context.seed)?,
        FileOps::new(&mounted.file("two"), context.seed + 1)?,
    ];
    let mut durable = Vec::new();
    for record in 1..=u64::from(context.effort.steps / 4) {
        std::io::Write::write_all(&mut &log, &record_of(record))?;
        log.sync_data()?;
        durable.push(Durable { record, entries: count()? });
        others.iter_mut().try_for_each(FileOps::step)?;
    }
    drop((log, others));
    mounted.unmount()?;
    Ok(durable)
}

fn record_of(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(RECORD / 8)
}

/// Mounts the image after a power cut, which replays the journal, and checks the records.
fn look(context: &Context, image: &Path, kind: FileSystem, records: u64) -> Result<()> {
    let disk = Disk::plug_image(&context.machine, image)?;
    let path = disk.path()?;
    let options = if kind == FileSystem::Xfs { "nouuid" } else { "rw" };
    let mounted = Mounted::new(&path, kind, options).context("the journal is not replayed")?;
    if records > 0 {
        let log = File::open(mounted.file(LOG)).context("the log is lost")?;
        let mut bytes = vec![0; RECORD];
        for record in 1..=records {
            let found = log.read_exact_at(&mut bytes, (record - 1) * RECORD as u64);
            found.with_context(|| format!("record {record} of {records} is lost"))?;
            ensure!(bytes == record_of(record), "record {record} of {records} is wrong");
        }
    }
    run("ls", &["-R", &mounted.place().to_string_lossy()])?;
    mounted.unmount()?;
    kind.check(&path)
}
