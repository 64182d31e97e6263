// SPDX-License-Identifier: Apache-2.0
//! The channel for the daemon's own messages (SET_BACKEND_REQ_FD), and the only message on it:
//! CONFIG_CHANGE, which makes the front-end read the capacity again.
//!
//! The message waits until the front-end has been quiet for [`QUIET`]: QEMU 6.0 to 7.2 handle it
//! while they wait for an answer on the other channel, ask for the configuration there, and take the
//! answer that they waited for as the answer to that. It also waits until a queue runs, because QEMU
//! ignores it before.

use crate::session::Session;
use rustix::net::SendFlags;
use std::fs::File;
use std::io;
use std::time::Duration;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

/// Time without a message of the front-end before the daemon sends one.
pub(crate) const QUIET: Duration = Duration::from_millis(50);

/// Code of VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
const CONFIG_CHANGE: u32 = 2;
const VERSION: u32 = 1;

/// The channel of a connection.
#[derive(Debug, Default)]
pub(crate) struct BackendChannel {
    channel: Option<File>,
    /// The capacity in sectors that the front-end has read, or has a message to read.
    known_sectors: Option<u64>,
}

impl BackendChannel {
    /// Replaces the channel.
    pub(crate) fn replace(&mut self, channel: File) {
        self.channel = Some(channel);
    }

    /// The channel's socket.
    pub(crate) fn socket(&self) -> Option<&File> {
        self.channel.as_ref()
    }

    /// The capacity that the front-end knows.
    pub(crate) fn known_sectors(&self) -> Option<u64> {
        self.known_sectors
    }

    /// Records that the front-end knows this capacity.
    pub(crate) fn set_known_sectors(&mut self, capacity_sectors: u64) {
        self.known_sectors = Some(capacity_sectors);
    }

    /// Forgets the capacity that the front-end knows: [`Session::owes_config_change`] is true until
    /// CONFIG_CHANGE is sent.
    pub(crate) fn mark_changed(&mut self) {
        self.known_sectors = None;
    }

    fn send_config_change(&mut self) -> io::Result<()> {
        let Some(channel) = &self.channel else { return Ok(()) };
        let message = [CONFIG_CHANGE, VERSION, 0].map(u32::to_ne_bytes).concat();
        // The front-end may change O_NONBLOCK of the socket at any time.
        let sent = rustix::net::send(channel, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        if sent < message.len() {
            self.channel = None; // the front-end cannot find the start of another message
            return Err(io::ErrorKind::WriteZero.into());
        }
        Ok(())
    }
}

impl Session<'_> {
    /// Returns whether the front-end needs a message about the capacity.
    pub(crate) fn owes_config_change(&self) -> bool {
        let can_be_told = self.backend_channel.channel.is_some()
            && self.has_protocol(VhostUserProtocolFeatures::CONFIG)
            && self.queues.iter().any(|queue| queue.running.is_some());
        can_be_told && self.backend_channel.known_sectors != Some(self.capacity_sectors())
    }

    /// Makes the front-end read the configuration space again.
    pub(crate) fn announce_config_change(&mut self) {
        self.backend_channel.set_known_sectors(self.capacity_sectors());
        match self.backend_channel.send_config_change() {
            Ok(()) => tracing::debug!("the front-end was told to read the capacity"),
            Err(error) => tracing::warn!(
                %error,
                "the front-end cannot be told of the capacity: the guest sees it after a restart of \
                 its device"
            ),
        }
    }
}
