// SPDX-License-Identifier: Apache-2.0
//! The methods of the interface.

use super::backup;
use super::bitmaps;
use super::client::Client;
use super::jobs;
use super::mirror;
use super::protocol::{self, Call, CallError, INTERFACE, SERVICE, text};
use super::saving;
use super::snapshot;
use super::values::{
    discards_value, limits_of, loss_value, status_value, summary_value, totals_value,
};
use super::version;
use crate::disk::LockWait;
use crate::disk_options;
use crate::disks::mirror::Facts;
use crate::disks::{Disks, Force, Live, Mode, NewDisk, Origin, Removed, Traced};
use crate::events::limits_value;
use crate::failure::{Failure, Sort};
use crate::log;
use crate::values::{self, Cache, LogLevel, OnError, OnReadError, disk_name};
use clap::ValueEnum;
use data_plane::{ErrorPolicy, LimitChange, Limits, PlaneKind};
use serde_json::{Value, json};
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost_user::{Answer, Command, ErrorChange, Status};

/// Maximum wait of `List` for the disks.
const LIST_MAX: Duration = Duration::from_secs(2);

/// Maximum wait of a command that only looks at a disk: it has a kept connection.
const STATUS_MAX: Duration = Duration::from_secs(10);

/// The act of `Upgrade` for its errors.
pub(super) const UPGRADE: &str = "upgrade the daemon";

/// The result of a call.
pub(super) enum Done {
    /// One reply with these parameters.
    Reply(Value),
    /// A backup, whose progress precedes the reply.
    Backup(backup::Request),
    /// Another program, by default the present file of this one, replies.
    Upgrade(Option<PathBuf>),
    /// An empty reply, and the daemon ends.
    Stop,
    /// A stream of events follows.
    Events,
    /// A stream of slow requests follows a first reply.
    Trace(Traced, Value),
}

/// Carries out a call.
pub(super) fn carry_out(
    disks: &Arc<Disks>,
    client: &Client<'_>,
    mut call: Call,
    descriptors: Vec<OwnedFd>,
) -> Result<Done, CallError> {
    let method = call.method.clone();
    let (interface, name) = method.rsplit_once('.').unwrap_or(("", &method));
    match interface {
        INTERFACE => {}
        SERVICE => return service(name, call).map(Done::Reply),
        other => return Err(CallError::InterfaceNotFound(other.to_owned())),
    }
    let done = match name {
        "Add" => add(disks, client, &mut call, descriptors)?,
        "List" => {
            call.no_more()?;
            let rows = disks.statuses(LIST_MAX);
            json!({"disks": rows.iter().map(summary_value).collect::<Vec<_>>()})
        }
        "Bitmaps" => bitmaps::rows(&client.look(disks, &mut call, Disks::bitmaps)?),
        "RemoveBitmap" => bitmaps::remove(disks, client, &mut call)?,
        "Jobs" => jobs::list(disks, &mut call)?,
        "CancelJob" => jobs::cancel(disks, client, &mut call)?,
        "SetJobBandwidth" => jobs::set_bandwidth(disks, client, &mut call)?,
        "Reload" => reload(disks, client, &call)?,
        "Remove" => remove(disks, client, &mut call)?,
        "Save" => {
            let name = only_disk(disks, &mut call)?;
            client.means(&name);
            saving::save(disks, client, &name)?
        }
        "Commit" => snapshot::commit(disks, client, &mut call)?,
        "Mirror" => mirror::begin(disks, client, &mut call)?,
        "MirrorStatus" => mirror::status(disks, &mut call)?,
        "CompleteMirror" => mirror::complete(disks, client, &mut call)?,
        "Snapshot" => snapshot::take(disks, client, &mut call)?,
        "Snapshots" => snapshot::rows(&client.look(disks, &mut call, Disks::chain)?),
        "SetLogLevel" => set_log_level(&mut call)?,
        "Version" => version::version(disks, &call)?,
        "Backup" => return backup::request(disks, client, &mut call).map(Done::Backup),
        "Upgrade" => return upgrade(client, &mut call).map(Done::Upgrade),
        "Stop" => {
            call.no_more()?;
            return Ok(Done::Stop);
        }
        "Events" => {
            call.no_more()?;
            return if call.more { Ok(Done::Events) } else { Err(CallError::ExpectedMore) };
        }
        "Trace" => {
            let (traced, first) = trace(disks, client, &mut call)?;
            return Ok(Done::Trace(traced, first));
        }
        _ => of_disk(disks, client, name, &mut call)?,
    };
    Ok(Done::Reply(done))
}

