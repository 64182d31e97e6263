// SPDX-License-Identifier: Apache-2.0
//! The commit of changed tables, and the state of the image after one that failed.
//!
//! | State | Tables in the file | A change | A read of a changed cluster |
//! |---|---|---|---|
//! | `Sound` | lack the changes of the present batch | is made | is answered after the commit |
//! | `Full` | lack the changes of `uncommitted` | repeats the commit first, once in a batch | gets data from memory |
//! | `Lost` | unknown | fails | gets data from memory |
//!
//! `Sound` becomes `Full` if a commit finds no room, and `Sound` again when a later one succeeds. Each other
//! error of a commit leads to `Lost`, which has no end. No change is made in `Full`, so that `uncommitted`
//! holds at most the changes of one batch. Clusters outside of it are in the file as in memory: a lane may
//! use their places in all states.

use crate::extents::Extent;
use crate::image::{Answer, Image, Question};
use crate::job::{Begun, Job};
use crate::mapped::Mapped;
use crate::storage::{CommitError, Store};
use crate::versions::Ranges;
use std::io;
use std::ops::Range;

/// Carries out the writes of a commit.
pub(crate) type Run<'a> = &'a mut dyn FnMut(&mut Image, Job) -> Result<(), CommitError>;

/// The changes of the tables, and what the last commit has made of them.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    state: State,
    /// Clusters of the disk that have changed since the last commit.
    uncommitted: Ranges,
    /// The new places of those of them that have only got one.
    mapped: Vec<Mapped>,
    /// There are other changes, too: a commit needs a flush of imago.
    has_others: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Sound,
    /// The errno of a commit without room, and whether it was repeated in this batch.
    Full { errno: i32, is_repeated: bool },
    /// The errno of the commit.
    Lost(i32),
}

impl Tables {
    /// The errno of the last commit, if that has failed.
    fn failure(&self) -> Option<i32> {
        match self.state {
            State::Sound => None,
            State::Full { errno, .. } | State::Lost(errno) => Some(errno),
        }
    }

    /// Notes that clusters are about to change.
    pub(crate) fn change(&mut self, clusters: Range<u64>) {
        self.add_others();
        if clusters.start < clusters.end {
            self.uncommitted.insert(clusters);
        }
    }

    /// Notes that the next commit needs a flush of imago.
    pub(crate) fn add_others(&mut self) {
        self.has_others = true;
    }

    /// Returns whether the next commit needs a flush of imago.
    pub(crate) fn others(&self) -> bool {
        self.has_others
    }

    /// Notes that the changes since [`Tables::others`] had this value have given these places only.
    pub(crate) fn map(&mut self, mapped: Mapped, others: bool) {
        self.mapped.push(mapped);
        self.has_others = others;
    }

    /// The part of an extent around `at` whose place the file has, too; `None` if it lacks that of `at`. In
    /// `Sound` the whole extent: the commit precedes the answer.
    pub(crate) fn committed(&self, extent: Extent, at: u64) -> Option<Extent> {
        match self.state == State::Sound || extent.file != 0 {
            true => Some(extent),
            false => self.unchanged(extent, at),
        }
    }

    /// Returns whether a cluster of a range has changed since the last commit.
    pub(crate) fn has_changed(&self, range: &Range<u64>) -> bool {
        self.uncommitted.overlaps(range)
    }

    /// The part of an extent around `at` in which nothing has changed since the last commit.
    fn unchanged(&self, extent: Extent, at: u64) -> Option<Extent> {
        let mut part = extent;
        for range in self.uncommitted.overlapping(&(extent.start..extent.end)) {
            if range.contains(&at) {
                return None;
            }
            if range.end <= at {
                part.start = part.start.max(range.end);
            } else {
                part.end = part.end.min(range.start);
            }
        }
        Some(extent.part(part.start..part.end))
    }
}

