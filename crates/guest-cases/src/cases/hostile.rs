// SPDX-License-Identifier: Apache-2.0
//! A device that lies. The kernel must survive it unharmed, whatever becomes of the I/O, and be
//! rid of the disk when it is unplugged.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use virtio_spec::features::F_RING_PACKED;

use crate::case::{Case, Context};
use crate::load::{Errors, Load, Summary};
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug, Way};
use crate::machine::slot::Slot;
use crate::mode::Mode;
use crate::protocol::Lie;
use crate::system::{read, wait_for};

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-hostile-ring",
        short: &[Mode::Request, Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "used ids out of range, twice and at random, an index that jumps, a ring that is scribbled on, chains that get longer: the kernel lives and the disk goes",
        run: |context| each(context, RING, &Start::after(64)),
    },
    Case {
        name: "guest-hostile-packed",
        short: &[Mode::BioPoll],
        modes: Mode::ALL,
        has_long: true,
        about: "the same lies in packed virtqueues: the kernel lives and the disk goes",
        run: |context| each(context, &[RING, TRUTH].concat(), &Start { packed: true, after: 64 }),
    },
    Case {
        name: "guest-hostile-answers",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "wrong lengths, no status or an unknown one, interrupts without reason, no answers: the kernel lives and the disk goes",
        run: |context| each(context, ANSWERS, &Start::after(64)),
    },
    Case {
        name: "guest-hostile-config",
        short: &[Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "limits of zero, limits without bound, random configurations, a capacity that jumps: the kernel lives and the disk goes",
        run: |context| each(context, CONFIG, &Start::after(0)),
    },
    Case {
        name: "guest-hostile-probe",
        short: &[],
        modes: Mode::OURS,
        has_long: false,
        about: "a device that lies from the first request on can be unplugged",
        run: |context| each(context, &[RING, ANSWERS].concat(), &Start::after(0)),
    },
    Case {
        name: "guest-hostile-start",
        short: &[Mode::Request, Mode::Bio],
        modes: Mode::OURS,
        has_long: true,
        about: "a device that breaks its ring while it is probed is reset, is not started again, and goes",
        run: start,
    },
];

const RING: &[Lie] = &[
    Lie::IdsOutOfRange,
    Lie::IdsTwice,
    Lie::IdsRandom,
    Lie::IndexJumps,
    Lie::ScribblesRing,
    Lie::ChainsJoined,
];
/// Shows that the others are lies in a disk that works.
const TRUTH: &[Lie] = &[Lie::Nothing];
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

/// How a device begins.
struct Start {
    /// With packed rings.
    packed: bool,
    /// How many requests it answers as it should.
    after: u32,
}

impl Start {
    fn after(after: u32) -> Self {
        Self { packed: false, after }
    }

    fn plug(&self, lie: Lie, seed: u64) -> Plug {
        let plug = Plug::of(Backing::Liar { lie, after: self.after, seed });
        plug.with("packed", self.packed)
    }
}

/// How long a disk is used.
const USE: Duration = Duration::from_millis(700);

/// Every lie, and the disk goes in one way and in the other. Where a device begins with the truth,
/// at least one disk must have been used.
fn each(context: &Context, lies: &[Lie], start: &Start) -> Result<()> {
    let mut used = 0;
    for round in 0..(context.effort.rounds / 10).max(1) {
        for (index, &lie) in lies.iter().enumerate() {
            let seed = context.seed.wrapping_add(u64::from(round));
            let what = || format!("{lie:?}, seed {seed}");
            if start.after == 0 && matches!(lie, Lie::NeverAnswers | Lie::AnswersHalf) {
                silent_from_the_start(context, start, lie, seed).with_context(what)?;
                continue;
            }
            let way =
                if (index as u32 + round).is_multiple_of(2) { Way::Orderly } else { Way::Surprise };
            println!("{lie:?}, {way:?}");
            used += one(context, start, lie, seed, way).with_context(what)?;
        }
    }
    ensure!(start.after == 0 || used > 0, "no disk was used, whatever the device did");
    Ok(())
}

/// The virtio core starts a device that is not started when it was probed, and ours was just reset.
/// What goes wrong then depends on which of the two comes first.
fn start(context: &Context) -> Result<()> {
    for round in 0..context.effort.rounds {
        let plug = Start::after(0).plug(Lie::IdsTwice, context.seed);
        let disk = Disk::plug(&context.machine, &plug)?;
        let status = disk.virtio()?.0.join("status");
        wait_for("the device to be reset", || (read(&status).ok()? == "0x00000000").then_some(()))
            .with_context(|| format!("round {round}: its status is {:?}", read(&status)))?;
        // The slot is busy for a moment after it was filled.
        std::thread::sleep(USE);
        disk.unplug(Way::Orderly)?;
    }
    Ok(())
}

/// The driver waits in its probe, which the kernel's hot-plug driver waits for: it can only be pulled
/// out. Nothing may open its node, which would wait, too.
fn silent_from_the_start(context: &Context, start: &Start, lie: Lie, seed: u64) -> Result<()> {
    if !Slot::have_hot_plug_driver() {
        println!("{lie:?}: not here, where the case itself plugs and would wait with the driver");
        return Ok(());
    }
    println!("{lie:?}, pulled out");
    let disk = Disk::plug_device(&context.machine, &start.plug(lie, seed))?;
    std::thread::sleep(USE);
    disk.unplug(Way::Surprise)
}

/// One disk. Returns how many reads, writes and flushes were tried on it.
fn one(context: &Context, start: &Start, lie: Lie, seed: u64, way: Way) -> Result<u64> {
    let disk = Disk::plug_device(&context.machine, &start.plug(lie, seed))?;
    std::thread::sleep(USE);
    // A driver may have refused it.
    let size = disk.bytes().unwrap_or(0).min(16 << 20);
    let load = match disk.path() {
        Ok(path) if size >= 8 << 20 => Load::start(&path, size, 4, Errors::Careless, seed),
        Ok(_) => Err(anyhow!("it has {size} bytes only")),
        Err(why) => Err(why),
    };
    if let (Lie::Nothing, Ok(load)) = (lie, &load) {
        load.wait_for(1).context("a device that tells the truth")?;
        ensure!(disk.has_feature(F_RING_PACKED)? == start.packed, "another kind of ring");
    }
    std::thread::sleep(USE);
    let gone = disk.unplug(way);
    let tried = match load {
        Ok(load) => {
            let Summary { operations, errors } = load.finish()?;
            println!("  {operations} went well, {errors} did not");
            operations + errors
        }
        Err(why) => {
            println!("  no I/O: {why:#}");
            0
        }
    };
    gone.map(|()| tried)
}
