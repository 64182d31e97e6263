// SPDX-License-Identifier: Apache-2.0
//! Merges: the content that the image of a running disk has itself goes into its backing file, in
//! which the guest goes on.
//!
//! | Step | After a crash behind it |
//! |---|---|
//! | 1. the backing file is locked for writing, and grows to the size of the disk | the image is served as before, here and below: the guest does not see the backing file where the image has content |
//! | 2. wrappers note the parts that the guest changes; everything is copied, then the changed parts, as long as each pass leaves half of them at most | the same |
//! | 3. a brake makes the changes few ([`backend::wrap::Brake`]), and they are copied durably | the same |
//! | 4. the queues are drained, the rest is copied, the backing file is synced and opened | the same |
//! | 5. the image gets the mark of a merged one | the image is not served for writing, and the mark of the backing file means nothing any more ([`backend::mark`]) |
//! | 6. the mark of the backing file is removed | the same |
//! | 7. the new configuration file takes the place of the old one | the next start serves the backing file |
//! | 8. the guest goes on in the backing file | the same |
//!
//! The client of the command waits; if it goes, or cancels, the merge ends after step 4 at the latest. Steps 3 and
//! 4: `converge`. Only one thread writes to the backing file; the client's thread abandons one that hangs:
//!
//! | State of the work | Begins | Next |
//! |---|---|---|
//! | in progress | [`Disks::merge`] notes it in the table, and locks the backing file | over; left |
//! | left | the client has the answer, and the thread of the backing file has not ended in time | over, when the storage answers |
//! | over | both threads have dropped the `Kept` | |
//!
//! So no other work on the disk begins before the last write to the backing file.

mod copier;
mod marked;
mod plan;
mod state;

pub(super) use state::MergeState;

use super::Disks;
use super::config_file::NewConfig;
use super::converge::{
    self, Convergence, Copier as _, OwnedByTarget, REST_MAX, STUCK, TargetQueue, TargetThread,
    Unfinished,
};
use super::exchange::{New, Source, identity, options, replacement};
use super::job::{Kind, Owner};
use super::layers::Layers;
use super::replacing;
use super::turn::HeldTurn;
use crate::disk::{self, From, LockWait};
use crate::events::{Change as Event, Work};
use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::pace::{Bandwidth, LOOK, Pace};
use backend::file::{File as ImageFile, RaisedLock};
use backend::wrap::{Brake, Growth};
use copier::Copier;
use marked::{Marked, Unmarked};
use plan::Plan;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;
use vhost_user::Replacement;

const WHAT: &str = "commit the image of the disk";
/// The reason of a merge that was ended.
const CANCELLED: &str = "it was cancelled, and the disk goes on in its image; repeat the command";

/// The options of a merge.
#[derive(Debug)]
pub struct Wanted {
    /// Rewrite the configuration file of the disk.
    pub update_config: bool,
    /// Bytes per second that are copied at most while the guest goes on.
    pub bandwidth: Arc<Bandwidth>,
}

