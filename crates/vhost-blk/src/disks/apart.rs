// SPDX-License-Identifier: Apache-2.0
//! Work for a client on a thread of its own. Storage that hangs keeps that thread, and neither the thread of the client
//! nor its place among the clients: other disks stay under control.
//!
//! The threads are bounded. An opening has the name of its disk, also after its removal, and the number of disks is
//! bounded. Each disk has one thread at most that looks at its files.

use super::starting::removed_while_opening;
use super::{Disks, NewDisk};
use crate::failure::Failure;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;
use vhost_user::Control;

/// Interval of the look at the client.
const LOOK: Duration = Duration::from_millis(100);

/// A look at the files of a disk; ends with the drop. No upgrade begins meanwhile.
struct Looking {
    disks: Arc<Disks>,
    name: String,
    control: Arc<Control>,
    _sign: Arc<()>,
}

impl Looking {
    /// The look of a disk, if there is no other one.
    fn begin(disks: &Arc<Disks>, name: &str, what: &str) -> Result<Option<Looking>, Failure> {
        let sign = disks.wait_for_storage(name, what)?;
        let mut state = disks.lock();
        let control = Arc::clone(&state.entry(name)?.control);
        if state.looking.iter().any(|other| Arc::ptr_eq(other, &control)) {
            return Ok(None);
        }
        state.looking.push(Arc::clone(&control));
        Ok(Some(Looking { disks: Arc::clone(disks), name: name.to_owned(), control, _sign: sign }))
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.disks.lock().looking.retain(|other| !Arc::ptr_eq(other, &self.control));
    }
}

/// The disks whose files a thread looks at.
pub(super) type LookedAt = Vec<Arc<Control>>;

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
        apart(&what, act, || match self.lock().is_left(&opening) {
            true => Err(removed_while_opening(&name)),
            false if !go_on() => {
                let remedy = "check its storage; see vhost-blk ctl list";
                Err(Failure::run(&what, "the client has not waited for it", remedy))
            }
            false => Ok(()),
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
        let (what, remedy) = (format!("look at the files of {name}"), "check its storage");
        let looking = loop {
            match Looking::begin(self, name, &what)? {
                Some(looking) => break looking,
                None if go_on() => std::thread::sleep(LOOK),
                None => {
                    let why = "an earlier look at them has not ended";
                    return Err(Failure::run(what, why, remedy));
                }
            }
        };
        let act = move || look(&looking.disks, &looking.name);
        apart(&what, act, || match go_on() {
            true => Ok(()),
            false => Err(Failure::run(&what, "the client has not waited for it", remedy)),
        })
    }
}

/// Carries out `act` on a thread of its own, and waits for it until `go_on` fails.
fn apart<T: Send + 'static>(
    what: &str,
    act: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    go_on: impl Fn() -> Result<(), Failure>,
) -> Result<T, Failure> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let body = move || {
        let _ = sender.send(act()); // the client may have gone
    };
    std::thread::Builder::new()
        .name("apart".into())
        .spawn(body)
        .map_err(|error| Failure::run(what, error, "raise the limit on threads (ulimit -u)"))?;
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(done) => return done,
            Err(RecvTimeoutError::Timeout) => go_on()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::run(what, "its thread has panicked", "report this error"));
            }
        }
    }
}
