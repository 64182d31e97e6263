// SPDX-License-Identifier: Apache-2.0
//! Errors of the control plane.

use backend::ResizeError;
use data_plane::{KernelError, LimitError, QueueStartError};
use std::io;

/// Errors that end a connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The front-end sent a message that the protocol or the device does not allow.
    #[error("the front-end's message was refused: {0}")]
    Refused(String),
    /// The front-end sent no message, and another one waited.
    #[error("the front-end said nothing, and another one waits; find its process")]
    Silent,
    /// The front-end sent a part of a message.
    #[error("a message of the front-end was incomplete for {seconds} s; restart the VMM")]
    Incomplete {
        /// Time that the part waited.
        seconds: u64,
    },
    /// The front-end leaves answers unread, and the socket has no room for another one.
    #[error("the front-end has read no answer for {seconds} s; restart the VMM")]
    Deaf {
        /// Time that the answer waited.
        seconds: u64,
    },
    /// Queues were stopped and no data plane could start them again. A front-end can connect again;
    /// it loses no request if it keeps an in-flight region.
    #[error("the queues could not be started again: {0}; connect again")]
    Lost(String),
    /// The socket failed.
    #[error("the connection failed: {0}; connect again")]
    Socket(#[from] io::Error),
}

/// Errors of a move of the queues to another data plane.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SwitchError {
    /// The kernel does not support the guest's packed virtqueues.
    #[error(
        "the guest uses packed virtqueues, and the kernel knows only split ones; set --packed off \
         and restart the guest's device"
    )]
    Packed,
    /// The kernel cannot run the disk.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A queue did not start; the queues run on the old data plane.
    #[error(transparent)]
    Start(#[from] QueueStartError),
    /// No data plane could start the queues.
    #[error("{0}; the VMM is disconnected and can connect again")]
    Lost(String),
}

/// Errors of a command that stops the queues for a while.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OperateError {
    /// The disk does not get this size; nothing is changed.
    #[error(transparent)]
    Resize(#[from] ResizeError),
    /// Another program may use the image.
    #[error("the guest runs elsewhere, and may write to the image there; grow the disk there")]
    Released,
    /// The storage has the new size, and the device has the old one.
    #[error("the disk cannot be opened again with its new size: {0}; repeat the command")]
    Lane(io::Error),
    /// The guest may rely on write-through mode.
    #[error(
        "a guest that started in write-through mode sends no FLUSH and would lose writes in a power \
         cut; set write-back in the guest, or stop its VMM first"
    )]
    NoFlush,
    /// A disk would lose its limits.
    #[error("the limit group {0} has no limits; give --iops or --bandwidth")]
    NoLimits(String),
    /// The limits stay.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The kernel plane cannot treat errors like this.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No data plane could start the queues.
    #[error(
        "the queues could not be started again: {0}; the VMM is disconnected and can connect again"
    )]
    Lost(io::Error),
}

/// Errors in the header of a message. Each names the field, its value and the valid values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HeaderError {
    /// Another version of the protocol.
    #[error("flags: version {found}, and it is {expected}")]
    Version {
        /// The version in the header.
        found: u32,
        /// The version of the protocol.
        expected: u32,
    },
    /// Flags that a request must not have.
    #[error("flags: {0:#x} in a request")]
    Flags(u32),
    /// An unknown request code.
    #[error("code: not known")]
    Code,
    /// A payload of a wrong fixed size, in bytes.
    #[error("size: {size} bytes of payload, and it takes {expected}")]
    Size {
        /// The size in the header.
        size: u32,
        /// The size of the message.
        expected: usize,
    },
    /// A payload outside the bounds of the message, in bytes.
    #[error("size: {size} bytes of payload, and it takes {least} to {most}")]
    Bounds {
        /// The size in the header.
        size: u32,
        /// The minimum size of the message.
        least: usize,
        /// The maximum size of the message.
        most: usize,
    },
}

/// The error of a message that the device refuses.
pub(crate) fn refusal(cause: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, cause.to_string())
}
