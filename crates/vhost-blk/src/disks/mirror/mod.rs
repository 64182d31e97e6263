// SPDX-License-Identifier: Apache-2.0
//! Mirrors: the content of a running disk is copied to other storage, a copy that follows the writes
//! of the guest until a client completes it: the guest goes on in the new storage.
//!
//! | Step | After a crash behind it |
//! |---|---|
//! | 1. the target is made and locked: a file beside its place, or a block device | the disk is served from the old storage, here and below; the target is of no use |
//! | 2. wrappers note the parts that the guest changes, and everything is copied once: the mirror is ready | the same |
//! | 3. changed parts are copied, again and again, until a client asks for the completion | the same |
//! | 4. a brake makes the changes few ([`backend::wrap::Brake`]), and they are copied durably | the same |
//! | 5. the queues are drained, the rest is copied, the target is synced, gets its name, and is opened | both have the content of the disk |
//! | 6. the old image gets the mark of one whose disk has moved; a block device has none | the old image is not served for writing, and names the new storage |
//! | 7. the new configuration file takes the place of the old one | the next start serves the new storage |
//! | 8. the guest goes on in the new storage | the same |
//!
//! No step writes to the old image but its mark. Any failure before step 8 leaves the guest in the old
//! storage, without a mark. Only one thread works on the target; all others abandon a target that hangs. Steps 4
//! and 5: `converge`. The states of a mirror: `state`.

mod completion;
mod copier;
mod facts;
mod old;
pub(super) mod plan;
mod stack;
mod state;
mod target;
mod worker;

pub use facts::Facts;
pub(super) use state::Mirror;
pub use state::Phase;

use super::Disks;
use super::converge::TargetThread;
use super::exchange::Source;
use super::job::{Job, Kind, Owner};
use crate::backup::ImageReader;
use crate::failure::Failure;
use crate::pace::{Bandwidth, LOOK, Pace};
use crate::values::Format;
use backend::wrap::Growth;
use copier::Copier;
use old::Old;
use plan::Plan;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;
use target::{Model, New};
use worker::Worker;

const WHAT: &str = "mirror the disk";

/// The options of a mirror.
#[derive(Debug)]
pub struct Wanted {
    /// Path of a new file, or of a block device.
    pub target: PathBuf,
    /// Format of a new file; by default that of the disk.
    pub format: Option<Format>,
    /// Bytes per second that are copied at most before the completion.
    pub bandwidth: Arc<Bandwidth>,
    /// Give the content of a block device up.
    pub overwrite: bool,
    /// The completion will rewrite the configuration file, or not; `None`: unknown.
    pub update_config: Option<bool>,
}

/// A mirror that is complete.
#[derive(Clone, Debug)]
pub struct Completed {
    /// Path of the new storage.
    pub image: PathBuf,
    /// Path of the old one.
    pub before: PathBuf,
    /// Options for the next start of the disk.
    pub options: String,
    /// The configuration file that has them now.
    pub config: Option<PathBuf>,
    /// The old image has a mark.
    pub is_marked: bool,
    /// Time in which the disk took no request.
    pub pause: Duration,
}

impl Disks {
    /// Begins a mirror of a disk. Waits for its requests in flight as long as `go_on` says so.
    ///
    /// # Errors
    /// [`Failure`]; the disk is as before, and there is no new file.
    pub fn mirror(
        self: &Arc<Self>,
        name: &str,
        wanted: &Wanted,
        go_on: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let refused = |told: String| Failure::told(format!("{WHAT} {name}"), told);
        // The path may hang: nothing is held, and the disk has no work.
        let what = format!("{WHAT} {name}");
        let sign = self.use_target(name, &what, "mirror", &wanted.target)?;
        let planned = self.source(name, WHAT)?;
        // Not only after the whole copy.
        let updates = wanted.update_config;
        updates.map_or(Ok(()), |updates| planned.check_config(updates)).map_err(refused)?;
        let plan = Arc::new(Plan::of(&planned, wanted).map_err(refused)?);
        let mirror = Arc::new(Mirror::new(plan.path().to_owned(), plan.capacity_bytes()));
        let act = format!("the begin of a mirror of the disk {name}");
        let turn = self.turn(&what, act, &mut || go_on())?;
        let owned = self.own(&planned, &mirror, &wanted.bandwidth);
        let (source, owner) = owned.map_err(refused)?;
        drop(turn);
        let go_on = || go_on() && !mirror.is_cancelled();
        let old = Old::new(reader(&source).map_err(refused)?);
        let opening = opening(&plan, &source, &mirror, &old);
        let thread =
            TargetThread::start(what, sign, opening, go_on).inspect_err(|_| old.close())?;
        // The thread is there before anything follows the disk, which only it ends.
        let (start, started) = channel::<Worker>();
        let body = move || started.into_iter().for_each(Worker::run);
        let spawned = thread::Builder::new().name("mirror".into()).spawn(body);
        let begun = spawned
            .map_err(|error| format!("{error}; raise the limit on threads (ulimit -u)"))
            .and_then(|_| {
                let followed = source.follow(mirror.brake(), Growth::Mirroring, go_on);
                followed.map_err(|unfinished| unfinished.to_string())
            });
        if let Err(told) = begun {
            old.close();
            thread.close();
            return Err(refused(told));
        }
        self.note_last(&source, None);
        let worker = Worker {
            disks: Arc::clone(self),
            owner,
            pace: Pace::new(Arc::clone(&wanted.bandwidth)),
            source,
            plan,
            mirror,
            old,
            thread,
        };
        let _ = start.send(worker); // the thread waits for it
        Ok(())
    }

