// SPDX-License-Identifier: Apache-2.0
//! The driver gets no memory when it cannot wait for it: I/O goes on with what it has.

use anyhow::{Context as _, Result, ensure};

use crate::case::{Case, Context};
use crate::load::{Errors, Load, Summary};
use crate::machine::disk::{Disk, Plug};
use crate::mode::{MODULE, Mode};
use crate::symbols::{Refused, Symbols};

pub(crate) const CASES: &[Case] = &[Case {
    name: "guest-no-memory",
    short: &[],
    modes: &[Mode::Request, Mode::Bio],
    has_long: false,
    about: "half of the memory that the driver asks for without waiting is refused: no I/O fails, none stands still",
    run: no_memory,
}];

/// Allocations that are refused, in percent.
const REFUSED: u32 = 50;
/// Reads and writes with and without refusals.
const OPERATIONS: u64 = 500;

fn no_memory(context: &Context) -> Result<()> {
    let disk = Disk::plug(&context.machine, &Plug::file(64))?;
    let load = Load::start(&disk.path()?, disk.bytes()?, 4, Errors::Fail, context.seed)?;
    load.wait_for(OPERATIONS / 10)?;
    let fault = Symbols::of(MODULE)?.all()?.refuse_memory(Refused::Atomic, REFUSED)?;
    let under = load.wait_for(OPERATIONS).context("while memory is refused");
    let injected = fault.injected()?;
    println!("{injected} allocations were refused");
    drop(fault);
    under?;
    load.wait_for(OPERATIONS / 10).context("afterwards")?;
    let Summary { operations, errors } = load.finish()?;
    println!("{operations} operations, {errors} errors");
    ensure!(injected > 0, "no allocation was refused");
    Ok(())
}
