// SPDX-License-Identifier: Apache-2.0
//! A client of the Network Block Device protocol over a Unix socket: writes a backup into the export of
//! a server (qemu-nbd, nbdkit).
//!
//! Our own code: the crate `nbd` has neither NBD_OPT_GO nor WRITE_ZEROES nor block sizes, and libnbd
//! would make the daemon depend on a library in C. The subset is small: the fixed newstyle handshake,
//! simple replies, one request at a time. No wait is without a bound or an end by `Hangup`.

mod address;
mod client;
mod handshake;
mod wire;

pub use address::Address;
pub(crate) use client::{Client, ZEROES_MAX};
pub(crate) use wire::Hangup;

use std::io;

/// Errors of a server or its connection. The texts have the remedy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NbdError {
    /// This program has ended the connection.
    #[error("this program has ended the connection; repeat the command")]
    HungUp,
    /// There is no connection.
    #[error("it cannot be reached: {0}; start it, and check the path and its permissions")]
    Unreachable(io::Error),
    /// The queue of its socket is full.
    #[error(
        "it serves other clients; wait for their end, or let it serve more (qemu-nbd --shared)"
    )]
    Busy,
    /// The server has closed the connection.
    #[error("it has ended the connection; see its messages, and start it again")]
    Ended,
    /// The server is too slow.
    #[error(
        "it has not answered for {0} s; check its storage, and whether it serves another client"
    )]
    Silent(u64),
    /// The socket has failed.
    #[error("the connection has failed: {0}; start the server again")]
    Socket(io::Error),
    /// The server breaks the protocol.
    #[error("the server does not speak the present NBD protocol ({0}); use qemu-nbd or nbdkit")]
    Broken(&'static str),
    /// The server refuses the export.
    #[error("it refuses the export \"{export}\": {why}; check the name (nbdinfo --list)")]
    Refused {
        /// Name of the export.
        export: String,
        /// The cause.
        why: String,
    },
    /// The server wants encryption.
    #[error("it wants TLS, which a Unix socket does not need; start it without TLS")]
    Tls,
    /// The export cannot be written.
    #[error("the export is read-only; let the server export it for writing")]
    ReadOnly,
    /// The export is too small.
    #[error("the export has {has} bytes, and the disk {needs}; make it as large as the disk")]
    Small {
        /// Size of the export in bytes.
        has: u64,
        /// Size of the disk in bytes.
        needs: u64,
    },
    /// The blocks of the export do not fit.
    #[error(
        "it wants requests of whole blocks of {0} bytes, which this disk does not have; let it serve smaller ones"
    )]
    Blocks(u32),
    /// The server has failed a request.
    #[error("a {act} at {at} failed there: {why}; check its storage")]
    Request {
        /// The request.
        act: &'static str,
        /// Position in bytes.
        at: u64,
        /// Its error.
        why: io::Error,
    },
}