/// A merge that is complete.
#[derive(Debug)]
pub struct Merged {
    /// Path of the backing file, which the disk has now.
    pub image: PathBuf,
    /// Path of the image before, which is no longer needed.
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
        let what = format!("{WHAT} {name}");
        let refused = |told: String| Failure::told(&what, told);
        let act = format!("the begin of a commit of the disk {name}");
        let turn = self.turn(&what, act, &mut || go_on())?;
        let source = self.source(name, WHAT)?;
        let state = Arc::new(MergeState::new(source.image.disk.info().capacity_sectors * 512));
        let kind = Kind::Merge(Arc::clone(&state));
        let owner = self.begin_job(&source, kind, &wanted.bandwidth).map_err(refused)?;
        self.check_no_backup(name).map_err(refused)?;
        // Neither a snapshot nor an upgrade comes in between from here on; the backing file may hang.
        drop(turn);
        let go_on = || go_on() && !state.is_cancelled();
        let bytes = state.brake.written().capacity_bytes();
        let plan =
            self.plan_merge(&source, &what, bytes, update_config, &go_on).map_err(refused)?;
        state.has_target(plan.image());
        let lock = plan.lock(self, &source).map_err(refused)?;
        let marked = Marked::of(plan.backing());
        let kept = Arc::new(Kept { _lock: lock, owner });
        let (of_thread, of_source, of_error) = (Arc::clone(&plan), source.clone(), what.clone());
        let open = move || {
            let merge = of_thread.open(&of_source);
            merge.map(Copier::new).map_err(|told| Failure::told(of_error, told))
        };
        let thread =
            TargetThread::start(what.clone(), Arc::clone(&kept) as converge::Sign, open, go_on)?;
        let merging = Merging { disks: self, source: &source, plan: &plan, state: &state, marked };
        let followed = source.follow(&state.brake, Growth::Merging, &go_on);
        let followed = followed.map_err(|unfinished| match unfinished {
            replacing::Unfinished::Cancelled => CANCELLED.to_owned(),
            other => other.to_string(),
        });
        let (target, has_begun) = (plan.image().display().to_string(), followed.is_ok());
        let done = followed.and_then(|()| {
            source.events.tell(&Event::WorkBegun(Work::Commit, target.clone()));
            merging.run(thread.acts(), wanted, &go_on).inspect_err(|_| source.end_following())
        });
        let job = kept.owner.job();
        if has_begun {
            let outcome = done.as_ref().map(drop);
            let outcome = outcome.map_err(|told| (told.clone(), state.is_cancelled() || !go_on()));
            job.ends_with(Event::of_end(Work::Commit, target, outcome));
        }
        let done = match done {
            Ok(Done { turn, new, config, pause }) => {
                let in_new = |new| self.go_on_in(&source, Some((&turn, plan.args().clone())), new);
                new.into_iter().for_each(in_new);
                drop(turn);
                let (image, overlay) = plan.paths();
                Ok(Merged { image, overlay, options: options(plan.args()), config, pause })
            }
            Err(told) => Err(refused(told)),
        };
        drop(kept);
        if !thread.close() {
            let target = plan.image().display();
            tracing::warn!(disk = name, %target, "the backing file does not answer; its lock and its thread are released when it does");
            job.tell_end(&source.events);
        }
        done
    }

    /// Plans a merge. Tells errors before the copy; the configuration may change meanwhile.
    fn plan_merge(
        self: &Arc<Self>,
        source: &Source,
        what: &str,
        capacity_bytes: u64,
        update_config: bool,
        go_on: &impl Fn() -> bool,
    ) -> Result<Arc<Plan>, String> {
        let of_plan = source.clone();
        let plan = move || Plan::of(&of_plan, update_config, capacity_bytes).map(Arc::new);
        let check = || if go_on() { Ok(()) } else { Err(CANCELLED.to_owned()) };
        let plan = self.told_apart((&source.name, what), None, plan, check)?;
        let config = self.config_apart(source, what, plan.args(), update_config, check);
        config.map(|_| plan)
    }
}

/// The image and the backing file are for this merge alone. The lock goes first.
struct Kept {
    _lock: Option<RaisedLock>,
    owner: Owner,
}

/// A merge whose backing file is open.
struct Merging<'a> {
    disks: &'a Arc<Disks>,
    source: &'a Source,
    plan: &'a Plan,
    state: &'a Arc<MergeState>,
    marked: Marked,
}

/// The guest goes on in the backing file.
struct Done<'a> {
    /// Neither a reload nor a save before the table tells that.
    turn: HeldTurn<'a>,
    /// Its storage.
    new: Option<New>,
    /// The configuration file that was changed.
    config: Option<PathBuf>,
    pause: Duration,
}

