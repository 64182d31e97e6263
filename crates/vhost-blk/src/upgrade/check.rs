// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk upgrade-check`: the new program reads the options and the state of the running one,
//! on stdin, and changes nothing.

use super::state::{DiskState, ProgramState, SocketState};
use crate::disk::{self, From};
use crate::disks::kept;
use crate::failure::Failure;
use crate::options::{DaemonArgs, DiskArgs, ProcessArgs, ServeArgs};
use crate::socket::{self, Source};
use crate::{disk_options, server, wrappers};
use backend::file::OpenAs;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

/// Checks that this program can take over from `serve`, with the options `args`.
///
/// # Errors
/// [`Failure`] with the first obstacle.
pub fn check(args: &ServeArgs) -> Result<(), Failure> {
    args.check()?;
    let state = read_state()?;
    check_sockets(&args.process, &state)?;
    let [only] = &state.disks[..] else {
        return Err(cannot(format!("{} disks, and serve has one", state.disks.len())));
    };
    // As at the start of the new program, which has the process id of the old one.
    Source::choose_for(args, state.pid)?;
    check_source(&args.disk, only)?;
    if let Some(image) = &only.exchanged {
        let disk = image.clone().put_into(args.disk.clone());
        disk.check()?;
        return check_image(&disk, state.pid, only);
    }
    disk::check_format(&args.disk, only.backing.is_some()).map_err(cannot)?;
    let as_open = |open: Option<OpenAs>| {
        let image = only.image.as_ref().map(|image| (image.identity, image.direct));
        match image == open.map(|open| (open.identity, open.direct)) {
            true => Ok(()),
            false => Err(cannot("--blk-file or --direct name another file than the open one")),
        }
    };
    if only.backing.is_some() {
        as_open(Some(disk::identify(&args.disk)?))?;
        return check_image(&args.disk, state.pid, only);
    }
    let from = From::Served { opened: None, punches: only.punches() };
    let (info, open) = disk::examine(&args.disk, from)?;
    as_open(open)?;
    only.device.check(&info, &server::device_options(&args.disk)).map_err(cannot)
}

/// Checks that this program can take over from `daemon`, with the options `args`.
///
/// # Errors
/// [`Failure`] with the first obstacle.
pub fn check_daemon(args: &DaemonArgs) -> Result<(), Failure> {
    args.check()?;
    let state = read_state()?;
    check_sockets(&args.process, &state)?;
    state.disks.iter().try_for_each(|disk| {
        let checked = check_disk(&args.process, state.pid, disk);
        checked.map_err(|failure| Failure { what: format!("take over {}", disk.name), ..failure })
    })
}

/// Checks a disk of `daemon`, with the options of the state.
fn check_disk(process: &ProcessArgs, pid: u32, disk: &DiskState) -> Result<(), Failure> {
    let args = options(disk)?;
    process.check_socket(args.socket_path.as_ref())?;
    Source::of_disk(&args)?;
    check_source(&args, disk)?;
    check_image(&args, pid, disk)
}

/// Checks the options of a disk that are used after its image is open: an error there would end a served disk.
fn check_source(args: &DiskArgs, disk: &DiskState) -> Result<(), Failure> {
    let was_passed = disk.front_ends.as_ref().is_none_or(|socket| socket.file.is_none());
    if let (true, Some(path)) = (was_passed, &args.socket_path) {
        let why = format!("--socket-path {} is new: the socket was passed", path.display());
        return Err(cannot(why));
    }
    same_path("--socket-path", args.socket_path.as_deref(), disk.front_ends.as_ref())?;
    wrappers::check(args)
}

/// Checks a disk with these options, and the image that the process `pid` has open.
fn check_image(args: &DiskArgs, pid: u32, disk: &DiskState) -> Result<(), Failure> {
    disk::check_format(args, disk.backing.is_some()).map_err(cannot)?;
    let place = |fd| PathBuf::from(format!("/proc/{pid}/fd/{fd}"));
    let mut open = disk.images().map(place);
    let info = match disk.backing {
        Some(_) => disk::examine_qcow2(args, &open.collect::<Vec<_>>())?,
        None => {
            let from = From::Served { opened: open.next(), punches: disk.punches() };
            disk::examine(args, from)?.0
        }
    };
    disk.device.check(&info, &server::device_options(args)).map_err(cannot)
}

/// The options of a disk of `daemon`.
///
/// # Errors
/// [`Failure`] if this program does not take them.
pub(super) fn options(disk: &DiskState) -> Result<DiskArgs, Failure> {
    let source = format!("the options of the disk {}", disk.name);
    let options = disk.options.as_ref().ok_or_else(|| cannot(format!("{source} are missing")))?;
    disk_options::to_disk(&source, options)
}

fn read_state() -> Result<ProgramState, Failure> {
    let state = ProgramState::read(io::stdin().lock()).map_err(cannot)?;
    for (disk, fd) in state.disks.iter().filter_map(|disk| Some((disk, disk.bitmaps?))) {
        let place = PathBuf::from(format!("/proc/{}/fd/{fd}", state.pid));
        kept::check(&place).map_err(|why| cannot(format!("the disk {}: {why}", disk.name)))?;
    }
    Ok(state)
}

fn cannot(why: impl Display) -> Failure {
    Failure::run("take over the running disk", why, "see `Upgrade` in docs/operations.md")
}

/// Checks that the sockets of the process have the same places, and groups that exist.
fn check_sockets(args: &ProcessArgs, state: &ProgramState) -> Result<(), Failure> {
    socket::control_access(args)?;
    socket::metrics_access(args)?;
    same_path("--control-path", args.control_path.as_deref(), Some(&state.control))?;
    same_path("--pidfile", args.pidfile.as_deref(), state.pidfile.as_ref())?;
    let metrics = args.metrics_path().map(PathBuf::as_path);
    same_path("--metrics", metrics, state.metrics.as_ref())
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
