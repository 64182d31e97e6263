// SPDX-License-Identifier: Apache-2.0
//! Merges: the content that the image of a running disk has itself goes into its backing file, in
//! which the guest goes on.
//!
//! | Step | After a crash behind it |
//! |---|---|
//! | 1. the backing file is locked for writing, and grows to the size of the disk | the image is served as before, here and below: the guest does not see the backing file where the image has content |
//! | 2. a wrapper notes the parts that the guest changes; everything is copied, then the changed parts, again and again | the same |
//! | 3. the queues are drained, the rest is copied, the backing file is synced and opened | the same |
//! | 4. the mark of the backing file is removed | both have the content of the disk |
//! | 5. the image gets the mark of a merged one | the image is not served for writing |
//! | 6. the new configuration file takes the place of the old one | the next start serves the backing file |
//! | 7. the guest goes on in the backing file | the same |
//!
//! The client of the command waits; if it goes, the merge ends after step 2 at the latest.

mod plan;

use super::Disks;
use super::config_file::NewConfig;
use super::exchange::{New, Source, identity, options, replacement};
use super::job::Kind;
use super::layers::{Following, Layers};
use super::replacing::{DRAIN_MAX, Unfinished, wait};
use crate::disk::{self, From, LockWait};
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::pace::Pace;
use backend::Disk;
use backend::file::File as ImageFile;
use backend::wrap::Written;
use plan::Plan;
use qcow2::merge::Merge;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;
use vhost_user::Replacement;

const WHAT: &str = "merge the image into its backing file, of";
/// Changed bytes that are few enough for the drained disk.
const FEW_BYTES: u64 = 4 << 20;
/// Bytes of changed parts that are taken at once.
const PIECE_MAX: u64 = 1 << 20;
/// Maximum copies of changed parts before the disk is drained.
const PASSES_MAX: usize = 16;
/// Interval of the look at the client while the bandwidth is used up.
const LOOK: Duration = Duration::from_millis(50);
/// The reason of a merge that was ended.
const CANCELLED: &str = "it was cancelled, and the disk goes on in its image; repeat the command";

/// The options of a merge.
#[derive(Debug)]
pub struct Wanted {
    /// Rewrite the configuration file of the disk.
    pub update_config: bool,
    /// Bytes per second that are copied at most while the guest goes on.
    pub bandwidth: Option<NonZeroU64>,
}

/// A merge that is complete.
#[derive(Debug)]
pub struct Merged {
    /// Path of the backing file, which the disk has now.
    pub image: PathBuf,
    /// Path of the image before, which is of no use any more.
    pub overlay: PathBuf,
    /// Options for the next start of the disk.
    pub options: String,
    /// The configuration file that has them now.
    pub config: Option<PathBuf>,
    /// Time in which the disk took no request at the end.
    pub pause: Duration,
}

impl Disks {
    /// Merges the image of a disk into its backing file, as long as `go_on` says so.
    ///
    /// # Errors
    /// [`Failure`]; the disk goes on in its image.
    pub fn merge(
        self: &Arc<Self>,
        name: &str,
        wanted: &Wanted,
        go_on: impl Fn() -> bool,
    ) -> Result<Merged, Failure> {
        let update_config = wanted.update_config;
        let refused = |told: String| Failure::told(format!("{WHAT} {name}"), told);
        let no_reload = self.no_reload();
        let source = self.source(name, WHAT)?;
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let kind = Kind::Merge(Arc::clone(&is_cancelled));
        let _job = self.begin_job(&source, kind).map_err(refused)?;
        self.check_no_backup(name).map_err(refused)?;
        let go_on = || go_on() && !is_cancelled.load(Ordering::Relaxed);
        let plan = Plan::of(&source, update_config).map_err(refused)?;
        // Tells errors before the copy; the file may change meanwhile.
        self.config_of(&source, plan.args(), update_config).map_err(refused)?;
        let _lock = plan.lock(&source).map_err(refused)?;
        let mut merge = plan.open(&source).map_err(refused)?;
        let written = track(&source, &go_on).map_err(refused)?;
        drop(no_reload);
        let pace = Pace::new(wanted.bandwidth);
        let done = copy_all(&mut merge, &written, plan.capacity_bytes(), pace, &go_on)
            .and_then(|()| self.finish(&source, &plan, update_config, (merge, written), &go_on));
        let (new, config, pause) = done.map_err(|told| {
            source.end_following();
            refused(told)
        })?;
        let options = options(plan.args());
        if let Some(new) = new {
            self.go_on_in(&source, plan.args().clone(), new);
        }
        let (image, overlay) = plan.into_paths();
        Ok(Merged { image, overlay, options, config, pause })
    }

    /// Makes the guest go on in the backing file.
    fn finish(
        &self,
        source: &Source,
        plan: &Plan,
        update_config: bool,
        (merge, written): (Merge, Arc<Written>),
        go_on: &impl Fn() -> bool,
    ) -> Result<(Option<New>, Option<PathBuf>, Duration), String> {
        let _no_reload = self.no_reload_while(go_on).ok_or(CANCELLED)?;
        let config = self.config_of(source, plan.args(), update_config)?;
        let file = config.as_ref().map(|config| config.path().to_owned());
        let change = Change {
            args: plan.args().clone(),
            layers: Arc::clone(&source.layers),
            top: Arc::clone(&source.image.top),
            marks: Marks::of(plan)?,
            config,
        };
        let (sender, new) = channel();
        let order = source.control.replace_storage(Box::new(move |_: &Arc<dyn Disk>| {
            change.prepare(merge, &written, &sender)
        }));
        let pause = wait(&order, DRAIN_MAX, go_on).map_err(told)?;
        Ok((new.try_recv().ok(), file, pause))
    }
}

