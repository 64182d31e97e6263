// SPDX-License-Identifier: Apache-2.0
//! A device that does not answer for a while.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use lab_case::system::run;

use crate::case::{Case, Context};
use crate::load::{Errors, Load};
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug};
use crate::mode::Mode;
use crate::protocol::Lie;
use crate::system::kernel_log;

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "guest-silent",
        short: &[],
        modes: Mode::OURS,
        has_long: false,
        about: "a device that stops answering is reported within a minute, and goes on when it answers again",
        run: silent,
    },
    Case {
        name: "guest-silent-serial",
        short: &[],
        modes: Mode::OURS,
        has_long: false,
        about: "the driver leaves a device that answers neither reads nor the question for its serial number",
        run: silent_serial,
    },
];

/// What the driver says of it.
const REPORT: &str = "no answer to request";

const REPORT_LIMIT: Duration = Duration::from_secs(75);

/// Requests that the device answers before it falls silent: more than the kernel sends by itself.
const ANSWERED: u32 = 100;

fn silent_serial(context: &Context) -> Result<()> {
    let lie = Lie::NeverAnswers;
    // One queue: the device counts for each.
    let plug = Plug::of(Backing::Liar { lie, after: ANSWERED, seed: context.seed }).queues(1);
    let disk = Disk::plug(&context.machine, &plug)?;
    // What it reads is random.
    let load = Load::start(&disk.path()?, 8 << 20, 1, Errors::Careless, context.seed)?;
    wait_for_silence(&load);
    let path = disk.sysfs()?.join("serial");
    let question = std::thread::spawn(move || std::fs::read_to_string(path));
    // It is with the device then, which has had nothing else to do.
    std::thread::sleep(Duration::from_secs(1));
    ensure!(!question.is_finished(), "the device has answered");
    disk.unbind()?;
    load.finish()?;
    let answer = question.join().map_err(|_| anyhow!("the question's thread has panicked"))?;
    // The file has gone with the disk, or there was no number: what counts is the end.
    println!("the question ended with {answer:?}");
    Ok(())
}

/// Returns when nothing was answered for two seconds.
fn wait_for_silence(load: &Load) {
    loop {
        let before = load.operations();
        std::thread::sleep(Duration::from_secs(2));
        if load.operations() == before {
            return;
        }
    }
}

fn silent(context: &Context) -> Result<()> {
    let args = vec!["--num-queues=4".to_owned()];
    let disk = Disk::plug(&context.machine, &Plug::of(Backing::Daemon { bytes: 64 << 20, args }))?;
    let load = Load::start(&disk.path()?, 64 << 20, 3, Errors::Fail, context.seed)?;
    load.wait_for(50)?;
    let (reported, log) = kernel_log(|| {
        disk.signal("STOP")?;
        let end = Instant::now() + REPORT_LIMIT;
        while Instant::now() < end && !run("dmesg", &[])?.contains(REPORT) {
            std::thread::sleep(Duration::from_secs(1));
        }
        disk.signal("CONT")?;
        Ok(Instant::now() < end)
    })?;
    load.wait_for(50)?;
    load.finish()?;
    ensure!(reported && log.contains(REPORT), "nobody said that the device does not answer: {log}");
    Ok(())
}
