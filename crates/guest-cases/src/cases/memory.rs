// SPDX-License-Identifier: Apache-2.0
//! The driver gets no memory when it cannot wait for it: I/O goes on with what it has.

use std::ops::Range;

use anyhow::{Context as _, Result, ensure};
use lab_case::faults::Fault;

use crate::case::{Case, Context};
use crate::load::{Errors, Load, Summary};
use crate::machine::disk::{Disk, Plug};
use crate::mode::Mode;

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
    let text = text_of("virtio_blk")?;
    let only_there = [
        ("ignore-gfp-wait", "Y"),
        ("require-start", &*format!("{:#x}", text.start)),
        ("require-end", &*format!("{:#x}", text.end)),
    ];
    let fault = Fault::on("failslab", REFUSED, &only_there)?;
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

/// Where the functions of a module are, as far as it takes to know them in a stack.
fn text_of(module: &str) -> Result<Range<u64>> {
    let symbols = std::fs::read_to_string("/proc/kallsyms")?;
    let of_module = format!("[{module}]");
    let functions = symbols.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (address, kind) = (words.next()?, words.next()?);
        let is_function = matches!(kind, "t" | "T") && words.nth(1) == Some(&of_module);
        is_function.then(|| u64::from_str_radix(address, 16).ok()).flatten()
    });
    let (first, last) = functions
        .fold((u64::MAX, 0), |(first, last), address| (first.min(address), last.max(address)));
    ensure!(first < last, "the kernel does not say where {module} is");
    Ok(first..last)
}
