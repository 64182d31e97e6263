// SPDX-License-Identifier: Apache-2.0
//! The files of an image: itself, and its backing files as far as the policy allows them.

use crate::entry::{EXCLUSIVE, PLACE};
use crate::fields::{self, Fields};
use crate::header::{self, Header};
use crate::places::Places;
use crate::storage::{Log, Store};
use crate::{AllowBacking, Qcow2Error};
use backend::file::place;
use imago::format::drivers::FormatDriverInstance;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Maximum files of a chain.
pub const FILES_MAX: usize = 32;

/// One file of the chain. Without a header it is raw.
#[derive(Debug)]
pub(crate) struct Link {
    /// Its name.
    pub(crate) path: PathBuf,
    /// The path to open it: `path`, or that of a descriptor below `/proc`.
    pub(crate) opened: PathBuf,
    pub(crate) header: Option<Header>,
}

/// Follows the chain from `path`, the top first, which is qcow2 or raw.
pub(crate) fn follow(
    path: &Path,
    is_qcow2: bool,
    allow: AllowBacking,
) -> Result<Vec<Link>, Qcow2Error> {
    follow_by(path, is_qcow2, allow, &mut |_, path| Ok(path.into()))
}

/// The same. `open` opens each file by its number and its name, and returns the path to open it again: all
/// later accesses have this file, whatever gets its name.
pub(crate) fn follow_by(
    path: &Path,
    is_qcow2: bool,
    allow: AllowBacking,
    open: &mut dyn FnMut(usize, &Path) -> Result<PathBuf, Qcow2Error>,
) -> Result<Vec<Link>, Qcow2Error> {
    let mut links: Vec<Link> = Vec::new();
    let mut seen = Vec::new();
    let mut next = Some((path.to_owned(), is_qcow2));
    while let Some((path, is_qcow2)) = next.take() {
        let named_by = links.last().map(|link| link.path.clone());
        let failed = |source| Qcow2Error::Image { path: path.clone(), source };
        // Before it is opened: an open of a pipe waits.
        let no_file = || refuse(&path, "it is no regular file", "copy it to a file");
        let named = fs::metadata(&path).map_err(failed)?;
        if !named.is_file() {
            return Err(no_file());
        }
        if seen.contains(&(named.dev(), named.ino())) || links.len() == FILES_MAX {
            return Err(too_long(&path));
        }
        let opened = open(links.len(), &path)?;
        let file = File::open(&opened).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        if !found.is_file() {
            return Err(no_file());
        }
        let identity = (found.dev(), found.ino());
        if seen.contains(&identity) {
            return Err(too_long(&path));
        }
        seen.push(identity);
        if let (Some(image), AllowBacking::SameDir) = (named_by, allow) {
            // The name may lead to another file than at the check of the name.
            let real = fs::read_link(place(&file)).map_err(failed)?;
            if !is_beside(&real, &image).map_err(failed)? {
                return Err(Qcow2Error::Backing { path: image, backing: path });
            }
        }
        let header = is_qcow2.then(|| header::read(&path, &file)).transpose()?;
        if let Some((name, format)) = header.as_ref().and_then(|header| header.backing.clone()) {
            next = Some(backing(&path, &name, format.as_deref(), allow)?);
        }
        links.push(Link { path, opened, header });
    }
    Ok(links)
}

fn too_long(path: &Path) -> Qcow2Error {
    let what = "its chain of backing files has a loop, or more than 32 files";
    refuse(path, what, "rebase it with `qemu-img rebase`")
}

