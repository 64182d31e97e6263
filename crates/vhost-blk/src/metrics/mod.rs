// SPDX-License-Identifier: Apache-2.0
//! `--metrics`: counters of the disks over HTTP, for Prometheus and other collectors.
//!
//! The disks gather the counters for each scrape; nothing runs between two scrapes. A disk whose
//! storage hangs does not answer: it is marked after a bounded wait, and the others are on the page. One thread
//! serves the clients in turn. Each client has a bounded time to ask and to read the answer: a
//! silent one delays the next by that time, and holds its descriptor no longer.

mod http;
mod page;
mod queues;
mod rows;

use crate::disks::Disks;
use crate::failure::Failure;
use crate::socket_file::{self, SocketFile};
use crate::values::MetricsAddress;
use socket2::Socket;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use vhost_user::ACCEPT_RETRY;

/// Maximum wait for the disks at a scrape.
const DISKS_ANSWER_MAX: Duration = Duration::from_secs(2);

/// A listening metrics socket.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    /// The address with the port that the kernel chose for port 0.
    address: MetricsAddress,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Listener {
    /// Listens on `address`. A socket file has these permission bits and this group. Also returns the file, if
    /// there is one.
    ///
    /// # Errors
    /// [`Failure`] if the address is not free, or not an address of this machine.
    pub fn open(
        address: &MetricsAddress,
        (mode, group): (u32, Option<u32>),
    ) -> Result<(Listener, Option<SocketFile>), Failure> {
        match address {
            MetricsAddress::Unix(path) => {
                let (listener, file) = socket_file::listen(path, mode, group)?;
                Ok((Listener { socket: listener.into(), address: address.clone() }, Some(file)))
            }
            MetricsAddress::Tcp(wanted) => {
                let bound = TcpListener::bind(wanted).and_then(|listener| {
                    let address = MetricsAddress::Tcp(listener.local_addr()?);
                    Ok(Listener { socket: listener.into(), address })
                });
                let failed = |why| {
                    Failure::run(
                        format!("listen for scrapes on {wanted}"),
                        why,
                        "choose a free port and an address of this machine for --metrics; the \
                         packaged units have no network unless a drop-in gives them one",
                    )
                };
                Ok((bound.map_err(failed)?, None))
            }
        }
    }

    /// The socket of an earlier program. It keeps its address if `address` is another one by now.
    pub fn of(socket: OwnedFd, address: &MetricsAddress) -> Listener {
        let socket = Socket::from(socket);
        let bound = socket.local_addr().ok().and_then(|bound| bound.as_socket());
        let address = bound.map_or_else(|| address.clone(), MetricsAddress::Tcp);
        Listener { socket, address }
    }

    /// Serves scrapes until the process ends.
    ///
    /// # Errors
    /// [`Failure`] if no thread can be started.
    pub fn start(self, disks: Arc<Disks>) -> Result<(), Failure> {
        tracing::info!(address = %self.address, "metrics");
        let body = move || self.serve(&disks);
        let spawned = std::thread::Builder::new().name("metrics".into()).spawn(body);
        spawned.map(drop).map_err(|error| {
            Failure::run("serve metrics", error, "raise the limit on threads (ulimit -u)")
        })
    }

    fn serve(&self, disks: &Disks) {
        let scrape = || page::of(disks.statuses(DISKS_ANSWER_MAX));
        loop {
            match self.socket.accept() {
                Ok((client, _)) => {
                    if let Err(error) = http::answer(&client, scrape) {
                        tracing::debug!(%error, "a scrape failed");
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "accepting a scrape failed");
                    std::thread::sleep(ACCEPT_RETRY);
                }
            }
        }
    }
}
