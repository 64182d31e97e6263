// SPDX-License-Identifier: Apache-2.0
//! Snapshots: the image of a running disk becomes the read-only backing file of a new qcow2 overlay,
//! in which the guest goes on.
//!
//! | Step | After a crash behind it |
//! |---|---|
//! | 1. the overlay is made, and the new configuration file beside the old one, both durably | the image is served as before; the overlay has no data and is of no use |
//! | 2. the queues are drained, the image is synced, the overlay is opened | the same |
//! | 3. the image gets its mark ([`backend::mark`]) | no program opens the image for writing; the overlay has no data of its own, and shows the content of the image |
//! | 4. the new configuration file takes the place of the old one | the next start serves the overlay |
//! | 5. the guest goes on in the overlay | the same |
//!
//! No step after the third writes to the image, and the overlay is written only after it.

mod overlay;
pub(super) mod plan;

use super::Disks;
use super::config_file::NewConfig;
use super::converge::{
    Exchanged, Last, New, TargetQueue, TargetThread, TargetUser, Unfinished, Words,
};
use super::exchange::{self, SYNC, identity, options, replacement, settled, synced};
use super::job::{Job, Kind};
use super::layers::Layers;
use super::replacing::{DRAIN_MAX, wait};
use crate::disk::{self, From, LockWait};
use crate::events::{Change as Event, Work};
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::values::Format;
use backend::Disk;
use backend::file::File as ImageFile;
use overlay::Overlay;
use plan::Plan;
use qcow2::inspect::{self, FileFacts};
use qcow2::{AllowBacking, Qcow2Disk};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use vhost_user::Replacement;

const WHAT: &str = "take a snapshot of";
/// The reason of a snapshot that was cancelled.
const CANCELLED: &str = "it was cancelled; repeat the command";

/// The options of a snapshot.
#[derive(Debug)]
pub struct Wanted {
    /// Path of the new overlay.
    pub overlay: PathBuf,
    /// Rewrite the configuration file of the disk.
    pub update_config: bool,
    /// Do without the mark where the image cannot have one.
    pub no_mark: bool,
}

/// A snapshot that was taken.
#[derive(Debug)]
pub struct Taken {
    /// Path of the overlay.
    pub overlay: PathBuf,
    /// Options for the next start of the disk.
    pub options: String,
    /// The configuration file that names the overlay now.
    pub config: Option<PathBuf>,
    /// The image has a mark.
    pub is_marked: bool,
    /// Time in which the disk took no request.
    pub pause: Duration,
}

/// The space that a disk takes.
#[derive(Debug)]
pub struct Space {
    /// The files of the disk, the top first.
    pub files: Vec<FileFacts>,
    /// Bytes of discarded data whose places in qcow2 images were freed, also in those before a snapshot
    /// or a commit.
    pub unmapped_bytes: Option<u64>,
}

/// A new overlay. Only its thread ([`TargetThread`]) works on it.
struct Made {
    plan: Arc<Plan>,
    /// The backing files that it needs.
    needs: AllowBacking,
    overlay: Overlay,
}

impl TargetUser for Made {
    const WORDS: Words =
        Words { thread: "snapshot-target", target: "overlay", cancelled: CANCELLED };
    type Error = Infallible;
}

impl Exchanged for Made {
    const LATE: &'static str = "was not open";
    const UNMOVED: &'static str =
        "the guest goes on in its image; check the storage of the overlay, and repeat the command";
}

impl Disks {
    /// Takes a snapshot of a disk. Waits for its requests in flight as long as `go_on` says so, and
    /// at most 10 s.
    ///
    /// # Errors
    /// [`Failure`]; the disk is as before, and there is no overlay, but for one in a storage that hangs.
    pub fn snapshot(
        self: &Arc<Self>,
        name: &str,
        wanted: &Wanted,
        go_on: impl Fn() -> bool,
    ) -> Result<Taken, Failure> {
        let what = format!("{WHAT} {name}");
        let refused = |told: String| Failure::told(&what, told);
        // The drained disk then has little to sync.
        self.sync_for((name, &what), &go_on)?;
        let cancelled = Arc::new(AtomicBool::new(false));
        let act = format!("the begin of a snapshot of the disk {name}");
        let turn = self.turn(&what, act, &mut || go_on())?;
        let sign = self.use_target(name, &what, "snapshot", &wanted.overlay)?;
        let source = self.source(name, WHAT)?;
        let owner =
            self.begin_job(&source, Kind::Snapshot(Arc::clone(&cancelled)), &Arc::default());
        let owner = owner.map_err(refused)?;
        self.check_no_backup(name).map_err(refused)?;
        // Neither an upgrade nor other work comes in between from here on; the overlay may hang.
        drop(turn);
        let go_on = || go_on() && !cancelled.load(Ordering::Relaxed);
        let plan = Plan::of(&source, wanted).map_err(refused)?;
        let no_image = |why| refused(format!("the image: {why}; check the storage of the disk"));
        let image = source.image.top.metadata().map_err(no_image)?;
        let of_error = what.clone();
        let open = move || {
            let made = || {
                let plan = Arc::new(plan.locate()?);
                let overlay = Overlay::create(&plan, &image)?;
                Ok(Made { needs: plan.needs()?, plan, overlay })
            };
            made().map_err(|told: String| Failure::told(of_error, told))
        };
        let thread = TargetThread::start(what.clone(), sign, open, go_on)?;
        let job = owner.job();
        let taken = self.go_on_in_overlay(name, wanted, (thread.acts(), &job), &go_on);
        let taken = taken.map_err(refused);
        // Removes an overlay that is not used.
        if !thread.close() {
            let overlay = wanted.overlay.display();
            tracing::warn!(disk = name, %overlay, "the storage does not answer; the overlay is removed when it does");
        }
        drop(owner);
        taken
    }

