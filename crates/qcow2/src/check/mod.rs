// SPDX-License-Identifier: Apache-2.0
//! The check of an image: its tables against its reference counts, as `qemu-img check` does it.
//!
//! `tables` counts the references of all tables (`tally`), and `refcounts` compares them with the
//! counts in the image. It reads images that are not served, for example dirty ones.

mod bitmaps;
mod refcounts;
mod snapshots;
mod tables;
mod tally;

use crate::fields::{self, Fields, extension, incompatible, u64_at};
use crate::header::L1_ENTRIES_MAX;
use crate::{Qcow2Error, chain};
use refcounts::Refcounts;
pub(crate) use refcounts::{get as refcount_of, set as set_refcount};
use std::fs::File;
use std::io;
use std::path::Path;
use tally::Tally;

/// Maximum texts of [`Report::findings`].
pub const FINDINGS_MAX: usize = 100;
/// Maximum length of the refcount table in bytes, as QEMU.
const REFCOUNT_TABLE_MAX: u64 = 8 << 20;
/// Maximum clusters of a file, as QEMU.
const CLUSTERS_MAX: u64 = i32::MAX as u64;

/// Maximum length of the encryption header in bytes; LUKS needs 2 MiB.
const ENCRYPTION_MAX: u64 = 64 << 20;
/// Autoclear bit: the external data file is a raw image.
const DATA_FILE_RAW: u64 = 2;
/// The last type of encryption.
const LUKS: u32 = 2;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Errors: data may be lost, or will be.
    pub errors: u64,
    /// Clusters that take space and that no table names.
    pub leaks: u64,
    /// Leaked clusters that were freed.
    pub repaired_leaks: u64,
    /// One line for each of the first errors and leaks.
    pub findings: Vec<String>,
    /// Clusters of the disk that have a place in the file.
    pub allocated_clusters: u64,
    /// All clusters of the disk.
    pub total_clusters: u64,
    /// Size of a cluster in bytes.
    pub cluster_bytes: u64,
    /// End of the last cluster in use, in bytes.
    pub end_bytes: u64,
    /// The image is marked as not closed properly.
    pub is_dirty: bool,
    /// The image is marked corrupt.
    pub is_marked_corrupt: bool,
}

impl Report {
    fn finding(&mut self, text: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(text);
        }
    }

    fn error(&mut self, text: impl Into<String>) {
        self.errors += 1;
        self.finding(format!("error: {}", text.into()));
    }

    fn leak(&mut self, text: impl Into<String>) {
        self.leaks += 1;
        self.finding(format!("leak: {}", text.into()));
    }
}

/// Checks the image in `file`, which nothing changes meanwhile.
///
/// # Errors
/// [`Qcow2Error`]: the image cannot be checked.
pub fn check(path: &Path, file: &File) -> Result<Report, Qcow2Error> {
    let fields = readable(path, file)?;
    let run = || {
        let mut report = Report::default();
        let mut refcounts = Refcounts::open(file, &fields)?;
        examine(file, &fields, &mut refcounts, false, &mut report)?;
        Ok(report)
    };
    run().map_err(|why| unreadable(path, &why))
}

/// As [`check`], and frees leaked clusters if there is no error. The file is writable.
///
/// # Errors
/// As [`check`]; clusters may have been freed then.
pub fn repair_leaks(path: &Path, file: &File) -> Result<Report, Qcow2Error> {
    let found = check(path, file)?;
    if found.errors > 0 || found.leaks == 0 {
        return Ok(found);
    }
    let fields = readable(path, file)?;
    let run = || {
        let mut refcounts = Refcounts::open(file, &fields)?;
        examine(file, &fields, &mut refcounts, true, &mut Report::default())?;
        // Reads the repaired counts again.
        tables::mark_exclusive(file, &fields, &mut Refcounts::open(file, &fields)?)
    };
    run().map_err(|why| unreadable(path, &why))?;
    let left = check(path, file)?;
    Ok(Report { repaired_leaks: found.leaks - left.leaks.min(found.leaks), ..left })
}

fn unreadable(path: &Path, why: &io::Error) -> Qcow2Error {
    let what = format!("its tables cannot be read: {why}");
    chain::refuse(path, &what, "see `qemu-img check`, and check the storage")
}

/// The header of an image that the check understands.
fn readable(path: &Path, file: &File) -> Result<Fields, Qcow2Error> {
    const OTHER: &str = "use `qemu-img check`";
    let failed = |why: io::Error| unreadable(path, &why);
    if !fields::is_qcow2(file).map_err(failed)? {
        return Err(chain::refuse(
            path,
            "not a qcow2 image",
            "give a qcow2 image: a raw one has nothing to check",
        ));
    }
    let fields = Fields::read(file).map_err(failed)?;
    let refuse = |what: &str| chain::refuse(path, what, OTHER);
    check_format(&fields).map_err(|what| refuse(&what))?;
    let extensions = fields.extensions(file).map_err(failed)?;
    // As QEMU: a name without length is none.
    if fields.backing_bytes > 0 {
        fields.backing(file, &extensions).map_err(failed)?;
    }
    let has_key = extensions.iter().any(|found| found.kind == extension::ENCRYPTION);
    if fields.encryption > LUKS || (fields.encryption == LUKS) != has_key {
        return Err(refuse("its encryption is unknown"));
    }
    check_tables(&fields).map_err(refuse)?;
    Ok(fields)
}

