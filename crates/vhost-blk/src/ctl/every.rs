// SPDX-License-Identifier: Apache-2.0
//! Questions about one disk or about all of them.

use super::ask::Asker;
use super::{Call, Named, print, shown, stats, unserved};
use crate::failure::{Failure, Sort};
use clap::Args;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The name of a disk, or the wish for all.
#[derive(Args, Clone, Debug)]
pub struct NamedOrAll {
    /// The disk.
    #[command(flatten)]
    pub disk: Named,
    /// All disks in the order of their names; with --json an array
    #[arg(long, conflicts_with = "name")]
    pub all: bool,
}

pub(super) fn stats(disk: &Named) -> Call {
    Call::new("get the counters", "Stats", json!({"name": disk.name})).told(stats::stats)
}

pub(super) fn status(disk: &Named) -> Call {
    let call = Call::new("get the status", "Status", json!({"name": disk.name}));
    call.told(unserved::status).of_member("status")
}

/// As [`stats`], under the name of the disk.
pub(super) fn named_stats(disk: &Named) -> Call {
    stats(disk).told(stats::named)
}

/// Connections that ask at the same time: the daemon serves few clients.
const ASKERS: usize = 8;

/// Asks about each disk of the daemon, several at a time, and prints the answers in the order of the names. A disk that
/// is not served has no counters and is left out. One that does not answer keeps nothing back of the others.
///
/// # Errors
/// [`Failure`] of the first disk that has not answered, after all answers, or if the daemon does not answer.
pub(super) fn show<'a>(
    connect: impl Fn() -> Result<Asker<'a>, Failure> + Sync,
    call: impl Fn(&Named) -> Call + Sync,
    as_json: bool,
) -> Result<(), Failure> {
    let list = connect()?.ask("list the disks", "List", &json!({}), None)?;
    let disks = list["disks"].as_array().into_iter().flatten();
    let names: Vec<Named> =
        disks.map(|disk| Named { name: disk["name"].as_str().map(str::to_owned) }).collect();
    let (mut told, mut failed) = (Vec::new(), None);
    for (name, reply) in names.iter().zip(replies(&connect, &call, &names)?) {
        match reply {
            Ok(reply) => told.push(shown(&call(name), &reply, as_json)),
            Err(failure) if failure.sort == Sort::NoSuchDisk => {}
            Err(failure) => failed = failed.or(Some(failure)),
        }
    }
    print(&match as_json {
        true => format!("[{}]\n", told.join(",").replace('\n', "")),
        false => told.join("\n"),
    })?;
    failed.map_or(Ok(()), Err)
}

/// The daemon's replies about the disks, in their order.
///
/// # Errors
/// [`Failure`] if the daemon does not answer.
fn replies<'a>(
    connect: &(impl Fn() -> Result<Asker<'a>, Failure> + Sync),
    call: &(impl Fn(&Named) -> Call + Sync),
    names: &[Named],
) -> Result<Vec<Result<Value, Failure>>, Failure> {
    let next = AtomicUsize::new(0);
    let ask = || -> Result<Vec<_>, Failure> {
        let mut asker = connect()?;
        let mut replies = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(name) = names.get(index) else { return Ok(replies) };
            let call = call(name);
            match asker.ask(call.what, call.method, &call.parameters, None) {
                Err(failure) if failure.sort == Sort::NoAnswer => return Err(failure),
                reply => replies.push((index, reply)),
            }
        }
    };
    let mut all = Vec::new();
    std::thread::scope(|scope| {
        let askers: Vec<_> = (0..names.len().min(ASKERS)).map(|_| scope.spawn(ask)).collect();
        for asker in askers {
            all.extend(asker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(())
    })?;
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, reply)| reply).collect())
}
