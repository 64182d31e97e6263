// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl`: sends a command to the control socket of a running daemon.

mod add;
mod ask;
mod backup;
mod errors;
mod every;
mod jobs;
mod limit;
mod mirror;
mod resize;
mod stats;
mod text;
mod trace;
mod unserved;
mod version;

use crate::clock;
use crate::failure::Failure;
use crate::options::{CONTROL_PATH, CONTROL_VARIABLE};
use crate::output::{print, print_next};
use crate::values::{self, Cache, LogLevel, word};
use add::AddArgs;
pub(crate) use ask::Asker;
use ask::Stream;
use backup::BackupArgs;
use clap::{Args, Subcommand, ValueEnum};
use errors::ErrorsArgs;
use every::NamedOrAll;
use jobs::JobsArgs;
use limit::LimitArgs;
use mirror::MirrorArgs;
use serde_json::{Value, json};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;
pub(crate) use text::{job as job_text, table};
use trace::TraceArgs;

/// Arguments of `vhost-blk ctl`.
#[derive(Args, Clone, Debug)]
pub struct CtlArgs {
    /// The daemon's --control-path
    #[arg(long, value_name = "PATH", default_value = CONTROL_PATH, env = CONTROL_VARIABLE,
          hide_env_values = true, global = true)]
    pub control_path: PathBuf,
    /// Print the daemon's answer as JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Seconds to wait for the answer, 0: no limit. The daemon may still carry out the command later
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = values::patience,
          global = true)]
    pub timeout: u32,
    /// The command.
    #[command(subcommand)]
    pub action: Action,
}

/// A data plane by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlaneName {
    /// The kernel module
    Kernel,
    /// The daemon's own io_uring threads
    Uring,
}

/// The name of a disk.
#[derive(Args, Clone, Debug)]
pub struct Named {
    /// The disk; may be left out if the daemon has one disk
    #[arg(value_parser = values::disk_name)]
    pub name: Option<String>,
}

