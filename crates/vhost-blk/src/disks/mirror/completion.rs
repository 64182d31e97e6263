// SPDX-License-Identifier: Apache-2.0
//! The end of a mirror: the guest goes on in the new storage.

use super::Completed;
use super::bound::Bound;
use super::copier::{CHUNK, Copier};
use super::hand::Acts;
use super::state::{Mirror, Ordered};
use super::target::Named;
use super::worker::{SLOW, STUCK, Unfinished, Worker};
use crate::disk::{self, From, LockWait, Opened};
use crate::disks::Disks;
use crate::disks::config_file::NewConfig;
use crate::disks::exchange::{New, Source, options, replacement, settled};
use crate::disks::growth;
use crate::disks::layers::Layers;
use crate::disks::reload::NoReload;
use crate::disks::replacing::{DRAIN_MAX, wait_and};
use crate::options::DiskArgs;
use backend::Disk;
use backend::file::File as ImageFile;
use qcow2::Qcow2Disk;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use vhost_user::Replacement;

/// Time in which the rest can be copied while the disk takes no request.
const REST_TIME: Duration = Duration::from_millis(30);
/// Bounds of the rest in bytes.
const REST_MIN: u64 = 256 << 10;
const REST_MAX: u64 = 4 << 20;
/// Parts that it may have in any case.
const REST_PARTS_MIN: u64 = 4;
/// Copies of changed parts while the brake has its least bound, before the disk drains: the writes in flight
/// at the begin of the first are noted in the second.
const PASSES: usize = 2;
/// Interval of the copies while the disk drains: its writes may wait for them.
const TICK: Duration = Duration::from_millis(1);
/// Interval of the look at a reload that is in progress.
const LOOK: Duration = Duration::from_millis(20);
/// Longest time in which the drained disk waits for its new storage.
const DRAINED_MAX: Duration = STUCK;

