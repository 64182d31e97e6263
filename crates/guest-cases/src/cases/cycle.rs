// SPDX-License-Identifier: Apache-2.0
//! The disk or its driver goes and comes again, under load.

use anyhow::{Context as _, Result, ensure};
use lab_case::outcome::skip;

use crate::case::{Case, Context};
use crate::load::Errors;
use crate::load::everything::Everything;
use crate::machine::disk::{Disk, Plug, Way};
use crate::mode::Mode;
use crate::system::wait_for;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-unplug",
        short: &[Mode::Request, Mode::BioPoll],
        modes: Mode::ALL,
        has_long: true,
        about: "a disk is unplugged under load: every request ends, and the next disk works",
        run: |context| unplug(context, Way::Orderly),
    },
    Case {
        name: "guest-surprise",
        short: &[Mode::RequestPoll, Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "a disk loses its power under load, before the kernel knows: every request ends, and the next disk works",
        run: |context| unplug(context, Way::Surprise),
    },
    Case {
        name: "guest-button",
        short: &[],
        modes: Mode::INTERRUPTS,
        has_long: false,
        about: "a disk whose button is pressed goes in order after five seconds, under load",
        run: button,
    },
    Case {
        name: "guest-bind",
        short: &[Mode::Bio],
        modes: Mode::ALL,
        has_long: true,
        about: "the driver is taken off a disk under load, and put on again",
        run: rebind,
    },
];

fn plug_and_load<'a>(context: &'a Context) -> Result<(Disk<'a>, Everything)> {
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let load = Everything::start(context, &disk, Errors::End)?;
    Ok((disk, load))
}

fn unplug(context: &Context, way: Way) -> Result<()> {
    for round in 0..context.effort.rounds {
        let (disk, load) = plug_and_load(context).with_context(|| format!("round {round}"))?;
        let gone = disk.unplug(way);
        load.end().with_context(|| format!("round {round}"))?;
        gone.with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

fn button(context: &Context) -> Result<()> {
    let (mut disk, load) = plug_and_load(context)?;
    if !disk.is_hot_plugged() {
        return Err(skip("the slots of a kernel with lockdep have no button: see machine/slot.rs"));
    }
    let pci = disk.pci().to_owned();
    disk.ask_to_go()?;
    wait_for("the kernel to let the disk go", || (!pci.exists()).then_some(()))?;
    load.end()
}

fn rebind(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    for round in 0..context.effort.rounds {
        let load = Everything::start(context, &disk, Errors::End)?;
        let unbound = disk.unbind();
        load.end().with_context(|| format!("round {round}"))?;
        unbound?;
        ensure!(disk.block().is_none(), "the block device is still there");
        disk.bind()?;
        disk.wait_for_block()?;
    }
    Ok(())
}
