// SPDX-License-Identifier: Apache-2.0
//! The source of front-ends: a socket file of this process, or a passed socket.

use crate::failure::Failure;
use crate::options::{DiskArgs, ProcessArgs, ServeArgs};
use crate::os;
use crate::socket_file::{self, SocketFile};
use socket2::{Domain, Socket, Type};
use std::os::fd::RawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

/// First descriptor that a service manager passes.
const LISTEN_FDS_START: RawFd = 3;

/// The socket to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A socket file to create.
    Path {
        /// Its path.
        path: PathBuf,
        /// Permission bits.
        mode: u32,
        /// Group to set.
        group: Option<u32>,
    },
    /// An inherited descriptor, and the option or variable that named it.
    Fd(RawFd, &'static str),
}

/// An open source of front-ends.
#[derive(Debug)]
pub enum Endpoint {
    /// A listening socket, and its file if this process created one.
    Listening(UnixListener, Option<SocketFile>),
    /// The connection of a single front-end.
    Connected(UnixStream),
}

impl Source {
    /// Selects the only source that the options and the environment name.
    ///
    /// # Errors
    /// [`Failure`] if they name no source, several sources or an invalid one.
    pub fn choose(args: &ServeArgs) -> Result<Source, Failure> {
        Source::choose_for(args, std::process::id())
    }

    /// As [`Source::choose`], for the process `pid` with the environment of this one.
    ///
    /// # Errors
    /// As [`Source::choose`].
    pub fn choose_for(args: &ServeArgs, pid: u32) -> Result<Source, Failure> {
        let passed = passed_sockets(pid)?;
        match (&args.disk.socket_path, args.fd, passed) {
            (Some(_), None, false) => Source::of_disk(&args.disk),
            (None, Some(fd), false) => Ok(Source::Fd(fd, "--fd")),
            (None, None, true) => Ok(Source::Fd(LISTEN_FDS_START, "LISTEN_FDS")),
            (None, None, false) => Err(Failure::usage(
                "choose a socket",
                "none is given",
                "give --socket-path PATH or --fd N",
            )),
            (_, _, true) => Err(Failure::usage(
                "choose a socket",
                "the service manager passes one (LISTEN_FDS) and the options name another",
                "drop --socket-path and --fd, or start without socket activation",
            )),
            (Some(_), Some(_), false) => Err(Failure::usage(
                "choose a socket",
                "both --socket-path and --fd are given",
                "give one of them",
            )),
        }
    }

    /// The socket file of a disk.
    ///
    /// # Errors
    /// [`Failure`] if the options name no path, or an unknown group.
    pub fn of_disk(args: &DiskArgs) -> Result<Source, Failure> {
        let Some(path) = args.socket_path.clone() else {
            return Err(Failure::usage(
                "choose a socket",
                "none is given",
                "give --socket-path PATH",
            ));
        };
        let (mode, group) =
            access(args.socket_mode, args.socket_group.as_deref(), "--socket-group")?;
        Ok(Source::Path { path, mode, group })
    }

    /// Opens the source.
    ///
    /// # Errors
    /// [`Failure`] if the socket cannot be created or is of a wrong type.
    pub fn open(&self) -> Result<Endpoint, Failure> {
        match self {
            Source::Path { path, mode, group } => {
                let (listener, file) = socket_file::listen(path, *mode, *group)?;
                Ok(Endpoint::Listening(listener, Some(file)))
            }
            Source::Fd(fd, name) => inherited(*fd, name),
        }
    }
}

/// Refuses a socket of a service manager: no disk of a daemon would take its connections.
///
/// # Errors
/// [`Failure`] if there is one.
pub fn refuse_passed() -> Result<(), Failure> {
    match passed_sockets(std::process::id()) {
        Ok(false) => Ok(()),
        _ => Err(Failure::usage(
            "start the daemon",
            "the service manager passes a socket (LISTEN_FDS), and `vhost-blk daemon` makes its own ones",
            "drop the socket unit, or use vhost-blk serve for one disk",
        )),
    }
}

/// Returns whether a service manager passed a socket to the process `pid` (`sd_listen_fds(3)`).
fn passed_sockets(pid: u32) -> Result<bool, Failure> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(pid) {
        return Ok(false);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => Ok(false),
        Some(1) => Ok(true),
        Some(count) => Err(Failure::usage(
            "use the passed sockets",
            format!("LISTEN_FDS says {count}, and one disk has one socket"),
            "have one ListenStream= in the socket unit",
        )),
    }
}

/// Permission bits and group of the control socket.
///
/// # Errors
/// [`Failure`] if the group is unknown.
pub fn control_access(args: &ProcessArgs) -> Result<(u32, Option<u32>), Failure> {
    access(args.control_mode, args.control_group.as_deref(), "--control-group")
}

/// Permission bits and group of the metrics socket.
///
/// # Errors
/// [`Failure`] if the group is unknown.
pub fn metrics_access(args: &ProcessArgs) -> Result<(u32, Option<u32>), Failure> {
    access(args.metrics_mode, args.metrics_group.as_deref(), "--metrics-group")
}

/// Permission bits and group of a socket file, whose group `option` names.
fn access(
    mode: Option<u32>,
    group: Option<&str>,
    option: &str,
) -> Result<(u32, Option<u32>), Failure> {
    let group = group.map(|name| group_number(name, option)).transpose()?;
    let default = if group.is_some() { 0o660 } else { 0o600 };
    Ok((mode.unwrap_or(default), group))
}

fn group_number(name: &str, option: &str) -> Result<u32, Failure> {
    let failed = |why: String, remedy: &str| {
        Err(Failure::usage(format!("use {option} {name}"), why, remedy))
    };
    if let Ok(number) = name.parse::<u32>() {
        return Ok(number);
    }
    match os::group_id(name) {
        Ok(Some(number)) => Ok(number),
        Ok(None) => failed("there is no such group".into(), "see getent group for those that are"),
        Err(error) => failed(error.to_string(), "give the group's number"),
    }
}

fn inherited(fd: RawFd, name: &str) -> Result<Endpoint, Failure> {
    let failed = |why: String| {
        let remedy = "pass a UNIX stream socket that is listening or connected";
        Failure::run(format!("use descriptor {fd} ({name})"), why, remedy)
    };
    let owned = os::inherited_fd(fd).map_err(|error| failed(error.to_string()))?;
    let socket = Socket::from(owned);
    match (socket.domain(), socket.r#type()) {
        (Ok(Domain::UNIX), Ok(Type::STREAM)) => {}
        (Ok(_), Ok(_)) => return Err(failed("it is not a UNIX stream socket".into())),
        _ => return Err(failed("it is not a socket".into())),
    }
    let listening = socket.is_listener().map_err(|error| failed(error.to_string()))?;
    socket.set_nonblocking(false).map_err(|error| failed(error.to_string()))?;
    if listening {
        return Ok(Endpoint::Listening(
            UnixListener::from(std::os::fd::OwnedFd::from(socket)),
            None,
        ));
    }
    socket.peer_addr().map_err(|_| failed("it is neither listening nor connected".into()))?;
    Ok(Endpoint::Connected(UnixStream::from(std::os::fd::OwnedFd::from(socket))))
}