impl Worker {
    /// Makes the guest go on in the new storage.
    pub(super) fn complete(&mut self, ordered: Ordered) -> Result<Completed, Unfinished> {
        let (refused, update_config) = (Unfinished::Refused, ordered.update_config);
        self.source()?.check_config(update_config).map_err(refused)?;
        let plan = Arc::clone(&self.plan);
        let checked =
            move |copier: &mut Copier| Ok(plan.check_name().and_then(|()| copier.check_path()));
        self.with(checked)?.map_err(refused)?;
        self.converge(ordered)?;
        // From the look at the configuration to the end, at most DRAIN_MAX and DRAINED_MAX.
        let disks = Arc::clone(&self.disks);
        let _no_reload = self.no_reload(&disks, ordered)?;
        let source = self.source()?;
        source.check_config(update_config).map_err(refused)?;
        let before = source.storage_path().map_err(refused)?;
        let args = self.plan.next(&source.args, self.plan.path());
        let config = self.disks.config_of(&source, &args, update_config).map_err(refused)?;
        let config_path = config.as_ref().map(|config| config.path().to_owned());
        let is_marked = Arc::new(AtomicBool::new(false));
        let change = Change {
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
        let (pause, new) = self.exchange(change)?;
        if let Some(new) = new {
            self.disks.go_on_in(&source, args.clone(), new);
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

    /// Returns an error if the order is not wanted any more, or the brake was released.
    fn check_order(&self, ordered: Ordered) -> Result<(), Unfinished> {
        self.check()?;
        if self.mirror.ordered() != Some(ordered) {
            return Err(Unfinished::Refused(super::state::WITHDRAWN.to_owned()));
        }
        match self.mirror.brake().is_on() {
            true => Ok(()),
            false => Err(Unfinished::Refused(SLOW.to_owned())),
        }
    }

    /// Copies changed parts durably until few are left, however fast the guest writes: [`Bound`].
    fn converge(&self, ordered: Ordered) -> Result<(), Unfinished> {
        // The syncs from here on are short.
        self.with(Copier::sync)?;
        let few = self.with(|copier| Ok(copier.bytes_in(REST_TIME)))?;
        let brake = self.mirror.brake();
        let part = brake.written().part_bytes();
        let few = few.clamp(REST_MIN, REST_MAX).max(REST_PARTS_MIN * part);
        let (mut bound, mut passes) = (Bound::new(brake.written().bytes(), few), 0);
        brake.hold(bound.bytes());
        while passes < PASSES {
            passes += usize::from(bound.is_least());
            let mut at = 0;
            while let Some(piece) = self.next(at, CHUNK)? {
                at = piece.end;
                bound.copied(piece.end - piece.start);
                self.slow(&bound);
                self.check_order(ordered)?;
            }
            self.with(Copier::sync)?;
            bound.passed(brake.written().bytes());
            self.slow(&bound);
        }
        self.check_order(ordered)
    }

    /// Changes the bound of the brake, unless it was released, and starts the writes that may start.
    fn slow(&self, bound: &Bound) {
        let brake = self.mirror.brake();
        if brake.lower(bound.bytes()) {
            brake.proceed();
        }
    }

    /// Lets reloads wait. One in progress may wait for the end of the mirror, or for another disk: the
    /// copy goes on meanwhile, so that no write of the guest waits for it.
    fn no_reload<'a>(
        &self,
        disks: &'a Disks,
        ordered: Ordered,
    ) -> Result<NoReload<'a>, Unfinished> {
        loop {
            self.check_order(ordered)?;
            if let Some(no_reload) = disks.try_no_reload() {
                return Ok(no_reload);
            }
            self.copy_rest()?;
            std::thread::sleep(LOOK);
        }
    }

    /// Exchanges the storage of the drained disk. Returns the pause.
    fn exchange(&self, change: Change) -> Result<(Duration, Option<New>), Unfinished> {
        let (sender, new) = channel();
        let has_begun = Arc::new(AtomicBool::new(false));
        let (begun, acts) = (Arc::clone(&has_begun), self.hand.acts().clone());
        let ordered = change.ordered;
        let order = self.source.control.replace_storage(Box::new(move |_: &Arc<dyn Disk>| {
            change.mirror.begin_rest(change.ordered)?;
            // Read after the answer, which orders it.
            begun.store(true, Ordering::Relaxed);
            change.prepare(&acts, &sender)
        }));
        let mut failed = None;
        let waited = wait_and(&order, DRAIN_MAX, TICK, || {
            if failed.is_none() {
                failed = self.check_order(ordered).and_then(|()| self.copy_rest()).err();
            }
            failed.is_none()
        });
        match (waited, failed) {
            (Ok(pause), _) => Ok((pause, new.try_recv().ok())),
            (Err(_), Some(failed)) if !has_begun.load(Ordering::Relaxed) => Err(failed),
            (Err(unfinished), _) if !has_begun.load(Ordering::Relaxed) => {
                Err(Unfinished::Refused(unfinished.to_string()))
            }
            (Err(unfinished), _) => Err(Unfinished::Ended(unfinished.to_string())),
        }
    }

    /// Copies the parts that are noted, and lets writes that wait for that go on. The thread of the target
    /// takes them itself: none is between the notes and the new storage when the last act begins.
    fn copy_rest(&self) -> Result<(), Unfinished> {
        let (mirror, begun) = (Arc::clone(&self.mirror), Instant::now());
        let act = move |copier: &mut Copier| copier.rest(mirror.brake().written());
        // Without the copier, the exchange has begun to copy the rest itself.
        let goes_on = || {
            self.check()?;
            if begun.elapsed() < STUCK {
                return Ok(());
            }
            self.mirror.brake().release();
            Err(Unfinished::Refused(SLOW.to_owned()))
        };
        self.hand.acts().ask(act, goes_on)?;
        self.mirror.brake().proceed();
        Ok(())
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
    fn prepare(self, acts: &Acts, new: &Sender<New>) -> Result<Replacement, String> {
        let deadline = Instant::now() + DRAINED_MAX;
        let (mirror, args) = (Arc::clone(&self.mirror), self.args.clone());
        let first_bytes = Some(self.first_bytes);
        let opened = acts.last(move |mut copier| -> Result<(Opened, Named), String> {
            let copied = copier.rest(mirror.brake().written()).and_then(|()| copier.sync());
            copied.map_err(|error| error.to_string())?;
            let named = copier.name()?;
            let from = From::Locked { identity: named.identity()?, first_bytes };
            let opened = disk::open(&args, from, LockWait::No);
            Ok((opened.map_err(|failure| failure.to_string())?, named))
        });
        // The old image keeps the content of this moment.
        settled(self.qcow2.as_deref())?;
        let left = deadline.saturating_duration_since(Instant::now());
        let (opened, named) = match opened.recv_timeout(left) {
            Ok(opened) => opened?,
            Err(RecvTimeoutError::Disconnected) => return Err(super::state::CANCELLED.to_owned()),
            Err(RecvTimeoutError::Timeout) => {
                return Err(format!(
                    "the new storage did not take the rest of the copy in {} s, and the guest goes on \
                     in the old one; check both storages, and begin the mirror again with --to",
                    DRAINED_MAX.as_secs()
                ));
            }
        };
        let layers = Arc::clone(&self.layers);
        replacement(opened, &layers, new, Box::new(move || self.commit(named)))
    }

    /// Marks the old image, and replaces the configuration file.
    fn commit(self, named: Named) -> Result<(), String> {
        let Change { args, top, config, is_marked, mirror, .. } = self;
        let path: PathBuf = args.blk_file.unwrap_or_default();
        mirror.begin_move()?;
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