/// The methods of `org.varlink.service`.
fn service(name: &str, mut call: Call) -> Result<Value, CallError> {
    let done = match name {
        "GetInfo" => json!({
            "vendor": "vhost-blk",
            "product": "vhost-blk",
            "version": env!("CARGO_PKG_VERSION"),
            "url": "",
            "interfaces": [SERVICE, INTERFACE],
        }),
        "GetInterfaceDescription" => match &*call.required("interface", text)? {
            INTERFACE => json!({"description": protocol::DESCRIPTION}),
            SERVICE => json!({"description": protocol::SERVICE_DESCRIPTION}),
            other => return Err(CallError::InterfaceNotFound(other.to_owned())),
        },
        _ => return Err(CallError::MethodNotFound(name.to_owned())),
    };
    call.no_more()?;
    Ok(done)
}

/// The methods of one disk.
fn of_disk(
    disks: &Arc<Disks>,
    client: &Client<'_>,
    method: &str,
    call: &mut Call,
) -> Result<Value, CallError> {
    let wanted = call.optional("name", text)?;
    let (what, command) = command(disks, method, call)?;
    let saves = match part_of(method) {
        Some(part) => saving::is_wanted(call)?.then_some(part),
        None => None,
    };
    call.no_more()?;
    check_change(&command)?;
    if method == "Status"
        && let Some(row) = disks.start_of(wanted.as_deref())
    {
        return Ok(json!({"status": null, "unserved": summary_value(&row)}));
    }
    let name = disks.resolve(wanted.as_deref())?;
    if saves.is_some() {
        disks.check_save_for(&name, || client.is_connected())?;
    }
    client.means(&name);
    if command == Command::Resume {
        disks.before_resume(&name, || client.is_connected())?;
    }
    let what = format!("{what} the disk {name}");
    match ask(disks, client, &name, command, &what)? {
        Answer::Status(status) if method == "DiscardStats" => {
            let space = disks.look_for(&name, Disks::space, || client.is_connected())?;
            Ok(discards_value(&name, &status, &space))
        }
        Answer::Status(status) => {
            let facts = disks.mirror_facts(&name)?;
            let mut told = told(method, &name, &status, facts.as_ref());
            if method == "Status" {
                saving::add_options(disks, &name, &status, &mut told["status"])?;
                told["status"]["storage_gone"] = loss_value(disks.loss(&name)?.as_ref());
                // The device knows only the lock that follows a guest, which that of a qcow2 image does not.
                if disks.locks_qcow2(&name)? {
                    told["status"]["image_lock"] = json!("held");
                }
            }
            Ok(told)
        }
        Answer::Switched(queues) => Ok(json!({"moved_queues": queues})),
        Answer::Resized(bytes) => Ok(json!({"capacity_bytes": bytes})),
        Answer::Changed(changed) => {
            saving::with_saved(disks, client, (&name, saves), json!({"changed": changed}))
        }
        Answer::Limited(changed, limits, group) => {
            let limits = limits_value(&limits, group.as_deref());
            let reply = json!({"changed": changed, "limits": limits});
            saving::with_saved(disks, client, (&name, saves), reply)
        }
        Answer::Refused(why) => Err(Failure::told(what, why).into()),
    }
}

/// The options that a method changes and may save.
fn part_of(method: &str) -> Option<Live> {
    match method {
        "Limit" => Some(Live::Limits),
        "SetCache" => Some(Live::Cache),
        "SetErrors" => Some(Live::Errors),
        _ => None,
    }
}

/// The command of a method of one disk, and its act for errors.
fn command(
    disks: &Disks,
    method: &str,
    call: &mut Call,
) -> Result<(&'static str, Command), CallError> {
    Ok(match method {
        "Status" => ("get the status of", Command::Status),
        "Stats" => ("get the counters of", Command::Status),
        "DiscardStats" => ("get the discards of", Command::Status),
        "Resize" => {
            let bytes = call.optional("bytes", Value::as_u64)?;
            ("resize", Command::Resize(bytes))
        }
        "Limit" => ("limit", limit(disks, call)?),
        "Pause" => ("pause", Command::Pause),
        "Resume" => ("resume", Command::Resume),
        "Switch" => {
            let plane = |value: &Value| match value.as_str()? {
                "kernel" => Some(PlaneKind::Kernel),
                "uring" => Some(PlaneKind::Uring),
                _ => None,
            };
            ("switch the data plane of", Command::Switch(call.required("plane", plane)?))
        }
        "SetCache" => {
            let mode = call.required("mode", word::<Cache>)?;
            let on = mode == Cache::Writeback;
            ("set the cache mode of", Command::SetCache(on))
        }
        "SetErrors" => ("set the treatment of errors of", Command::SetErrors(errors(call)?)),
        _ => return Err(CallError::MethodNotFound(method.to_owned())),
    })
}