impl Image {
    /// Writes the changes of a batch to the file, in the order that a crash needs. The next sync of the file makes
    /// them durable.
    ///
    /// # Errors
    /// errno of the failure: again and again until there is room, or for ever ([`Image::lost`]).
    pub(crate) fn commit(&mut self) -> Result<(), i32> {
        self.commit_by(&mut Job::in_place)
    }

    /// Makes the changes of a batch durable with all before, and gives reserved clusters back: nothing changes the
    /// file from then on. `run` is that of [`Image::commit_by`].
    ///
    /// # Errors
    /// As [`Image::commit`].
    pub(crate) fn settle_by(&mut self, run: Run<'_>) -> Result<(), i32> {
        self.commit_by(run)?;
        let commits = self.versions().commits();
        let settled = self.store().map_err(CommitError::Lost).and_then(Store::settle);
        settled.map_err(|why| self.fail(why))?;
        self.versions().synced(commits);
        Ok(())
    }

    /// Makes what was committed durable.
    ///
    /// # Errors
    /// The error of the system call: no change succeeds any more.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        let synced = self.store().and_then(Store::sync);
        let failed = |why| io::Error::from_raw_os_error(self.fail(CommitError::Lost(why)));
        synced.map_err(failed)
    }

    /// The same. `run` carries the writes out, and may read the image meanwhile, but not change it.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn commit_by(&mut self, run: Run<'_>) -> Result<(), i32> {
        let committed = match self.tables.state {
            State::Lost(errno) | State::Full { errno, is_repeated: true } => Err(errno),
            State::Sound | State::Full { .. } => self.write_tables_by(run),
        };
        self.end_batch();
        committed
    }

    /// Ends a batch: the next one may repeat the commit.
    pub(crate) fn end_batch(&mut self) {
        if let State::Full { is_repeated, .. } = &mut self.tables.state {
            *is_repeated = false;
        }
    }

    /// The same, with the error of the system call.
    pub(crate) fn committed(&mut self) -> io::Result<()> {
        self.commit().map_err(io::Error::from_raw_os_error)
    }

    /// errno of a failed commit that cannot be repeated: the tables in the file are unknown.
    pub(crate) fn lost(&self) -> Option<i32> {
        match self.tables.state {
            State::Lost(errno) => Some(errno),
            State::Sound | State::Full { .. } => None,
        }
    }

    /// Fails if the last commit has failed.
    pub(crate) fn check_committed(&self) -> Result<(), i32> {
        self.tables.failure().map_or(Ok(()), Err)
    }

    /// Makes the image ready for a change: repeats a commit that has found no room.
    pub(crate) fn make_room(&mut self) -> io::Result<()> {
        let ready = match self.tables.state {
            State::Sound => Ok(()),
            State::Full { is_repeated: false, .. } => self.write_tables(),
            State::Full { errno, is_repeated: true } | State::Lost(errno) => Err(errno),
        };
        ready.map_err(io::Error::from_raw_os_error)
    }

    /// A commit within a batch.
    pub(crate) fn write_tables(&mut self) -> Result<(), i32> {
        self.write_tables_by(&mut Job::in_place)
    }

    fn write_tables_by(&mut self, run: Run<'_>) -> Result<(), i32> {
        if self.tables.uncommitted.is_empty() {
            return Ok(());
        }
        let flushed = self.flush().map_err(CommitError::Lost);
        let committed = flushed.and_then(|()| {
            let Some(Begun { job, rest }) = self.store()?.begin_commit(self.cluster_bytes())?
            else {
                return Ok(());
            };
            let written = run(self, job);
            let store = self.store()?;
            let freed = store.end_commit(rest, written)?;
            if self.gives_back {
                freed.into_iter().for_each(|range| store.punch(range));
            }
            if !store.is_synced() {
                self.versions().committed();
            }
            Ok(())
        });
        match committed {
            Ok(()) => {
                self.tables = Tables::default();
                Ok(())
            }
            Err(why) => Err(self.fail(why)),
        }
    }

    /// Moves the changes of imago's tables to the overlay.
    pub(crate) fn flush(&self) -> io::Result<()> {
        match self.keep_mapped()? {
            true => Ok(()),
            false => self.access.flush(),
        }
    }

    /// Keeps the entries of new places, if there are no other changes. Returns whether that is so.
    pub(crate) fn keep_mapped(&self) -> io::Result<bool> {
        Ok(!self.tables.has_others && self.store()?.map(&self.tables.mapped)?)
    }

    /// Returns whether changes wait for a commit.
    #[cfg(test)]
    pub(crate) fn is_changed(&self) -> bool {
        !self.tables.uncommitted.is_empty()
    }

    /// Takes the error of a commit. Returns its errno.
    fn fail(&mut self, why: CommitError) -> i32 {
        let errno = |why: &io::Error| why.raw_os_error().unwrap_or(libc::EIO);
        let (state, errno) = match why {
            CommitError::Full(why) => {
                self.complain(&why);
                (State::Full { errno: errno(&why), is_repeated: true }, errno(&why))
            }
            CommitError::Lost(why) => {
                tracing::error!(
                    "qcow2: the tables cannot be written: {why}; no write succeeds any more"
                );
                (State::Lost(errno(&why)), errno(&why))
            }
        };
        self.tables.state = state;
        errno
    }

    /// The answer that needs no commit: nothing has changed at `at` since the last one, and an extent ends where
    /// something has. Else the answer that has to wait.
    ///
    /// # Errors
    /// The answer, which waits.
    pub(crate) fn answer_at_once(&self, answer: Answer, at: u64) -> Result<Answer, Answer> {
        if self.tables.state != State::Sound {
            return Err(answer);
        }
        let unchanged = |extent| self.tables.unchanged(extent, at);
        match answer {
            Answer::Extent(extent, version) => match unchanged(extent) {
                Some(part) => Ok(Answer::Extent(part, version)),
                None => Err(answer),
            },
            Answer::Zero(len, extent, version) => match unchanged(extent) {
                Some(part) => Ok(Answer::Zero(len.min(part.end - at), part, version)),
                None => Err(answer),
            },
            Answer::Data(mut data) => match unchanged(Extent::zeroes(at..at + data.len() as u64)) {
                Some(part) => {
                    data.truncate((part.end - at) as usize);
                    Ok(Answer::Data(data))
                }
                None => Err(Answer::Data(data)),
            },
            other => Err(other),
        }
    }

    /// The answer to a read at `at`, if it was `answer` before the commit failed.
    pub(crate) fn read_again(&mut self, answer: Answer, at: u64, len: u64) -> Answer {
        match answer {
            Answer::Extent(extent, _) if extent.file == 0 => self.answer(Question::Read(at, len)),
            answer => answer,
        }
    }

    /// The answer to a change at `at`, if it was `answer` before the commit failed with `errno`. The place of
    /// a cluster that the commit did not have to change is as good as before.
    pub(crate) fn fail_change(&self, answer: Answer, at: u64, errno: i32) -> Answer {
        match answer {
            Answer::Extent(extent, version) if self.lost().is_none() => {
                let part = self.tables.committed(extent, at);
                part.map_or(Answer::Failed(errno), |part| Answer::Extent(part, version))
            }
            Answer::Failed(own) => Answer::Failed(own),
            _ => Answer::Failed(errno),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::image::Piece;
    use crate::storage::Log;
    use crate::{AllowBacking, chain};
    use backend::file::place;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    use std::fs::{self, File};
    use std::io::Write;
    use std::process::Command;

    const MIB: u64 = 1 << 20;

    const ALL: Extent = Extent { start: 4, end: 40, file: 0, host: 100 };

    fn tables(state: State) -> Tables {
        let mut tables = Tables { state, ..Tables::default() };
        [8..12, 20..24, 30..30].into_iter().for_each(|range| tables.change(range));
        tables
    }

    #[test]
    fn after_a_failed_commit_an_extent_names_no_place_that_the_file_lacks() {
        for state in [State::Full { errno: 28, is_repeated: false }, State::Lost(5)] {
            let of = tables(state);
            assert_eq!(of.committed(ALL, 4), Some(Extent { end: 8, ..ALL }));
            assert_eq!((of.committed(ALL, 8), of.committed(ALL, 23)), (None, None));
            let middle = Extent { start: 12, end: 20, host: 108, ..ALL };
            assert_eq!(
                (of.committed(ALL, 12), of.committed(ALL, 19)),
                (Some(middle), Some(middle))
            );
            assert_eq!(of.committed(ALL, 24), Some(Extent { start: 24, host: 120, ..ALL }));
            let below = Extent { file: 1, ..ALL };
            assert_eq!(of.committed(below, 8), Some(below));
        }
        assert_eq!(tables(State::Sound).committed(ALL, 8), Some(ALL));
    }

    /// An image over a raw file of 8 MiB full of nines. A seal of the file can make its writes fail.
    pub(crate) fn overlay() -> (tempfile::TempDir, File, Image) {
        overlay_with(None)
    }

    /// The same; the log gets all changes.
    pub(crate) fn overlay_with(log: Option<Log>) -> (tempfile::TempDir, File, Image) {
        let directory = tempfile::tempdir().expect("a directory");
        let (base, path) = (directory.path().join("base.raw"), directory.path().join("a.qcow2"));
        fs::write(&base, vec![9; 8 << 20]).expect("a base");
        let create = ["create", "-qf", "qcow2", "-b", "base.raw", "-F", "raw", "a.qcow2", "8M"];
        let made = Command::new("qemu-img").current_dir(directory.path()).args(create).status();
        assert!(made.expect("qemu-img runs; scripts/setup.sh installs it").success());
        let memory = memfd_create("image", MemfdFlags::ALLOW_SEALING).expect("memory");
        let mut file = File::from(memory);
        file.write_all(&fs::read(&path).expect("the image")).expect("a copy");
        let opened = [place(&file), base];
        let links = chain::follow_open(&path, &opened, AllowBacking::SameDir).expect("a chain");
        let header = links[0].header.as_ref().expect("a header");
        let access = chain::open(&links, true, log).expect("it opens");
        let image = Image::new(access, header, std::sync::Arc::default());
        (directory, file, image)
    }

    #[test]
    fn after_lost_tables_reads_get_the_content_and_no_write_a_place() {
        let (_directory, file, mut image) = overlay();
        let write = |at: u64| Question::Write(at, vec![1; 4096]);
        assert_eq!(image.answer(write(0)), Answer::Done(4096));
        assert_eq!(image.commit(), Ok(()));
        assert_eq!(image.answer(write(MIB + 8192)), Answer::Done(4096));
        let read = image.answer(Question::Read(MIB, 4096));
        let rewrite = image.answer(write(MIB));
        assert!(matches!((&read, &rewrite), (Answer::Extent(..), Answer::Extent(..))));
        // From now on each write fails.
        fcntl_add_seals(&file, SealFlags::WRITE).expect("a seal");
        assert_eq!(image.commit(), Err(libc::EPERM));
        assert_eq!(image.lost(), Some(libc::EPERM));
        let (failed, below) = (Answer::Failed(libc::EPERM), Answer::Data(vec![9; 4096]));
        assert_eq!(image.read_again(read, MIB, 4096), below);
        assert_eq!(image.fail_change(rewrite, MIB, libc::EPERM), failed);
        assert_eq!(image.fail_change(Answer::Done(4096), MIB, libc::EPERM), failed);
        assert_eq!(image.answer(Question::Read(MIB + 12288, 4096)), below);
        assert!(matches!(image.own(MIB, 4096), Ok(Piece::Data(data)) if data == [9; 4096]));
        assert_eq!(image.answer(write(2 * MIB)), failed);
        let rewrite = image.answer(write(0));
        assert_eq!(image.fail_change(rewrite, 0, libc::EPERM), failed);
        assert!(matches!(image.answer(Question::Read(0, 4096)), Answer::Extent(..)));
        assert_eq!(image.commit(), Err(libc::EPERM));
    }
}
