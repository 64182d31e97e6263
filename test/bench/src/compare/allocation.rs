// SPDX-License-Identifier: Apache-2.0
//! Writes into an empty qcow2 image.

use anyhow::Result;
use kit::metric::{Set, in_turn};

use super::args::Args;
use super::sample::sample_new;
use crate::disk;
use crate::load::{Load, Mode, Op};
use crate::plan::point_of;
use crate::server::{Settings, Storage};

/// Method of the measurement, for the report.
pub(super) const METHOD: &str = "Random writes of 4 KiB to an empty qcow2 image, which each server gets \
    anew for each sample, without a warm-up. The disk is so large that nearly every write allocates a cluster. \
    The client sends no FLUSH. Ours has its tables in the file before a write completes, and \
    qemu-storage-daemon keeps them in its memory.";

/// Size of the disk over that of the files: a sample writes to a small part of its clusters.
const LARGER: u64 = 256;

/// Measures all servers of qcow2 images in turn.
pub(super) fn measure(
    args: &Args,
    settings: &Settings,
    storage: Storage,
    set: &mut Set,
) -> Result<()> {
    let wanted = settings.file_of(storage).filter(|_| settings.qcow2 && !args.packed);
    let (Some(file), Some(program)) = (wanted, &settings.ours) else { return Ok(()) };
    for round in 0..args.rounds() {
        for &depth in &args.depths {
            let load = Load { op: Op::Randwrite, ..args.load(Mode::Event, depth) };
            let servers = settings.specs_of_image(storage, &disk::empty_beside(file));
            for spec in in_turn(&servers, round) {
                args.go_on()?;
                let image = disk::create_empty(program, file, settings.size_bytes * LARGER)?;
                let server = spec.start(args.server_cpus())?;
                let figures = sample_new(args, &server, &load, args.server_cpus())?;
                set.add(&server.name, &point_of(storage, &load), figures);
                drop(server);
                image.close()?;
            }
        }
        eprintln!("bench: {storage}, allocation, round {} of {}", round + 1, args.rounds());
    }
    Ok(())
}