/// As [`follow`] for a qcow2 image whose files are open: `opened` has the paths of their descriptors
/// below `/proc`, the top first. The names in the headers may be out of date: a file may have moved.
pub(crate) fn follow_open(
    path: &Path,
    opened: &[PathBuf],
    allow: AllowBacking,
) -> Result<Vec<Link>, Qcow2Error> {
    let differs = |path: &Path| {
        let remedy = "give the image the header of before, or restart the daemon";
        refuse(path, "its chain of backing files is not the one that is open", remedy)
    };
    let mut links = Vec::with_capacity(opened.len());
    let mut next = Some((path.to_owned(), true));
    for opened in opened {
        let (path, is_qcow2) = next.take().ok_or_else(|| differs(path))?;
        let read = |opened: &Path| {
            let failed = |source| Qcow2Error::Image { path: path.clone(), source };
            header::read(&path, &File::open(opened).map_err(failed)?)
        };
        let header = is_qcow2.then(|| read(opened)).transpose()?;
        if let Some((name, format)) = header.as_ref().and_then(|header| header.backing.clone()) {
            let backing = beside(&path, &name);
            if allow == AllowBacking::Off {
                return Err(Qcow2Error::Backing { path, backing });
            }
            next = Some((backing, is_format_qcow2(&path, format.as_deref())?));
        }
        links.push(Link { path, opened: opened.clone(), header });
    }
    match next {
        None => Ok(links),
        Some((path, _)) => Err(differs(&path)),
    }
}

/// Returns whether a file is in the directory of the image at `image`. `real` is its path without links.
fn is_beside(real: &Path, image: &Path) -> io::Result<bool> {
    let directory = match image.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory.canonicalize()?,
        _ => Path::new(".").canonicalize()?,
    };
    Ok(real.parent() == Some(&*directory))
}

/// Path of the backing file, and whether it is qcow2.
fn backing(
    path: &Path,
    name: &str,
    format: Option<&str>,
    allow: AllowBacking,
) -> Result<(PathBuf, bool), Qcow2Error> {
    let backing = beside(path, name);
    let is_beside = || is_beside(&backing.canonicalize()?, path);
    let is_allowed = match allow {
        AllowBacking::Off => false,
        AllowBacking::SameDir => {
            is_beside().map_err(|source| Qcow2Error::Image { path: backing.clone(), source })?
        }
        AllowBacking::Any => true,
    };
    if !is_allowed {
        return Err(Qcow2Error::Backing { path: path.into(), backing });
    }
    Ok((backing, is_format_qcow2(path, format)?))
}

/// Returns whether the header of the image at `path` says that its backing file is qcow2.
fn is_format_qcow2(path: &Path, format: Option<&str>) -> Result<bool, Qcow2Error> {
    match format {
        Some("qcow2") => Ok(true),
        Some("raw") => Ok(false),
        Some(other) => {
            let what = format!("the format {other} of its backing file is not supported");
            Err(refuse(path, &what, "convert the backing file to qcow2 and rebase the image"))
        }
        None => Err(refuse(
            path,
            "its header does not name the format of the backing file",
            "run `qemu-img rebase -u -b BACKING -F qcow2 IMAGE` (or -F raw), as it is",
        )),
    }
}

/// Path of a file that the image at `path` names.
pub(crate) fn beside(path: &Path, name: &str) -> PathBuf {
    path.parent().unwrap_or(Path::new(".")).join(name)
}

pub(crate) fn refuse(path: &Path, what: &str, remedy: &str) -> Qcow2Error {
    Qcow2Error::Refused { path: path.into(), what: what.into(), remedy: remedy.into() }
}

/// A chain that imago has open.
pub(crate) struct Opened {
    /// The image.
    pub(crate) access: FormatAccess<Store>,
    /// Size of the disk in the first backing file in bytes.
    pub(crate) backing_bytes: u64,
}

/// Opens the chain with imago; only the first file is writable.
pub(crate) fn open(links: &[Link], writable: bool, log: Option<Log>) -> Result<Opened, Qcow2Error> {
    let mut below: Option<FormatAccess<Store>> = None;
    let mut backing_bytes = 0;
    for (index, link) in links.iter().enumerate().rev() {
        let failed = |source| Qcow2Error::Image { path: link.path.clone(), source };
        let write = writable && index == 0;
        let log = log.clone().filter(|_| index == 0);
        let Link { path, opened, .. } = link;
        backing_bytes = below.as_ref().map_or(0, FormatAccess::size);
        let store = Store::open(opened, path, index as u32, write, log).map_err(failed)?;
        if let (true, Some(header)) = (write, &link.header) {
            let fields = check_tables(path, opened)?;
            store.fill_up(header.cluster_bytes).map_err(failed)?;
            if fields.autoclear != 0 {
                store.clear_autoclear().map_err(failed)?;
            }
        }
        let opened = match link.header {
            Some(_) => Qcow2::<Store>::builder(store)
                .write(write)
                .backing(below.take())
                .data_file(None)
                .open(DenyImplicitOpenGate::default())
                .and_then(checked),
            None => {
                Raw::builder(store).open(DenyImplicitOpenGate::default()).map(FormatAccess::new)
            }
        };
        let opened = opened.map_err(failed)?;
        if let (true, Some(header)) = (write, &link.header) {
            protect(&opened, header.cluster_bytes).map_err(failed)?;
        }
        below = Some(opened);
    }
    let access = below.ok_or_else(|| Qcow2Error::NotQcow2 { path: PathBuf::new() })?;
    Ok(Opened { access, backing_bytes })
}

