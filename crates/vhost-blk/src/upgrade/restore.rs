// SPDX-License-Identifier: Apache-2.0
//! The new program takes over: it owns the descriptors that the old one has passed.

use super::check::options;
use super::state::{ClientState, DiskState, ImageOptions, ProgramState, SocketState};
use super::{VARIABLE, now_ns};
use crate::control::codec::{CALL_BYTES_MAX, Channel};
use crate::disk::TakenImage;
use crate::disks::Origin;
use crate::events::Events;
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::socket_file::SocketFile;
use crate::{log, os};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
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
    /// The disks.
    pub disks: Vec<TakenDisk>,
    /// The file of the process id, and its locked descriptor.
    pub pidfile: Option<TakenSocket>,
    /// Names of the disks of the directory that have failed to start.
    pub failed: Vec<String>,
    /// The control connection that has asked for the upgrade.
    pub client: TakenClient,
    /// A signal has asked the old program for a reload that has not begun.
    pub reload_is_due: bool,
    /// The facts for the answer.
    pub upgraded: Upgraded,
}

/// A control connection, taken over.
#[derive(Debug)]
pub struct TakenClient {
    /// The connection, with calls that the old program has received.
    pub channel: Channel,
    /// The client waits for an answer.
    pub wants_answer: bool,
}

/// A finished upgrade.
#[derive(Debug)]
pub struct Upgraded {
    /// Version of the old program.
    from: String,
    stopped_at_ns: u64,
    /// Names of the disks that had a front-end.
    had_front_end: Vec<String>,
    /// Disks that could not be taken over.
    lost: Vec<String>,
    /// Number of subscribers of events.
    watchers: usize,
}

/// A listening socket, and its file if the program created one.
pub type TakenSocket = (OwnedFd, Option<SocketFile>);

/// A disk, taken over.
#[derive(Debug)]
pub struct TakenDisk {
    /// Its name.
    pub name: String,
    /// Its options; `None`: those of the command line.
    pub args: Option<DiskArgs>,
    /// The source of its options.
    pub origin: Origin,
    /// The parts that continue.
    pub parts: TakenParts,
}

/// The parts of a disk that continue.
#[derive(Debug)]
pub struct TakenParts {
    /// Its open image, with its lock.
    pub image: Option<TakenImage>,
    /// `serve`: the options of that image, in place of those of the command line.
    pub exchanged: Option<ImageOptions>,
    /// The state of its device.
    pub device: DeviceState,
    /// The descriptors that `device` names.
    pub descriptors: Vec<OwnedFd>,
    /// The listening socket of front-ends, and its file.
    pub front_ends: Option<TakenSocket>,
    /// Its bitmaps.
    pub bitmaps: Option<File>,
    /// Bytes that it has unmapped in qcow2 images.
    pub unmapped_bytes: u64,
}

impl Upgraded {
    /// Notes that a disk could not be taken over.
    pub fn has_lost(&mut self, disk: String) {
        self.lost.push(disk);
    }

    /// The answer to the client of the upgrade; watchers of `events` get the event. `is_connected` waits for a disk, and
    /// returns whether its front-end is connected again.
    ///
    /// # Errors
    /// [`Failure`] if a disk or a front-end got lost.
    pub fn answer(
        &self,
        events: &Events,
        is_connected: impl Fn(&str) -> bool,
    ) -> Result<Value, Failure> {
        let kept = self.had_front_end.iter().filter(|name| !self.lost.contains(name));
        let alone: Vec<&str> =
            kept.map(String::as_str).filter(|name| !is_connected(name)).collect();
        let pause_us = now_ns().saturating_sub(self.stopped_at_ns) / 1000;
        let to = env!("CARGO_PKG_VERSION");
        tracing::info!(from = self.from, to, pause_us, "the program was upgraded");
        events.tell_upgraded(&self.from, to, pause_us, self.watchers);
        let missing: Vec<String> =
            [("the disks", self.lost.join(", ")), ("the front-ends of", alone.join(", "))]
                .into_iter()
                .filter(|(_, names)| !names.is_empty())
                .map(|(kind, names)| format!("{kind} {names}"))
                .collect();
        if !missing.is_empty() {
            return Err(Failure::run(
                "keep all disks and front-ends",
                format!("the new program runs without {}", missing.join(" and ")),
                "see its log; add a lost disk again with vhost-blk ctl add or reload, and restart a \
                 VMM that does not connect again by itself",
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
    if let Some(level) = state.log_level {
        log::set_level(level);
    }
    let with_front_end = state.disks.iter().filter(|disk| disk.device.has_front_end());
    let upgraded = Upgraded {
        from: state.from,
        stopped_at_ns: state.stopped_at_ns,
        had_front_end: with_front_end.map(|disk| disk.name.clone()).collect(),
        lost: Vec::new(),
        watchers: state.watchers,
    };
    let disks = state.disks.into_iter().map(|disk| owner.disk(disk));
    Ok(Some(Taken {
        disks: disks.collect::<Result<_, _>>()?,
        control: Some(owner.socket(state.control)?),
        metrics: state.metrics.map(|socket| owner.socket(socket)).transpose()?,
        pidfile: state.pidfile.map(|file| owner.socket(file)).transpose()?,
        client: owner.client(state.client)?,
        reload_is_due: state.reload_is_due,
        failed: state.failed,
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

    fn own_all(&mut self, all: Vec<RawFd>) -> Result<Vec<OwnedFd>, Failure> {
        all.into_iter().map(|fd| self.own(fd)).collect()
    }

    fn disk(&mut self, state: DiskState) -> Result<TakenDisk, Failure> {
        let args = state.options.is_some().then(|| options(&state)).transpose()?;
        let image = self.image(&state)?;
        let bitmaps = state.bitmaps.map(|fd| self.own(fd)).transpose()?.map(File::from);
        let DiskState { name, origin, exchanged, device, unmapped_bytes, .. } = state;
        let parts = TakenParts {
            image,
            exchanged,
            bitmaps,
            unmapped_bytes,
            device,
            descriptors: self.own_all(state.descriptors)?,
            front_ends: state.front_ends.map(|socket| self.socket(socket)).transpose()?,
        };
        Ok(TakenDisk { name, args, origin, parts })
    }

    fn image(&mut self, state: &DiskState) -> Result<Option<TakenImage>, Failure> {
        let mut files = self.own_all(state.images().collect())?.into_iter().map(File::from);
        let Some(file) = files.next() else { return Ok(None) };
        let backing = state.backing.is_some().then(|| files.collect());
        let punches = state.punches();
        // Without them the tables are looked at again.
        let read = |fd: OwnedFd| {
            let mut bytes = Vec::new();
            File::from(fd).read_to_end(&mut bytes).ok().map(|_| bytes)
        };
        let clusters = state.clusters.map(|fd| self.own(fd)).transpose()?.and_then(read);
        Ok(Some(TakenImage { file, backing, punches, clusters }))
    }

    fn client(&mut self, state: ClientState) -> Result<TakenClient, Failure> {
        let stream = UnixStream::from(self.own(state.fd)?);
        let channel = Channel::resume(stream, CALL_BYTES_MAX, state.unread);
        Ok(TakenClient { channel, wants_answer: state.wants_answer })
    }

    fn socket(&mut self, state: SocketState) -> Result<TakenSocket, Failure> {
        let file = state.file.map(|file| SocketFile::of_parts(file.path, file.identity));
        Ok((self.own(state.fd)?, file))
    }
}