    /// Makes the guest go on in the overlay.
    fn go_on_in_overlay(
        self: &Arc<Self>,
        name: &str,
        wanted: &Wanted,
        (acts, job): (&TargetQueue<Made>, &Job),
        go_on: &dyn Fn() -> bool,
    ) -> Result<Taken, String> {
        let check = || match go_on() {
            true => Ok(()),
            false => Err(Unfinished::Ended(CANCELLED.to_owned())),
        };
        let made = acts.act(|made| Ok((Arc::clone(&made.plan), made.needs)), check);
        let (plan, needs) = made.map_err(Unfinished::told)?;
        let what = format!("{WHAT} {name}");
        let act = format!("a snapshot of the disk {name}");
        // From the look at the configuration to the end: STUCK for that, DRAIN_MAX, and DRAINED_MAX for each wait before
        // the mark.
        let turn = self.turn(&what, act, &mut || go_on());
        let turn = turn.map_err(|failure| failure.cause())?;
        let source = self.source(name, WHAT).map_err(|failure| failure.to_string())?;
        source.check_config(wanted.update_config)?;
        let args = plan.next(&source.args, needs);
        let check = || check().map_err(Unfinished::told);
        let config = self.config_apart(&source, &what, &args, wanted.update_config, check)?;
        let path = config.as_ref().map(|config| config.path().to_owned());
        let change = Change {
            name: name.to_owned(),
            args: args.clone(),
            layers: Arc::clone(&source.layers),
            top: Arc::clone(&source.image.top),
            qcow2: source.image.qcow2.clone(),
            mark: plan.marks().then(|| plan.overlay().to_owned()),
            config,
        };
        let target = plan.overlay().display().to_string();
        source.events.tell(&Event::WorkBegun(Work::Snapshot, target.clone()));
        let tell = |outcome| job.ends_with(Event::of_end(Work::Snapshot, target.clone(), outcome));
        let (sender, new) = channel();
        let acts = acts.clone();
        let prepare = move |old: &Arc<dyn Disk>| change.prepare(&acts, old, sender);
        let order = source.control.replace_storage(Box::new(prepare));
        let waited = wait(&order, DRAIN_MAX, go_on).map_err(|unfinished| unfinished.to_string());
        let pause = waited.inspect_err(|why| tell(Err((why.clone(), !go_on()))))?;
        let options = options(&args);
        if let Ok(new) = new.try_recv() {
            self.go_on_in(&source, Some((&turn, args)), new);
        }
        tell(Ok(()));
        let overlay = plan.overlay().to_owned();
        Ok(Taken { overlay, options, config: path, is_marked: plan.marks(), pause })
    }

    /// The space that the files of a disk take. A disk without an image has none.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, or its image cannot be read.
    pub fn space(&self, name: &str) -> Result<Space, Failure> {
        let Some(image) = self.lock().entry(name)?.image.clone() else {
            return Ok(Space { files: vec![], unmapped_bytes: None });
        };
        let has_some = image.qcow2.is_some() || image.unmapped_before > 0;
        let unmapped_bytes = has_some.then(|| image.unmapped_bytes());
        Ok(Space { files: self.chain(name)?, unmapped_bytes })
    }

    /// The files of a disk, the top first.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, it has no image, or the image cannot be read.
    pub fn chain(&self, name: &str) -> Result<Vec<FileFacts>, Failure> {
        let source = self.source(name, "show the files of")?;
        let is_qcow2 = source.args.format == Some(Format::Qcow2);
        let path = source.args.blk_file.as_deref().unwrap_or(Path::new(""));
        match inspect::inspect_as(path, Some(is_qcow2)) {
            Ok(found) => Ok(found.files),
            Err(why) => Err(Failure::told(format!("show the files of {name}"), why)),
        }
    }
}

