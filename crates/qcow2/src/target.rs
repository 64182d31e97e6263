// SPDX-License-Identifier: Apache-2.0
//! An image or block device that a copy is written to, again and again at the same places.

use crate::image::{Answer, EXTENT_MAX, Image, Question};
use crate::job::Job;
use crate::storage::{self, Log, Store};
use crate::{AllowBacking, Qcow2Error, chain};
use backend::file::{identity_of, place};
use backend::mark;
use imago::Mapping;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// A file that the caller has locked.
pub(crate) struct Locked {
    /// [`backend::file::OpenAs::identity`].
    pub(crate) identity: (u64, u64),
    /// Bytes of the clusters of an image in use that reads it as its backing file.
    pub(crate) read_in: Option<u64>,
}

/// The target of a copy, open for writing.
pub struct Target(Kind);

enum Kind {
    Raw(File),
    Qcow2(Box<Image>),
}

impl Target {
    /// Opens a file or block device for writing. The caller has locked the one of this `identity`
    /// ([`backend::file::OpenAs::identity`]). The backing files of a qcow2 image are opened, too.
    ///
    /// # Errors
    /// [`Qcow2Error`], also if another file is at the path by now, which gets no change.
    pub fn open(
        path: &Path,
        identity: (u64, u64),
        is_qcow2: bool,
        allow_backing: AllowBacking,
    ) -> Result<Target, Qcow2Error> {
        let locked = Locked { identity, read_in: None };
        Target::recorded(path, Some(locked), is_qcow2, allow_backing, None)
    }

    /// The same; records the changes of an image in `log`. With [`Locked::read_in`] it refuses an image in which a
    /// write could free data that is still read.
    pub(crate) fn recorded(
        path: &Path,
        locked: Option<Locked>,
        is_qcow2: bool,
        allow_backing: AllowBacking,
        log: Option<Log>,
    ) -> Result<Target, Qcow2Error> {
        let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
        let file = File::options().read(true).write(true).open(path).map_err(failed)?;
        let read_in = locked.as_ref().and_then(|locked| locked.read_in);
        locked.map_or(Ok(()), |locked| check_identity(path, &file, locked.identity))?;
        if !is_qcow2 {
            return Ok(Target(Kind::Raw(file)));
        }
        let links = chain::follow_by(path, true, allow_backing, &mut |number, path| {
            Ok(if number == 0 { place(&file) } else { path.into() })
        })?;
        let Some(header) = links.first().and_then(|link| link.header.as_ref()) else {
            return Err(Qcow2Error::NotQcow2 { path: path.into() });
        };
        if header.has_snapshots {
            let remedy = "delete them with `qemu-img snapshot -d`";
            return Err(chain::refuse(path, "it has internal snapshots", remedy));
        }
        // The rest of such a cluster is read where it was: a new place of the cluster frees that.
        let moves_data = || {
            let image = Image::new(chain::open(&links, false, None)?, header, Arc::default());
            image.moves_data().map_err(failed)
        };
        if read_in.is_some_and(|bytes| bytes < header.cluster_bytes) && moves_data()? {
            let what = "it has compressed clusters or clusters without the flag COPIED, which are larger than those \
                        of the image over it";
            let remedy = "commit with the disk stopped (qemu-img commit)";
            return Err(chain::refuse(path, what, remedy));
        }
        let image = Image::new(chain::open(&links, true, log)?, header, Arc::default());
        // An end in the middle may leak clusters. The mark stays until they are looked for.
        mark::set_in_use(&file, mark::InUse::Leaks).map_err(failed)?;
        if mark::in_use(&file).map_err(failed)?.is_some() {
            image.store().map(Store::may_reserve).map_err(failed)?;
        }
        Ok(Target(Kind::Qcow2(Box::new(image))))
    }

    /// A raw image or block device that is open for writing, and locked.
    pub fn of_raw(file: File) -> Target {
        Target(Kind::Raw(file))
    }

