// SPDX-License-Identifier: Apache-2.0
//! A running disk goes on in another image: the steps that a snapshot, a merge and a mirror share. Errors that
//! are texts have cause and remedy.

use super::config_file::NewConfig;
use super::converge::{STUCK, TargetQueue, TargetUser};
use super::layers::{Following, Layers};
use super::replacing::{DRAIN_MAX, Unfinished, wait};
use super::turn::HeldTurn;
use super::{Disks, Mode, Origin, growth};
use crate::backup::Image as Served;
use crate::disk::Opened;
use crate::events::DiskEvents;
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::upgrade::{self, ImageOptions, Parts, Storage};
use crate::values::{AllowBacking, Plane, word};
use backend::file::File as ImageFile;
use backend::file::identity_of;
use backend::wrap::{Brake, Growth};
use backend::{Disk, Info, quoted};
use qcow2::Qcow2Disk;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::time::Duration;
use vhost_user::{Control, Replacement};

/// Interval of the look at a client.
const LOOK: Duration = Duration::from_millis(100);

/// Refuses a disk that is read-only, or has the kernel alone as its data plane, with the text for that.
///
/// # Errors
/// The text.
pub(super) fn check_disk(
    args: &DiskArgs,
    is_read_only: bool,
    [read_only, kernel]: [&str; 2],
) -> Result<(), String> {
    match args.data_plane {
        _ if is_read_only => Err(read_only.to_owned()),
        Plane::Kernel => Err(kernel.to_owned()),
        _ => Ok(()),
    }
}

/// Checks that no completed write of an image is lost. If its writes wait in the page cache, it makes them durable, so
/// that the drained disk has few.
///
/// # Errors
/// Cause and remedy.
pub(super) fn check_writes(top: &ImageFile) -> Result<(), String> {
    top.check_writes().map_err(lost)
}

/// A disk as it is before the exchange.
#[derive(Clone)]
pub(super) struct Source {
    pub(super) name: String,
    pub(super) args: DiskArgs,
    pub(super) origin: Origin,
    pub(super) control: Arc<Control>,
    pub(super) events: Arc<DiskEvents>,
    pub(super) image: Image,
    pub(super) layers: Arc<Layers>,
}

/// The storage after the exchange.
pub(super) struct New {
    image: Image,
    storage: Storage,
    /// Notices for the user.
    notices: Vec<String>,
}

/// The bitmaps of a disk after an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bitmaps {
    /// The new storage has the content of the old one.
    GoOn,
    /// Other programs may have written to it.
    End,
}

/// The open image of a disk.
#[derive(Clone)]
pub(super) struct Image {
    /// The disk with its wrappers.
    pub(super) disk: Arc<dyn Disk>,
    /// The file of the image.
    pub(super) top: Arc<ImageFile>,
    /// The qcow2 image below the wrappers.
    pub(super) qcow2: Option<Arc<Qcow2Disk>>,
    /// Bytes that the disk has unmapped in other images: before a snapshot, a commit or an upgrade.
    pub(super) unmapped_before: u64,
    /// The properties that the guest has read, but for the size, which changes.
    pub(super) told: Info,
}

impl Image {
    /// Bytes of discarded data whose places in qcow2 images were freed.
    pub(super) fn unmapped_bytes(&self) -> u64 {
        let here = self.qcow2.as_ref().map_or(0, |qcow2| qcow2.unmapped_bytes());
        self.unmapped_before + here
    }

    /// The image below the wrappers, to be read.
    pub(super) fn served(&self) -> Served {
        match &self.qcow2 {
            Some(qcow2) => Served::Qcow2(Arc::clone(qcow2)),
            None => Served::Raw(Arc::clone(&self.top)),
        }
    }

    /// The properties that the guest has read: without requests that only the present storage has.
    pub(super) fn told(&self) -> Info {
        Info { capacity_sectors: self.disk.info().capacity_sectors, ..self.told.clone() }
    }
}

