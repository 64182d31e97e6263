// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl mirror`: begins a mirror, shows it, completes it and cancels it.

use super::add::absolute;
use super::ask::Asker;
use super::{Named, jobs, text};
use crate::failure::Failure;
use crate::image::progress;
use crate::values::{self, Format, word};
use clap::Args;
use serde_json::{Value, json};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

/// Arguments of `vhost-blk ctl mirror`.
#[derive(Args, Clone, Debug)]
pub struct MirrorArgs {
    /// The disk.
    #[command(flatten)]
    pub disk: Named,
    /// Begin a mirror to this storage: a new file, or a block device that is as large as the disk or
    /// larger
    #[arg(long, value_name = "FILE|DEVICE")]
    pub to: Option<PathBuf>,
    /// Format of the new file [default: that of the disk]
    #[arg(long, value_name = "FORMAT", requires = "to")]
    pub format: Option<Format>,
    /// Maximum bytes per second to copy, with K, M, G or T (powers of 1024). The completion has no limit
    #[arg(long, value_name = "SIZE", value_parser = values::rate_of_bytes, requires = "to")]
    pub bandwidth: Option<NonZeroU64>,
    /// Allow the loss of the block device's content. A file is never overwritten
    #[arg(long, requires = "to")]
    pub overwrite: bool,
    /// Wait until everything was copied once. The end of this program does not end the mirror
    #[arg(long, conflicts_with = "cancel")]
    pub wait: bool,
    /// Make the guest go on in the new storage, once everything was copied. The next start of the disk
    /// needs the printed options
    #[arg(long)]
    pub complete: bool,
    /// Rewrite the file of a disk of --config-dir, so that it names the new storage. Comments stay
    #[arg(long, requires = "complete")]
    pub update_config: bool,
    /// End the mirror. The guest goes on in its old storage, and a new file is removed
    #[arg(long, conflicts_with_all = ["to", "complete"])]
    pub cancel: bool,
}

/// The form of a reply.
type Text = fn(&Value) -> String;

/// Interval of the look at the progress.
const TICK: Duration = Duration::from_millis(200);
const WHAT: &str = "mirror the disk";
const SHOW: &str = "show the mirror of the disk";

/// Carries the command out. Returns the last reply and its text. `connect` makes a connection whose
/// replies arrive in the usual time, or without a limit.
pub(super) fn run<'a>(
    args: &MirrorArgs,
    connect: impl Fn(bool) -> Result<Asker<'a>, Failure>,
) -> Result<(Value, Text), Failure> {
    let name = &args.disk.name;
    let of = json!({ "name": name });
    let mut asker = connect(true)?;
    if args.cancel {
        let call = jobs::cancel(name.as_deref(), Some("mirror"));
        let reply = asker.ask(call.what, call.method, &call.parameters, None)?;
        return Ok((reply, call.text));
    }
    let mut begun = None;
    if let Some(to) = &args.to {
        // The daemon has another working directory.
        let parameters = json!({
            "name": name, "target": absolute(to)?, "format": args.format.map(word),
            "bandwidth": args.bandwidth, "overwrite": args.overwrite,
            "update_config": args.complete.then_some(args.update_config),
        });
        begun = Some(asker.ask(WHAT, "Mirror", &parameters, None)?);
    }
    if args.wait || args.complete {
        wait_until_ready(&mut asker, &of, begun.is_some())?;
    }
    if args.complete {
        let parameters = json!({"name": name, "update_config": args.update_config});
        let what = "complete the mirror of the disk";
        let reply = connect(false)?.ask(what, "CompleteMirror", &parameters, None)?;
        return Ok((reply, text::mirrored));
    }
    match begun {
        Some(reply) if args.wait => Ok((reply, text::mirror_is_ready)),
        Some(reply) => Ok((reply, text::mirror_begun)),
        None => Ok((asker.ask(SHOW, "MirrorStatus", &of, None)?, text::mirror)),
    }
}

/// Shows the progress of the first copy until its end. `is_own`: this command has begun the mirror.
fn wait_until_ready(asker: &mut Asker<'_>, of: &Value, is_own: bool) -> Result<(), Failure> {
    let bar = progress::bar()
        .map_err(|why| Failure::run("show the progress", why, "redirect standard error"))?;
    let waited = loop {
        let reply = match asker.ask(SHOW, "MirrorStatus", of, None) {
            Ok(reply) => reply,
            Err(failure) => break Err(failure),
        };
        let mirror = &reply["mirror"];
        if mirror.is_null() {
            let told = match reply["ended"].as_str() {
                None => "it is not being mirrored; begin that with --to".to_owned(),
                Some(ended) if is_own => ended.to_owned(),
                Some(ended) => format!("it is not being mirrored any more: {ended}"),
            };
            break Err(Failure::told(WHAT, told));
        }
        if mirror["state"] != "copying" {
            break Ok(());
        }
        let count = |name: &str| mirror[name].as_u64().unwrap_or_default();
        bar.set_length(count("total_bytes"));
        bar.set_position(count("copied_bytes"));
        thread::sleep(TICK);
    };
    bar.finish_and_clear();
    waited
}
