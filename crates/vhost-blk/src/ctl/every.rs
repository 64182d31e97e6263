// SPDX-License-Identifier: Apache-2.0
//! Questions about one disk or about all of them.

use super::ask::Asker;
use super::{Call, Named, shown, stats, unserved};
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

/// Asks about each disk of the daemon in turn, and returns the text to print. A disk that is removed meanwhile, or has
/// no answer because it is not served, is left out.
///
/// # Errors
/// [`Failure`] if the daemon does not answer, or refuses a question.
pub(super) fn ask(
    mut asker: Asker<'_>,
    call: impl Fn(&Named) -> Call,
    as_json: bool,
) -> Result<String, Failure> {
    let list = asker.ask("list the disks", "List", &json!({}), None)?;
    let mut told = Vec::new();
    for disk in list["disks"].as_array().into_iter().flatten() {
        let name = disk["name"].as_str().map(str::to_owned);
        let call = call(&Named { name: name.clone() });
        match asker.ask(call.what, call.method, &call.parameters, None) {
            Ok(reply) => {
                let is_named = !as_json && call.member.is_empty();
                let head = name.filter(|_| is_named).map(|name| format!("disk {name}\n"));
                told.push(head.unwrap_or_default() + &shown(&call, &reply, as_json));
            }
            Err(failure) if failure.sort == Sort::NoSuchDisk => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(match as_json {
        true => {
            format!("[{}]\n", told.iter().map(|text| text.trim_end()).collect::<Vec<_>>().join(","))
        }
        false => told.join("\n"),
    })
}
