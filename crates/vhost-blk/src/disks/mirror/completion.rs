// SPDX-License-Identifier: Apache-2.0
//! The end of a mirror: the guest goes on in the new storage.

use super::Completed;
use super::copier::Copier;
use super::state::{Mirror, Ordered};
use super::target::Named;
use super::worker::Worker;
use crate::disk::{self, From, LockWait, Opened};
use crate::disks::config_file::NewConfig;
use crate::disks::converge::{Convergence, OwnedByTarget, STUCK, TargetQueue, Unfinished};
use crate::disks::exchange::{New, Source, options, replacement, settled};
use crate::disks::growth;
use crate::disks::layers::Layers;
use crate::options::DiskArgs;
use backend::file::File as ImageFile;
use qcow2::Qcow2Disk;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use vhost_user::Replacement;

impl Worker {
    /// Makes the guest go on in the new storage.
    pub(super) fn complete(&self, ordered: Ordered) -> Result<Completed, Unfinished> {
        let (refused, update_config) = (Unfinished::Refused, ordered.update_config);
        self.source()?.check_config(update_config).map_err(refused)?;
        let check = || self.check_order(ordered);
        let (acts, brake) = (self.thread.acts(), self.mirror.brake());
        let end = Convergence { acts, brake, check: &check };
        let plan = Arc::clone(&self.plan);
        end.with(move |copier: &mut Copier| {
            Ok(plan.check_name().and_then(|()| copier.check_path()))
        })?
        .map_err(refused)?;
        end.converge_synced(&self.disks, &self.source)?;
        // From the look at the configuration to the end: STUCK for that, DRAIN_MAX, and DRAINED_MAX for each wait before
        // the mark.
        let act = format!("the end of the mirror of the disk {}", self.source.name);
        let turn = end.turn(&self.disks, &act)?;
        let source = self.source()?;
        source.check_config(update_config).map_err(refused)?;
        let args = self.plan.next(&source.args, self.plan.path());
        let path = source.storage_path();
        let config = self.disks.config_of(&source, &args, update_config);
        let prepare = move || Ok((path().map_err(refused)?, config().map_err(refused)?));
        let (before, config) = end.meanwhile(&self.disks, &source.name, Some(STUCK), prepare)?;
        let config_path = config.as_ref().map(|config| config.path().to_owned());
        let is_marked = Arc::new(AtomicBool::new(false));
        let change = Change {
            name: source.name.clone(),
            args: args.clone(),
            first_bytes: self.plan.capacity_bytes(),
            layers: Arc::clone(&source.layers),
            top: Arc::clone(&source.image.top),
            qcow2: source.image.qcow2.clone(),
            mirror: Arc::clone(&self.mirror),
            ordered,
            config,
            is_marked: Arc::clone(&is_marked),
        };
        let (pause, new) = self.exchange(&end, change)?;
        if let Some(new) = new {
            self.disks.go_on_in(&source, Some((&turn, args.clone())), new);
        }
        if self.plan.is_device() {
            self.watch_device();
        }
        Ok(Completed {
            image: self.plan.path().to_owned(),
            before,
            options: options(&args),
            config: config_path,
            is_marked: is_marked.load(Ordering::Relaxed),
            pause,
        })
    }

    /// The disk as it is now.
    fn source(&self) -> Result<Source, Unfinished> {
        let source = self.disks.source(&self.source.name, super::WHAT);
        source.map_err(|failure| Unfinished::Ended(failure.to_string()))
    }

    /// Returns an error if the order is not wanted any more.
    fn check_order(&self, ordered: Ordered) -> Result<(), Unfinished> {
        self.check()?;
        match self.mirror.ordered() == Some(ordered) {
            true => Ok(()),
            false => Err(Unfinished::Refused(super::state::WITHDRAWN.to_owned())),
        }
    }

    /// Exchanges the storage of the drained disk. Returns the pause.
    fn exchange(
        &self,
        end: &Convergence<'_, Copier>,
        change: Change,
    ) -> Result<(Duration, Option<New>), Unfinished> {
        let (sender, new) = channel();
        let (mirror, ordered) = (Arc::clone(&self.mirror), change.ordered);
        let acts = self.thread.acts().clone();
        let begin = move || mirror.begin_rest(ordered);
        let replace = move || change.prepare(&acts, &sender);
        let pause = end.exchange(&self.source.control, begin, replace)?;
        Ok((pause, new.try_recv().ok()))
    }

    /// Makes the disk as large as its new block device, also later.
    fn watch_device(&self) {
        if let Err(failure) = growth::watch(&self.disks) {
            tracing::warn!(disk = self.source.name, %failure, "a new size of the device is not noticed");
        }
        self.disks.adopt_size(&self.source.name);
    }
}

/// The change of a disk that is drained.
struct Change {
    /// Name of the disk.
    name: String,
    args: DiskArgs,
    /// Size of the disk in bytes.
    first_bytes: u64,
    layers: Arc<Layers>,
    /// The file of the old image.
    top: Arc<ImageFile>,
    /// The old disk, if it is qcow2.
    qcow2: Option<Arc<Qcow2Disk>>,
    mirror: Arc<Mirror>,
    ordered: Ordered,
    config: Option<NewConfig>,
    /// The old image has a mark.
    is_marked: Arc<AtomicBool>,
}

impl Change {
    /// Waits for the new storage, which has everything then. If it hangs, the guest goes on in the old one.
    fn prepare(self, acts: &TargetQueue<Copier>, new: &Sender<New>) -> Result<Replacement, String> {
        let (args, first_bytes) = (self.args.clone(), Some(self.first_bytes));
        let open = move |copier: Copier| -> Result<(Opened, Named), String> {
            let known = copier.known();
            let named = copier.name()?;
            let from = From::Locked { identity: named.identity()?, first_bytes, known };
            let opened = disk::open(&args, from, LockWait::No);
            Ok((opened.map_err(|failure| failure.to_string())?, named))
        };
        let last = Convergence::last(acts, Arc::clone(self.mirror.brake()), open);
        // The old image keeps the content of this moment.
        settled(self.qcow2.as_deref())?;
        let (opened, named) = last.wait(&self.name)?;
        let layers = Arc::clone(&self.layers);
        replacement(acts, opened, &layers, new, Box::new(move || self.commit(named)))
    }

    /// Marks the old image, and replaces the configuration file.
    fn commit(self, named: OwnedByTarget<Named>) -> Result<(), String> {
        let Change { args, top, config, is_marked, mirror, .. } = self;
        let path: PathBuf = args.blk_file.unwrap_or_default();
        mirror.begin_move()?;
        let marked = top.mark_moved(&path);
        let marked = marked
            .map_err(|error| unmark(&top, format!("the old image cannot be marked: {error}")))?;
        config
            .map_or(Ok(()), |config| config.replace(marked))
            .map_err(|told| unmark(&top, told))?;
        is_marked.store(marked, Ordering::Relaxed);
        named.into_inner().into_iter().for_each(Named::keep);
        Ok(())
    }
}

/// Removes the mark of an image that stays in use. Returns the cause of this with the remedy.
fn unmark(top: &ImageFile, told: String) -> String {
    match top.unmark_moved() {
        Ok(()) => format!("{told}; check the file system and the permissions"),
        Err(error) => format!(
            "{told}, and the mark of the image stays: {error}; remove it with `{}` before the next \
             start of the disk",
            top.moved_unmarking()
        ),
    }
}