fn told(method: &str, name: &str, status: &Status, facts: Option<&Facts>) -> Value {
    match method {
        "Stats" => json!({
            "name": name, "limits": limits_of(status), "queues": totals_value(status),
        }),
        _ => {
            let mut value = status_value(name, status);
            value["mirror"] = facts.map(mirror::value).into();
            json!({"status": value, "unserved": null})
        }
    }
}

/// Waits for the answer of a disk as long as the client is connected, and for its status at most [`STATUS_MAX`].
pub(super) fn ask(
    disks: &Disks,
    client: &Client<'_>,
    name: &str,
    command: Command,
    what: &str,
) -> Result<Answer, Failure> {
    let is_look = command == Command::Status;
    let (posted, begun) = (disks.post(name, command)?, Instant::now());
    loop {
        if let Some(answer) = posted.wait(Some(Client::LOOK)) {
            return Ok(answer);
        }
        if is_look && begun.elapsed() >= STATUS_MAX {
            return Err(Failure::run(what, "it does not answer", "check its storage"));
        }
        if posted.is_lost() {
            return Err(Failure::run(what, "it has gone meanwhile", "see vhost-blk ctl list"));
        }
        if !client.is_connected() {
            let remedy = "check the storage of the disk";
            return Err(Failure::run(what, "the client has not waited for it", remedy));
        }
    }
}

fn remove(disks: &Disks, client: &Client<'_>, call: &mut Call) -> Result<Value, CallError> {
    let name = call.required("name", text)?;
    let force = match call.optional("force", Value::as_bool)? {
        Some(true) => Force::Yes,
        _ => Force::No,
    };
    let forgets = saving::is_wanted(call)?;
    call.no_more()?;
    // Also a disk that is not served yet, or could not be started.
    if disks.start_of(Some(&name)).is_none() {
        disks.resolve(Some(&name))?;
    }
    client.means(&name);
    only_many(disks, "remove a disk")?;
    let removed = match forgets {
        true => disks.remove_with_file(&name, force, || client.is_connected())?,
        false => disks.remove(&name, force, || client.is_connected())?,
    };
    Ok(json!({"given_up": removed == Removed::GivenUp, "config": disks.present_file_of(&name)}))
}

fn add(
    disks: &Arc<Disks>,
    client: &Client<'_>,
    call: &mut Call,
    mut descriptors: Vec<OwnedFd>,
) -> Result<Value, CallError> {
    let name = call.required("name", |value| disk_name(value.as_str()?).ok())?;
    let table = call.required("options", disk_options::table)?;
    let index = call.optional("image", Value::as_u64)?;
    let saves = saving::is_wanted(call)?;
    call.no_more()?;
    let image = match index.map(|index| index as usize) {
        None => None,
        Some(index) if index < descriptors.len() => Some(descriptors.swap_remove(index)),
        Some(_) => return Err(CallError::InvalidParameter("image".into())),
    };
    only_many(disks, "add a disk")?;
    client.means(&name);
    let args = crate::config::disk_of_table(&format!("the options of the disk {name}"), &table)?;
    if saves {
        disks.check_save(&name)?;
    }
    let wait = LockWait::from_now();
    let new = NewDisk { name, args, origin: Origin::Command, image, taken: None, wait };
    let warnings = disks.add_for(new, saves, || client.is_connected())?;
    Ok(json!({"warnings": warnings}))
}

fn limit(disks: &Disks, call: &mut Call) -> Result<Command, CallError> {
    let group = call.optional("group", |value| disk_name(value.as_str()?).ok())?;
    let change = limit_change(call)?;
    if group.is_some() {
        only_many(disks, "share limits between disks")?;
    }
    Ok(Command::Limit(group.map(Into::into), change))
}

/// Refuses a change of limits without a value: an earlier interface took it for the removal of all. A wrong parameter
/// is refused before.
fn check_change(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Limit(None, change) if change.is_empty() => {
            let remedy =
                "name iops, bandwidth, burst_ms or group; iops 0 and bandwidth 0 remove the limits";
            Err(Failure::run("limit the disk", "the call names no limit", remedy))
        }
        _ => Ok(()),
    }
}

fn errors(call: &mut Call) -> Result<ErrorChange, CallError> {
    let others = call.optional("on_error", word::<OnError>)?.map(ErrorPolicy::from);
    let reads = call.optional("on_read_error", word::<OnReadError>)?.map(ErrorPolicy::from);
    let io_timeout = call.optional("io_timeout", |value| match value.as_f64()? {
        0.0 => Some(None),
        seconds => values::io_timeout(&seconds.to_string()).ok().map(|limit| Some(limit.0)),
    })?;
    Ok(ErrorChange { reads: reads.or(others), others, io_timeout })
}

