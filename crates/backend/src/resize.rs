// SPDX-License-Identifier: Apache-2.0
//! Errors of a change of the size ([`crate::Disk::resize`]).

use std::io;

/// Errors of [`crate::Disk::resize`]; each text names the cause and the remedy. The disk keeps its
/// capacity.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The disk has no file or block device that could grow.
    #[error(
        "only a file or a block device can grow; remove the disk, and add it with another --size (serve: \
         start it again)"
    )]
    Fixed,
    /// The image is being merged into its backing file.
    #[error(
        "the image of the disk is being merged into its backing file; repeat this after its end, or \
         cancel that (vhost-blk ctl commit --cancel)"
    )]
    Merging,
    /// The disk is being mirrored to other storage.
    #[error(
        "the disk is being mirrored to other storage; repeat this after its end, or cancel that \
         (vhost-blk ctl mirror --cancel)"
    )]
    Mirroring,
    /// A larger size for a disk that must not be changed.
    #[error(
        "the disk is read-only; enlarge its image by other means, and repeat this without SIZE"
    )]
    ReadOnly,
    /// The wanted size is smaller than the disk.
    #[error(
        "the disk has {capacity} bytes, and {wanted} would cut its end off; give a larger size \
         (a copy made inside the guest can be smaller)"
    )]
    Smaller {
        /// The wanted size in bytes.
        wanted: u64,
        /// The capacity of the disk in bytes.
        capacity: u64,
    },
    /// The wanted size is no multiple of the logical block.
    #[error(
        "{wanted} bytes are not a multiple of the disk's block of {block} bytes; give {} or {}",
        .wanted - .wanted % u64::from(*.block), .wanted.next_multiple_of((*.block).into())
    )]
    PartOfBlock {
        /// The wanted size in bytes.
        wanted: u64,
        /// Logical block size in bytes.
        block: u32,
    },
    /// The format of the image has no room for this size.
    #[error(
        "the image can have at most {most} bytes, and {wanted} are wanted; give a smaller size, or convert the \
         image to raw or to larger clusters"
    )]
    TooLarge {
        /// The wanted size in bytes.
        wanted: u64,
        /// The largest size in bytes.
        most: u64,
    },
    /// The size of a block device is not the daemon's to choose.
    #[error(
        "the block device has {present} bytes, and {wanted} are wanted; enlarge the device itself \
         (lvextend, for example), and repeat this without SIZE"
    )]
    Device {
        /// The wanted size in bytes.
        wanted: u64,
        /// The size of the device in bytes.
        present: u64,
    },
    /// The storage has become smaller than the disk.
    #[error(
        "the storage has {present} bytes, fewer than the {capacity} of the disk: I/O at its end \
         fails; enlarge the storage again"
    )]
    Shrunk {
        /// The size of the storage in bytes.
        present: u64,
        /// The capacity of the disk in bytes.
        capacity: u64,
    },
    /// The file cannot be made larger.
    #[error(
        "the file cannot get {wanted} bytes: {source}; check the limits of its file system and of \
         the daemon (LimitFSIZE=, ulimit -f)"
    )]
    Grow {
        /// The wanted size in bytes.
        wanted: u64,
        /// Error of the system call.
        source: io::Error,
    },
    /// A part of the growth is in the image. The disk keeps its size.
    #[error(
        "{source}, after a part of the growth to {wanted} bytes. The disk keeps its {capacity}, and has up \
         to {present} when it is served again; make room, and repeat this"
    )]
    GrownInPart {
        /// The wanted size in bytes.
        wanted: u64,
        /// Size in bytes that the image has, once its tables find room.
        present: u64,
        /// The capacity of the disk in bytes.
        capacity: u64,
        /// Error of the system call.
        source: io::Error,
    },
    /// The size cannot be read.
    #[error("the size of the storage cannot be read: {0}; check the storage and its log")]
    Size(io::Error),
}
