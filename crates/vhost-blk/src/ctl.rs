// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl`: sends a command to the control socket of a running daemon.

use crate::control::wire::{Answer, PlaneName, Request};
use crate::failure::Failure;
use clap::{Args, Subcommand};
use serde_json::Value;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
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
#[derive(Clone, Copy, Debug, Subcommand)]
pub enum Action {
    /// Show the data plane of the queues, the reason for it, and their counters
    Status,
    /// Move the queues to another data plane while the guest runs. No request is lost. If the move
    /// fails, the queues stay on their data plane
    Switch {
        /// The new data plane
        plane: PlaneName,
    },
}

/// Runs `vhost-blk ctl`.
///
/// # Errors
/// [`Failure`] if no daemon answers, or it refuses the command.
pub fn ctl(args: &CtlArgs) -> Result<(), Failure> {
    let (what, request) = match args.action {
        Action::Status => ("get the status", Request::Status {}),
        Action::Switch { plane } => ("switch the data plane", Request::Switch { plane }),
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
    let text = match (&answer.status, answer.moved_queues) {
        (Some(status), _) if args.json => format!("{status}\n"),
        (Some(status), _) => status_text(status),
        (None, Some(queues)) if args.json => format!("{{\"moved_queues\":{queues}}}\n"),
        (None, Some(queues)) => format!("done; {queues} running queues were moved\n"),
        (None, None) => String::new(),
    };
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
    use serde_json::json;

    #[test]
    fn a_status_is_told_line_by_line() {
        let status = json!({
            "disk": "file a.img (direct)", "data_plane": "uring", "why": "--data-plane says so",
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
