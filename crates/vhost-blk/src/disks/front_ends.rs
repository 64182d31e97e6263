// SPDX-License-Identifier: Apache-2.0
//! The thread of a disk: serves one front-end after another until its stop is ordered.

use crate::events::{Change, DiskEvents};
use crate::os;
use crate::server::Server;
use crate::stop::Stop;
use data_plane::OncePerSecond;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost_user::{ACCEPT_RETRY, Next};

/// Maximum time until the first message of a front-end while another one waits.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Connections of a disk that are served one right after the other, and the interval of those that follow them: each
/// causes two log lines and two events.
const BURST: u32 = 16;
const INTERVAL: Duration = Duration::from_millis(100);

/// Interval of the looks at orders and the stop in between.
const LOOK: Duration = Duration::from_millis(5);

/// The pace at which the connections of a disk are served.
#[derive(Debug, Default)]
pub(super) struct ConnectionPace {
    /// The time by which all connections so far would have come at [`INTERVAL`].
    due: Option<Instant>,
}

impl ConnectionPace {
    /// Counts a connection. Returns the time until the next one may be served.
    fn wait(&mut self, now: Instant) -> Duration {
        let due = self.due.map_or(now, |due| due.max(now)) + INTERVAL;
        self.due = Some(due);
        (due - now).saturating_sub((BURST - 1) * INTERVAL)
    }
}

/// The front-ends of a disk.
pub(super) struct FrontEnds {
    pub(super) server: Server,
    pub(super) stop: Arc<Stop>,
    pub(super) events: Arc<DiskEvents>,
    pub(super) endings: OncePerSecond,
    pub(super) pace: ConnectionPace,
}

impl FrontEnds {
    /// Serves one front-end after another, first the one that is `connected`; others wait.
    pub(super) fn serve_all(&mut self, listener: &UnixListener, connected: Option<UnixStream>) {
        let next = Next { listener: listener.as_fd(), patience: SILENCE_MAX };
        let first = connected.or_else(|| self.server.take_waiting());
        self.serve_from(first, next);
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

    /// Serves `front_end`, and each that has connected meanwhile.
    fn serve_from(&mut self, mut front_end: Option<UnixStream>, next: Next<'_>) {
        while let Some(stream) = front_end.filter(|_| !self.stop.asked()) {
            self.serve_one(stream, Some(next));
            self.wait_for_pace();
            front_end = self.server.take_waiting();
        }
    }

    /// Counts a connection, waits until the next one may be served, and answers orders meanwhile.
    fn wait_for_pace(&mut self) {
        let deadline = Instant::now() + self.pace.wait(Instant::now());
        while Instant::now() < deadline && !self.stop.asked() {
            self.server.answer();
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()).min(LOOK));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_in_a_loop_are_slowed_down_after_a_burst_and_not_after_a_pause() {
        let (mut pace, mut now) = (ConnectionPace::default(), Instant::now());
        for _ in 0..2 {
            let waits: Vec<Duration> = (0..BURST + 3)
                .map(|_| {
                    let wait = pace.wait(now);
                    now += wait;
                    wait
                })
                .collect();
            let (burst, rest) = waits.split_at(BURST as usize - 1);
            assert_eq!(burst, [Duration::ZERO; BURST as usize - 1]);
            assert_eq!(rest, [INTERVAL; 4]);
            now += BURST * INTERVAL;
        }
    }
}
