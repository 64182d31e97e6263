// SPDX-License-Identifier: Apache-2.0
//! A device that stops answering for a while, or answers without an interrupt.

use std::time::Duration;

use anyhow::{Result, anyhow, ensure};

use crate::case::cases;
use crate::guest::load::{Errors, Load};
use crate::guest::machine::backing::Backing;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::Mode;
use crate::guest::system::KernelLog;
use crate::guest::{Context, Modes};
use kit::disks::Lie;

cases! { Guest;
    "guest-silent", Modes::of(Mode::OURS),
        "a device that stops answering is reported within a minute, and goes on when it answers again",
        silent;
    "guest-silent-serial", Modes::of(Mode::OURS),
        "the driver leaves a device that answers neither reads nor the question for its serial number",
        silent_serial;
    "guest-lost-interrupts", Modes::of(&[Mode::Request, Mode::Bio]),
        "requests whose interrupt does not come are ended and reported, also while the driver goes",
        lost_interrupts;
}

/// The driver's messages about a device that does not answer, one that sends no interrupts, and one
/// that the driver has given up.
const REPORT: &str = "no answer to request";
const LOST: &str = "interrupt is late or lost";
const GIVEN_UP: &str = "the device is given up";

const REPORT_LIMIT: Duration = Duration::from_secs(75);

/// Requests that the device answers before it falls silent; more than the kernel sends by itself.
const ANSWERED: u32 = 100;

fn silent_serial(context: &Context) -> Result<()> {
    let lie = Lie::NeverAnswers;
    // One queue, because the device counts the requests of each queue separately.
    let plug = Plug::of(Backing::Liar { lie, after: ANSWERED, seed: context.seed }).queues(1);
    let disk = Disk::plug(&context.machine, &plug)?;
    // The device returns random data.
    let load = Load::start(&disk.path()?, 8 << 20, 1, Errors::Careless, context.seed)?;
    wait_for_silence(&load);
    let path = disk.sysfs()?.join("serial");
    let question = std::thread::spawn(move || std::fs::read_to_string(path));
    // After this time the question has reached the device, which has nothing else to do.
    std::thread::sleep(Duration::from_secs(1));
    ensure!(!question.is_finished(), "the device has answered");
    disk.unbind()?;
    load.finish()?;
    let answer = question.join().map_err(|_| anyhow!("the question's thread has panicked"))?;
    // The file was removed with the disk, or the device gave no number: only the end of the wait
    // matters.
    println!("the question ended with {answer:?}");
    Ok(())
}

/// Waits until no request was answered for two seconds, after some were.
fn wait_for_silence(load: &Load) {
    loop {
        let before = load.operations();
        std::thread::sleep(Duration::from_secs(2));
        if before > 0 && load.operations() == before {
            return;
        }
    }
}

fn silent(context: &Context) -> Result<()> {
    let args = vec!["--num-queues=4".to_owned()];
    let disk = Disk::plug(&context.machine, &Plug::of(Backing::Daemon { bytes: 64 << 20, args }))?;
    let load = Load::start(&disk.path()?, 64 << 20, 3, Errors::Fail, context.seed)?;
    load.wait_for(50)?;
    let log = KernelLog::mark()?;
    disk.signal("STOP")?;
    let reported = log.wait_for(REPORT, REPORT_LIMIT);
    disk.signal("CONT")?;
    load.wait_for(50)?;
    load.finish()?;
    ensure!(reported?, "nobody said that the device does not answer: {}", log.lines()?);
    Ok(())
}

fn lost_interrupts(context: &Context) -> Result<()> {
    let backing = Backing::Liar { lie: Lie::CallsNever, after: ANSWERED, seed: context.seed };
    let disk = Disk::plug(&context.machine, &Plug::of(backing).queues(4))?;
    let log = KernelLog::mark()?;
    // The device returns random data.
    let load = Load::start(&disk.path()?, 8 << 20, 3, Errors::Careless, context.seed)?;
    let reported = log.wait_for(LOST, REPORT_LIMIT)?;
    disk.unbind()?;
    let ended = load.finish()?;
    let log = log.lines()?;
    println!("{} went well, {} did not", ended.operations, ended.errors);
    ensure!(reported, "nobody said that interrupts are lost: {log}");
    for wrong in [REPORT, GIVEN_UP] {
        ensure!(!log.contains(wrong), "a device that answers is taken for a silent one: {log}");
    }
    Ok(())
}