/// Commands for a running daemon.
#[derive(Clone, Debug, Subcommand)]
pub enum Action {
    /// Serve another disk, with the options of serve
    Add(Box<AddArgs>),
    /// Copy a disk to a new image while the guest runs. The copy has the content of the disk at its
    /// start. Interrupting this command cancels the backup
    Backup(BackupArgs),
    /// Show the bitmaps of a disk, which note changes for incremental backups
    ///
    /// An upgrade and a clean end of the disk keep them; a crash or a kill of the daemon ends them. While
    /// the disk is not served they are in IMAGE.vhost-blk-bitmaps beside its image
    Bitmaps {
        /// The disk.
        #[command(flatten)]
        disk: Named,
        /// Remove this one: its next backup has to be a full one
        #[arg(long, value_name = "BITMAP", value_parser = values::disk_name)]
        remove: Option<String>,
    },
    /// Merge the image of a disk into its backing file, and let the guest continue there: the opposite of
    /// snapshot. Waits for the end without a limit; the end of this program cancels the commit
    Commit {
        /// The disk.
        #[command(flatten)]
        disk: Named,
        /// Cancel the commit that another client waits for
        #[arg(long, conflicts_with_all = ["update_config", "bandwidth"])]
        cancel: bool,
        /// Rewrite the file of a disk of --config-dir, so that it names the backing file
        #[arg(long)]
        update_config: bool,
        /// Maximum bytes per second to copy, with K, M, G or T (powers of 1024). The last part, while the disk
        /// takes no request, has no limit
        #[arg(long, value_name = "SIZE", value_parser = values::rate_of_bytes)]
        bandwidth: Option<NonZeroU64>,
    },
    /// Show the discards of a disk since it is served, and the space that each file of it takes
    DiscardStats(Named),
    /// Print the changes of all disks as they happen, until the daemon or this program is stopped
    Events,
    /// Show the backups, commits and mirrors in progress, of one disk or of all. Change the bandwidth of one, or
    /// cancel it
    Jobs(JobsArgs),
    /// Limit the rate of a disk or of its group. A limit that is not given stays. Requests that exceed a limit wait in
    /// the guest's queues
    Limit(LimitArgs),
    /// Show all disks
    List,
    /// Change the minimum severity of the daemon's log lines
    LogLevel {
        /// The severity
        level: LogLevel,
    },
    /// Copy a disk to other storage while the guest runs, and let the guest go on there (--complete).
    /// Without --to, --complete and --cancel: show the mirror of the disk
    Mirror(MirrorArgs),
    /// Complete the requests in flight of a disk and take no other one. The guest's requests wait;
    /// the image stays open and locked
    Pause(NamedOrAll),
    /// Read the directory of configuration files again, as SIGHUP does. Adds, removes and changes the
    /// disks whose files have changed, and prints the treatment of each
    Reload,
    /// Close the connection and the socket of a disk, complete its requests in flight, and close it
    Remove {
        /// The disk
        #[arg(value_parser = values::disk_name)]
        name: String,
        /// Detach the disk even if its storage does not answer within a second. Its name and its
        /// socket can be used again at once. Until the storage answers, the image stays in use, and
        /// pending reads may still write to guest memory
        #[arg(long)]
        force: bool,
        /// Remove its file of --config-dir, too: it is not served again after a restart of the daemon
        #[arg(long)]
        save: bool,
    },
    /// Enlarge a disk while the guest runs. The guest sees the new size at once if the VMM passes it
    /// on (QEMU does). A disk cannot shrink
    Resize {
        /// The disk, and the new size of its image in bytes or with K, M, G or T (powers of 1024). Without a size the
        /// disk adopts the present size of its image or block device. A single argument that looks like
        /// a size is taken as the size
        #[arg(value_name = "NAME|SIZE", num_args = 0..=2)]
        words: Vec<String>,
    },
    /// End a pause, and a halt after an error of the storage: the failed requests are tried again
    Resume(NamedOrAll),
    /// Keep a disk with its present options for the next start of the daemon: write its file of
    /// --config-dir, or its limits, cache mode and treatment of errors into the present file
    Save(Named),
    /// Set the cache mode of a disk. writeback is refused while a front-end is connected
    #[command(allow_missing_positional = true)]
    SetCache {
        /// The disk; may be left out if the daemon has one disk
        #[arg(value_parser = values::disk_name)]
        name: Option<String>,
        /// The mode
        #[arg(required = true)]
        mode: Cache,
        /// Write the mode into the file of the disk, too
        #[arg(long)]
        save: bool,
    },
    /// Set the effect of errors of the storage, and the time limit after which a hang is reported, while the
    /// guest runs. The queues stop for a moment
    SetErrors(ErrorsArgs),
    /// Make the image of a disk the read-only backing file of a new qcow2 image, in which the guest
    /// goes on. Requests wait for a moment. The next start of the disk needs the printed options
    Snapshot {
        /// The disk.
        #[command(flatten)]
        disk: Named,
        /// The new image; it must not exist
        #[arg(long, value_name = "OVERLAY")]
        to: PathBuf,
        /// Rewrite the file of a disk of --config-dir, so that it names the new image. Comments stay
        #[arg(long)]
        update_config: bool,
        /// Go on if the file system of the image has no extended attributes: nothing then keeps a
        /// later start from writing to the image, which corrupts the new one
        #[arg(long)]
        no_mark: bool,
    },
    /// Show the image of a disk and its backing files, the newest first
    Snapshots(Named),
    /// Show the counters of the queues of a disk, since it is served
    Stats(NamedOrAll),
    /// Show the state, the options and the data plane of a disk, and its queues with their counters
    Status(NamedOrAll),
    /// Stop the daemon, as SIGTERM does
    Stop,
    /// Move the queues of a disk to another data plane while the guest runs. No request is lost. If
    /// the move fails, the queues stay on their data plane
    #[command(allow_missing_positional = true)]
    Switch {
        /// The disk; may be left out if the daemon has one disk
        #[arg(value_parser = values::disk_name)]
        name: Option<String>,
        /// The new data plane
        #[arg(required = true)]
        plane: PlaneName,
    },
    /// Print slow requests as they complete, with the time of each stage, until the disk has gone, or the daemon or
    /// this program is stopped. While a trace runs, each request costs some readings of the clock
    Trace(TraceArgs),
    /// Replace the program of the daemon while the guests of all of its disks run, after the new one
    /// has checked that it can take over. Otherwise the old program continues to serve. The upgrade is
    /// refused while a disk is in memory (--backend mem), or is being backed up, mirrored or merged
    Upgrade {
        /// Absolute path of the new program, which only root or the daemon's user can change
        /// [default: the file that the daemon was started from, as it is now]
        #[arg(long, value_name = "PATH")]
        program: Option<String>,
    },
    /// Show the versions of the daemon, of the kernel module and of this program, with a warning if they differ, and
    /// the start time of the daemon
    Version,
}

