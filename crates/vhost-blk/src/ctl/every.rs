// SPDX-License-Identifier: Apache-2.0
//! Questions about one disk or about all of them.

use super::ask::Asker;
use super::{Call, Named, print, shown, stats, unserved};
use crate::failure::{Failure, Sort};
use clap::Args;
use serde_json::json;

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

/// Asks about each disk of the daemon in turn, and prints the answers. A disk that is not served has no counters and is
/// left out. One that does not answer keeps nothing back of the others.
///
/// # Errors
/// [`Failure`] of the first disk that has not answered, after all answers, or if the daemon does not answer.
pub(super) fn show(
    mut asker: Asker<'_>,
    call: impl Fn(&Named) -> Call,
    as_json: bool,
) -> Result<(), Failure> {
    let list = asker.ask("list the disks", "List", &json!({}), None)?;
    let (mut told, mut failed) = (Vec::new(), None);
    for disk in list["disks"].as_array().into_iter().flatten() {
        let call = call(&Named { name: disk["name"].as_str().map(str::to_owned) });
        match asker.ask(call.what, call.method, &call.parameters, None) {
            Ok(reply) => told.push(shown(&call, &reply, as_json)),
            Err(failure) => match failure.sort {
                Sort::NoSuchDisk => {}
                Sort::NoAnswer => return Err(failure),
                Sort::Run | Sort::Usage => failed = failed.or(Some(failure)),
            },
        }
    }
    print(&match as_json {
        true => format!("[{}]\n", told.join(",").replace('\n', "")),
        false => told.join("\n"),
    })?;
    failed.map_or(Ok(()), Err)
}
