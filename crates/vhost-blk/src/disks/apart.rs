// SPDX-License-Identifier: Apache-2.0
//! Work for a client on a thread of its own. Storage that hangs keeps that thread, and neither the thread of the client
//! nor its place among the clients: other disks stay under control.
//!
//! The threads are bounded. An opening has the name of its disk, also after its removal, and the number of disks is
//! bounded. Each disk has one thread at most for each [`Kind`] of work.

use super::exchange::synced;
use super::starting::removed_while_opening;
use super::{Disks, NewDisk};
use crate::failure::Failure;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::sleep;
use std::time::{Duration, Instant};
use vhost_user::Control;

/// Interval of the look at the client.
const LOOK: Duration = Duration::from_millis(100);

/// The kinds of work on the files of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A look for a client.
    Look,
    /// A sync before work that a client has ordered.
    Sync,
    /// A look at the file of the configuration.
    Config,
    /// The preparation of an exchange of the storage.
    Exchange,
}

/// Work on the files of a disk; ends with the drop. No upgrade begins meanwhile.
struct Working {
    disks: Arc<Disks>,
    name: String,
    control: Arc<Control>,
    kind: Kind,
    _sign: Arc<()>,
}

impl Working {
    /// The work on a disk, after other work of this kind, or an upgrade. `turn` is called until then; it returns the wait
    /// for its next call.
    fn begin<E: From<Failure>>(
        disks: &Arc<Disks>,
        name: &str,
        kind: Kind,
        mut turn: impl FnMut() -> Result<Duration, E>,
    ) -> Result<Working, E> {
        loop {
            match Working::try_begin(disks, name, kind)? {
                Some(working) => return Ok(working),
                None => sleep(turn()?),
            }
        }
    }

    /// The work on a disk. `None`: there is other work of this kind, or an upgrade is in progress.
    fn try_begin(disks: &Arc<Disks>, name: &str, kind: Kind) -> Result<Option<Working>, Failure> {
        let mut state = disks.lock();
        let control = Arc::clone(&state.entry(name)?.control);
        let is_same =
            |(other, of): &(Arc<Control>, Kind)| *of == kind && Arc::ptr_eq(other, &control);
        if state.is_held || state.worked_on.iter().any(is_same) {
            return Ok(None);
        }
        state.worked_on.push((Arc::clone(&control), kind));
        let sign = state.storage_waits.begin(name);
        let (disks, name) = (Arc::clone(disks), name.to_owned());
        Ok(Some(Working { disks, name, control, kind, _sign: sign }))
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        let is_other = |(control, kind): &(Arc<Control>, Kind)| {
            *kind != self.kind || !Arc::ptr_eq(control, &self.control)
        };
        self.disks.lock().worked_on.retain(is_other);
    }
}

/// The disks on whose files threads work.
pub(super) type WorkedOn = Vec<(Arc<Control>, Kind)>;

impl Disks {
    /// Adds a disk for a client, and waits for it as long as `go_on` says so. `saves`: writes its file, too. Returns the
    /// warnings of its start.
    ///
    /// # Errors
    /// As [`Disks::add`] and [`Disks::save`]; nothing of the disk remains. Without the client, or after a removal of the
    /// disk, the opening goes on until the storage answers.
    pub fn add_for(
        self: &Arc<Self>,
        new: NewDisk,
        saves: bool,
        go_on: impl Fn() -> bool,
    ) -> Result<Vec<String>, Failure> {
        let (reservation, source) = self.reserve_new(&new)?;
        let (opening, name) = (reservation.opening(), new.name.clone());
        let what = format!("add the disk {name}");
        let disks = Arc::clone(self);
        let act = move || {
            let name = new.name.clone();
            disks.add_reserved(new, &source, Arc::new(reservation))?;
            let warnings = disks.notices_of(&name);
            match saves {
                true => disks.save_added(&name).map(|()| warnings),
                false => Ok(warnings),
            }
        };
        apart(&what, LOOK, act, || match self.lock().is_left(&opening) {
            true => Err(removed_while_opening(&name)),
            false if !go_on() => {
                let remedy = "check its storage; see vhost-blk ctl list";
                Err(Failure::run(&what, "the client has not waited for it", remedy))
            }
            false => Ok(LOOK),
        })
    }

