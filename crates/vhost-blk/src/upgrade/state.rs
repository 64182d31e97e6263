// SPDX-License-Identifier: Apache-2.0
//! The state that a program passes to the next one: JSON in a memory file.
//!
//! [`FORMAT`] counts changes that an older program would misread. A program reads the formats that
//! it knows, and its check refuses the others while the old program still serves.

use crate::disks::Origin;
use crate::options::DiskArgs;
use crate::os::memory_file;
use crate::values::{AllowBacking, Format, LogLevel};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::io::Read;
use std::os::fd::RawFd;
use std::path::PathBuf;
use vhost_user::DeviceState;

/// Version of the format.
pub(super) const FORMAT: u32 = 2;
/// Maximum size: 1024 disks with 64 queues, 509 regions and their counters need less.
const BYTES_MAX: u64 = 512 << 20;

/// The state of a program.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProgramState {
    pub(super) format: u32,
    /// Version of the program that wrote it.
    pub(super) from: String,
    /// Its process id.
    pub(super) pid: u32,
    /// Time of the monotonic clock, in nanoseconds, at which the disks stopped.
    pub(super) stopped_at_ns: u64,
    pub(super) control: SocketState,
    pub(super) metrics: Option<SocketState>,
    /// The control connection that has asked for the upgrade.
    pub(super) client: ClientState,
    /// A signal has asked for a reload that has not begun.
    pub(super) reload_is_due: bool,
    /// Names of the disks of the directory that have failed to start. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) failed: Vec<String>,
    pub(super) disks: Vec<DiskState>,
    /// The level of log lines that a command has set. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) log_level: Option<LogLevel>,
    /// The file of the process id, whose descriptor has its lock. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) pidfile: Option<SocketState>,
    /// Number of subscribers of events. Older programs do not know it.
    #[serde(default)]
    pub(super) watchers: usize,
}

/// The part of a state that is the same in all formats.
#[derive(Deserialize)]
struct Version {
    format: u32,
}

/// A control connection.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ClientState {
    pub(super) fd: RawFd,
    /// It waits for an answer.
    pub(super) wants_answer: bool,
    /// Bytes of its next calls.
    pub(super) unread: Vec<u8>,
}

/// A listening socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SocketState {
    pub(super) fd: RawFd,
    /// Its file, if the program has created it.
    pub(super) file: Option<SocketFileState>,
}

/// A socket file: path, device and number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SocketFileState {
    pub(super) path: PathBuf,
    pub(super) identity: (u64, u64),
}

/// A disk.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DiskState {
    pub(super) name: String,
    /// Its options; `None`: those of the command line.
    pub(super) options: Option<Value>,
    pub(super) origin: Origin,
    /// The socket of front-ends, if it listens.
    pub(super) front_ends: Option<SocketState>,
    pub(super) image: Option<ImageState>,
    /// The backing files of a qcow2 image; `None`: `image` is raw. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) backing: Option<Vec<ImageState>>,
    /// `serve`: the image in which the disk goes on, in place of that of the command line. Older
    /// programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) exchanged: Option<ImageOptions>,
    /// The memory file with its bitmaps, if it has some. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) bitmaps: Option<RawFd>,
    /// The memory file with [`Qcow2Disk::known`](qcow2::Qcow2Disk::known), if it is a qcow2 image and they are known.
    /// Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) clusters: Option<RawFd>,
    /// Bytes that the disk has unmapped in qcow2 images. Older programs do not know it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) unmapped_bytes: u64,
    pub(super) device: DeviceState,
    /// The descriptors that `device` names.
    pub(super) descriptors: Vec<RawFd>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// An open image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ImageState {
    pub(super) fd: RawFd,
    pub(super) identity: (u64, u64),
    pub(super) direct: bool,
    /// Its file system punches holes, if that is known. Older programs do not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) punches: Option<bool>,
}

/// The options of a disk that depend on its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageOptions {
    blk_file: Option<PathBuf>,
    format: Option<Format>,
    allow_backing: AllowBacking,
    logical_block_size: Option<u32>,
}

impl ImageOptions {
    /// The options of a disk.
    pub fn of(args: &DiskArgs) -> Self {
        let DiskArgs { blk_file, format, allow_backing, logical_block_size, .. } = args;
        ImageOptions {
            blk_file: blk_file.clone(),
            format: *format,
            allow_backing: *allow_backing,
            logical_block_size: *logical_block_size,
        }
    }

    /// The options of the disk with these ones.
    pub fn put_into(self, args: DiskArgs) -> DiskArgs {
        let ImageOptions { blk_file, format, allow_backing, logical_block_size } = self;
        DiskArgs { blk_file, format, allow_backing, logical_block_size, ..args }
    }
}

impl DiskState {
    /// The descriptors of its image, the image itself first.
    pub(super) fn images(&self) -> impl Iterator<Item = RawFd> {
        let backing = self.backing.as_ref().into_iter().flatten();
        self.image.iter().chain(backing).map(|image| image.fd)
    }

    /// Returns whether the file system of the image punches holes, if that is known.
    pub(super) fn punches(&self) -> Option<bool> {
        self.image.as_ref()?.punches
    }
}

impl ProgramState {
    /// Writes the state to a memory file and rewinds it.
    pub(super) fn write(&self) -> io::Result<File> {
        memory_file("vhost-blk-upgrade", &serde_json::to_vec(self)?)
    }

    /// Reads a state.
    ///
    /// # Errors
    /// The cause, also if the format is unknown.
    pub(super) fn read(from: impl Read) -> Result<Self, String> {
        let mut text = Vec::new();
        from.take(BYTES_MAX).read_to_end(&mut text).map_err(|error| error.to_string())?;
        let told = |error: serde_json::Error| error.to_string();
        match serde_json::from_slice::<Version>(&text).map_err(told)?.format {
            FORMAT => serde_json::from_slice(&text).map_err(told),
            format => Err(format!("its format is {format}, and this program reads {FORMAT}")),
        }
    }

    /// All descriptors that it names.
    pub(super) fn descriptors(&self) -> HashSet<RawFd> {
        let sockets = [Some(&self.control), self.metrics.as_ref(), self.pidfile.as_ref()];
        let mut all: HashSet<RawFd> =
            sockets.into_iter().flatten().map(|socket| socket.fd).collect();
        all.insert(self.client.fd);
        for disk in &self.disks {
            all.extend(disk.front_ends.as_ref().map(|socket| socket.fd));
            all.extend(disk.images());
            all.extend(disk.bitmaps);
            all.extend(disk.clusters);
            all.extend(&disk.descriptors);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_format_and_an_unknown_field_are_refused() {
        let why = ProgramState::read(&br#"{"format":1}"#[..]).unwrap_err();
        assert!(why.contains("its format is 1"), "{why}");
        let why = ProgramState::read(&br#"{"format":2,"odd":0}"#[..]).unwrap_err();
        assert!(why.contains("odd"), "{why}");
        assert!(ProgramState::read(&b"{}"[..]).is_err());
        assert!(ProgramState::read(&b""[..]).is_err());
    }
}
