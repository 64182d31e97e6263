// SPDX-License-Identifier: Apache-2.0
//! The driver gets no memory in contexts that cannot wait: I/O continues with the memory that it
//! has.

use anyhow::{Context as _, Result, ensure};

use crate::case::cases;
use crate::guest::load::{Errors, Load, Summary};
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{MODULE, Mode};
use crate::guest::symbols::{Refused, Symbols};
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-no-memory", Modes::of(&[Mode::Request, Mode::Bio]),
        "half of the memory that the driver asks for without waiting is refused: no I/O fails, none stands still",
        no_memory;
}

/// Percentage of allocations that are refused.
const REFUSED: u32 = 50;
/// Number of reads and writes, with and without refusals.
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
