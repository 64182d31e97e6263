// SPDX-License-Identifier: Apache-2.0
//! The module's parameters, and what sysfs says of them.

use anyhow::{Result, ensure};

use crate::case::{Case, Context};
use crate::machine::disk::{Disk, Plug};
use crate::mode::{self, Driver, Mode, POLL_QUEUES};
use crate::system::kernel_log;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-parameters",
        short: &[Mode::Request],
        modes: &[Mode::Request],
        has_long: false,
        about: "parameters that contradict each other or make no sense are refused, with a reason in the kernel's log",
        run: refused,
    },
    Case {
        name: "guest-mode",
        short: &[],
        modes: Mode::OURS,
        has_long: false,
        about: "sysfs shows how a disk does its I/O and how many of its queues poll",
        run: shown,
    },
    Case {
        name: "guest-poll-limit",
        short: &[],
        modes: &[Mode::RequestPoll, Mode::BioPoll],
        has_long: false,
        about: "where fewer queues can poll than asked for, one keeps its interrupt and the kernel's log says so",
        run: fewer,
    },
    Case {
        name: "guest-queue-limit",
        short: &[],
        modes: Mode::ALL,
        has_long: false,
        about: "num_request_queues bounds the queues of a disk",
        run: bounded,
    },
];

fn refused(context: &Context) -> Result<()> {
    mode::unload()?;
    let wrong = [
        vec!["poll_queues=4", "num_request_queues=4"],
        vec!["poll_queues=9", "num_request_queues=2", "use_bio=1"],
        vec!["queue_depth=1000000"],
        vec!["poll_queues=-1"],
        vec!["use_bio=perhaps"],
        vec!["num_request_queues=many"],
    ];
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
    // Polled ones are among them.
    ensure!(disk.number("io_queues")? == 4, "{}", disk.attribute("io_queues")?);
    let expected = if context.mode.polls() { POLL_QUEUES.to_string() } else { "0".to_owned() };
    ensure!(mode::parameter("poll_queues")? == expected);
    Ok(())
}

/// Whether sysfs says of a disk that this project's driver has it, and how.
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
    ensure!(log.contains("poll"), "the kernel's log has no word of it: {log}");
    Ok(())
}

fn bounded(context: &Context) -> Result<()> {
    let _driver = Driver::load(context.mode, &["num_request_queues=3"])?;
    let disk = Disk::plug(&context.machine, &Plug::file(16).queues(8))?;
    let vectors = std::fs::read_dir(disk.pci().join("msi_irqs"))?.count();
    // One for changes of the configuration.
    let most = if context.mode.polls() { 1 + 3 - usize::from(POLL_QUEUES) } else { 1 + 3 };
    ensure!(vectors <= most, "{vectors} interrupts, at most {most} are needed");
    Ok(())
}
