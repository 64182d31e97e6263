// SPDX-License-Identifier: Apache-2.0
//! Describes an image and its chain without opening it as a disk: no lock, no change, also while
//! another program uses it.

use crate::chain::{self, FILES_MAX};
use crate::fields::{Extension, Fields, extension, incompatible, is_qcow2};
use crate::{AllowBacking, Qcow2Error, header};
use backend::lock::{User, user_of};
use backend::mark::{self, Marked};
use std::fs::{self, File};
use std::io::{self, Seek};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A reason, and its remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub what: String,
    /// The remedy.
    pub remedy: String,
}

/// The header of a qcow2 image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Facts {
    /// Version of the format.
    pub version: u32,
    /// Size of a cluster in bytes.
    pub cluster_bytes: u64,
    /// Width of a reference count in bits.
    pub refcount_bits: u32,
    /// Features beyond those of every image, in words.
    pub features: Vec<String>,
    /// Internal snapshots.
    pub snapshots: u32,
    /// Name of the backing file as in the header, and its format.
    pub backing: Option<(String, Option<String>)>,
}

/// One file of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFacts {
    /// Its path.
    pub path: PathBuf,
    /// It is a block device.
    pub is_device: bool,
    /// Size of its disk in bytes.
    pub virtual_bytes: u64,
    /// Space that it takes on its file system in bytes; of a device its size.
    pub disk_bytes: u64,
    /// The header; a raw image has none.
    pub qcow2: Option<Qcow2Facts>,
    /// Reasons of the daemon to refuse this file.
    pub refusals: Vec<Refusal>,
    /// Another program that uses it.
    pub user: Option<User>,
    /// Its mark, with which it is not served for writing.
    pub mark: Option<Marked>,
}

/// A chain, the top first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// The files, as far as they can be read.
    pub files: Vec<FileFacts>,
    /// The reason for the chain to end before its last file.
    pub broken: Option<Refusal>,
    /// Least options with which the daemon serves it, or the first reason to refuse it.
    pub serve: Result<Needs, Refusal>,
}

/// Options that the daemon needs for an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// The format qcow2.
    pub qcow2: bool,
    /// Backing files that must be allowed.
    pub allow_backing: AllowBacking,
    /// No writes.
    pub read_only: bool,
}

/// Describes the image at `path` and its chain.
///
/// # Errors
/// [`Qcow2Error`]: the image cannot be read.
pub fn inspect(path: &Path) -> Result<Inspection, Qcow2Error> {
    inspect_as(path, None)
}

/// As [`inspect`] for an image of a known format: qcow2 or raw.
///
/// # Errors
/// As there.
pub fn inspect_as(path: &Path, is_qcow2: Option<bool>) -> Result<Inspection, Qcow2Error> {
    let top = file(path, is_qcow2)?;
    let mut seen = vec![identity(path)?];
    let mut files = vec![top];
    let mut broken = None;
    while let Some((below, format)) = files.last().and_then(next) {
        let found = match format.as_deref() {
            _ if files.len() == FILES_MAX => Err(refusal("it has more than 32 files", REBASE)),
            Some("raw" | "qcow2") => identity(&below)
                .and_then(|id| match seen.contains(&id) {
                    true => Ok(None),
                    false => {
                        seen.push(id);
                        file(&below, Some(format.as_deref() == Some("qcow2"))).map(Some)
                    }
                })
                .map_err(told)
                .and_then(|found| found.ok_or_else(|| refusal("its chain has a loop", REBASE))),
            // The format of the next file is unknown, and is not guessed.
            _ => break,
        };
        match found {
            Ok(found) => files.push(found),
            Err(why) => {
                broken = Some(why);
                break;
            }
        }
    }
    let serve = serve(path, &files, broken.as_ref());
    Ok(Inspection { files, broken, serve })
}

const REBASE: &str = "rebase it with `qemu-img rebase`";

fn refusal(what: &str, remedy: &str) -> Refusal {
    Refusal { what: what.into(), remedy: remedy.into() }
}

/// The cause and the remedy of an error.
fn told(why: Qcow2Error) -> Refusal {
    match why {
        Qcow2Error::Refused { what, remedy, path } => {
            Refusal { what: format!("{}: {what}", path.display()), remedy }
        }
        other => {
            let text = other.to_string();
            let (what, remedy) = text.rsplit_once("; ").unwrap_or((&text, ""));
            refusal(what, remedy)
        }
    }
}

/// Device and inode, which tell a loop.
fn identity(path: &Path) -> Result<(u64, u64), Qcow2Error> {
    let found = fs::metadata(path)
        .map_err(|source| Qcow2Error::Unreadable { path: path.into(), source })?;
    Ok((found.dev(), found.ino()))
}

/// Path and format of the backing file.
fn next(above: &FileFacts) -> Option<(PathBuf, Option<String>)> {
    let (name, format) = above.qcow2.as_ref()?.backing.clone()?;
    Some((chain::beside(&above.path, &name), format))
}

