// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl`: sends a command to the control socket of a running daemon.

use crate::control::wire::{Answer, PlaneName, Request};
use crate::failure::Failure;
use crate::values::{self, Burst, Size};
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of `vhost-blk ctl`.
#[derive(Args, Clone, Debug)]
pub struct CtlArgs {
    /// The daemon's --control-path
    #[arg(long, value_name = "PATH")]
    pub control_path: PathBuf,
    /// Print the daemon's answer as JSON
    #[arg(long)]
    pub json: bool,
    /// Seconds to wait for the answer, 0: no limit. The daemon may still carry out the command later
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub timeout: u32,
    /// The command.
    #[command(subcommand)]
    pub action: Action,
}

/// Commands for a running daemon.
#[derive(Clone, Debug, Subcommand)]
pub enum Action {
    /// Show the data plane of the queues, the reason for it, and their counters
    Status,
    /// Move the queues to another data plane while the guest runs. No request is lost. If the move
    /// fails, the queues stay on their data plane
    Switch {
        /// The new data plane
        plane: PlaneName,
    },
    /// Enlarge the disk while the guest runs. The guest sees the new size at once if the VMM passes
    /// it on (QEMU does). A disk cannot shrink
    Resize {
        /// The new size of the image, in bytes or with K, M, G or T. Without it the disk adopts the
        /// present size of its image or block device
        #[arg(value_parser = values::size)]
        size: Option<Size>,
    },
    /// Complete the requests in flight and take no other one. The guest's requests wait; the image
    /// stays open and locked
    Pause,
    /// End a pause
    Resume,
    /// Limit the rate of the disk, in place of its present limits. Requests that exceed it wait in
    /// the guest's queues
    #[command(group = clap::ArgGroup::new("limits").required(true).multiple(true))]
    Limit {
        /// Requests per second at most, of any kind
        #[arg(long, value_name = "N", value_parser = values::iops, group = "limits")]
        iops: Option<NonZeroU64>,
        /// Bytes per second that requests read, write or zero at most, with K, M, G or T
        #[arg(long, value_name = "SIZE", value_parser = values::rate_of_bytes, group = "limits")]
        bandwidth: Option<NonZeroU64>,
        /// Unused time, in seconds, that requests may catch up on: 0.01 to 3600
        #[arg(long, value_name = "SECONDS", default_value = "0.1", value_parser = values::burst)]
        burst_seconds: Burst,
        /// No limit
        #[arg(long, group = "limits", conflicts_with_all = ["iops", "bandwidth"])]
        none: bool,
    },
    /// Replace the daemon's program while the guest runs, after the new one has checked that it can
    /// take over. Otherwise the old one serves on
    Upgrade {
        /// Absolute path of the new program, which only root or the daemon's user can change
        /// [default: the file that the daemon was started from, as it is now]
        #[arg(long, value_name = "PATH")]
        program: Option<PathBuf>,
    },
}

/// Runs `vhost-blk ctl`.
///
/// # Errors
/// [`Failure`] if no daemon answers, or it refuses the command.
pub fn ctl(args: &CtlArgs) -> Result<(), Failure> {
    let (what, request) = match args.action.clone() {
        Action::Status => ("get the status", Request::Status {}),
        Action::Switch { plane } => ("switch the data plane", Request::Switch { plane }),
        Action::Resize { size } => {
            ("resize the disk", Request::Resize { bytes: size.map(|size| size.0) })
        }
        Action::Pause => ("pause the disk", Request::Pause {}),
        Action::Resume => ("resume the disk", Request::Resume {}),
        Action::Limit { iops, bandwidth, burst_seconds, none: _ } => {
            let burst_ms = u32::try_from(burst_seconds.0.as_millis()).ok();
            ("limit the disk", Request::Limit { iops, bandwidth, burst_ms })
        }
        Action::Upgrade { program } => ("upgrade the daemon", Request::Upgrade { program }),
    };
    let patience = (args.timeout > 0).then(|| Duration::from_secs(args.timeout.into()));
    let answer = ask(&args.control_path, request, patience).map_err(|error| {
        let at = format!("ask the daemon at {}", args.control_path.display());
        match error.kind() {
            // The read timeout of the socket.
            io::ErrorKind::WouldBlock => Failure::run(
                at,
                format!("no answer in {} s", args.timeout),
                "check the disk, whose requests the daemon waits for, or raise --timeout",
            ),
            _ => Failure::run(at, error, "see that it runs with this --control-path, as this user"),
        }
    })?;
    if let Some(why) = &answer.error {
        return Err(Failure::told(what, why));
    }
    let text = if args.json { answer_json(answer) } else { answer_text(&answer) };
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| Failure::run("write the output", error, "check where stdout goes"))
}