/// Refuses a format that the check does not understand. The error is the reason.
fn check_format(fields: &Fields) -> Result<(), String> {
    let refuse = |what: &str| Err(what.to_owned());
    if !(2..=3).contains(&fields.version) {
        return Err(format!("qcow2 of version {}", fields.version));
    }
    let unknown = fields.incompatible & !incompatible::KNOWN;
    if unknown != 0 {
        return Err(format!("it has unknown incompatible features ({unknown:#x})"));
    }
    if fields.incompatible & incompatible::DATA_FILE != 0 {
        return refuse("its data is in another file");
    }
    if !(9..=21).contains(&fields.cluster_bits) || fields.refcount_order > 6 {
        return refuse("its clusters or refcounts have an impossible size");
    }
    let least = if fields.version == 2 { 72 } else { 104 };
    if !(least..=fields.cluster_bytes()).contains(&fields.header_bytes.into()) {
        return refuse("its header has an impossible length");
    }
    let has_other_compression = fields.incompatible & incompatible::COMPRESSION != 0;
    if fields.compression > 1 || has_other_compression != (fields.compression == 1) {
        return refuse("its type of compression is unknown");
    }
    if fields.autoclear & DATA_FILE_RAW != 0 {
        return refuse("it has the flag of a raw data file, and no data file");
    }
    if fields.backing_at > fields.cluster_bytes() {
        return refuse("the name of its backing file has an impossible place");
    }
    Ok(())
}

/// Refuses tables that no image has. The error is the reason.
fn check_tables(fields: &Fields) -> Result<(), &'static str> {
    let is_apart = |at: u64| at.is_multiple_of(fields.cluster_bytes()) && at < 1 << 56;
    let refcount_bytes = u64::from(fields.refcount_clusters) << fields.cluster_bits;
    if !is_apart(fields.refcounts_at) || refcount_bytes > REFCOUNT_TABLE_MAX {
        return Err("its refcount table has an impossible place or size");
    }
    let by_l1 = u128::from(fields.l1_entries) << (2 * fields.cluster_bits - entry_bits(fields));
    if !is_apart(fields.l1_at)
        || fields.l1_entries > L1_ENTRIES_MAX
        || by_l1 < u128::from(fields.size_bytes)
    {
        return Err("its L1 table has an impossible place or size");
    }
    Ok(())
}

/// Bits of the length of an L2 entry.
fn entry_bits(fields: &Fields) -> u32 {
    if fields.incompatible & incompatible::EXTENDED_L2 == 0 { 3 } else { 4 }
}

/// Reads a table of 64-bit entries.
fn read_table(file: &File, at: u64, entries: u64) -> io::Result<Vec<u64>> {
    let bytes = fields::read_padded(file, entries as usize * 8, at)?;
    Ok((0..entries as usize).map(|entry| u64_at(&bytes, entry * 8)).collect())
}

/// Counts the references of all tables, and compares them with the refcounts.
fn examine(
    file: &File,
    fields: &Fields,
    refcounts: &mut Refcounts<'_>,
    repair: bool,
    report: &mut Report,
) -> io::Result<()> {
    let file_bytes = file.metadata()?.len();
    if file_bytes >> fields.cluster_bits > CLUSTERS_MAX {
        return Err(io::Error::other("the file has more clusters than QEMU allows"));
    }
    let mut tally = Tally::new(fields.cluster_bits, file_bytes);
    report.cluster_bytes = fields.cluster_bytes();
    let disk_bytes = fields.size_bytes / 512 * 512;
    report.total_clusters = disk_bytes.div_ceil(fields.cluster_bytes());
    report.is_dirty = fields.incompatible & incompatible::DIRTY != 0;
    report.is_marked_corrupt = fields.incompatible & incompatible::CORRUPT != 0;
    let mut counter = tables::Counter::new(file, fields, &mut tally, report);
    counter.count(0, fields.cluster_bytes(), 1, "the header");
    counter.active_table()?;
    snapshots::count(&mut counter)?;
    counter.l2_tables()?;
    for found in fields.extensions(file)? {
        match found.kind {
            extension::ENCRYPTION => {
                let place = fields::read_padded(file, 16, found.at)?;
                let (at, bytes) = (u64_at(&place, 0), u64_at(&place, 8));
                if bytes > ENCRYPTION_MAX {
                    counter.report.error("the encryption header is too long");
                } else {
                    counter.count(at, bytes, 1, "the encryption header");
                }
            }
            extension::BITMAPS => bitmaps::count(&mut counter, found)?,
            _ => {}
        }
    }
    refcounts.count_own(&mut counter);
    refcounts.compare(&tally, repair, report)?;
    report.end_bytes = tally.end_bytes();
    tables::check_exclusive(file, fields, refcounts, report)
}
