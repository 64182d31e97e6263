// SPDX-License-Identifier: Apache-2.0
//! The new program takes over: it owns the descriptors that the old one has passed.

use super::state::{ProgramState, SocketState};
use super::{VARIABLE, now_ns};
use crate::failure::Failure;
use crate::os;
use crate::socket_file::SocketFile;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use vhost_user::DeviceState;

/// A program's state, taken over.
#[derive(Debug)]
pub struct Taken {
    /// The control socket, and its file.
    pub control: Option<TakenSocket>,
    /// The metrics socket, and its file.
    pub metrics: Option<TakenSocket>,
    /// The disk.
    pub disk: TakenDisk,
    /// The control connection that waits for the answer.
    pub client: UnixStream,
    /// The facts for its answer.
    pub upgraded: Upgraded,
}

/// A finished upgrade.
#[derive(Clone, Debug)]
pub struct Upgraded {
    /// Version of the old program.
    from: String,
    stopped_at_ns: u64,
    had_front_end: bool,
}

/// A listening socket, and its file if the program created one.
pub type TakenSocket = (OwnedFd, Option<SocketFile>);

/// A disk, taken over.
#[derive(Debug, Default)]
pub struct TakenDisk {
    /// Its open image, with its lock.
    pub image: Option<File>,
    /// The state of its device, and the descriptors that the state names.
    pub device: Option<(DeviceState, Vec<OwnedFd>)>,
    /// The listening socket of front-ends, and its file.
    pub front_ends: Option<TakenSocket>,
}

impl Upgraded {
    /// The answer to the client of the upgrade. `status` is the first one of the new program.
    ///
    /// # Errors
    /// [`Failure`] if the front-end got lost.
    pub fn answer(&self, status: Option<vhost_user::Answer>) -> Result<Value, Failure> {
        let pause_us = now_ns().saturating_sub(self.stopped_at_ns) / 1000;
        let connected = match status {
            Some(vhost_user::Answer::Status(status)) => status.connected,
            _ => false,
        };
        let to = env!("CARGO_PKG_VERSION");
        tracing::info!(from = self.from, to, pause_us, "the program was upgraded");
        if self.had_front_end && !connected {
            return Err(Failure::run(
                "keep the front-end",
                "the new program runs, and its front-end is disconnected",
                "see its log, and restart the guest's VMM if that does not connect again by itself",
            ));
        }
        Ok(json!({"version": to, "pause_us": pause_us}))
    }
}

/// Takes over the state that an old program of this process has passed; `None`: there is none.
///
/// # Errors
/// [`Failure`] if it cannot be read.
pub fn take() -> Result<Option<Taken>, Failure> {
    let Some(fd) = passed() else { return Ok(None) };
    let mut owner = Owner::default();
    let file = File::from(owner.own(fd)?);
    let state = ProgramState::read(file).map_err(failed)?;
    let [disk] = <[_; 1]>::try_from(state.disks).map_err(|_| failed("it has not one disk"))?;
    let own_all = |owner: &mut Owner, all: Vec<RawFd>| -> Result<Vec<OwnedFd>, Failure> {
        all.into_iter().map(|fd| owner.own(fd)).collect()
    };
    let upgraded = Upgraded {
        from: state.from,
        stopped_at_ns: state.stopped_at_ns,
        had_front_end: disk.device.has_front_end(),
    };
    Ok(Some(Taken {
        disk: TakenDisk {
            image: disk.image.map(|image| owner.own(image.fd)).transpose()?.map(File::from),
            device: Some((disk.device, own_all(&mut owner, disk.descriptors)?)),
            front_ends: state.front_ends.map(|socket| owner.socket(socket)).transpose()?,
        },
        control: Some(owner.socket(state.control)?),
        metrics: state.metrics.map(|socket| owner.socket(socket)).transpose()?,
        client: UnixStream::from(owner.own(state.client)?),
        upgraded,
    }))
}

/// The descriptor of the state. The variable stays in the environment of later children, which
/// have another process id.
fn passed() -> Option<RawFd> {
    let value = std::env::var(VARIABLE).ok()?;
    let (process, fd) = value.split_once(':')?;
    (process.parse() == Ok(std::process::id())).then(|| fd.parse().ok())?
}

fn failed(why: impl std::fmt::Display) -> Failure {
    let remedy = "start the daemon again; guests with an in-flight region lose nothing";
    Failure::run("take over from the old program", why, remedy)
}

/// Takes ownership of each descriptor once.
#[derive(Default)]
struct Owner(HashSet<RawFd>);

impl Owner {
    fn own(&mut self, fd: RawFd) -> Result<OwnedFd, Failure> {
        if fd <= 2 || !self.0.insert(fd) {
            return Err(failed(format!("descriptor {fd} has two uses")));
        }
        os::inherited_fd(fd).map_err(|error| failed(format!("descriptor {fd}: {error}")))
    }

    fn socket(&mut self, state: SocketState) -> Result<TakenSocket, Failure> {
        let file = state.file.map(|file| SocketFile::of_parts(file.path, file.identity));
        Ok((self.own(state.fd)?, file))
    }
}