impl Source {
    /// Finds the path of the image or block device without symbolic links. The file there is the open one, which the
    /// result does not keep open.
    pub(super) fn storage_path(&self) -> impl FnOnce() -> Result<PathBuf, String> + Send + 'static {
        let path = self.args.blk_file.clone().unwrap_or_default();
        let identity = identity_of(self.image.top.found());
        move || real_path_as(&path, identity)
    }

    /// Makes the disk note the parts that its guest changes, for a copy with this brake.
    ///
    /// # Errors
    /// [`Unfinished`].
    pub(super) fn follow(
        &self,
        brake: &Arc<Brake>,
        growth: Growth,
        go_on: impl FnMut() -> bool,
    ) -> Result<(), Unfinished> {
        let brake = Arc::clone(brake);
        let order = self.layers.change(&self.control, move |stack| {
            if stack.capacity_bytes() != brake.written().capacity_bytes() {
                return Err(RESIZED.to_owned());
            }
            stack.following = Some(Following { brake, growth });
            Ok(())
        });
        wait(&order, DRAIN_MAX, go_on).map(drop)
    }

    /// Ends the following of a merge or a mirror. The order is not withdrawn: it is carried out after the
    /// requests in flight, also if they take longer than this waits.
    pub(super) fn end_following(&self) {
        let order = self.layers.end(&self.control, |stack| {
            stack.following = None;
            Ok(())
        });
        if let Some(told) = still_followed(order.wait(DRAIN_MAX)) {
            tracing::warn!(disk = self.name, told, "changes are still noted");
        }
    }

    /// The path of the image without symbolic links. The file there is the open one.
    pub(super) fn path(&self) -> Result<PathBuf, String> {
        path_of(self.args.blk_file.as_deref().unwrap_or(Path::new("")), &self.image.top)
    }

    /// Checks the origin of the options of the disk.
    pub(super) fn check_config(&self, updates: bool) -> Result<(), String> {
        let refusal = match (self.origin, updates) {
            (Origin::Directory, false) => {
                "its file of --config-dir names the present image, which the next start would not \
                 open; give --update-config, which changes the file"
            }
            (Origin::Command, true) => {
                "it has no file of --config-dir; drop --update-config, and use the options that the \
                 answer tells for the next start"
            }
            _ => return Ok(()),
        };
        Err(refusal.to_owned())
    }
}

/// The warning after an order to end the following, if it is not carried out.
fn still_followed(answer: Result<Result<Duration, String>, RecvTimeoutError>) -> Option<String> {
    match answer {
        // The layers have gone with the disk.
        Ok(Ok(_)) | Err(RecvTimeoutError::Disconnected) => None,
        Ok(Err(told)) => Some(format!(
            "a resize and the kernel data plane are refused until the disk is added again: {told}"
        )),
        Err(RecvTimeoutError::Timeout) => Some(
            "its requests in flight are not complete, and a resize and the kernel data plane are \
             refused until they are; check its storage"
                .to_owned(),
        ),
    }
}

/// The real path of an open file of a chain.
pub(super) fn path_of(path: &Path, open: &backend::file::File) -> Result<PathBuf, String> {
    let shown = path.display();
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(format!(
            "{shown} is a block device, and a chain of images has files only; take the snapshot \
             where the device comes from (lvcreate --snapshot, for example)"
        ));
    }
    real_path_of(path, open)
}

/// The real path of an open file or block device.
pub(super) fn real_path_of(path: &Path, open: &backend::file::File) -> Result<PathBuf, String> {
    real_path_as(path, identity_of(open.found()))
}

/// The real path of the file with this identity.
fn real_path_as(path: &Path, identity: (u64, u64)) -> Result<PathBuf, String> {
    let shown = path.display();
    let failed = |error: io::Error| {
        format!("{shown}: {error}; make the image visible to the daemon at this path")
    };
    let real = fs::canonicalize(path).map_err(failed)?;
    let found = fs::metadata(&real).map_err(failed)?;
    match identity == identity_of(&found) {
        true => Ok(real),
        false => Err(format!(
            "{shown} is another file than the open one by now; give the image its name back"
        )),
    }
}

impl Disks {
    /// A disk with an image. `what`: the act for an error.
    pub(super) fn source(&self, name: &str, what: &str) -> Result<Source, Failure> {
        let state = self.lock();
        let entry = state.entry(name)?;
        let refused = |why, remedy| Failure::run(format!("{what} {name}"), why, remedy);
        let Some(image) = entry.image.clone() else {
            return Err(refused("the disk has no image file", "serve a disk of kind file"));
        };
        let (args, origin) = (entry.args.clone(), entry.origin);
        let (control, layers) = (Arc::clone(&entry.control), Arc::clone(&entry.layers));
        let (name, events) = (name.to_owned(), Arc::clone(&entry.events));
        Ok(Source { name, args, origin, control, events, image, layers })
    }

