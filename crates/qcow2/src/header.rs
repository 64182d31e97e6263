// SPDX-License-Identifier: Apache-2.0
//! The checks of a qcow2 header that precede imago: each refusal has its remedy.

use crate::Qcow2Error;
use crate::fields::{Extension, FEATURE_NAME_BYTES, Fields, extension, incompatible as bit};
use std::fs::File;
use std::path::Path;

pub use crate::fields::{MAGIC, is_qcow2};

/// Largest virtual size: file offsets of the disk stay far from overflow.
const SIZE_MAX: u64 = 1 << 60;
/// Largest L1 table in entries (32 MiB, as QEMU).
pub(crate) const L1_ENTRIES_MAX: u32 = 4 << 20;

/// Largest virtual size with clusters of so many bytes. An entry of the L1 table covers a table of 8-byte entries for
/// clusters.
pub(crate) fn size_max(cluster_bytes: u64) -> u64 {
    SIZE_MAX.min(u64::from(L1_ENTRIES_MAX) * (cluster_bytes / 8) * cluster_bytes)
}

/// The facts of a header that the crate needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Size of a cluster in bytes.
    pub cluster_bytes: u64,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// The image has internal snapshots.
    pub has_snapshots: bool,
    /// The image has dirty bitmaps of QEMU.
    pub has_bitmaps: bool,
    /// Name of the backing file, and its format.
    pub backing: Option<(String, Option<String>)>,
}

impl Header {
    /// Something beside the content of the disk, which a new image of this content would not have.
    pub fn extra(&self) -> Option<&'static str> {
        if self.backing.is_some() {
            Some("a backing file")
        } else if self.has_snapshots {
            Some("internal snapshots")
        } else {
            self.has_bitmaps.then_some("dirty bitmaps of QEMU")
        }
    }
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
    let fields = Fields::read(file).map_err(failed)?;
    if let Some((what, remedy)) = refusals(path, &fields).into_iter().next() {
        return Err(Qcow2Error::Refused { path: path.into(), what, remedy });
    }
    let extensions = fields.extensions(file).map_err(failed)?;
    if let Some((what, remedy)) = extension_refusal(path, &extensions) {
        return Err(Qcow2Error::Refused { path: path.into(), what, remedy });
    }
    Ok(Header {
        cluster_bytes: fields.cluster_bytes(),
        size_bytes: fields.size_bytes,
        has_snapshots: fields.snapshots != 0,
        has_bitmaps: extensions.iter().any(|found| found.kind == extension::BITMAPS),
        backing: fields.backing(file, &extensions).map_err(failed)?,
    })
}

/// All reasons to refuse the image at `path`, with their remedies; the most important first.
pub(crate) fn refusals(path: &Path, fields: &Fields) -> Vec<(String, String)> {
    let mut found = features(fields);
    found.extend(sizes(fields));
    found.into_iter().map(|(what, remedy)| (what, named(remedy, path))).collect()
}

/// The reason to refuse the image at `path` because of the extensions of its header, with the remedy. imago expects
/// whole entries in the table of feature names, and reads on to the end of the list, also beyond the name of the
/// backing file.
pub(crate) fn extension_refusal(path: &Path, extensions: &[Extension]) -> Option<(String, String)> {
    let is_odd = |found: &&Extension| {
        found.kind == extension::FEATURE_NAMES && !found.bytes.is_multiple_of(FEATURE_NAME_BYTES)
    };
    let what = match (extensions.iter().find(is_odd), extensions.last()) {
        (Some(Extension { bytes, .. }), _) => {
            format!("its feature names take {bytes} bytes (each: {FEATURE_NAME_BYTES})")
        }
        (None, Some(Extension { kind: extension::END, .. })) => return None,
        (None, _) => "the list of its header extensions has no end".to_owned(),
    };
    Some((what, named(CONVERT, path)))
}

fn named(remedy: &str, path: &Path) -> String {
    remedy.replace("IMAGE", &path.display().to_string())
}

type Refusal = (String, &'static str);

const CONVERT: &str = "convert it with `qemu-img convert -O qcow2 IMAGE NEW`, or serve it with \
                       qemu-storage-daemon";

fn features(fields: &Fields) -> Vec<Refusal> {
    let mut found: Vec<Refusal> = Vec::new();
    let mut refuse = |what: &str, remedy| found.push((what.to_owned(), remedy));
    match fields.version {
        3 => {}
        2 => refuse("qcow2 of version 2", "run `qemu-img amend -o compat=1.1 IMAGE`"),
        other => refuse(&format!("qcow2 of version {other}"), CONVERT),
    }
    if fields.encryption != 0 {
        refuse("the image is encrypted", "serve it with qemu-storage-daemon");
    }
    let checks = [
        (bit::DIRTY, "it was not closed properly (dirty bit)", "run `qemu-img check -r all IMAGE`"),
        (
            bit::CORRUPT,
            "it is marked corrupt",
            "run `qemu-img check -r all IMAGE`, and check the data",
        ),
        (bit::DATA_FILE, "its data is in another file (external data file)", CONVERT),
        (bit::COMPRESSION, "its compression is not deflate (zstd)", CONVERT),
        (bit::EXTENDED_L2, "it has extended L2 entries", CONVERT),
    ];
    for (bit, what, remedy) in checks {
        if fields.incompatible & bit != 0 {
            refuse(what, remedy);
        }
    }
    if fields.incompatible & !bit::KNOWN != 0 {
        let what = format!("it has unknown incompatible features ({:#x})", fields.incompatible);
        refuse(&what, CONVERT);
    }
    found
}

/// Checks the sizes.
fn sizes(fields: &Fields) -> Option<Refusal> {
    const REPAIR: &str = "check the image with `vhost-blk check IMAGE`";
    let cluster_bits = fields.cluster_bits;
    if !(12..=21).contains(&cluster_bits) {
        let remedy = "convert it with `qemu-img convert -O qcow2 -o cluster_size=64k IMAGE NEW`";
        return Some((format!("clusters of 2^{cluster_bits} bytes (supported: 4K to 2M)"), remedy));
    }
    let size = fields.size_bytes;
    if !(512..=SIZE_MAX).contains(&size) {
        return Some((format!("a disk of {size} bytes"), "give an image of 512 bytes to 1 EiB"));
    }
    if !size.is_multiple_of(512) {
        let remedy = "give it whole sectors with `qemu-img resize IMAGE +512`";
        return Some((format!("a disk of {size} bytes, which ends within a sector"), remedy));
    }
    let l1_entries = fields.l1_entries;
    let by_l1 = u64::from(l1_entries) << (2 * cluster_bits - 3);
    if l1_entries > L1_ENTRIES_MAX || by_l1 < size {
        return Some((format!("an L1 table of {l1_entries} entries for {size} bytes"), REPAIR));
    }
    None
}
