// SPDX-License-Identifier: Apache-2.0
//! The end of the use of an image: what was discarded is unmapped, the tables are durable, and the mark goes.

use crate::disk_thread::Work;
use crate::{Qcow2Disk, answer_within};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Wait at the end of a disk for its thread to unmap what was discarded, and then to settle. Without
/// that the next opening checks the image.
const END_MAX: Duration = Duration::from_secs(1);

/// The answer to [`Qcow2Disk::begin_settling`].
#[derive(Debug)]
pub struct Settling(Receiver<io::Result<()>>);

impl Settling {
    /// Waits until the tables are durable, at most for `patience`.
    ///
    /// # Errors
    /// As [`Qcow2Disk::settle`].
    pub fn wait(&self, patience: Duration) -> io::Result<()> {
        answer_within(patience, &self.0)
    }
}

impl Qcow2Disk {
    /// Waits until the tables are durable, at most for `patience`. No request may be in flight. Without
    /// one, nothing changes the file from then on.
    ///
    /// # Errors
    /// The error of the commit, now or earlier; [`io::ErrorKind::TimedOut`] if it takes longer.
    pub fn settle(&self, patience: Duration) -> io::Result<()> {
        self.begin_settling().wait(patience)
    }

    /// As [`Qcow2Disk::settle`], without the wait.
    pub fn begin_settling(&self) -> Settling {
        let (reply, answer) = channel();
        let _ = self.work().send(Work::Settle(reply)); // a thread that has ended sends no answer
        Settling(answer)
    }

    /// Unmaps what was discarded, and waits for that at most for `patience`. It is done without this, too,
    /// a little later.
    ///
    /// # Errors
    /// As [`Qcow2Disk::settle`].
    pub fn unmap_discarded(&self, patience: Duration) -> io::Result<()> {
        let (reply, answer) = channel();
        self.ask_within(patience, Work::Unmap(reply), &answer)
    }

    /// Ends the use of the image, which nothing writes any more and which is settled: the last change of
    /// the file by this disk. The drop of the disk does the same.
    pub fn end_use(&self) {
        if let Some(in_use) = &self.in_use {
            in_use.end();
        }
    }

    /// Unmaps what was discarded, settles, and ends the use of the image, within a limit. No request follows. The drop
    /// of a disk does this unless it was done before.
    pub fn close(&self) {
        self.close_within(END_MAX, END_MAX);
    }

    /// As [`Qcow2Disk::close`], with limits of the caller on both waits.
    pub fn close_within(&self, unmap_max: Duration, settle_max: Duration) {
        if self.in_use.is_none() || self.is_closed.swap(true, Ordering::Relaxed) {
            return;
        }
        let ended = match self.unmap_discarded(unmap_max) {
            Err(why) if why.kind() != io::ErrorKind::TimedOut => Err(why),
            _ => self.settle(settle_max),
        };
        match ended {
            Ok(()) => self.end_use(),
            // The thread may be in the middle of a commit. Until it ends, no other program may write to the image.
            Err(why) if why.kind() == io::ErrorKind::TimedOut => {
                let _ = self.work().send(Work::Hold(Arc::clone(self.top()))); // a thread that has ended writes nothing
            }
            Err(_) => {} // the image keeps its mark
        }
    }
}

impl Drop for Qcow2Disk {
    fn drop(&mut self) {
        self.close();
    }
}