impl<'a> Merging<'a> {
    fn run(
        &self,
        acts: &TargetQueue<Copier>,
        wanted: &Wanted,
        go_on: &impl Fn() -> bool,
    ) -> Result<Done<'a>, String> {
        let check = || match go_on() {
            true => Ok(()),
            false => Err(Unfinished::Ended(CANCELLED.to_owned())),
        };
        let copy = Copy { acts, check: &check, state: self.state };
        let brake = &self.state.brake;
        copy.all(self.plan.capacity_bytes(), brake, Pace::new(Arc::clone(&wanted.bandwidth)))
            .and_then(|()| {
                let end = Convergence { acts, brake, check: &check };
                end.converge_synced(self.disks, self.source)?;
                self.finish(&end, wanted.update_config)
            })
            .map_err(Unfinished::told)
    }

    /// Makes the guest go on in the backing file.
    fn finish(
        &self,
        end: &Convergence<'_, Copier>,
        update_config: bool,
    ) -> Result<Done<'a>, Unfinished> {
        let (source, plan) = (self.source, self.plan);
        let act = format!("the end of the commit of the disk {}", source.name);
        let turn = end.turn(self.disks, &act)?;
        let config = self.disks.config_of(source, plan.args(), update_config);
        let config = move || config().map_err(Unfinished::Refused);
        let config = end.meanwhile(self.disks, &source.name, Some(STUCK), config)?;
        let file = config.as_ref().map(|config| config.path().to_owned());
        let change = Change {
            name: source.name.clone(),
            args: plan.args().clone(),
            layers: Arc::clone(&source.layers),
            top: Arc::clone(&source.image.top),
            state: Arc::clone(self.state),
            marked: self.marked.clone(),
            backing_path: plan.image().to_owned(),
            config,
        };
        let (sender, new) = channel();
        let (acts, state) = (end.acts.clone(), Arc::clone(self.state));
        let begin = move || if state.is_cancelled() { Err(CANCELLED.to_owned()) } else { Ok(()) };
        let replace = move || change.prepare(&acts, &sender);
        let pause = end.exchange(&source.control, begin, replace)?;
        Ok(Done { turn, new: new.try_recv().ok(), config: file, pause })
    }
}

/// The copy before the brake is on.
struct Copy<'a> {
    acts: &'a TargetQueue<Copier>,
    check: &'a dyn Fn() -> Result<(), Unfinished>,
    state: &'a MergeState,
}

impl Copy<'_> {
    /// Copies the whole disk, and then the parts that were changed meanwhile, as long as each pass leaves half
    /// of them at most: a guest may change them faster than they are copied.
    fn all(&self, capacity_bytes: u64, brake: &Brake, mut pace: Pace) -> Result<(), Unfinished> {
        let written = brake.written();
        let first = |up_to| self.state.copied(up_to);
        self.copy(std::iter::once(0..capacity_bytes), &mut pace, first)?;
        let mut most = u64::MAX;
        while written.bytes() > REST_MAX && written.bytes() <= most {
            most = written.bytes() / 2;
            self.copy(written.take(converge::piece_max(&pace)), &mut pace, |_| ())?;
        }
        Ok(())
    }

    /// Copies ranges, durably. `copied_up_to` learns of each position that is reached.
    fn copy(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        pace: &mut Pace,
        copied_up_to: impl Fn(u64),
    ) -> Result<(), Unfinished> {
        for Range { start: mut at, end } in ranges {
            while at < end {
                self.keep_pace(pace)?;
                let max = converge::piece_max(pace);
                let (done, copied) =
                    self.acts.act(move |copier| copier.some(at..end, max), self.check)?;
                at += done;
                copied_up_to(at);
                pace.copied(copied);
            }
        }
        self.acts.act(Copier::sync, self.check)
    }

    /// Waits for the bandwidth.
    fn keep_pace(&self, pace: &Pace) -> Result<(), Unfinished> {
        loop {
            (self.check)()?;
            match pace.wait() {
                Duration::ZERO => return Ok(()),
                wait => thread::sleep(wait.min(LOOK)),
            }
        }
    }
}

