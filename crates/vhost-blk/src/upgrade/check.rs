// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk upgrade-check`: the new program reads the options and the state of the running one,
//! on stdin, and changes nothing.

use super::state::{ProgramState, SocketState};
use crate::failure::Failure;
use crate::options::ServeArgs;
use crate::values::MetricsAddress;
use crate::{disk, engine};
use std::io;
use std::path::Path;

/// Checks that this program can take over, with the options `args`.
///
/// # Errors
/// [`Failure`] with the first obstacle.
pub fn check(args: &ServeArgs) -> Result<(), Failure> {
    args.check()?;
    let state = ProgramState::read(io::stdin().lock()).map_err(cannot)?;
    let metrics = match &args.process.metrics {
        Some(MetricsAddress::Unix(path)) => Some(path.as_path()),
        _ => None,
    };
    same_path("--socket-path", args.disk.socket_path.as_deref(), state.front_ends.as_ref())?;
    same_path("--control-path", args.process.control_path.as_deref(), Some(&state.control))?;
    same_path("--metrics", metrics, state.metrics.as_ref())?;
    let [only] = &state.disks[..] else {
        return Err(cannot(format!("{} disks, and serve has one", state.disks.len())));
    };
    let (info, open) = disk::examine(&args.disk)?;
    let open = open.map(|open| (open.identity, open.direct));
    if only.image.as_ref().map(|image| (image.identity, image.direct)) != open {
        return Err(cannot("--blk-file or --direct name another file than the open one"));
    }
    only.device.check(&info, &engine::device_options(&args.disk)).map_err(cannot)
}

fn cannot(why: impl std::fmt::Display) -> Failure {
    Failure::run("take over the running disk", why, "see `Upgrade` in docs/operations.md")
}

/// Checks that an option names the socket file that is in use.
fn same_path(
    option: &str,
    wanted: Option<&Path>,
    socket: Option<&SocketState>,
) -> Result<(), Failure> {
    let file = socket.and_then(|socket| socket.file.as_ref());
    match file {
        Some(file) if wanted != Some(&file.path) => {
            Err(cannot(format!("{option} has changed; it was {}", file.path.display())))
        }
        _ => Ok(()),
    }
}
