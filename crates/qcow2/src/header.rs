// SPDX-License-Identifier: Apache-2.0
//! The checks of a qcow2 header that precede imago: each refusal has its remedy.

use crate::Qcow2Error;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The first bytes of every qcow2 image.
pub const MAGIC: &[u8; 4] = b"QFI\xfb";
const HEADER_BYTES: usize = 104;
/// Type of the header extension that names the format of the backing file.
const BACKING_FORMAT: u32 = 0xe279_2aca;
/// Largest virtual size: file offsets of the disk stay far from overflow.
pub(crate) const SIZE_MAX: u64 = 1 << 60;
/// Largest L1 table in entries (32 MiB, as QEMU).
pub(crate) const L1_ENTRIES_MAX: u32 = 4 << 20;

/// The facts of a header that the crate needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Size of a cluster in bytes.
    pub cluster_bytes: u64,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// The image has internal snapshots.
    pub has_snapshots: bool,
    /// Name of the backing file, and its format.
    pub backing: Option<(String, Option<String>)>,
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

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_be_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_be_bytes)
}

/// Reads and checks the header of `file`.
///
/// # Errors
/// [`Qcow2Error`]: the image is refused, with the remedy.
pub fn read(path: &Path, file: &File) -> Result<Header, Qcow2Error> {
    let failed = |source| Qcow2Error::Image { path: path.into(), source };
    if !is_qcow2(file).map_err(failed)? {
        return Err(Qcow2Error::NotQcow2 { path: path.into() });
    }
    let mut bytes = [0; HEADER_BYTES];
    file.read_exact_at(&mut bytes, 0).map_err(failed)?;
    let refused = |(what, remedy): (String, &str)| Qcow2Error::Refused {
        path: path.into(),
        what,
        remedy: remedy.replace("IMAGE", &path.display().to_string()),
    };
    check_features(&bytes).map_err(refused)?;
    let cluster_bits = check_sizes(&bytes).map_err(refused)?;
    let backing = backing(file, &bytes, 1 << cluster_bits).map_err(failed)?;
    Ok(Header {
        cluster_bytes: 1 << cluster_bits,
        size_bytes: u64_at(&bytes, 24),
        has_snapshots: u32_at(&bytes, 60) != 0,
        backing,
    })
}

type Refusal = (String, &'static str);

fn check_features(bytes: &[u8]) -> Result<(), Refusal> {
    const CONVERT: &str = "convert it with `qemu-img convert -O qcow2 IMAGE NEW`, or serve it with \
                           qemu-storage-daemon";
    let refuse = |what: &str, remedy| Err((what.to_owned(), remedy));
    match u32_at(bytes, 4) {
        3 => {}
        2 => return refuse("qcow2 of version 2", "run `qemu-img amend -o compat=1.1 IMAGE`"),
        other => return Err((format!("qcow2 of version {other}"), CONVERT)),
    }
    if u32_at(bytes, 32) != 0 {
        return refuse("the image is encrypted", "serve it with qemu-storage-daemon");
    }
    let features = u64_at(bytes, 72);
    let checks = [
        (1, "it was not closed properly (dirty bit)", "run `qemu-img check -r all IMAGE`"),
        (2, "it is marked corrupt", "run `qemu-img check -r all IMAGE`, and check the data"),
        (4, "its data is in another file (external data file)", CONVERT),
        (8, "its compression is not deflate (zstd)", CONVERT),
        (16, "it has extended L2 entries", CONVERT),
    ];
    for (bit, what, remedy) in checks {
        if features & bit != 0 {
            return refuse(what, remedy);
        }
    }
    if features != 0 {
        return Err((format!("it has unknown incompatible features ({features:#x})"), CONVERT));
    }
    Ok(())
}

/// Checks the sizes and returns the bits of a cluster.
fn check_sizes(bytes: &[u8]) -> Result<u32, Refusal> {
    const REPAIR: &str = "check the image with `qemu-img check IMAGE`";
    let cluster_bits = u32_at(bytes, 20);
    if !(12..=21).contains(&cluster_bits) {
        let remedy = "convert it with `qemu-img convert -O qcow2 -o cluster_size=64k IMAGE NEW`";
        return Err((format!("clusters of 2^{cluster_bits} bytes (supported: 4K to 2M)"), remedy));
    }
    let size = u64_at(bytes, 24);
    if !(512..=SIZE_MAX).contains(&size) {
        return Err((format!("a disk of {size} bytes"), "give an image of 512 bytes to 1 EiB"));
    }
    let l1_entries = u32_at(bytes, 36);
    let by_l1 = u64::from(l1_entries) << (2 * cluster_bits - 3);
    if l1_entries > L1_ENTRIES_MAX || by_l1 < size {
        return Err((format!("an L1 table of {l1_entries} entries for {size} bytes"), REPAIR));
    }
    Ok(cluster_bits)
}

/// Name and format of the backing file.
fn backing(
    file: &File,
    bytes: &[u8],
    cluster: u64,
) -> io::Result<Option<(String, Option<String>)>> {
    let (at, len) = (u64_at(bytes, 8), u32_at(bytes, 16));
    if at == 0 {
        return Ok(None);
    }
    let text = |bytes: Vec<u8>| {
        String::from_utf8(bytes).map_err(|_| io::Error::other("a name that is not UTF-8"))
    };
    if len == 0 || len > 1023 || at > cluster || at + u64::from(len) > cluster {
        return Err(io::Error::other("the name of the backing file is outside of the header"));
    }
    let read = |at: u64, len: u32| -> io::Result<Vec<u8>> {
        let mut found = vec![0; len as usize];
        file.read_exact_at(&mut found, at)?;
        Ok(found)
    };
    let name = text(read(at, len)?)?;
    let mut position = u64::from(u32_at(bytes, 100));
    while position + 8 <= cluster {
        let head = read(position, 8)?;
        let (kind, len) = (u32_at(&head, 0), u32_at(&head, 4));
        if kind == 0 || u64::from(len) > cluster {
            break;
        }
        if kind == BACKING_FORMAT {
            return Ok(Some((name, Some(text(read(position + 8, len)?)?))));
        }
        position += 8 + u64::from(len).next_multiple_of(8);
    }
    Ok(Some((name, None)))
}
