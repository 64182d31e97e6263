// SPDX-License-Identifier: Apache-2.0
//! The fields of a qcow2 header as they are in the file, without a judgement.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The first bytes of every qcow2 image.
pub const MAGIC: &[u8; 4] = b"QFI\xfb";
/// Length of a header of version 2.
const HEADER_2_BYTES: u64 = 72;
const HEADER_BYTES: usize = 105;
/// Position of `size`, a field of 8 bytes.
pub(crate) const SIZE_AT: usize = 24;
/// Position of `autoclear_features`, a field of 8 bytes.
pub(crate) const AUTOCLEAR_AT: usize = 88;
/// Maximum header extensions that are read.
const EXTENSIONS_MAX: usize = 64;
/// Bytes of an entry of the table of feature names.
pub(crate) const FEATURE_NAME_BYTES: u32 = 48;
/// Maximum length of a name in the header.
const NAME_MAX: u32 = 1023;

/// Bits of [`Fields::incompatible`].
pub(crate) mod incompatible {
    pub(crate) const DIRTY: u64 = 1;
    pub(crate) const CORRUPT: u64 = 2;
    pub(crate) const DATA_FILE: u64 = 4;
    pub(crate) const COMPRESSION: u64 = 8;
    pub(crate) const EXTENDED_L2: u64 = 16;
    pub(crate) const KNOWN: u64 = 31;
}

/// Types of header extensions.
pub(crate) mod extension {
    pub(crate) const END: u32 = 0;
    pub(crate) const BACKING_FORMAT: u32 = 0xe279_2aca;
    pub(crate) const BITMAPS: u32 = 0x2385_2875;
    pub(crate) const ENCRYPTION: u32 = 0x0537_be77;
    pub(crate) const FEATURE_NAMES: u32 = 0x6803_f857;
}

/// A header extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extension {
    pub(crate) kind: u32,
    pub(crate) at: u64,
    pub(crate) bytes: u32,
}

/// The fields of a header. Positions are those of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fields {
    pub(crate) version: u32,
    pub(crate) backing_at: u64,
    pub(crate) backing_bytes: u32,
    pub(crate) cluster_bits: u32,
    pub(crate) size_bytes: u64,
    pub(crate) encryption: u32,
    pub(crate) l1_entries: u32,
    pub(crate) l1_at: u64,
    pub(crate) refcounts_at: u64,
    pub(crate) refcount_clusters: u32,
    pub(crate) snapshots: u32,
    pub(crate) snapshots_at: u64,
    pub(crate) incompatible: u64,
    pub(crate) compatible: u64,
    pub(crate) autoclear: u64,
    pub(crate) refcount_order: u32,
    pub(crate) header_bytes: u32,
    pub(crate) compression: u8,
}

/// Returns whether the file begins as a qcow2 image.
///
/// # Errors
/// The error of the system call.
pub fn is_qcow2(file: &File) -> io::Result<bool> {
    let mut start = [0; 4];
    match file.read_exact_at(&mut start, 0) {
        Ok(()) => Ok(&start == MAGIC),
        Err(why) if why.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(why) => Err(why),
    }
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_be_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_be_bytes)
}

/// The entries of a table, or of a part of one.
pub(crate) fn entries(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.as_chunks().0.iter().map(|entry| u64::from_be_bytes(*entry))
}