/// The change of a disk that is drained.
struct Change {
    /// Name of the disk.
    name: String,
    args: DiskArgs,
    layers: Arc<Layers>,
    /// The file of the image.
    top: Arc<ImageFile>,
    state: Arc<MergeState>,
    marked: Marked,
    backing_path: PathBuf,
    config: Option<NewConfig>,
}

impl Change {
    /// Waits for the backing file, which has everything then. If it hangs, the guest goes on in the image.
    fn prepare(self, acts: &TargetQueue<Copier>, new: &Sender<New>) -> Result<Replacement, String> {
        let (args, marked) = (self.args.clone(), self.marked.clone());
        let open = move |copier: Copier| {
            let known = copier.known();
            // The tables of an image have one user at a time.
            drop(copier);
            let identity = identity(&marked.backing)?;
            let from = From::Locked { identity, first_bytes: None, known };
            let opened = disk::open(&args, from, LockWait::No);
            Ok((opened.map_err(|failure| failure.to_string())?, marked))
        };
        let brake = Arc::clone(&self.state.brake);
        let (opened, marked) = Convergence::last(acts, brake, open).wait(&self.name)?;
        let layers = Arc::clone(&self.layers);
        replacement(acts, opened, &layers, new, Box::new(move || self.commit(marked)))
    }

    /// Marks the image in place of the backing file, and replaces the configuration file.
    fn commit(self, marked: OwnedByTarget<Marked>) -> Result<(), String> {
        let Change { top, backing_path, config, state, .. } = self;
        state.begin_move()?;
        let is_marked = top
            .mark_merged(&backing_path)
            .map_err(|error| restored(&state, &top, None, format!("{CANNOT_MARK}: {error}")))?;
        let unmarked = marked.then(Marked::remove, STUCK).unwrap_or_else(|| Err(HANGS.to_owned()));
        let unmarked = unmarked.map_err(|told| restored(&state, &top, None, told))?;
        match config.map_or(Ok(()), |config| config.replace(is_marked)) {
            Ok(()) => {
                unmarked.into_inner().into_iter().for_each(Unmarked::keep);
                Ok(())
            }
            Err(told) => Err(restored(&state, &top, Some(unmarked), told)),
        }
    }
}

const CANNOT_MARK: &str = "the image cannot be marked";
const HANGS: &str = "the backing file does not answer";

/// Gives both files the marks of before: the guest goes on in the image. Returns the cause `told` with the remedy.
fn restored(
    state: &MergeState,
    top: &ImageFile,
    unmarked: Option<OwnedByTarget<Unmarked>>,
    told: String,
) -> String {
    state.ends();
    // The backing file first: without its mark, the image is the only marked one.
    let hangs = || Err(io::Error::other(HANGS));
    let of_backing =
        unmarked.map_or(Ok(()), |it| it.act(Unmarked::restore, STUCK).unwrap_or_else(hangs));
    // Also if the backing file hangs, and gets its mark later: a start with the mark of the image would ask for the
    // backing file, which does not get the guest's next writes.
    let of_image = top.unmark_merged();
    let told = match &of_backing {
        Ok(()) => told,
        Err(error) => format!("{told}, and the mark of the backing file is not restored: {error}"),
    };
    match (of_image, of_backing) {
        (Err(error), _) => format!(
            "{told}, and the mark of the image is not removed: {error}; the guest goes on in the image, which \
             has its data: do not remove it. Repeat the command, or run `{}` before the next start of the disk",
            top.merged_unmarking()
        ),
        (Ok(()), Err(_)) => format!("{told}; repeat the command"),
        (Ok(()), Ok(())) => format!("{told}; check the file system and the permissions"),
    }
}
