// SPDX-License-Identifier: Apache-2.0
//! Opens the sockets of a daemon, or takes them over from an earlier program.

use crate::failure::Failure;
use crate::metrics;
use crate::options::ServeArgs;
use crate::socket::{Endpoint, Source};
use crate::socket_file::{self, SocketFile};
use crate::upgrade::{self, Taken, TakenSocket};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};

/// Permission bits of the control socket: its commands can interrupt the disk.
const CONTROL_MODE: u32 = 0o600;

/// The socket files of this process, which go with it.
#[derive(Clone, Debug, Default)]
pub struct Files(Arc<Mutex<Vec<SocketFile>>>);

impl Files {
    fn add(&self, file: Option<SocketFile>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(file);
    }

    /// Removes the files.
    pub fn remove(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// The open sockets of a daemon.
#[derive(Debug)]
pub struct Sockets {
    /// The source of front-ends.
    pub endpoint: Endpoint,
    /// The control socket. Its existence implies that of the front-ends' socket.
    pub control: Option<UnixListener>,
    /// The metrics socket. It is the last one: its existence implies that of the others.
    pub metrics: Option<metrics::Listener>,
    /// Second descriptors of them for a later program, if there is a control socket.
    pub passed: Option<upgrade::Sockets>,
}

impl Sockets {
    /// Opens the sockets that `args` and `source` name, or those that are `taken`. `connected` is
    /// the connection of a front-end that an earlier program has served.
    ///
    /// # Errors
    /// [`Failure`] if a socket cannot be opened. `files` has those of the others.
    pub fn open(
        args: &ServeArgs,
        source: &Source,
        mut taken: Option<&mut Taken>,
        connected: Option<&UnixStream>,
        files: &Files,
    ) -> Result<Sockets, Failure> {
        let front_ends = taken.as_mut().and_then(|taken| taken.front_ends.take());
        let endpoint = match (front_ends, connected) {
            (Some((socket, file)), _) => Endpoint::Listening(socket.into(), file),
            (None, Some(stream)) => Endpoint::Connected(stream.try_clone().map_err(no_descriptor)?),
            (None, None) => source.open()?,
        };
        let (endpoint, passed_front_ends) = match endpoint {
            Endpoint::Listening(listener, file) => {
                let passed = passed_on(&listener, file.as_ref())?;
                files.add(file);
                (Endpoint::Listening(listener, None), Some(passed))
            }
            connected => (connected, None),
        };
        let taken_control = taken.as_mut().and_then(|taken| taken.control.take());
        let control = open_control(args, taken_control, files)?;
        let metrics = open_metrics(args, taken.and_then(|taken| taken.metrics.take()), files)?;
        let (control, passed_control) = control.unzip();
        let (metrics, passed_metrics) = metrics.unzip();
        let passed = passed_control.map(|control| upgrade::Sockets {
            front_ends: passed_front_ends,
            control,
            metrics: passed_metrics,
        });
        Ok(Sockets { endpoint, control, metrics, passed })
    }
}

fn open_control(
    args: &ServeArgs,
    taken: Option<TakenSocket>,
    files: &Files,
) -> Result<Option<(UnixListener, upgrade::Socket)>, Failure> {
    let Some(path) = &args.control_path else { return Ok(None) };
    let (listener, file) = match taken {
        Some((socket, file)) => (socket.into(), file),
        None => {
            let (listener, file) = socket_file::listen(path, CONTROL_MODE, None)?;
            (listener, Some(file))
        }
    };
    let passed = passed_on(&listener, file.as_ref())?;
    files.add(file);
    Ok(Some((listener, passed)))
}

fn open_metrics(
    args: &ServeArgs,
    taken: Option<TakenSocket>,
    files: &Files,
) -> Result<Option<(metrics::Listener, upgrade::Socket)>, Failure> {
    let Some(address) = &args.metrics else { return Ok(None) };
    let (listener, file) = match taken {
        Some((socket, file)) => (metrics::Listener::of(socket, address), file),
        None => metrics::Listener::open(address)?,
    };
    let passed = passed_on(&listener, file.as_ref())?;
    files.add(file);
    Ok(Some((listener, passed)))
}

fn passed_on(socket: &impl AsFd, file: Option<&SocketFile>) -> Result<upgrade::Socket, Failure> {
    upgrade::Socket::of(socket, file).map_err(no_descriptor)
}

fn no_descriptor(error: std::io::Error) -> Failure {
    Failure::run("keep a socket", error, "raise the limit on open files (ulimit -n)")
}
