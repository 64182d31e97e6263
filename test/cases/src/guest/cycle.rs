// SPDX-License-Identifier: Apache-2.0
//! The disk or its driver is removed and added again, under load.

use anyhow::{Context as _, Result, ensure};
use kit::outcome::{expect_io_errors, skip};
use virtio_spec::features::F_VERSION_1;

use crate::case::cases;
use crate::guest::load::Errors;
use crate::guest::load::everything::Everything;
use crate::guest::machine::disk::{Disk, Plug, Way};
use crate::guest::mode::Mode;
use crate::guest::system::wait_for;
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-unplug", Modes::of(Mode::ALL).at_every_change(&[Mode::Request, Mode::BioPoll]).and_long(),
        "a disk is unplugged under load: every request ends, and the next disk works",
        |context| unplug(context, Way::Orderly);
    "guest-surprise", Modes::of(Mode::ALL).at_every_change(&[Mode::RequestPoll, Mode::Bio]).and_long(),
        "a disk loses its power under load, before the kernel knows: every request ends, and the next disk works",
        |context| unplug(context, Way::Surprise);
    "guest-surprise-legacy", Modes::of(Mode::OURS),
        "the same with a device whose registers read as all ones when it is gone: the kernel does not warn",
        surprise_legacy;
    "guest-button", Modes::of(Mode::INTERRUPTS),
        "a disk whose button is pressed goes in order after five seconds, under load",
        button;
    "guest-bind", Modes::of(Mode::ALL).at_every_change(&[Mode::Bio]).and_long(),
        "the driver is taken off a disk under load, and put on again",
        rebind;
}

fn plug_and_load<'a>(context: &'a Context) -> Result<(Disk<'a>, Everything)> {
    let disk = Disk::plug(&context.machine, &Plug::file(Everything::DISK_MIB))?;
    let load = Everything::start(context, &disk, Errors::End)?;
    Ok((disk, load))
}

fn unplug(context: &Context, way: Way) -> Result<()> {
    // Requests in flight fail when the disk is removed.
    expect_io_errors();
    for round in 0..context.effort.rounds {
        let (disk, load) = plug_and_load(context).with_context(|| format!("round {round}"))?;
        let gone = disk.unplug(way);
        load.end().with_context(|| format!("round {round}"))?;
        gone.with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

/// The registers of a legacy device are I/O ports, which read as all ones if there is no device.
/// (In QEMU, memory without a device reads as zero.)
fn surprise_legacy(context: &Context) -> Result<()> {
    expect_io_errors();
    let plug = Plug::file(Everything::DISK_MIB);
    let plug = plug.with("disable-legacy", "off").with("disable-modern", true);
    for round in 0..context.effort.rounds.min(5) {
        let disk = Disk::plug(&context.machine, &plug)?;
        ensure!(!disk.has_feature(F_VERSION_1)?, "it is no legacy device");
        let load = Everything::start(context, &disk, Errors::End)?;
        let gone = disk.unplug(Way::Surprise);
        load.end().with_context(|| format!("round {round}"))?;
        gone.with_context(|| format!("round {round}"))?;
    }
    Ok(())
}

fn button(context: &Context) -> Result<()> {
    expect_io_errors();
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
    expect_io_errors();
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
