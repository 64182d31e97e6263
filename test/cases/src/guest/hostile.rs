// SPDX-License-Identifier: Apache-2.0
//! A lying device. The kernel must survive it unharmed, whatever the outcome of the I/O, and must
//! remove the disk when it is unplugged.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use kit::outcome::{expect_io_errors, skip_part};
use virtio_spec::features::F_RING_PACKED;

use crate::case::cases;
use crate::guest::load::{Errors, Load, Summary};
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug, Way};
use crate::guest::machine::slot::Slot;
use crate::guest::mode::Mode;
use crate::guest::system::{read, wait_for};
use crate::guest::{Context, Modes};
use kit::disks::Lie;

cases! { Guest;
    "guest-hostile-ring", Modes::of(Mode::ALL).at_every_change(&[Mode::Request, Mode::Bio]).and_long(),
        "used ids out of range, twice and at random, an index that jumps, a ring that is scribbled on, chains that get longer: the kernel lives and the disk goes",
        |context| each(context, RING, &Start::after(64));
    "guest-hostile-packed", Modes::of(Mode::ALL).at_every_change(&[Mode::BioPoll]).and_long(),
        "the same lies in packed virtqueues: the kernel lives and the disk goes",
        |context| each(context, &[RING, TRUTH].concat(), &Start { packed: true, after: 64 });
    "guest-hostile-answers", Modes::of(Mode::ALL),
        "wrong lengths, no status or an unknown one, interrupts without reason, no answers: the kernel lives and the disk goes",
        |context| each(context, ANSWERS, &Start::after(64));
    "guest-hostile-config", Modes::of(Mode::ALL).at_every_change(&[Mode::Bio]).and_long(),
        "limits of zero, limits without bound, random configurations, a capacity that jumps: the kernel lives and the disk goes",
        config;
    "guest-hostile-probe", Modes::of(Mode::OURS),
        "a device that lies from the first request on can be unplugged",
        |context| each(context, &[RING, ANSWERS].concat(), &Start::after(0));
    "guest-hostile-start", Modes::of(Mode::OURS).at_every_change(&[Mode::Request, Mode::Bio]).and_long(),
        "a device that breaks its ring while it is probed is reset, is not started again, and goes",
        start;
}

const RING: &[Lie] = &[
    Lie::IdsOutOfRange,
    Lie::IdsTwice,
    Lie::IdsRandom,
    Lie::IndexJumps,
    Lie::ScribblesRing,
    Lie::ChainsJoined,
];
/// An honest device, to show that the disk works apart from the lies.
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

/// Initial behaviour of a device.
struct Start {
    /// The device has packed rings.
    packed: bool,
    /// Number of requests that the device answers correctly before it lies.
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

/// Time for which a disk is used.
const USE: Duration = Duration::from_millis(700);

/// Tells every lie, and removes the disk in an orderly way and by surprise in turn.
fn each(context: &Context, lies: &[Lie], start: &Start) -> Result<()> {
    expect_io_errors();
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
            one(context, start, lie, seed, way).with_context(what)?;
        }
    }
    Ok(())
}

/// Attributes that the kernel sets from the configuration.
const TAKEN: [&str; 5] = [
    "size",
    "queue/logical_block_size",
    "queue/max_segments",
    "queue/discard_max_hw_bytes",
    "queue/write_zeroes_max_bytes",
];

/// Bit of a virtio device's status: the driver has failed it.
const FAILED: u32 = 0x80;

/// The kernel's values of a disk's configuration, once it has its block device.
fn taken(disk: &Disk) -> Option<Vec<String>> {
    let sysfs = disk.sysfs().ok()?;
    TAKEN.iter().map(|name| read(sysfs.join(name)).ok()).collect()
}