    /// Notes the mirror as the work of the disk, which is still as it was planned. From then on neither a
    /// snapshot nor an upgrade comes in between, and a removal by a reload cancels the mirror.
    /// The caller has the turn.
    fn own(
        self: &Arc<Self>,
        planned: &Source,
        mirror: &Arc<Mirror>,
        bandwidth: &Arc<Bandwidth>,
    ) -> Result<(Source, Owner), String> {
        let source = self.source(&planned.name, WHAT).map_err(|failure| failure.to_string())?;
        if !Arc::ptr_eq(&source.image.top, &planned.image.top) {
            return Err("it has got another image a moment ago; repeat the command".to_owned());
        }
        let owner = self.begin_job(&source, Kind::Mirror(Arc::clone(mirror)), bandwidth)?;
        self.check_no_backup(&source.name)?;
        Ok((source, owner))
    }

    /// Completes the mirror of a disk: the guest goes on in the new storage. Waits for the first copy
    /// and for the exchange as long as `go_on` says so.
    ///
    /// # Errors
    /// [`Failure`]; the guest goes on in the old storage. The mirror goes on, too, unless the text says
    /// that it has ended.
    pub fn complete_mirror(
        &self,
        name: &str,
        update_config: bool,
        go_on: impl Fn() -> bool,
    ) -> Result<Completed, Failure> {
        let refused =
            |told: String| Failure::told(format!("complete the mirror of the disk {name}"), told);
        let mirror = self.mirror_of(name)?;
        let mirror = mirror.ok_or_else(|| refused(self.no_mirror(name)))?;
        self.source(name, WHAT)?.check_config(update_config).map_err(refused)?;
        let number = mirror.order(update_config).map_err(refused)?;
        loop {
            if let Some(answer) = mirror.answer(number, LOOK) {
                return answer.map_err(refused);
            }
            if !go_on() && mirror.withdraw(number) {
                return Err(refused(state::WITHDRAWN.to_owned()));
            }
        }
    }

    /// Cancels the mirror of a disk, which is this job, and waits for its end, as long as `go_on` says so.
    ///
    /// # Errors
    /// [`Failure`] if the guest has moved before, or the mirror has not ended.
    pub(super) fn cancel_mirror(
        &self,
        name: &str,
        job: &Arc<Job>,
        go_on: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        job.cancel();
        let is_present =
            || self.job(name).ok().flatten().is_some_and(|present| Arc::ptr_eq(&present, job));
        while is_present() {
            if !go_on() {
                return Err(Failure::run(
                    format!("cancel the mirror of the disk {name}"),
                    "the storage of the disk has not completed its requests",
                    "check it; the mirror ends as soon as they are complete",
                ));
            }
            thread::sleep(LOOK);
        }
        let cancelled = job.mirror().map_or(Ok(()), |mirror| mirror.cancelled());
        let what = format!("cancel the mirror of the disk {name}");
        cancelled.map_err(|told| Failure::told(what, told))
    }

    /// The state of the mirror of a disk, if there is one.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk.
    pub fn mirror_facts(&self, name: &str) -> Result<Option<Facts>, Failure> {
        Ok(self.mirror_of(name)?.and_then(|mirror| mirror.facts()))
    }

    /// The reason for which the last mirror of a disk has ended, if it has failed.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk.
    pub fn mirror_ended(&self, name: &str) -> Result<Option<String>, Failure> {
        Ok(self.lock().entry(name)?.last_mirror.clone())
    }

    /// The refusal of an act that needs a mirror.
    fn no_mirror(&self, name: &str) -> String {
        let state = self.lock();
        match state.entry(name).ok().and_then(|entry| entry.last_mirror.as_ref()) {
            None => "it is not being mirrored; begin that with --to".to_owned(),
            Some(told) => format!("it is not being mirrored any more: {told}"),
        }
    }

    /// Notes the reason of the end of a mirror.
    fn note_last(&self, source: &Source, ended: Option<String>) {
        if let Some(entry) = self.lock().in_table(&source.control) {
            entry.last_mirror = ended;
        }
    }

    fn mirror_of(&self, name: &str) -> Result<Option<Arc<Mirror>>, Failure> {
        Ok(self.job(name)?.and_then(|job| job.mirror().cloned()))
    }
}

fn reader(source: &Source) -> Result<ImageReader, String> {
    let no_descriptor = |why| format!("{why}; raise the limit on open files (ulimit -n)");
    source.image.served().reader().map_err(no_descriptor)
}

/// The opening of the target, which nothing of the disk waits for. It keeps nothing of the old image open but its
/// reader in `old`.
fn opening(
    plan: &Arc<Plan>,
    source: &Source,
    mirror: &Arc<Mirror>,
    old: &Old,
) -> impl FnOnce() -> Result<Copier, Failure> + Send + 'static {
    let model =
        Model { name: source.name.clone(), args: source.args.clone(), info: source.image.told() };
    let (plan, mirror, old) = (Arc::clone(plan), Arc::clone(mirror), old.clone());
    move || {
        let new = New::make(&plan, &model)?;
        new.part().into_iter().for_each(|part| mirror.has_part(part));
        Ok(Copier::new(old, new, plan.unit()))
    }
}