/// The change of a disk that is drained.
struct Change {
    /// Name of the disk.
    name: String,
    args: DiskArgs,
    layers: Arc<Layers>,
    /// The file that becomes the backing file.
    top: Arc<ImageFile>,
    /// Its disk, if it is qcow2.
    qcow2: Option<Arc<Qcow2Disk>>,
    /// The content of its mark.
    mark: Option<PathBuf>,
    config: Option<NewConfig>,
}

impl Change {
    /// Waits for the overlay over the image, which has everything that the guest wrote. If one of both hangs, the
    /// guest goes on in the image.
    fn prepare(
        self,
        acts: &TargetQueue<Made>,
        old: &Arc<dyn Disk>,
        new: Sender<exchange::New>,
    ) -> Result<Replacement, String> {
        let (old, top, qcow2) = (Arc::clone(old), Arc::clone(&self.top), self.qcow2.clone());
        let capacity_sectors = old.info().capacity_sectors;
        let image = acts.on_old(SYNC, move |is_wanted| {
            synced(&*old)?;
            // The guest may go on in the image by now.
            is_wanted()?;
            settled(qcow2.as_deref())?;
            identity(&top)
        })?;
        let args = self.args.clone();
        let last = Last::order(acts, move |made: Made, _| {
            let opened = disk::open(&args, From::Overlay { image }, LockWait::No);
            let opened = opened.map_err(|failure| failure.to_string())?;
            if opened.disk.info().capacity_sectors != capacity_sectors {
                return Err(exchange::RESIZED.to_owned());
            }
            Ok(New { opened, rest_bytes: None, made: made.overlay })
        });
        let (opened, overlay) = last.wait(&self.name)?;
        let layers = Arc::clone(&self.layers);
        let commit = move || {
            self.commit()?;
            overlay.into_inner().into_iter().for_each(Overlay::keep);
            Ok(())
        };
        replacement(acts, opened, &layers, &new, Box::new(commit))
    }

    /// Marks the image, and replaces the configuration file. The mark has no limit: the guest must not go on in an
    /// image with a mark that comes late.
    fn commit(self) -> Result<(), String> {
        let Change { top, mark, config, .. } = self;
        let is_marked = mark.is_some();
        if let Some(overlay) = mark
            && let Err(error) = top.mark(&overlay)
        {
            return Err(unmark(&top, format!("the image cannot be marked: {error}")));
        }
        match config.map(|config| config.replace(is_marked)) {
            Some(Err(told)) if is_marked => Err(unmark(&top, told)),
            Some(Err(told)) => Err(told),
            Some(Ok(())) | None => Ok(()),
        }
    }
}

/// Removes the mark of an image that stays in use. Returns the cause of this with the remedy.
fn unmark(top: &ImageFile, told: String) -> String {
    match top.overlay() {
        Ok(None) => format!("{told}; check its file system, or give --no-mark"),
        _ => match top.unmark() {
            Ok(()) => format!("{told}; check the file system and the permissions"),
            Err(error) => format!(
                "{told}, and the mark of the image stays: {error}; remove it with `{}` before the next \
                 start of the disk",
                top.unmarking()
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disks::kept::Earlier;
    use backend::FileOptions;

    #[test]
    fn a_change_that_cannot_be_recorded_leaves_no_mark() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("a.img"), vec![0; 4096]).unwrap();
        let text = format!("blk-file = '{}'\nsocket-path = '/s'\n", path("a.img").display());
        std::fs::write(path("a.toml"), &text).unwrap();
        let args = crate::config::disk_of_file(&path("a.toml")).unwrap();
        let top = Arc::new(ImageFile::open(path("a.img"), FileOptions::default()).unwrap());
        let config = NewConfig::prepare(&path("a.toml"), &args, &args).unwrap();
        // A directory in place of the file cannot be replaced.
        std::fs::remove_file(path("a.toml")).unwrap();
        std::fs::create_dir(path("a.toml")).unwrap();
        let mark = Some(path("b.qcow2"));
        let layers = Layers::new(Arc::clone(&top) as Arc<dyn Disk>, None, Earlier::default());
        let change = Change {
            name: "a".to_owned(),
            args,
            layers,
            top: Arc::clone(&top),
            qcow2: None,
            mark,
            config: Some(config),
        };
        let told = change.commit().unwrap_err();
        assert!(told.contains("a.toml cannot be replaced") && told.contains("; check"), "{told}");
        assert_eq!(top.overlay().unwrap(), None);
    }
}
