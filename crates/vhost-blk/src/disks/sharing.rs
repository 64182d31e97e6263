// SPDX-License-Identifier: Apache-2.0
//! An image or a socket that another disk of this daemon has: the daemon itself is no program to stop.

use super::exchange::Source;
use super::{Disks, Entry, Origin, Slot, State};
use crate::disk::{self, LockWait};
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::socket::Source as SocketSource;
use crate::values::LockMode;
use backend::file::{File as ImageFile, identity_of};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Returns whether two disks cannot have the same image: a writer has it alone.
pub(super) fn exclude_each_other(one: &DiskArgs, other: &DiskArgs) -> bool {
    let locks = |args: &DiskArgs| args.lock == LockMode::Auto;
    let writes = |args: &DiskArgs| !args.read_only.is_on();
    locks(one) && locks(other) && (writes(one) || writes(other))
}

/// Another disk of this daemon.
pub(super) struct Other {
    name: String,
    /// It was removed, and its storage has not answered.
    is_ending: bool,
}

impl Other {
    /// The cause of a refusal, and its remedy.
    pub(super) fn told(&self) -> (String, String) {
        let Other { name, is_ending } = self;
        match is_ending {
            false => (
                format!("the disk {name} of this daemon has it"),
                format!("remove that disk (vhost-blk ctl remove {name})"),
            ),
            true => (
                format!("the removed disk {name} of this daemon has it until its storage answers"),
                "check that storage".to_owned(),
            ),
        }
    }

    fn failure(&self, what: String, object: &str) -> Failure {
        let (why, remedy) = self.told();
        Failure::run(what, why, format!("{remedy}, or name another {object}"))
    }
}

impl Disks {
    /// Opens the storage of a disk. A command does not wait for an image that another disk has and keeps.
    ///
    /// # Errors
    /// [`Failure`] with the name of that disk, or as [`disk::open`].
    pub(super) fn open_storage(
        &self,
        args: &DiskArgs,
        from: disk::From,
        (origin, wait): (Origin, LockWait),
    ) -> Result<disk::Opened, Failure> {
        let place = match &from {
            disk::From::Descriptor(place) => Some(place.clone()),
            _ => args.blk_file.clone(),
        };
        let other = place.as_deref().and_then(|place| self.user_of_image(args, place));
        // A reload may bring an image from one disk to another.
        let wait = match (origin, other) {
            (Origin::Command, Some(Other { is_ending: false, .. })) => LockWait::No,
            _ => wait,
        };
        disk::open(args, from, wait).map_err(|failure| {
            let Some(file) = failure.in_use.as_deref() else { return failure };
            // The daemon may not see the path of a passed image.
            let is_image = args.blk_file.as_deref() == Some(file);
            let place = place.as_deref().filter(|_| is_image).unwrap_or(file);
            match self.user_of_image(args, place) {
                Some(other) => other.failure(format!("use the image {}", file.display()), "image"),
                None => failure,
            }
        })
    }

    /// Names the disk that listens on the socket of `source` in a failure to listen there.
    pub(super) fn told_of_listener(&self, source: &SocketSource, failure: Failure) -> Failure {
        let SocketSource::Path { path, .. } = source else { return failure };
        let Ok(found) = fs::symlink_metadata(path) else { return failure };
        let listens = |entry: &Entry| {
            entry.socket.as_ref().is_some_and(|file| file.parts().1 == identity_of(&found))
        };
        let other = self.lock().other(listens);
        other.map_or(failure, |other| {
            other.failure(format!("listen on {}", path.display()), "socket")
        })
    }

    /// A disk that has the image at `place`, or has it as a backing file.
    fn user_of_image(&self, args: &DiskArgs, place: &Path) -> Option<Other> {
        let image = identity_of(&fs::metadata(place).ok()?);
        self.lock().other(|entry| {
            files_of(entry).any(|file| identity_of(file.found()) == image)
                && exclude_each_other(args, &entry.args)
        })
    }

    /// Returns whether a disk has a locked qcow2 image.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk.
    pub fn locks_qcow2(&self, name: &str) -> Result<bool, Failure> {
        let state = self.lock();
        let entry = state.entry(name)?;
        let is_qcow2 = entry.image.as_ref().is_some_and(|image| image.qcow2.is_some());
        Ok(is_qcow2 && entry.args.lock == LockMode::Auto)
    }

    /// Another disk that has this file.
    pub(super) fn other_user_of(&self, source: &Source, file: &ImageFile) -> Option<Other> {
        let wanted = identity_of(file.found());
        let has_it = |entry: &Entry| {
            let is_other = !Arc::ptr_eq(&entry.control, &source.control);
            is_other && files_of(entry).any(|file| identity_of(file.found()) == wanted)
        };
        self.lock().other(has_it)
    }
}

/// The image of a disk, and its backing files.
fn files_of(entry: &Entry) -> impl Iterator<Item = &Arc<ImageFile>> {
    let top = entry.image.iter().map(|it| &it.top);
    let backing = entry.image.iter().filter_map(|it| it.qcow2.as_ref());
    top.chain(backing.flat_map(|qcow2| qcow2.files()))
}

impl State {
    /// A disk, which may be ending, of this kind.
    fn other(&self, is_wanted: impl Fn(&Entry) -> bool) -> Option<Other> {
        let served = self.table.iter().filter_map(|(name, slot)| match slot {
            Slot::Served(entry) => Some((name, &**entry, entry.stop.asked())),
            _ => None,
        });
        let given_up = self.given_up.iter().map(|it| (&it.name, &*it.entry, true));
        let mut all = served.chain(given_up).filter(|(_, entry, _)| is_wanted(entry));
        all.next().map(|(name, _, is_ending)| Other { name: name.clone(), is_ending })
    }
}