/// Reads bytes of the file; zeroes behind its end.
pub(crate) fn read_padded(file: &File, bytes: usize, mut at: u64) -> io::Result<Vec<u8>> {
    let mut found = vec![0; bytes];
    let mut rest = &mut found[..];
    while !rest.is_empty() {
        match file.read_at(rest, at) {
            Ok(0) => break,
            Ok(read) => {
                at += read as u64;
                rest = &mut rest[read..];
            }
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
    Ok(found)
}

impl Fields {
    /// Reads the header of a file that begins as a qcow2 image.
    pub(crate) fn read(file: &File) -> io::Result<Fields> {
        if file.metadata()?.len() < HEADER_2_BYTES {
            return Err(io::Error::other("the file ends inside of its header"));
        }
        let bytes = read_padded(file, HEADER_BYTES, 0)?;
        let version = u32_at(&bytes, 4);
        let is_2 = version == 2;
        // Version 2 has no field from 72 on.
        let (u32_from_3, u64_from_3) = (
            |at| if is_2 { 0 } else { u32_at(&bytes, at) },
            |at| if is_2 { 0 } else { u64_at(&bytes, at) },
        );
        let incompatible = u64_from_3(72);
        let has_compression = !is_2 && u32_at(&bytes, 100) > 104;
        Ok(Fields {
            version,
            backing_at: u64_at(&bytes, 8),
            backing_bytes: u32_at(&bytes, 16),
            cluster_bits: u32_at(&bytes, 20),
            size_bytes: u64_at(&bytes, SIZE_AT),
            encryption: u32_at(&bytes, 32),
            l1_entries: u32_at(&bytes, 36),
            l1_at: u64_at(&bytes, 40),
            refcounts_at: u64_at(&bytes, 48),
            refcount_clusters: u32_at(&bytes, 56),
            snapshots: u32_at(&bytes, 60),
            snapshots_at: u64_at(&bytes, 64),
            incompatible,
            compatible: u64_from_3(80),
            autoclear: u64_from_3(AUTOCLEAR_AT),
            refcount_order: if is_2 { 4 } else { u32_at(&bytes, 96) },
            header_bytes: if is_2 { HEADER_2_BYTES as u32 } else { u32_from_3(100) },
            compression: if has_compression { bytes[104] } else { 0 },
        })
    }

    /// Size of a cluster in bytes. The caller has checked its bits.
    pub(crate) fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits.min(63)
    }

    /// Extensions of the header, with the end of the list if it has one. They end before the name of the backing file.
    ///
    /// # Errors
    /// The error of the system call, an extension that does not fit, or too many of them.
    pub(crate) fn extensions(&self, file: &File) -> io::Result<Vec<Extension>> {
        let cluster = match self.backing_at {
            0 => self.cluster_bytes(),
            at => at.min(self.cluster_bytes()),
        };
        let mut found = Vec::new();
        let mut at = u64::from(self.header_bytes);
        while at < cluster {
            let head = read_padded(file, 8, at)?;
            let (kind, bytes) = (u32_at(&head, 0), u32_at(&head, 4));
            if at + 8 + u64::from(bytes) > cluster {
                return Err(io::Error::other("a header extension is longer than its cluster"));
            }
            if found.len() == EXTENSIONS_MAX {
                let why = format!("the header has more than {EXTENSIONS_MAX} extensions");
                return Err(io::Error::other(why));
            }
            found.push(Extension { kind, at: at + 8, bytes });
            if kind == extension::END {
                break;
            }
            at += 8 + u64::from(bytes).next_multiple_of(8);
        }
        Ok(found)
    }

    /// Name and format of the backing file. `extensions` are those of the header.
    pub(crate) fn backing(
        &self,
        file: &File,
        extensions: &[Extension],
    ) -> io::Result<Option<(String, Option<String>)>> {
        let (at, bytes, cluster) = (self.backing_at, self.backing_bytes, self.cluster_bytes());
        if at == 0 {
            return Ok(None);
        }
        if bytes == 0 || bytes > NAME_MAX || at > cluster || at + u64::from(bytes) > cluster {
            return Err(io::Error::other("the name of the backing file is outside of the header"));
        }
        let text = |at: u64, bytes: u32| {
            let found = read_padded(file, bytes as usize, at)?;
            String::from_utf8(found).map_err(|_| io::Error::other("a name that is not UTF-8"))
        };
        let format = extensions.iter().find(|found| found.kind == extension::BACKING_FORMAT);
        let format = format.map(|found| text(found.at, found.bytes.min(NAME_MAX))).transpose()?;
        Ok(Some((text(at, bytes)?, format)))
    }
}