    /// Prepares the new configuration file of a disk, if it has one. Its file system may hang
    /// ([`Disks::prepare_apart`]); the result does not keep the image open meanwhile.
    pub(super) fn config_of(
        &self,
        source: &Source,
        next: &DiskArgs,
        updates: bool,
    ) -> impl FnOnce() -> Result<Option<NewConfig>, String> + Send + 'static {
        let file = match (&self.mode, source.origin) {
            (Mode::Many(Some(directory)), Origin::Directory) if updates => {
                Some(directory.join(format!("{}.toml", source.name)))
            }
            _ => None,
        };
        let (present, next) = (source.args.clone(), next.clone());
        move || file.map(|file| NewConfig::prepare(&file, &present, &next)).transpose()
    }

    /// The same on a thread of its own, until `check` fails. `what`: the command, for an error.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn config_apart(
        self: &Arc<Self>,
        source: &Source,
        what: &str,
        args: &DiskArgs,
        updates: bool,
        check: impl Fn() -> Result<(), String>,
    ) -> Result<Option<NewConfig>, String> {
        let act = self.config_of(source, args, updates);
        self.told_apart((&source.name, what), Some(STUCK), act, check)
    }

    /// As [`Disks::prepare_apart`] for a client, until `check` fails.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn told_apart<T: Send + 'static>(
        self: &Arc<Self>,
        (name, what): (&str, &str),
        limit: Option<Duration>,
        act: impl FnOnce() -> Result<T, String> + Send + 'static,
        check: impl Fn() -> Result<(), String>,
    ) -> Result<T, String> {
        let of_thread = what.to_owned();
        let act = move || act().map_err(|told| Failure::told(of_thread, told));
        let turn = || check().map(|()| LOOK).map_err(|told| Failure::told(what, told));
        let done = self.prepare_apart((name, what), (limit, LOOK), act, turn);
        done.map_err(|failure| failure.cause())
    }

    /// Makes the entry of a disk that of its new storage, and drops the old one. `next`: the options name that
    /// storage from now on. Their turn lasts from the exchange on: nothing reads the old ones meanwhile, and stores
    /// them later.
    pub(super) fn go_on_in(
        &self,
        source: &Source,
        next: Option<(&HeldTurn<'_>, DiskArgs)>,
        new: New,
    ) {
        let args = next.map(|(_turn, args)| args);
        let New { mut image, storage, notices } = new;
        notices.iter().for_each(|notice| tracing::warn!(disk = source.name, "{notice}"));
        let path = args.as_ref().unwrap_or(&source.args).blk_file.as_deref();
        // Not under the lock of all disks: the file system of the path may hang.
        let watched = Disks::watched(path, &image.top);
        let mut state = self.lock();
        let Some(entry) = state.with_device(&source.control) else { return };
        entry.device = growth::device_number(&image.top);
        entry.watch.replace(watched);
        // The old image is settled: it unmaps nothing more.
        image.unmapped_before = entry.image.as_ref().map_or(0, Image::unmapped_bytes);
        if let Some(old) = &entry.image
            && let Ok(told) = vhost_user::seen(&old.told(), image.disk.info())
        {
            image.told = told;
        }
        let parts = Arc::new(Parts { storage, front_ends: entry.parts.front_ends.clone() });
        let old = (std::mem::replace(&mut entry.parts, parts), entry.image.replace(image));
        if let Some(args) = args {
            // A reload may have changed other options meanwhile.
            entry.args = ImageOptions::of(&args).put_into(entry.args.clone());
            entry.is_exchanged = true;
        }
        drop(state);
        drop(old);
    }
}

/// The path of a new file, in an existing directory without symbolic links.
pub(super) fn path_of_new(path: &Path) -> Result<PathBuf, String> {
    let shown = path.display();
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(format!("{shown}: it names no file; give the path of a new file"));
    };
    if !path.is_absolute() {
        return Err(format!("{shown}: the daemon has another directory; give an absolute path"));
    }
    let directory = fs::canonicalize(directory)
        .map_err(|error| format!("{shown}: its directory: {error}; give one that exists"))?;
    let path = directory.join(name);
    match (directory.is_dir(), path.to_str()) {
        (true, Some(_)) => Ok(path),
        (true, None) => Err(format!("{shown}: the path is not UTF-8; give another one")),
        (false, _) => Err(format!("{shown}: its parent is no directory; give one that exists")),
    }
}

/// The exchange to an opened disk, whose parts go to `new` and which gets the layers of the old one. An image that may
/// have lost completed writes is refused: each FLUSH fails there, and would succeed in the new storage.
pub(super) fn replacement<C: TargetUser>(
    acts: &TargetQueue<C>,
    opened: Opened,
    layers: &Arc<Layers>,
    new: &Sender<New>,
    commit: Box<dyn FnOnce() -> Result<(), String> + Send>,
) -> Result<Replacement, String> {
    let checked = Arc::clone(layers);
    acts.on_old(SYNC, move |_| checked.check_writes().map_err(lost))?;
    replacement_with(opened, layers, new, commit, Bitmaps::GoOn)
}

