// SPDX-License-Identifier: Apache-2.0
//! The peer of a control connection.

use super::codec::is_ready;
use super::methods::only_disk;
use super::protocol::{Call, CallError};
use crate::disks::Disks;
use crate::failure::Failure;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::event::PollFlags;
use rustix::process::geteuid;
use std::cell::RefCell;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// A connected client.
pub(super) struct Client<'a> {
    stream: &'a UnixStream,
    /// Its process; 0: one of another PID namespace.
    pub(super) pid: i32,
    pub(super) uid: u32,
    /// The disk of its command, once it is found.
    pub(super) disk: RefCell<String>,
}

impl<'a> Client<'a> {
    /// Interval of the look at the connection during a long command.
    pub(super) const LOOK: Duration = Duration::from_secs(1);

    /// The client at the other end of `stream`.
    pub(super) fn of(stream: &'a UnixStream) -> std::io::Result<Self> {
        // Not by rustix, whose type holds no process 0.
        let peer = getsockopt(stream, PeerCredentials)?;
        Ok(Client { stream, pid: peer.pid(), uid: peer.uid(), disk: RefCell::default() })
    }

    /// Returns whether the client has the rights of this process: it is root's, or of the same user.
    pub(super) fn is_owner(&self) -> bool {
        [0, geteuid().as_raw()].contains(&self.uid)
    }

    /// Notes the disk of its command, for the log.
    pub(super) fn means(&self, disk: &str) {
        disk.clone_into(&mut self.disk.borrow_mut());
    }

    /// The disk of a call whose other parameters are read, by its name. Notes it for the log.
    ///
    /// # Errors
    /// [`CallError`] if a parameter is left, or there is no such disk.
    pub(super) fn disk_of(
        &self,
        disks: &Disks,
        call: &Call,
        wanted: Option<&str>,
    ) -> Result<String, CallError> {
        call.no_more()?;
        let name = disks.resolve(wanted)?;
        self.means(&name);
        Ok(name)
    }

    /// Looks at the files of the disk of a call that has no other parameter.
    ///
    /// # Errors
    /// [`CallError`] if a parameter is left, or there is no such disk; the errors of `look`.
    pub(super) fn look<T: Send + 'static>(
        &self,
        disks: &Arc<Disks>,
        call: &mut Call,
        look: fn(&Disks, &str) -> Result<T, Failure>,
    ) -> Result<T, CallError> {
        let name = only_disk(disks, call)?;
        Ok(disks.look_for(&name, look, || self.is_connected())?)
    }

    /// Returns whether the client still waits.
    pub(super) fn is_connected(&self) -> bool {
        !is_ready(self.stream, PollFlags::RDHUP)
    }
}