    /// Size of the disk in the storage in bytes.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn size_bytes(&self) -> io::Result<u64> {
        match &self.0 {
            Kind::Raw(file) => (&*file).seek(SeekFrom::End(0)),
            Kind::Qcow2(image) => Ok(image.size_bytes()),
        }
    }

    /// The clusters that a qcow2 image has claimed, for [`Qcow2Options::known`](crate::Qcow2Options::known) after a sync.
    pub fn known(&self) -> Option<Vec<u8>> {
        match &self.0 {
            Kind::Raw(_) => None,
            Kind::Qcow2(image) => image.store().ok()?.known(),
        }
    }

    /// Enlarges a file. Its new part reads as zeroes.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn grow(&mut self, bytes: u64) -> io::Result<()> {
        match &mut self.0 {
            Kind::Raw(file) => file.set_len(bytes),
            Kind::Qcow2(image) => image.grow(bytes),
        }
    }

    /// Makes everything that was written durable.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn sync(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Kind::Raw(file) => file.sync_all(),
            Kind::Qcow2(image) => {
                image.settle_by(&mut Job::in_place).map_err(io::Error::from_raw_os_error)
            }
        }
    }

    /// Writes data at a position.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn write(&mut self, mut at: u64, mut data: &[u8]) -> io::Result<()> {
        let image = match &mut self.0 {
            Kind::Raw(file) => return file.write_all_at(data, at),
            Kind::Qcow2(image) => image,
        };
        while !data.is_empty() {
            let done = match image.answer(Question::Write(at, data.to_vec())) {
                Answer::Done(len) => len,
                Answer::Extent(extent, _) => {
                    let len = (extent.end - at).min(data.len() as u64);
                    let place = extent.host + (at - extent.start);
                    image.store()?.write_data(&data[..len as usize], place)?;
                    len
                }
                other => return Err(failure(&other)),
            };
            (at, data) = (at + done, &data[done as usize..]);
        }
        Ok(())
    }

    /// Makes a range read as zeroes, without space if the storage can do that.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn zero(&mut self, mut at: u64, mut len: u64) -> io::Result<()> {
        let image = match &mut self.0 {
            Kind::Raw(file) => return storage::zero(file, at, len),
            Kind::Qcow2(image) => image,
        };
        while len > 0 {
            let done = match image.answer(Question::Zero(at, len)) {
                Answer::Done(len) => len,
                Answer::Extent(extent, _) => {
                    let len = (extent.end - at).min(len);
                    image.store()?.zero_data(extent.host + (at - extent.start), len)?;
                    len
                }
                other => return Err(failure(&other)),
            };
            (at, len) = (at + done, len - done);
        }
        Ok(())
    }
}

impl Image {
    /// Returns whether the image itself has data that a write moves to another place: compressed clusters, and those
    /// that its tables do not declare its own (the flag COPIED of the specification).
    pub(crate) fn moves_data(&self) -> io::Result<bool> {
        let mut at = 0;
        while at < self.size_bytes() {
            let (mapping, found) = self.access.get_mapping(at, EXTENT_MAX)?;
            match mapping {
                Mapping::Special { layer, .. } if std::ptr::eq(layer, &self.access) => {
                    return Ok(true);
                }
                Mapping::Raw { storage, writable: false, .. } if storage.index() == 0 => {
                    return Ok(true);
                }
                _ if found == 0 => return Err(io::Error::other(format!("no mapping at {at}"))),
                _ => at += found,
            }
        }
        Ok(false)
    }
}

/// Refuses another file than the one of this identity.
pub(crate) fn check_identity(
    path: &Path,
    file: &File,
    identity: (u64, u64),
) -> Result<(), Qcow2Error> {
    let failed = |source| Qcow2Error::Unreadable { path: path.into(), source };
    if identity_of(&file.metadata().map_err(failed)?) == identity {
        return Ok(());
    }
    let what = "another file is at this path by now";
    Err(chain::refuse(
        path,
        what,
        "give the file of the disk its path back, and repeat the command",
    ))
}

fn failure(answer: &Answer) -> io::Error {
    match answer {
        Answer::Failed(errno) => io::Error::from_raw_os_error(*errno),
        _ => io::Error::other("the image has an odd mapping"),
    }
}