fn limit_change(call: &mut Call) -> Result<LimitChange, CallError> {
    let up_to =
        |most| move |value: &Value| value.as_u64().filter(|it| *it <= most).map(NonZeroU64::new);
    let iops = call.optional("iops", up_to(values::IOPS_MAX))?;
    let bytes = call.optional("bandwidth", up_to(values::BANDWIDTH_MAX))?;
    let burst = call.optional("burst_ms", |value| {
        let burst = Duration::from_millis(value.as_u64()?);
        (Limits::BURST_MIN..=Limits::BURST_MAX).contains(&burst).then_some(burst)
    })?;
    Ok(LimitChange { iops, bytes, burst })
}

fn reload(disks: &Arc<Disks>, client: &Client<'_>, call: &Call) -> Result<Value, CallError> {
    call.no_more()?;
    let what = "read the configuration again";
    let act = "the reload of the configuration".to_owned();
    let turn = disks.turn(what, act, &mut || client.is_connected())?;
    // A directory that is missing is no error of the call.
    let reports =
        disks.reload_now(&turn).map_err(|failure| Failure { sort: Sort::Run, ..failure })?;
    drop(turn);
    let change = |report: &crate::disks::reload::Report| {
        json!({
            "disk": report.disk,
            "outcome": report.outcome.name(),
            "reason": report.reason,
            "warnings": report.warnings,
        })
    };
    Ok(json!({"changes": reports.iter().map(change).collect::<Vec<_>>()}))
}

/// The program to upgrade to, if the client may name it.
fn upgrade(client: &Client<'_>, call: &mut Call) -> Result<Option<PathBuf>, CallError> {
    let program = call.optional("program", text)?;
    call.no_more()?;
    if program.is_some() && !client.is_owner() {
        let why = "only root and the user of the daemon may name a program";
        let remedy = "omit --program, or run the command as one of them";
        return Err(Failure::run(UPGRADE, why, remedy).into());
    }
    Ok(program.map(PathBuf::from))
}

/// Begins a trace. Its first reply names the disks that it does not cover.
fn trace(
    disks: &Arc<Disks>,
    client: &Client<'_>,
    call: &mut Call,
) -> Result<(Traced, Value), CallError> {
    let wanted = call.optional("name", text)?;
    let bound = call.required("slower_than_us", |value| value.as_u64().filter(|&us| us > 0))?;
    call.no_more()?;
    if !call.more {
        return Err(CallError::ExpectedMore);
    }
    let name = wanted.map(|name| disks.resolve(Some(&name))).transpose()?;
    let untraced = untraced(name.as_deref(), disks.untraceable())?;
    client.means(name.as_deref().unwrap_or(""));
    Ok((disks.trace(name, Duration::from_micros(bound))?, json!({"untraced": untraced})))
}

/// Selects the disks that a trace of all cannot cover; a trace of one such disk is refused.
fn untraced(name: Option<&str>, untraceable: Vec<String>) -> Result<Vec<String>, Failure> {
    let Some(name) = name else { return Ok(untraceable) };
    if untraceable.iter().any(|it| it == name) {
        return Err(Failure::run(
            format!("trace the disk {name}"),
            "its queues run in the kernel, whose module is too old to trace requests",
            format!(
                "load the module that belongs to this program, or move the disk: vhost-blk ctl \
                 switch {name} uring"
            ),
        ));
    }
    Ok(Vec::new())
}

fn set_log_level(call: &mut Call) -> Result<Value, CallError> {
    let level = call.required("level", word::<LogLevel>)?;
    call.no_more()?;
    log::set_level(level);
    Ok(json!({}))
}

/// The disk of a call that has no other parameter.
pub(super) fn only_disk(disks: &Disks, call: &mut Call) -> Result<String, CallError> {
    let wanted = call.optional("name", text)?;
    call.no_more()?;
    Ok(disks.resolve(wanted.as_deref())?)
}

/// A parameter with the words of an option.
pub(super) fn word<T: ValueEnum>(value: &Value) -> Option<T> {
    T::from_str(value.as_str()?, false).ok()
}

fn only_many(disks: &Disks, what: &str) -> Result<(), Failure> {
    match disks.mode {
        Mode::Many(_) => Ok(()),
        Mode::One => Err(Failure::run(
            what,
            "`vhost-blk serve` has one disk from its start to its end",
            "use vhost-blk daemon",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_cannot_be_traced_is_refused_or_named() {
        let old = || vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(untraced(None, old()).unwrap(), old());
        assert_eq!(untraced(Some("c"), old()).unwrap(), [""; 0]);
        let line = untraced(Some("b"), old()).unwrap_err().to_string();
        assert!(line.contains("trace the disk b") && line.contains("too old"), "{line}");
        assert!(line.contains("vhost-blk ctl switch b uring"), "{line}");
    }
}