/// Describes one file. `format`: it is qcow2 or raw by the header above it.
fn file(path: &Path, format: Option<bool>) -> Result<FileFacts, Qcow2Error> {
    let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
    let found = fs::metadata(path).map_err(failed)?;
    let is_device = found.file_type().is_block_device();
    if !is_device && !found.is_file() {
        let what = "neither a regular file nor a block device";
        return Err(chain::refuse(path, what, "give an image or a disk"));
    }
    let mut file = File::open(path).map_err(failed)?;
    let has_header = is_qcow2(&file).map_err(failed)?;
    let bytes = file.seek(io::SeekFrom::End(0)).map_err(failed)?;
    let mut facts = FileFacts {
        path: path.into(),
        is_device,
        virtual_bytes: bytes,
        disk_bytes: if is_device { bytes } else { found.blocks() * 512 },
        qcow2: None,
        refusals: Vec::new(),
        user: user_of(&file).map_err(failed)?,
        mark: mark::refusal(&file, path).map_err(failed)?,
    };
    match (format.unwrap_or(has_header), has_header) {
        (true, true) => describe(&file, &mut facts).map_err(failed)?,
        (true, false) => {
            let remedy = "rebase the image above with the right format (`qemu-img rebase -u`)";
            facts.refusals.push(refusal("not a qcow2 image", remedy));
        }
        (false, _) if bytes < 512 => {
            let remedy = "make it larger, for example with `truncate -s 1G`";
            facts.refusals.push(refusal("smaller than one block of 512 bytes", remedy));
        }
        (false, _) => {}
    }
    Ok(facts)
}

fn describe(file: &File, facts: &mut FileFacts) -> io::Result<()> {
    let fields = Fields::read(file)?;
    facts.virtual_bytes = fields.size_bytes;
    let reasons = header::refusals(&facts.path, &fields);
    facts.refusals.extend(reasons.into_iter().map(|(what, remedy)| Refusal { what, remedy }));
    const MAKE_AGAIN: &str = "make the image again from its data";
    let extensions = fields.extensions(file).unwrap_or_else(|why| {
        facts.refusals.push(refusal(&why.to_string(), MAKE_AGAIN));
        Vec::new()
    });
    let odd = header::extension_refusal(&facts.path, &extensions);
    facts.refusals.extend(odd.map(|(what, remedy)| Refusal { what, remedy }));
    let backing = fields.backing(file, &extensions).unwrap_or_else(|why| {
        facts.refusals.push(refusal(&why.to_string(), MAKE_AGAIN));
        None
    });
    if facts.is_device {
        facts.refusals.push(refusal("a qcow2 image on a block device", "copy it to a file"));
    }
    facts.qcow2 = Some(Qcow2Facts {
        version: fields.version,
        cluster_bytes: fields.cluster_bytes(),
        refcount_bits: 1 << fields.refcount_order.min(31),
        features: features(&fields, &extensions),
        snapshots: fields.snapshots,
        backing,
    });
    Ok(())
}

/// Features beyond those of every image.
fn features(fields: &Fields, extensions: &[Extension]) -> Vec<String> {
    const LAZY_REFCOUNTS: u64 = 1;
    let bits = fields.incompatible;
    let encryption = match fields.encryption {
        0 => None,
        1 => Some("encrypted (AES)".to_owned()),
        2 => Some("encrypted (LUKS)".to_owned()),
        other => Some(format!("encrypted (type {other})")),
    };
    let named = [
        (bits & incompatible::DIRTY != 0, "dirty (not closed properly)"),
        (bits & incompatible::CORRUPT != 0, "marked corrupt"),
        (bits & incompatible::DATA_FILE != 0, "external data file"),
        (bits & incompatible::COMPRESSION != 0, "zstd compression"),
        (bits & incompatible::EXTENDED_L2 != 0, "extended L2 entries"),
        (fields.compatible & LAZY_REFCOUNTS != 0, "lazy refcounts"),
    ];
    let mut found: Vec<String> = encryption.into_iter().collect();
    found.extend(named.iter().filter(|(has, _)| *has).map(|(_, name)| (*name).to_owned()));
    if bits & !incompatible::KNOWN != 0 {
        found.push(format!("unknown incompatible features ({:#x})", bits & !incompatible::KNOWN));
    }
    if extensions.iter().any(|found| found.kind == extension::BITMAPS) {
        found.push("dirty bitmaps".to_owned());
    }
    found
}

/// Finds the least options with which the daemon opens the chain.
fn serve(path: &Path, files: &[FileFacts], broken: Option<&Refusal>) -> Result<Needs, Refusal> {
    let top = &files[0];
    if let Some(reason) = top.refusals.first() {
        return Err(reason.clone());
    }
    let is_marked = top.mark.is_some();
    let Some(header) = &top.qcow2 else {
        return Ok(Needs { read_only: is_marked, ..Needs::default() });
    };
    let below = files[1..].iter().find_map(|file| Some((file, file.refusals.first()?)));
    if let Some((file, reason)) = below {
        let what = format!("its backing file {}: {}", file.path.display(), reason.what);
        return Err(Refusal { what, ..reason.clone() });
    }
    if let Some(reason) = broken {
        return Err(reason.clone());
    }
    let allows = [AllowBacking::Off, AllowBacking::SameDir, AllowBacking::Any];
    let mut refused = None;
    for allow_backing in allows {
        match chain::follow(path, true, allow_backing) {
            Ok(links) => {
                chain::open(&links, false, None).map_err(told)?;
                let read_only = header.snapshots > 0 || is_marked;
                return Ok(Needs { qcow2: true, allow_backing, read_only });
            }
            Err(why) => refused = Some(told(why)),
        }
    }
    Err(refused.unwrap_or_else(|| refusal("it cannot be opened", REBASE)))
}