    /// Looks at the files of a disk for a client, and waits for that as long as `go_on` says so.
    ///
    /// # Errors
    /// The errors of `look`, or [`Failure`] if the storage has not answered an earlier look.
    pub fn look_for<T: Send + 'static>(
        self: &Arc<Self>,
        name: &str,
        look: impl FnOnce(&Disks, &str) -> Result<T, Failure> + Send + 'static,
        go_on: impl Fn() -> bool,
    ) -> Result<T, Failure> {
        let what = format!("look at the files of {name}");
        let words = [&*what, "an earlier look at them", "check its storage"];
        self.work_for((Kind::Look, name), words, look, go_on)
    }

    /// As [`Disks::check_save_of`], for a client. Waits for that as long as `go_on` says so.
    ///
    /// # Errors
    /// As [`Disks::save`], or [`Failure`] if the file system has not answered an earlier check.
    pub fn check_save_for(
        self: &Arc<Self>,
        name: &str,
        go_on: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let what = format!("save the disk {name}");
        let words = [&*what, "an earlier check", "check the file system of --config-dir"];
        self.work_for((Kind::Config, name), words, Disks::check_save_of, go_on)
    }

    /// Makes the completed writes of a disk durable, and waits for that as long as `go_on` says so; a disk that is
    /// read-only has none. `what`: the command, for an error.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk, the sync fails, or an earlier one has not ended.
    pub(crate) fn sync_for(
        self: &Arc<Self>,
        (name, what): (&str, &str),
        go_on: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let of_error = what.to_owned();
        // The image may be the last one of a disk that was removed meanwhile: it ends before the work does.
        let sync = move |disks: &Disks, name: &str| {
            let image = disks.lock().entry(name)?.image.clone();
            let image = image.filter(|image| !image.disk.info().read_only);
            let done = image.map_or(Ok(()), |image| synced(&*image.disk));
            done.map_err(|told| Failure::told(&of_error, told))
        };
        let words = [what, "an earlier sync of the disk", "check the storage of the disk"];
        self.work_for((Kind::Sync, name), words, sync, go_on)
    }

    /// Works on the files of a disk for a client. The words are those of an error: the command, earlier work of this kind,
    /// and the remedy.
    fn work_for<T: Send + 'static>(
        self: &Arc<Self>,
        (kind, name): (Kind, &str),
        [what, earlier, remedy]: [&str; 3],
        act: impl FnOnce(&Disks, &str) -> Result<T, Failure> + Send + 'static,
        go_on: impl Fn() -> bool,
    ) -> Result<T, Failure> {
        let turn = |why: &str| match go_on() {
            true => Ok(LOOK),
            false => Err(Failure::run(what, why, remedy)),
        };
        let earlier = || turn(&format!("{earlier}, or an upgrade, has not ended"));
        let working = Working::begin(self, name, kind, earlier)?;
        let act = move || act(&working.disks, &working.name);
        apart(what, LOOK, act, || turn("the client has not waited for it"))
    }

    /// Carries out the preparation of an exchange of the storage of a disk, for at most `limit`, if there is one. `turn` is
    /// called meanwhile, first after `wait`; it returns the wait for its next call. `what`: the command, for an error.
    ///
    /// # Errors
    /// The errors of `act` and of `turn`, or [`Failure`] if a file system has not answered in time.
    pub(super) fn prepare_apart<T, E>(
        self: &Arc<Self>,
        (name, what): (&str, &str),
        (limit, wait): (Option<Duration>, Duration),
        act: impl FnOnce() -> Result<T, E> + Send + 'static,
        mut turn: impl FnMut() -> Result<Duration, E>,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<Failure> + Send + 'static,
    {
        let begun = Instant::now();
        let mut turn = || match limit.filter(|limit| begun.elapsed() >= *limit) {
            None => turn(),
            Some(limit) => {
                let why = format!(
                    "the file system of the image or of the configuration has not answered for {} s",
                    limit.as_secs()
                );
                Err(Failure::run(what, why, "check it, and repeat the command").into())
            }
        };
        let working = Working::begin(self, name, Kind::Exchange, &mut turn)?;
        // A result that no thread takes is dropped before the work ends: it may have a file.
        let act = move || act().map(|done| (done, working));
        apart(what, wait, act, turn).map(|(done, _)| done)
    }
}

/// Carries out `act` on a thread of its own, and waits for it until `turn` fails. The first call of `turn` is after
/// `wait`, and each returns the wait for the next one.
fn apart<T, E>(
    what: &str,
    mut wait: Duration,
    act: impl FnOnce() -> Result<T, E> + Send + 'static,
    mut turn: impl FnMut() -> Result<Duration, E>,
) -> Result<T, E>
where
    T: Send + 'static,
    E: From<Failure> + Send + 'static,
{
    let (sender, receiver) = mpsc::sync_channel(1);
    let body = move || {
        let done = act(); // drops what it owns before the answer
        let _ = sender.send(done); // the client may have gone
    };
    std::thread::Builder::new()
        .name("apart".into())
        .spawn(body)
        .map_err(|error| Failure::run(what, error, "raise the limit on threads (ulimit -u)"))?;
    loop {
        match receiver.recv_timeout(wait) {
            Ok(done) => return done,
            Err(RecvTimeoutError::Timeout) => wait = turn()?,
            Err(RecvTimeoutError::Disconnected) => {
                let failure = Failure::run(what, "its thread has panicked", "report this error");
                return Err(failure.into());
            }
        }
    }
}
