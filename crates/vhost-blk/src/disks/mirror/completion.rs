// SPDX-License-Identifier: Apache-2.0
//! The end of a mirror: the guest goes on in the new storage.

use super::Completed;
use super::copier::{CHUNK, Copier, CopyError};
use super::target::Named;
use super::worker::{Unfinished, Worker, lock, pieces};
use crate::disk::{self, From, LockWait};
use crate::disks::config_file::NewConfig;
use crate::disks::exchange::{New, options, replacement};
use crate::disks::growth;
use crate::disks::layers::Layers;
use crate::disks::replacing::{self, DRAIN_MAX, wait_and};
use crate::options::DiskArgs;
use backend::Disk;
use backend::file::File as ImageFile;
use backend::wrap::Written;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use vhost_user::{Command, Replacement};

/// Time in which the rest can be copied while the disk takes no request.
const REST_TIME: Duration = Duration::from_millis(30);
/// Bounds of the rest in bytes.
const REST_MIN: u64 = 256 << 10;
const REST_MAX: u64 = 4 << 20;
/// Parts that it may have in any case.
const REST_PARTS_MIN: u64 = 4;
/// Copies of changed parts with the brake on, before the disk drains.
const PASSES: usize = 2;
/// The refusal after the writes of the guest have waited in vain.
const SLOW: &str = "the new storage did not take a part of the copy for seconds, and the mirror goes on; check \
                    that storage, and repeat the command";
/// Interval of the copies while the disk drains: its writes may wait for them.
const TICK: Duration = Duration::from_millis(1);

impl Worker {
    /// Makes the guest go on in the new storage.
    pub(super) fn complete(&mut self, update_config: bool) -> Result<Completed, Unfinished> {
        let refused = Unfinished::Refused;
        let goes_on = || self.mirror.ordered().is_some() && self.check().is_ok();
        let withdrawn = || match self.check() {
            Err(ended) => ended,
            Ok(()) => refused(super::state::WITHDRAWN.to_owned()),
        };
        let _no_reload = self.disks.no_reload_while(&goes_on).ok_or_else(withdrawn)?;
        let gone = |failure: crate::failure::Failure| Unfinished::Ended(failure.to_string());
        let source = self.disks.source(&self.source.name, super::WHAT).map_err(gone)?;
        source.check_config(update_config).map_err(refused)?;
        self.plan.check_name().map_err(refused)?;
        let before = source.storage_path().map_err(refused)?;
        let args = self.plan.next(&source.args, self.plan.path());
        let config = self.disks.config_of(&source, &args, update_config).map_err(refused)?;
        let config_path = config.as_ref().map(|config| config.path().to_owned());
        self.converge()?;
        let is_marked = Arc::new(AtomicBool::new(false));
        let change = Change {
            args: args.clone(),
            first_bytes: self.plan.capacity_bytes(),
            layers: Arc::clone(&source.layers),
            top: Arc::clone(&source.image.top),
            written: Arc::clone(self.mirror.brake().written()),
            config,
            is_marked: Arc::clone(&is_marked),
        };
        let (pause, new) = self.exchange(change)?;
        if let Some(new) = new {
            self.disks.go_on_in(&source, args.clone(), new);
        }
        self.adopt_size();
        Ok(Completed {
            image: self.plan.path().to_owned(),
            before,
            options: options(&args),
            config: config_path,
            is_marked: is_marked.load(Ordering::Relaxed),
            pause,
        })
    }

    /// Returns whether the order is still wanted, and few parts are left.
    fn goes_on(&self) -> bool {
        self.mirror.ordered().is_some() && self.mirror.brake().is_on() && self.check().is_ok()
    }

    /// Copies changed parts durably until few are left. The brake keeps them few from then on: the first
    /// pass has the changes before it, and the second one those of the first and of the writes that were
    /// in flight at its begin.
    fn converge(&self) -> Result<(), Unfinished> {
        let rest_max = lock(&self.copier).as_ref().map_or(0, |copier| copier.bytes_in(REST_TIME));
        let brake = self.mirror.brake();
        let part = brake.written().part_bytes();
        brake.hold(rest_max.clamp(REST_MIN, REST_MAX).max(REST_PARTS_MIN * part));
        for _ in 0..PASSES {
            let taken = brake.written().take();
            for piece in taken.into_iter().flat_map(|range| pieces(range, CHUNK)) {
                self.check()?;
                self.with(|copier| copier.again(piece))?;
                self.mirror.copied(None);
                brake.proceed();
            }
            self.with(Copier::sync)?;
        }
        self.check()?;
        match self.mirror.ordered() {
            None => Err(Unfinished::Refused(super::state::WITHDRAWN.to_owned())),
            Some(_) if !brake.is_on() => Err(Unfinished::Refused(SLOW.to_owned())),
            Some(_) => Ok(()),
        }
    }

