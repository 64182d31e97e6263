// SPDX-License-Identifier: Apache-2.0
//! A device that does not answer for a while.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lab_case::system::run;

use crate::case::{Case, Context};
use crate::load::{Errors, Load};
use crate::machine::backing::Backing;
use crate::machine::disk::{Disk, Plug};
use crate::mode::Mode;
use crate::system::kernel_log;

pub(crate) const CASES: &[Case] = &[Case {
    name: "guest-silent",
    short: &[],
    modes: Mode::OURS,
    has_long: false,
    about: "a device that stops answering is reported within a minute, and goes on when it answers again",
    run: silent,
}];

/// What the driver says of it.
const REPORT: &str = "no answer to request";

const REPORT_LIMIT: Duration = Duration::from_secs(75);

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