/// The reason of an exchange that has no good end.
fn told(unfinished: Unfinished) -> String {
    match unfinished {
        Unfinished::Cancelled => CANCELLED.to_owned(),
        other => other.to_string(),
    }
}

/// Makes the disk note the parts that its guest changes.
fn track(source: &Source, go_on: &impl Fn() -> bool) -> Result<Arc<Written>, String> {
    let (sender, written) = channel();
    let order = source.layers.change(&source.control, move |stack| {
        let changes = Arc::new(Written::new(stack.capacity_bytes()));
        stack.following = Some(Following::Merge(Arc::clone(&changes)));
        let _ = sender.send(changes); // the receiver waits for the answer
        Ok(())
    });
    wait(&order, DRAIN_MAX, go_on).map_err(told)?;
    written.try_recv().map_err(|error| format!("{error}; try again"))
}

/// Copies the whole disk, and then the parts that were changed meanwhile until few are left. Those that
/// are left stay noted in `written`.
fn copy_all(
    merge: &mut Merge,
    written: &Written,
    capacity_bytes: u64,
    mut pace: Pace,
    go_on: &impl Fn() -> bool,
) -> Result<(), String> {
    copy(merge, std::iter::once(0..capacity_bytes), &mut pace, go_on)?;
    for _ in 0..PASSES_MAX {
        if written.bytes() <= FEW_BYTES {
            break;
        }
        copy(merge, written.take(PIECE_MAX), &mut pace, go_on)?;
    }
    Ok(())
}

/// Copies ranges, durably.
fn copy(
    merge: &mut Merge,
    ranges: impl IntoIterator<Item = Range<u64>>,
    pace: &mut Pace,
    go_on: &impl Fn() -> bool,
) -> Result<(), String> {
    for mut range in ranges {
        while !range.is_empty() {
            if !go_on() {
                return Err(CANCELLED.to_owned());
            }
            match pace.wait() {
                Duration::ZERO => {
                    pace.copied(merge.copy_piece(&mut range).map_err(not_copied)?);
                }
                wait => thread::sleep(wait.min(LOOK)),
            }
        }
    }
    merge.sync().map_err(not_copied)
}

fn not_copied(error: io::Error) -> String {
    format!(
        "the backing file cannot be written: {error}; check its storage and the free space, and \
         repeat the command"
    )
}

/// The change of a disk that is drained.
struct Change {
    args: DiskArgs,
    layers: Arc<Layers>,
    /// The file of the image.
    top: Arc<ImageFile>,
    marks: Marks,
    config: Option<NewConfig>,
}

/// The mark that goes and the one that comes.
struct Marks {
    backing: Arc<ImageFile>,
    backing_path: PathBuf,
    /// The overlay in the mark of the backing file.
    overlay: Option<PathBuf>,
}

impl Marks {
    fn of(plan: &Plan) -> Result<Marks, String> {
        let backing = Arc::clone(plan.backing());
        let overlay = backing.overlay().unwrap_or(None);
        Ok(Marks { backing, backing_path: plan.image().to_owned(), overlay })
    }
}

impl Change {
    /// Copies the rest, and opens the backing file, which has everything then.
    fn prepare(
        self,
        mut merge: Merge,
        written: &Written,
        new: &Sender<New>,
    ) -> Result<Replacement, String> {
        copy(&mut merge, written.take(PIECE_MAX), &mut Pace::new(None), &|| true)?;
        drop(merge);
        let identity = identity(&self.marks.backing)?;
        let opened =
            disk::open(&self.args, From::Locked { identity, first_bytes: None }, LockWait::No)
                .map_err(|failure| failure.to_string())?;
        let layers = Arc::clone(&self.layers);
        replacement(opened, &layers, new, Box::new(move || self.commit()))
    }

    /// Moves the mark from the backing file to the image, and replaces the configuration file.
    fn commit(self) -> Result<(), String> {
        let Change { top, marks, config, .. } = self;
        let Marks { backing, backing_path, overlay } = &marks;
        let unchanged = |told: String| {
            let restored = top.unmark_merged().and_then(|()| match overlay {
                Some(overlay) => backing.mark(overlay),
                None => Ok(()),
            });
            match restored {
                Ok(()) => format!("{told}; check the file system and the permissions"),
                Err(error) => format!(
                    "{told}, and the marks of the files are not restored: {error}; repeat the command"
                ),
            }
        };
        if overlay.is_some() {
            let unmarked = backing.unmark();
            unmarked.map_err(|error| unchanged(format!("a mark cannot be removed: {error}")))?;
        }
        let marked = top.mark_merged(backing_path);
        marked.map_err(|error| unchanged(format!("the image cannot be marked: {error}")))?;
        config.map_or(Ok(()), |config| config.replace().map_err(unchanged))
    }
}