/// The driver uses the values of every lie about the configuration: it refuses the device because
/// of them, or its attributes differ from those of an honest device. Then the disk is unplugged.
fn config(context: &Context) -> Result<()> {
    expect_io_errors();
    let start = Start::after(0);
    let honest = {
        let disk = Disk::plug(&context.machine, &start.plug(Lie::Nothing, context.seed))?;
        let honest = taken(&disk).context("an honest disk has no block device")?;
        disk.unplug(Way::Orderly)?;
        honest
    };
    for &lie in CONFIG {
        let disk = Disk::plug_device(&context.machine, &start.plug(lie, context.seed))?;
        let status = disk.virtio()?.0.join("status");
        let used = wait_for("the lie to be used", || {
            let bits = read(&status).ok()?;
            let bits = u32::from_str_radix(bits.trim_start_matches("0x"), 16).ok()?;
            if bits & FAILED != 0 {
                return Some("refused".to_owned());
            }
            taken(&disk).filter(|taken| *taken != honest).map(|taken| taken.join(" "))
        });
        let used = used.with_context(|| format!("{lie:?}, seed {}", context.seed))?;
        println!("{lie:?}: {used}, honest: {}", honest.join(" "));
        disk.unplug(Way::Orderly)?;
    }
    each(context, CONFIG, &start)
}

/// After the probe, the virtio core starts a device that is not started, and this device was just
/// reset. The resulting error depends on which of the two comes first.
fn start(context: &Context) -> Result<()> {
    expect_io_errors();
    for round in 0..context.effort.rounds {
        let plug = Start::after(0).plug(Lie::IdsTwice, context.seed);
        let disk = Disk::plug(&context.machine, &plug)?;
        let status = disk.virtio()?.0.join("status");
        wait_for("the device to be reset", || (read(&status).ok()? == "0x00000000").then_some(()))
            .with_context(|| format!("round {round}: its status is {:?}", read(&status)))?;
        // The slot is busy for a moment after a card was plugged.
        std::thread::sleep(USE);
        disk.unplug(Way::Orderly)?;
    }
    Ok(())
}

/// The driver waits in its probe, and the kernel's hot-plug driver waits for the probe, so the disk
/// can only be removed by surprise. No process may open its node, because it would wait too.
fn silent_from_the_start(context: &Context, start: &Start, lie: Lie, seed: u64) -> Result<()> {
    if !Slot::have_hot_plug_driver() {
        skip_part(format!("{lie:?}: the case itself plugs here and would wait with the driver"));
        return Ok(());
    }
    println!("{lie:?}, pulled out");
    let disk = Disk::plug_device(&context.machine, &start.plug(lie, seed))?;
    std::thread::sleep(USE);
    disk.unplug(Way::Surprise)
}

/// Uses one disk. Some I/O succeeds if the device is honest, or is so at first.
fn one(context: &Context, start: &Start, lie: Lie, seed: u64, way: Way) -> Result<()> {
    let works = lie == Lie::Nothing || start.after > 0;
    let plug = start.plug(lie, seed);
    let disk = if works {
        Disk::plug(&context.machine, &plug)?
    } else {
        // The driver may refuse the device.
        let disk = Disk::plug_device(&context.machine, &plug)?;
        std::thread::sleep(USE);
        disk
    };
    let size = disk.bytes().unwrap_or(0).min(16 << 20);
    let load = match disk.path() {
        Ok(path) if size >= 8 << 20 => Load::start(&path, size, 4, Errors::Careless, seed),
        Ok(_) => Err(anyhow!("it has {size} bytes only")),
        Err(why) => Err(why),
    };
    match &load {
        // Lies may follow soon: counts from the begin of the load.
        Ok(load) if works => wait_for("I/O of a device that works at first", || {
            (load.operations() > 0).then_some(())
        })?,
        Err(why) if works => bail!("no I/O on a device that works at first: {why:#}"),
        _ => {}
    }
    if lie == Lie::Nothing {
        ensure!(disk.has_feature(F_RING_PACKED)? == start.packed, "another kind of ring");
    }
    std::thread::sleep(USE);
    let gone = disk.unplug(way);
    match load {
        Ok(load) => {
            let Summary { operations, errors } = load.finish()?;
            println!("  {operations} went well, {errors} did not");
        }
        Err(why) => println!("  no I/O: {why:#}"),
    }
    gone
}