fn ask(path: &Path, request: Request, patience: Option<Duration>) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(patience)?;
    let sent = stream.write_all(format!("{}\n", serde_json::to_string(&request)?).as_bytes());
    // Read even after a failed write: a busy daemon sends its answer and closes the connection.
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    if line.is_empty() {
        sent?;
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ended without an answer"));
    }
    Ok(serde_json::from_str(&line)?)
}

/// The answer as one line of JSON: the status itself, or the fields of another answer.
fn answer_json(answer: Answer) -> String {
    let value = answer.status.unwrap_or_else(|| {
        json!({
            "moved_queues": answer.moved_queues,
            "capacity_bytes": answer.capacity_bytes,
            "changed": answer.changed,
            "version": answer.version,
            "pause_us": answer.pause_us,
        })
    });
    let fields = value.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    format!("{}\n", Value::from_iter(fields.map(|(name, value)| (name.clone(), value.clone()))))
}

fn answer_text(answer: &Answer) -> String {
    match answer {
        Answer { status: Some(status), .. } => status_text(status),
        Answer { moved_queues: Some(queues), .. } => {
            format!("done; {queues} running queues were moved\n")
        }
        Answer { capacity_bytes: Some(bytes), .. } => {
            format!("done; the disk has {bytes} bytes ({})\n", Size(*bytes))
        }
        Answer { version: Some(version), pause_us: Some(pause_us), .. } => {
            let ms = *pause_us as f64 / 1000.0;
            format!("done; version {version} runs, after a pause of {ms:.1} ms\n")
        }
        Answer { changed: Some(false), .. } => "nothing to do\n".to_owned(),
        _ => "done\n".to_owned(),
    }
}

fn limits_text(limits: &Value) -> String {
    let iops = limits["iops"].as_u64().map(|iops| format!("{iops} requests/s"));
    let bytes = limits["bandwidth"].as_u64().map(|bytes| format!("{}B/s", Size(bytes)));
    match iops.into_iter().chain(bytes).collect::<Vec<_>>() {
        none if none.is_empty() => "none".to_owned(),
        some => format!("{}, burst {} ms", some.join(", "), limits["burst_ms"]),
    }
}

fn status_text(status: &Value) -> String {
    let word = |name: &str| match &status[name] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let either = |name: &str, yes, no| if status[name] == true { yes } else { no };
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        writeln!(text, "{name:<12}{value}").expect("a string grows");
    };
    line("disk", word("disk"));
    line("size", format!("{} bytes", word("capacity_bytes")));
    line("state", either("paused", "paused: no request is taken", "serving").into());
    line("limits", limits_text(&status["limits"]));
    line("data plane", format!("{} ({})", word("data_plane"), word("why")));
    line("front-end", either("front_end_connected", "connected", "none").into());
    line("features", word("features"));
    line("cache", either("writeback", "writeback", "writethrough").into());
    for queue in status["queues"].as_array().into_iter().flatten() {
        let counts = ["chains", "refused", "kicks", "calls"];
        let counts =
            counts.iter().filter_map(|name| Some(format!(", {} {name}", queue.get(name)?)));
        let state = match queue["runs_on"].as_str() {
            Some(plane) => format!("runs on {plane}, {} descriptors", queue["size"]),
            None => "stopped".to_owned(),
        };
        line(&format!("queue {}", queue["index"]), state + &counts.collect::<String>());
    }
    for (name, told) in status["kernel"].as_object().into_iter().flatten() {
        line("kernel", format!("{name}: {}", told.as_str().unwrap_or_default()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_told_line_by_line() {
        let status = json!({
            "disk": "file a.img (direct)", "capacity_bytes": 4096, "paused": false,
            "limits": {"iops": 1000, "bandwidth": 50 << 20, "burst_ms": 100},
            "data_plane": "uring", "why": "--data-plane says so",
            "front_end_connected": true, "features": "0x3", "writeback": false,
            "queues": [
                {"index": 0, "runs_on": "uring", "size": 256, "chains": 7, "refused": 0,
                 "kicks": 3, "calls": 2},
                {"index": 1, "runs_on": null, "size": 0},
            ],
            "kernel": {"backend": "file", "queue0": "running chains=3"},
        });
        let expected = "\
disk        file a.img (direct)
size        4096 bytes
state       serving
limits      1000 requests/s, 50MB/s, burst 100 ms
data plane  uring (--data-plane says so)
front-end   connected
features    0x3
cache       writethrough
queue 0     runs on uring, 256 descriptors, 7 chains, 0 refused, 3 kicks, 2 calls
queue 1     stopped
kernel      backend: file
kernel      queue0: running chains=3
";
        assert_eq!(status_text(&status), expected);
    }
}