/// A call, and the form of its reply.
struct Call {
    what: &'static str,
    method: &'static str,
    parameters: Value,
    /// The member of the reply that `--json` prints; all of it if empty.
    member: &'static str,
    text: fn(&Value) -> String,
}

impl Call {
    fn new(what: &'static str, method: &'static str, parameters: Value) -> Call {
        Call { what, method, parameters, member: "", text: text::done }
    }

    /// Prints the reply like this, unless it is wanted as JSON.
    fn told(self, text: fn(&Value) -> String) -> Call {
        Call { text, ..self }
    }

    /// Prints this member of the reply as JSON.
    fn of_member(self, member: &'static str) -> Call {
        Call { member, ..self }
    }
}

/// Runs `vhost-blk ctl`.
///
/// # Errors
/// [`Failure`] if no daemon answers, or it refuses the command.
pub fn ctl(args: &CtlArgs) -> Result<(), Failure> {
    let patience = match args.action {
        Action::Commit { cancel: false, .. } => None,
        _ => (args.timeout > 0).then(|| Duration::from_secs(args.timeout.into())),
    };
    let connect = || Asker::connect(&args.control_path, patience);
    match &args.action {
        Action::Events => {
            let each = |reply: &Value| print_message(&reply["event"], args.json, text::event);
            let (path, parameters) = (&*args.control_path, json!({}));
            let (what, method) = ("receive events", "Events");
            let stream = Stream { path, patience, what, method, parameters };
            stream.follow(each, || reconnected(args.json))
        }
        Action::Version => version::show(connect()?, args.json),
        Action::Trace(trace) => trace.follow(&args.control_path, patience, args.json),
        Action::Add(add) => {
            let (parameters, image) = add.parameters()?;
            let reply = connect()?.ask("add the disk", "Add", &parameters, image.as_ref())?;
            print(shown(&Call::new("", "", Value::Null), &reply, args.json))?;
            text::warn(&reply, args.json);
            Ok(())
        }
        Action::Backup(backup) if !backup.cancel => {
            let reply = backup::run(backup, connect()?)?;
            let call = Call::new("", "", Value::Null).told(backup.text());
            print(shown(&call, &reply, args.json))
        }
        Action::Mirror(mirror) => {
            let connect =
                |is_usual: bool| Asker::connect(&args.control_path, patience.filter(|_| is_usual));
            let (reply, text) = mirror::run(mirror, connect)?;
            let call = Call::new("", "", Value::Null).told(text);
            print(shown(&call, &reply, args.json))
        }
        Action::Pause(which) if which.all => every::change(connect, every::pause, args.json),
        Action::Resume(which) if which.all => every::change(connect, every::resume, args.json),
        Action::Stats(which) if which.all => every::show(connect, every::named_stats, args.json),
        Action::Status(which) if which.all => every::show(connect, every::status, args.json),
        other => {
            let call = call(other)?;
            let reply = connect()?.ask(call.what, call.method, &call.parameters, None)?;
            print(shown(&call, &reply, args.json))?;
            unserved::check_changes(&reply)
        }
    }
}