/// As [`replacement`], with this treatment of the bitmaps.
pub(super) fn replacement_with(
    opened: Opened,
    layers: &Arc<Layers>,
    new: &Sender<New>,
    commit: Box<dyn FnOnce() -> Result<(), String> + Send>,
    bitmaps: Bitmaps,
) -> Result<Replacement, String> {
    let Opened { disk, top, qcow2, lock, notices } = opened;
    if let Some(top) = top.clone() {
        let storage = upgrade::Image::of(Arc::clone(&top), qcow2.clone()).map(Storage::Image);
        let no_descriptor = |error| format!("{error}; raise the limit on open files (ulimit -n)");
        let storage = storage.map_err(no_descriptor)?;
        let told = disk.info();
        let image = Image { disk: Arc::clone(&disk), top, qcow2, unmapped_before: 0, told };
        let _ = new.send(New { image, storage, notices }); // the receiver waits for the answer
    }
    let lock = lock.map(|(lock, _)| lock);
    Ok(layers.go_on_in(Replacement { disk, keeps_lock: false, lock, commit }, top, bitmaps))
}

/// The identity of the open file of a disk, whose next disk has to find it at its path.
pub(super) fn identity(file: &backend::file::File) -> Result<(u64, u64), String> {
    let failed = |error| format!("{}: {error}; check its storage", file.path().display());
    file.opened_as().map(|opened| opened.identity).map_err(failed)
}

/// The failure of work on a disk that has another size than at the begin.
pub(super) const RESIZED: &str = "it was resized a moment ago; repeat the command";

/// The sync of a drained disk, for an error.
pub(super) const SYNC: &str = "the sync of the image";

/// Makes the completed writes of a disk durable.
pub(super) fn synced(disk: &dyn Disk) -> Result<(), String> {
    disk.sync().map_err(lost)
}

/// The cause and the remedy of a sync that failed with this error.
fn lost(error: io::Error) -> String {
    format!(
        "a sync of the image failed, and completed writes may be lost: {error}; check the storage"
    )
}

/// Wait for the tables of a qcow2 image whose disk takes no request.
const TABLES_MAX: Duration = Duration::from_secs(2);

/// Makes the tables of a drained disk durable. Nothing changes its files from then on.
pub(crate) fn settled(qcow2: Option<&Qcow2Disk>) -> Result<(), String> {
    let slow = |why| format!("the tables of the image are not durable: {why}; check the storage");
    qcow2.map_or(Ok(()), |qcow2| qcow2.settle(TABLES_MAX).map_err(slow))
}

/// The options of a disk that depend on its image, for its next start.
pub(super) fn options(args: &DiskArgs) -> String {
    let path = quoted(args.blk_file.as_deref().unwrap_or(Path::new("")));
    let format = args.format.map_or("raw".to_owned(), word);
    let mut text = format!("--blk-file {path} --format {format}");
    if args.allow_backing != AllowBacking::Off {
        text += &format!(" --allow-backing {}", word(args.allow_backing));
    }
    if let Some(block) = args.logical_block_size.filter(|block| *block != 512) {
        text += &format!(" --logical-block-size {block}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_of_the_kernel_alone_and_a_read_only_one_are_refused() {
        use crate::disks::{mirror, snapshot};
        for refusals in [mirror::plan::REFUSALS, snapshot::plan::REFUSALS] {
            let of = |plane: &str, is_read_only: bool| {
                let text = format!("blk-file = '/a'\nsocket-path = '/s'\ndata-plane = '{plane}'\n");
                let table = text.parse::<toml::Table>().unwrap();
                let args = crate::config::disk_of_table("a test", &table).unwrap();
                check_disk(&args, is_read_only, refusals)
            };
            let told = of("kernel", false).unwrap_err();
            assert!(told.contains("; start it with --data-plane auto or uring"), "{told}");
            assert!(of("uring", true).unwrap_err().contains("read-only"));
            assert_eq!((of("uring", false), of("auto", false)), (Ok(()), Ok(())));
        }
    }

    #[test]
    fn a_disk_whose_changes_are_still_noted_has_a_warning_and_one_that_has_gone_has_none() {
        assert_eq!(still_followed(Ok(Ok(Duration::ZERO))), None);
        assert_eq!(still_followed(Err(RecvTimeoutError::Disconnected)), None);
        let slow = still_followed(Err(RecvTimeoutError::Timeout)).unwrap();
        assert!(slow.contains("check its storage"), "{slow}");
        let failed = still_followed(Ok(Err("no descriptor is left".to_owned()))).unwrap();
        assert!(failed.contains("added again: no descriptor is left"), "{failed}");
    }
}