    /// Exchanges the storage of the drained disk. Returns the pause.
    fn exchange(&self, change: Change) -> Result<(Duration, Option<New>), Unfinished> {
        let (sender, new) = channel();
        let copier = Arc::clone(&self.copier);
        let order = self.source.control.replace_storage(Box::new(move |_: &Arc<dyn Disk>| {
            let copier = lock(&copier).take();
            change.prepare(copier.ok_or(super::state::CANCELLED)?, &sender)
        }));
        let mut failed = None;
        let waited = wait_and(&order, DRAIN_MAX, TICK, || {
            failed = self.copy_taken().err();
            failed.is_none() && self.goes_on()
        });
        // The exchange has not begun if it has left the copier.
        let has_copier = lock(&self.copier).is_some();
        match (waited, failed, has_copier) {
            (Ok(pause), _, _) => Ok((pause, new.try_recv().ok())),
            (Err(_), Some(error), _) => Err(error.into()),
            (Err(replacing::Unfinished::Cancelled), _, true) => match self.check() {
                Err(ended) => Err(ended),
                Ok(()) if self.mirror.ordered().is_some() => {
                    Err(Unfinished::Refused(SLOW.to_owned()))
                }
                Ok(()) => Err(Unfinished::Refused(super::state::WITHDRAWN.to_owned())),
            },
            (Err(unfinished), _, true) => Err(Unfinished::Refused(unfinished.to_string())),
            (Err(unfinished), _, false) => Err(Unfinished::Ended(unfinished.to_string())),
        }
    }

    /// Copies the parts that were changed while the disk drains, and lets writes that wait for that go
    /// on. After an error the exchange finds no copier: it cannot miss a part.
    fn copy_taken(&self) -> Result<(), CopyError> {
        let brake = self.mirror.brake();
        let mut copier = lock(&self.copier);
        // With the copier, the exchange has begun to copy the rest itself.
        if let Some(present) = &mut *copier {
            let copied = copy_rest(present, brake.written());
            if copied.is_err() {
                *copier = None;
            }
            copied?;
        }
        drop(copier);
        self.mirror.copied(None);
        brake.proceed();
        Ok(())
    }

    /// Makes the disk as large as its new block device.
    fn adopt_size(&self) {
        if !self.plan.is_device() {
            return;
        }
        let name = &self.source.name;
        if let Err(failure) = growth::watch(&self.disks) {
            tracing::warn!(disk = name, %failure, "a new size of the device is not noticed");
        }
        if let Err(failure) = self.disks.post(name, Command::Resize(None)) {
            tracing::warn!(disk = name, %failure, "the size of the new device is not adopted");
        }
    }
}

fn copy_rest(copier: &mut Copier, written: &Written) -> Result<(), CopyError> {
    if written.bytes() == 0 {
        return Ok(());
    }
    let taken = written.take();
    taken.into_iter().flat_map(|range| pieces(range, CHUNK)).try_for_each(|it| copier.again(it))?;
    // Before a part is copied again, as in each pass.
    copier.sync()
}

/// The change of a disk that is drained.
struct Change {
    args: DiskArgs,
    /// Size of the disk in bytes.
    first_bytes: u64,
    layers: Arc<Layers>,
    /// The file of the old image.
    top: Arc<ImageFile>,
    written: Arc<Written>,
    config: Option<NewConfig>,
    /// The old image has a mark.
    is_marked: Arc<AtomicBool>,
}

impl Change {
    /// Copies the rest, and opens the new storage, which has everything then.
    fn prepare(self, mut copier: Copier, new: &Sender<New>) -> Result<Replacement, String> {
        let copied = copy_rest(&mut copier, &self.written).and_then(|()| copier.sync());
        copied.map_err(|error| error.to_string())?;
        let named = copier.name()?;
        let from = From::Locked { first_bytes: Some(self.first_bytes) };
        let opened = disk::open(&self.args, from, LockWait::No);
        let opened = opened.map_err(|failure| failure.to_string())?;
        let layers = Arc::clone(&self.layers);
        replacement(opened, &layers, new, Box::new(move || self.commit(named)))
    }

    /// Marks the old image, and replaces the configuration file.
    fn commit(self, named: Named) -> Result<(), String> {
        let Change { args, top, config, is_marked, .. } = self;
        let path: PathBuf = args.blk_file.unwrap_or_default();
        let marked = top.mark_moved(&path);
        let marked = marked
            .map_err(|error| unmark(&top, format!("the old image cannot be marked: {error}")))?;
        config.map_or(Ok(()), NewConfig::replace).map_err(|told| unmark(&top, told))?;
        is_marked.store(marked, Ordering::Relaxed);
        named.keep();
        Ok(())
    }
}

/// Removes the mark of an image that stays in use. Returns the cause of this with the remedy.
fn unmark(top: &ImageFile, told: String) -> String {
    match top.unmark_moved() {
        Ok(()) => format!("{told}; check the file system and the permissions"),
        Err(error) => format!(
            "{told}, and the mark of the image stays: {error}; remove it with `setfattr -x \
             user.vhost-blk.moved {}` before the next start of the disk",
            top.path().display()
        ),
    }
}