/// The remedy for tables with which an image can only be read.
const READ_ONLY: &str = "give --read-only, or run `qemu-img check -r all`";

/// Refuses to write to an image whose header and tables share a cluster, or have one that is counted as free: a
/// library that allocates there would put a table over the header, or look for a place of a block without end.
fn check_places(path: &Path, file: &File, fields: &Fields) -> Result<(), Qcow2Error> {
    let refuse = |what: &str| Err(refuse(path, what, READ_ONLY));
    let mut first = [0; 8];
    let read = file.read_exact_at(&mut first, fields.refcounts_at);
    let has_first = read.is_ok() && u64::from_be_bytes(first) & PLACE != 0;
    if !has_first || fields.refcount_clusters == 0 || fields.refcounts_at == 0 {
        return refuse("its refcount table has no block for its first clusters");
    }
    let read = |len: usize, at: u64| fields::read_padded(file, len, at);
    let failed = |source| Qcow2Error::Image { path: path.into(), source };
    let places = Places::read(fields.cluster_bytes(), &read).map_err(failed)?;
    if let Some(cluster) = places.overlap() {
        return refuse(&format!("cluster {cluster} of its file has two of its tables"));
    }
    match places.uncounted(&read).map_err(failed)? {
        None => Ok(()),
        Some(0) => refuse("its header is counted as free"),
        Some(cluster) => {
            refuse(&format!("the table in cluster {cluster} of its file is counted as free"))
        }
    }
}

/// Refuses to write to an image with an L2 table that could have another owner: its L1 entry lacks the flag of
/// exclusive clusters. Each write there would copy the table, and free the old one, which may be in use until
/// the L1 table is durable. Only an image with internal snapshots has such entries, or a damaged one.
fn check_tables(path: &Path, opened: &Path) -> Result<Fields, Qcow2Error> {
    let failed = |source| Qcow2Error::Image { path: path.into(), source };
    let file = File::open(opened).map_err(failed)?;
    let fields = Fields::read(&file).map_err(failed)?;
    check_places(path, &file, &fields)?;
    let Fields { l1_at, l1_entries, .. } = fields;
    (&file).seek(SeekFrom::Start(l1_at)).map_err(failed)?;
    let mut table = Vec::new();
    (&file).take(u64::from(l1_entries) * 8).read_to_end(&mut table).map_err(failed)?;
    let (entries, _) = table.as_chunks();
    let is_shared = |entry: &[u8; 8]| {
        let entry = u64::from_be_bytes(*entry);
        entry & PLACE != 0 && entry & EXCLUSIVE == 0
    };
    match entries.iter().position(is_shared) {
        None => Ok(fields),
        Some(number) => {
            let what = format!("entry {number} of its L1 table names a table that it shares");
            Err(refuse(path, &what, READ_ONLY))
        }
    }
}

/// Guards the tables of the image from now on.
fn protect(access: &FormatAccess<Store>, cluster_bytes: u64) -> io::Result<()> {
    let stores = access.inner().collect_storage_dependencies();
    let top = stores.into_iter().find(|store| store.index() == 0);
    top.map_or(Ok(()), |store| store.protect(cluster_bytes))
}

fn checked(image: Qcow2<Store>) -> io::Result<FormatAccess<Store>> {
    match image.size() {
        0 => Err(io::Error::other("a disk without size")),
        _ => Ok(FormatAccess::new(image)),
    }
}
