// SPDX-License-Identifier: Apache-2.0
//! A device that lies. The kernel must survive it unharmed, whatever becomes of the I/O, and be
//! rid of the disk when it is unplugged.

use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::case::{Case, Context};
use crate::load::{Errors, Load};
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug, Way};
use crate::mode::Mode;
use crate::protocol::Lie;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-hostile-ring",
        short: &[Mode::Request, Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "used ids out of range, twice and at random, an index that jumps, a ring that is scribbled on: the kernel lives and the disk goes",
        run: |context| each(context, RING, 64),
    },
    Case {
        name: "guest-hostile-answers",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "wrong lengths, no status or an unknown one, interrupts without reason, no answers: the kernel lives and the disk goes",
        run: |context| each(context, ANSWERS, 64),
    },
    Case {
        name: "guest-hostile-config",
        short: &[Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "limits of zero, limits without bound, random configurations, a capacity that jumps: the kernel lives and the disk goes",
        run: |context| each(context, CONFIG, 0),
    },
    Case {
        name: "guest-hostile-probe",
        short: &[],
        modes: Mode::OURS,
        has_long: false,
        about: "a device that lies from the first request on can be unplugged",
        run: |context| each(context, &[RING, ANSWERS].concat(), 0),
    },
];

const RING: &[Lie] =
    &[Lie::IdsOutOfRange, Lie::IdsTwice, Lie::IdsRandom, Lie::IndexJumps, Lie::ScribblesRing];
const ANSWERS: &[Lie] = &[
    Lie::Nothing,
    Lie::LengthsHuge,
    Lie::LengthsZero,
    Lie::StatusNotWritten,
    Lie::StatusUnknown,
    Lie::NeverAnswers,
    Lie::AnswersHalf,
    Lie::CallsAlways,
];
const CONFIG: &[Lie] = &[Lie::ConfigZero, Lie::ConfigHuge, Lie::ConfigRandom, Lie::CapacityJumps];

/// How long a disk is used.
const USE: Duration = Duration::from_millis(700);

/// Every lie, and the disk goes in one way and in the other.
fn each(context: &Context, lies: &[Lie], after: u32) -> Result<()> {
    for round in 0..(context.effort.rounds / 10).max(1) {
        for (index, &lie) in lies.iter().enumerate() {
            let way =
                if (index as u32 + round).is_multiple_of(2) { Way::Orderly } else { Way::Surprise };
            let seed = context.seed.wrapping_add(u64::from(round));
            println!("{lie:?}, {way:?}");
            one(context, lie, after, seed, way).with_context(|| format!("{lie:?}, seed {seed}"))?;
        }
    }
    Ok(())
}

fn one(context: &Context, lie: Lie, after: u32, seed: u64, way: Way) -> Result<()> {
    let plug = Plug::of(Backing::Liar { lie, after, seed });
    let disk = Disk::plug_device(&context.machine, &plug)?;
    std::thread::sleep(USE);
    // A driver may have refused it.
    let size = disk.bytes().unwrap_or(0).min(16 << 20);
    let load = match disk.path() {
        Ok(path) if size >= 8 << 20 => Load::start(&path, size, 4, Errors::Careless, seed).ok(),
        _ => None,
    };
    if load.is_none() {
        println!("  no I/O: {size} bytes");
    }
    std::thread::sleep(USE);
    let gone = disk.unplug(way);
    if let Some(load) = load {
        let summary = load.finish()?;
        println!("  {} went well, {} did not", summary.operations, summary.errors);
    }
    gone
}
