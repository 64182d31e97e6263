// SPDX-License-Identifier: Apache-2.0
//! The module's parameters, and their values in sysfs.

use anyhow::{Result, ensure};

use crate::case::cases;
use crate::guest::load::fio::{Engine, fio, verified};
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{self, Driver, MODULE, Mode, POLL_QUEUES};
use crate::guest::system::{kernel_log, write};
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-parameters", Modes::of(&[Mode::Request]).at_every_change(&[Mode::Request]),
        "parameters that are no numbers are refused, with a reason in the kernel's log",
        refused;
    "guest-parameters-bounded", Modes::of(&[Mode::Request, Mode::Bio]).at_every_change(&[Mode::Request, Mode::Bio]),
        "parameters that contradict each other or are too large are bounded, with a word in the kernel's log, and the disk works",
        contradictory;
    "guest-mode", Modes::of(Mode::OURS),
        "sysfs shows how a disk does its I/O and how many of its queues poll",
        shown;
    "guest-poll-limit", Modes::of(&[Mode::RequestPoll, Mode::BioPoll]),
        "where fewer queues can poll than asked for, one keeps its interrupt and the kernel's log says so",
        fewer;
    "guest-queue-limit", Modes::of(Mode::ALL),
        "num_request_queues bounds the queues of a disk",
        bounded;
}

fn refused(context: &Context) -> Result<()> {
    mode::unload()?;
    let wrong = [vec!["poll_queues=-1"], vec!["use_bio=perhaps"], vec!["num_request_queues=many"]];
    for words in wrong {
        let parameters: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let (loaded, log) = kernel_log(|| Ok(mode::insert(context.mode, &parameters)))?;
        ensure!(loaded.is_err(), "{words:?} was accepted");
        let name = words[0].split('=').next().unwrap_or_default();
        ensure!(log.contains(name), "{words:?} was refused without a reason: {log}");
    }
    let _driver = Driver::load(context.mode, &[])?;
    Ok(())
}

fn shown(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(16))?;
    shows_mode(&disk, context.mode)?;
    // The number includes polled queues.
    ensure!(disk.number("io_queues")? == 4, "{}", disk.attribute("io_queues")?);
    let expected = if context.mode.polls() { POLL_QUEUES.to_string() } else { "0".to_owned() };
    ensure!(mode::parameter("poll_queues")? == expected);
    Ok(())
}

/// Checks that sysfs shows this project's driver and its mode for a disk.
pub(super) fn shows_mode(disk: &Disk<'_>, mode: Mode) -> Result<()> {
    let path = if mode.is_bio() { "bio" } else { "request" };
    ensure!(disk.attribute("io_path")? == path, "io_path is {}", disk.attribute("io_path")?);
    let polled = if mode.polls() { u64::from(POLL_QUEUES) } else { 0 };
    ensure!(disk.number("io_poll_queues")? == polled, "{}", disk.attribute("io_poll_queues")?);
    Ok(())
}

fn fewer(context: &Context) -> Result<()> {
    let (disk, log) =
        kernel_log(|| Disk::plug(&context.machine, &Plug::file(16).queues(POLL_QUEUES)))?;
    let polled = disk.number("io_poll_queues")?;
    ensure!(polled == u64::from(POLL_QUEUES) - 1, "{polled} queues poll");
    ensure!(log.contains(POLL_BOUNDED), "the kernel's log has no word of it: {log}");
    Ok(())
}

const POLL_BOUNDED: &str = "because one of 2 queues needs interrupts";
const DEPTH_BOUNDED: &str = "the most that is possible";

fn contradictory(context: &Context) -> Result<()> {
    let wrong = ["poll_queues=2", "num_request_queues=2", "queue_depth=1000000"];
    let _driver = Driver::load(context.mode, &wrong)?;
    for number in ["2", "4000000000"] {
        // The bound also holds for a change while the driver is loaded.
        write(format!("/sys/module/{MODULE}/parameters/poll_queues"), number)?;
        let (disk, log) = kernel_log(|| Disk::plug(&context.machine, &Plug::file(16)))?;
        ensure!(disk.number("io_queues")? == 2, "{} queues", disk.attribute("io_queues")?);
        let polled = disk.number("io_poll_queues")?;
        ensure!(polled == 1, "{polled} queues poll");
        for words in [&format!("poll_queues={number}"), POLL_BOUNDED, DEPTH_BOUNDED] {
            ensure!(log.matches(words).count() == 1, "not said once: '{words}': {log}");
        }
        let job = Engine::Uring.job("bounded", &disk.path()?);
        fio(&[job.with(&verified(4)).with("--rw=randwrite --bs=4k")])?;
    }
    Ok(())
}

fn bounded(context: &Context) -> Result<()> {
    let _driver = Driver::load(context.mode, &["num_request_queues=3"])?;
    let disk = Disk::plug(&context.machine, &Plug::file(16).queues(8))?;
    let vectors = std::fs::read_dir(disk.pci().join("msi_irqs"))?.count();
    // One vector for changes of the configuration.
    let most = if context.mode.polls() { 1 + 3 - usize::from(POLL_QUEUES) } else { 1 + 3 };
    ensure!(vectors <= most, "{vectors} interrupts, at most {most} are needed");
    Ok(())
}
