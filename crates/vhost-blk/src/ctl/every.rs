// SPDX-License-Identifier: Apache-2.0
//! Questions about one disk or about all of them.

use super::ask::Asker;
use super::text::word;
use super::{Call, Named, shown, stats, unserved};
use crate::failure::{Failure, Sort};
use crate::output::print;
use crate::subscription::lock;
use clap::Args;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

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

pub(super) fn pause(disk: &Named) -> Call {
    Call::new("pause the disk", "Pause", json!({"name": disk.name}))
}

pub(super) fn resume(disk: &Named) -> Call {
    Call::new("resume the disk", "Resume", json!({"name": disk.name}))
}

/// As [`stats()`], under the name of the disk.
pub(super) fn named_stats(disk: &Named) -> Call {
    stats(disk).told(stats::named)
}

/// Connections that ask at the same time: the daemon serves few clients.
const ASKERS: usize = 8;

/// Asks about each disk of the daemon, several at a time, and prints the answers in the order of the names. A disk that
/// is not served has no counters and is left out. One that does not answer keeps nothing back of the others. One
/// connection suffices, if the daemon has no others left.
///
/// # Errors
/// [`Failure`] of the first disk that has not answered, after all answers, or if the daemon has no list of them.
pub(super) fn show<'a>(
    connect: impl Fn() -> Result<Asker<'a>, Failure> + Sync,
    call: impl Fn(&Named) -> Call + Sync,
    as_json: bool,
) -> Result<(), Failure> {
    let (mut told, mut failed) = (Vec::new(), None);
    for (_, name, reply) in replies(connect, &call)? {
        match reply {
            Ok(reply) => told.push(shown(&call(&name), &reply, as_json)),
            Err(failure) if failure.sort == Sort::NoSuchDisk => {}
            Err(failure) => failed = failed.or(Some(failure)),
        }
    }
    print_all(&told, "\n", as_json)?;
    failed.map_or(Ok(()), Err)
}

/// Changes each disk of the daemon as [`show`] asks about it. A disk that fails keeps no other back, and standard error
/// has its failure. One that could not be started is left out.
///
/// # Errors
/// [`Failure`] with the names of the disks that have failed, or if the daemon has no list of them.
pub(super) fn change<'a>(
    connect: impl Fn() -> Result<Asker<'a>, Failure> + Sync,
    call: impl Fn(&Named) -> Call + Sync,
    as_json: bool,
) -> Result<(), Failure> {
    let (mut told, mut failed) = (Vec::new(), Vec::new());
    for (row, named, reply) in replies(connect, &call)? {
        let (call, name) = (call(&named), word(&row["name"]));
        match reply {
            Ok(mut reply) => {
                reply["name"] = row["name"].clone();
                let text = shown(&call, &reply, as_json);
                told.push(if as_json { text } else { format!("{name}: {text}") });
            }
            Err(failure) if failure.sort == Sort::NoSuchDisk && !starts_first(&row) => {}
            Err(failure) => {
                Failure { what: format!("{} {name}", call.what), ..failure }.tell(as_json);
                failed.push((call.what, name));
            }
        }
    }
    print_all(&told, "", as_json)?;
    let Some((what, _)) = failed.first() else { return Ok(()) };
    let names: Vec<&str> = failed.iter().map(|(_, name)| &**name).collect();
    let why = format!("failed: {}", names.join(", "));
    Err(Failure::run(format!("{what} in each case"), why, "see the lines above"))
}

/// Returns whether a disk is being opened, and may take requests soon. One that has failed is tried again at any time.
fn starts_first(row: &Value) -> bool {
    row["state"] == "starting" && row["start"]["failure"].is_null()
}

/// A row of the list, its name, and the reply about that disk.
type Told = (Value, Named, Result<Value, Failure>);

/// The rows of all disks, and the daemon's replies about them.
fn replies<'a>(
    connect: impl Fn() -> Result<Asker<'a>, Failure> + Sync,
    call: impl Fn(&Named) -> Call + Sync,
) -> Result<Vec<Told>, Failure> {
    let mut asker = connect()?;
    let mut list = asker.ask("list the disks", "List", &json!({}), None)?;
    let mut rows: Vec<Value> = serde_json::from_value(list["disks"].take()).unwrap_or_default();
    // A disk that was given up has left its name, which another one may have.
    rows.retain(|row| row["state"] != "given_up");
    let named = |row: &Value| Named { name: row["name"].as_str().map(str::to_owned) };
    let names: Vec<Named> = rows.iter().map(named).collect();
    let questions = Questions { connect, call, names: &names, state: Mutex::default() };
    let replies = questions.replies(asker);
    let told = rows.into_iter().zip(names).zip(replies);
    Ok(told.map(|((row, name), reply)| (row, name, reply)).collect())
}

/// Prints answers about disks, as JSON in an array.
fn print_all(told: &[String], between: &str, as_json: bool) -> Result<(), Failure> {
    print(match as_json {
        true => format!("[{}]\n", told.join(",").replace('\n', "")),
        false => told.join(between),
    })
}

/// Questions about disks.
struct Questions<'n, Connect, Question> {
    connect: Connect,
    call: Question,
    names: &'n [Named],
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Number of disks that were asked about, or are being asked about.
    begun: usize,
    /// Those among them whose connection was refused.
    returned: Vec<usize>,
    replies: BTreeMap<usize, Result<Value, Failure>>,
}

impl<'a, Connect, Question> Questions<'_, Connect, Question>
where
    Connect: Fn() -> Result<Asker<'a>, Failure> + Sync,
    Question: Fn(&Named) -> Call + Sync,
{
    /// The daemon's replies about the disks, in their order. Without a connection the rest has its failure.
    fn replies(&self, mut first: Asker<'a>) -> Vec<Result<Value, Failure>> {
        let asked = std::thread::scope(|scope| {
            for _ in 1..self.names.len().min(ASKERS) {
                // Its failure to connect is that of the first connection, too, or it is not needed.
                scope.spawn(|| (self.connect)().and_then(|mut asker| self.ask_all(&mut asker)));
            }
            self.ask_all(&mut first)
        });
        // Again, for disks that the others have returned.
        let asked = asked.and_then(|()| self.ask_all(&mut first));
        let mut replies = std::mem::take(&mut self.lock().replies);
        let unasked = || Err(asked.clone().expect_err("otherwise each disk was asked about"));
        let reply = |index| replies.remove(&index).unwrap_or_else(unasked);
        (0..self.names.len()).map(reply).collect()
    }

    /// Asks about one disk after another, until all are asked about.
    fn ask_all(&self, asker: &mut Asker<'a>) -> Result<(), Failure> {
        loop {
            let Some(index) = self.lock().next(self.names.len()) else { return Ok(()) };
            let call = (self.call)(&self.names[index]);
            let reply = asker.ask(call.what, call.method, &call.parameters, None);
            let sort = reply.as_ref().err().map(|failure| failure.sort);
            match (sort, reply) {
                (Some(Sort::Busy), Err(failure)) => {
                    self.lock().returned.push(index);
                    return Err(failure);
                }
                (_, reply) => drop(self.lock().replies.insert(index, reply)),
            }
            // The answer may come after the patience: this connection is of no use then.
            if sort == Some(Sort::NoAnswer) {
                *asker = (self.connect)()?;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn next(&mut self, count: usize) -> Option<usize> {
        self.returned.pop().or_else(|| {
            let next = (self.begun < count).then_some(self.begun)?;
            self.begun += 1;
            Some(next)
        })
    }
}