/// The call of an action on one disk, or of one without a disk.
fn call(action: &Action) -> Result<Call, Failure> {
    let of = |disk: &Named| json!({"name": disk.name});
    Ok(match action {
        Action::Limit(limits) => {
            Call::new("limit the disk", "Limit", limits.parameters()).told(limit::text)
        }
        Action::List => {
            Call::new("list the disks", "List", json!({})).told(text::list).of_member("disks")
        }
        Action::LogLevel { level } => {
            Call::new("set the log level", "SetLogLevel", json!({"level": word(*level)}))
        }
        Action::Pause(which) => every::pause(&which.disk),
        Action::Reload => Call::new("read the configuration again", "Reload", json!({}))
            .told(text::changes)
            .of_member("changes"),
        Action::Remove { name, force, save } => {
            let parameters = json!({"name": name, "force": force, "save": save});
            Call::new("remove the disk", "Remove", parameters).told(text::removed)
        }
        Action::Resize { words } => {
            Call::new("resize the disk", "Resize", resize::parameters(words)?)
        }
        Action::Resume(which) => every::resume(&which.disk),
        Action::Save(disk) => Call::new("save the disk", "Save", of(disk)).told(text::saved),
        Action::SetCache { name, mode, save } => {
            let parameters = json!({"name": name, "mode": word(*mode), "save": save});
            Call::new("set the cache mode", "SetCache", parameters)
        }
        Action::SetErrors(errors) => {
            Call::new("set the treatment of errors", "SetErrors", errors.parameters())
        }
        Action::Stats(which) => every::stats(&which.disk),
        Action::Status(which) => every::status(&which.disk),
        Action::Stop => Call::new("stop the daemon", "Stop", json!({})),
        Action::Switch { name, plane } => {
            let parameters = json!({"name": name, "plane": word(*plane)});
            Call::new("switch the data plane", "Switch", parameters)
        }
        Action::Upgrade { program } => {
            Call::new("upgrade the daemon", "Upgrade", json!({"program": program}))
        }
        of_images => return call_of_images(of_images),
    })
}

/// The call of an action on the images of a disk.
fn call_of_images(action: &Action) -> Result<Call, Failure> {
    let of = |disk: &Named| json!({"name": disk.name});
    Ok(match action {
        Action::Bitmaps { disk, remove: Some(bitmap) } => {
            let parameters = json!({"name": disk.name, "bitmap": bitmap});
            Call::new("remove the bitmap", "RemoveBitmap", parameters)
        }
        Action::Bitmaps { disk, remove: None } => {
            Call::new("show the bitmaps of the disk", "Bitmaps", of(disk))
                .told(text::bitmaps)
                .of_member("bitmaps")
        }
        Action::Commit { disk, cancel: true, .. } => {
            jobs::cancel(disk.name.as_deref(), Some("commit"))
        }
        Action::Commit { disk, update_config, bandwidth, .. } => {
            let parameters = json!({
                "name": disk.name, "update_config": update_config, "bandwidth": bandwidth,
            });
            Call::new("commit the image of the disk", "Commit", parameters).told(text::commit)
        }
        Action::Snapshot { disk, to, update_config, no_mark } => {
            let parameters = json!({
                // The daemon has another working directory.
                "name": disk.name, "overlay": add::absolute(to)?,
                "update_config": update_config, "no_mark": no_mark,
            });
            Call::new("take a snapshot of the disk", "Snapshot", parameters).told(text::snapshot)
        }
        Action::Backup(backup) => jobs::cancel(backup.name.as_deref(), Some("backup")),
        Action::Snapshots(disk) => {
            Call::new("show the snapshots of the disk", "Snapshots", of(disk))
                .told(text::chain)
                .of_member("files")
        }
        Action::Jobs(jobs) => jobs.call(),
        Action::DiscardStats(disk) => {
            Call::new("get the discards", "DiscardStats", of(disk)).told(text::discard_stats)
        }
        _ => unreachable!("a simple call, or one with an own function"),
    })
}

fn shown(call: &Call, reply: &Value, as_json: bool) -> String {
    if !as_json {
        return (call.text)(reply);
    }
    let value = match call.member {
        "" => reply,
        // A disk that is not served has no status.
        "status" if reply["status"].is_null() => &reply["unserved"],
        member => &reply[member],
    };
    format!("{value}\n")
}

/// Says in a stream that messages may be missing here: the daemon was upgraded.
fn reconnected(as_json: bool) -> Result<bool, Failure> {
    let message = json!({"time": clock::now(), "event": "reconnected"});
    print_message(&message, as_json, text::event)
}

/// Prints a message of a stream, if there is one. Returns whether the reader of the output takes more.
fn print_message(
    message: &Value,
    as_json: bool,
    text: fn(&Value) -> String,
) -> Result<bool, Failure> {
    match (message.is_null(), as_json) {
        (true, _) => Ok(true),
        (_, true) => print_next(format!("{message}\n")),
        (_, false) => print_next(text(message)),
    }
}
