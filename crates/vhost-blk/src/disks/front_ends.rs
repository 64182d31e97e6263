// SPDX-License-Identifier: Apache-2.0
//! The thread of a disk: serves one front-end after another until its stop is ordered.

use crate::engine::Server;
use crate::events::{Change, DiskEvents};
use crate::os;
use crate::stop::Stop;
use data_plane::OncePerSecond;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost_user::{ACCEPT_RETRY, Next};

/// Maximum time until the first message of a front-end while another one waits.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The front-ends of a disk.
pub(super) struct FrontEnds {
    pub(super) server: Server,
    pub(super) stop: Arc<Stop>,
    pub(super) events: Arc<DiskEvents>,
    pub(super) endings: OncePerSecond,
}

impl FrontEnds {
    /// Serves one front-end after another, first the one that is `connected`; others wait in the
    /// backlog of the socket.
    pub(super) fn serve_all(&mut self, listener: &UnixListener, connected: Option<UnixStream>) {
        let next = Next { listener: listener.as_fd(), patience: SILENCE_MAX };
        self.serve_from(connected, next);
        while !self.stop.asked() {
            let control = self.server.control_fd().unwrap_or(self.stop.as_fd());
            match os::wait_readable([listener.as_fd(), self.stop.as_fd(), control]) {
                Ok([_, true, _]) => return,
                Ok([_, _, true]) => {
                    self.server.answer();
                    continue;
                }
                Ok([true, ..]) => {}
                Ok([false, ..]) => continue,
                Err(error) => {
                    tracing::error!(%error, "waiting for a front-end failed");
                    std::thread::sleep(ACCEPT_RETRY);
                    continue;
                }
            }
            match listener.accept() {
                Ok((stream, _)) => self.serve_from(Some(stream), next),
                Err(error) => {
                    tracing::error!(%error, "accepting a front-end failed");
                    std::thread::sleep(ACCEPT_RETRY);
                }
            }
        }
    }

    /// Serves `front_end`, and each that replaces a silent one.
    fn serve_from(&mut self, mut front_end: Option<UnixStream>, next: Next<'_>) {
        while let Some(stream) = front_end {
            self.serve_one(stream, Some(next));
            front_end = self.server.take_waiting();
        }
    }

    /// Serves a front-end until its connection ends.
    pub(super) fn serve_one(&mut self, stream: UnixStream, next: Option<Next<'_>>) {
        if let Err(error) = self.stop.watch(&stream) {
            tracing::error!(%error, "no descriptor is left for a front-end");
            self.server.forget_inherited();
            return;
        }
        tracing::info!("front-end connected");
        self.events.tell(&Change::Connected);
        let outcome = self.server.serve(stream, next);
        self.stop.forget();
        let reason = match outcome {
            Ok(()) => {
                tracing::info!("front-end disconnected");
                None
            }
            Err(_) if self.stop.asked() => {
                tracing::info!("front-end disconnected by the stop");
                None
            }
            Err(error) => {
                match self.endings.due(Instant::now()) {
                    Some(0) => tracing::warn!(error, "connection ended"),
                    Some(not_shown) => tracing::warn!(error, not_shown, "connection ended"),
                    None => {}
                }
                Some(error)
            }
        };
        self.events.tell(&Change::Disconnected(reason));
    }
}
