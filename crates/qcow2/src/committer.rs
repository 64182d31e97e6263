// SPDX-License-Identifier: Apache-2.0
//! The thread that carries out the writes of commits, with their syncs, while the thread of the disk answers reads.
//!
//! It is started by the first commit. A commit that follows a short one is carried out in place: two changes of
//! threads would take longer.

use crate::disk_thread::Work;
use crate::job::Job;
use crate::storage::CommitError;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Time of a commit for which no read needs to be answered meanwhile.
const SHORT: Duration = Duration::from_micros(200);

/// Carries out the writes of commits.
#[derive(Debug, Default)]
pub(crate) struct Committer {
    /// The way of the end of a job to the thread of the disk, as long as there is a disk.
    work: Weak<Mutex<Sender<Work>>>,
    jobs: Option<Sender<(Job, Sender<Work>)>>,
    /// The last commit was short.
    is_short: bool,
}

impl Committer {
    pub(crate) fn new(work: Weak<Mutex<Sender<Work>>>) -> Committer {
        Committer { work, ..Committer::default() }
    }

    /// Carries a job out. Other work goes to `meanwhile`.
    ///
    /// # Errors
    /// As [`Job::run`].
    pub(crate) fn carry_out(
        &mut self,
        job: Job,
        work: &Receiver<Work>,
        meanwhile: &mut dyn FnMut(Work),
    ) -> Result<(), CommitError> {
        let begun = Instant::now();
        let written = match if self.is_short { Err(job) } else { self.begin(job) } {
            Err(job) => job.run(),
            Ok(()) => loop {
                match work.recv() {
                    Ok(Work::Written(written)) => break written,
                    Ok(work) => meanwhile(work),
                    Err(_) => break Err(io::Error::other("the thread of commits has gone").into()),
                }
            },
        };
        self.is_short = begun.elapsed() < SHORT;
        written
    }

    /// Gives a job to the thread.
    ///
    /// # Errors
    /// The job: there is no thread, or no disk any more.
    fn begin(&mut self, job: Job) -> Result<(), Job> {
        let Some(work) = self.work.upgrade() else { return Err(job) };
        let work = work.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if self.jobs.is_none() {
            let (sender, jobs) = channel::<(Job, Sender<Work>)>();
            let body = move || {
                for (job, work) in jobs {
                    let _ = work.send(Work::Written(job.run())); // the thread of the disk waits
                }
            };
            let spawned = thread::Builder::new().name("qcow2-commit".into()).spawn(body);
            self.jobs = spawned.is_ok().then_some(sender);
        }
        match &self.jobs {
            None => Err(job),
            Some(jobs) => jobs.send((job, work)).map_err(|unsent| unsent.0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Work;
    use crate::crash_tests::{First, make, writer};
    use crate::disk_thread::{BATCH_MAX, Of, Reply, ToLane, start};
    use crate::image::{Answer, Image, Piece, Question};
    use crate::storage::Log;
    use crate::tables::tests::overlay_with;
    use backend::conformance::SyncEngine;
    use backend::{Engine, Remote, Slot, Token};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex, PoisonError};
    use std::time::Duration;

    const CLUSTER: u64 = 64 << 10;
    /// Longer than any answer takes.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// The thread of a disk, and a client of it.
    struct Client {
        _thread: Arc<Mutex<Sender<Work>>>,
        work: Sender<Work>,
        remote: Remote,
        answers: Sender<ToLane>,
        answered: Receiver<ToLane>,
    }

    impl Client {
        fn of(image: Image) -> Client {
            let thread = start(image, |_| ()).expect("a thread");
            let work = thread.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let (answers, answered) = channel();
            Client { _thread: thread, work, remote: SyncEngine::new().remote(), answers, answered }
        }

        fn ask(&self, slot: u32, question: Question) {
            let token = Token { slot: Slot(slot), layer: 0 };
            let (remote, answers) = (self.remote.clone(), self.answers.clone());
            let reply = Reply { token, remote, window: 0..0, answers };
            self.work.send(Work::Ask(question, reply)).expect("the thread of the disk");
        }

        fn next(&self) -> (Slot, Answer) {
            let next = self.answered.recv_timeout(PATIENCE);
            let ToLane { slot, answer, .. } = next.expect("an answer");
            (slot, answer)
        }
    }

    /// The log of changes holds the writes of a commit as long as its lock is taken.
    #[test]
    fn reads_are_answered_and_changes_wait_while_a_commit_hangs() {
        let log = Log::default();
        let (_directory, _file, mut image) = overlay_with(Some(log.clone()));
        assert_eq!(image.answer(Question::Write(0, vec![1; 4096])), Answer::Done(4096));
        assert_eq!(image.commit(), Ok(()));
        let client = Client::of(image);
        let hold = log.lock().unwrap_or_else(PoisonError::into_inner);
        // Data in a backing file becomes zero: the first write is that of the commit.
        client.ask(0, Question::Discard(CLUSTER, CLUSTER));
        // More than a batch has: the last one is asked after the begin of the commit.
        for read in 0..=BATCH_MAX as u64 {
            let at = read % 2 * (4 << 20);
            client.ask(1, Question::Read(at, 4096));
            let (slot, answer) = client.next();
            assert!(matches!(answer, Answer::Extent(..)), "{answer:?}");
            assert_eq!(slot, Slot(1));
        }
        client.ask(2, Question::Discard(8 * CLUSTER, CLUSTER));
        // The content is that of after the commit.
        client.ask(3, Question::Read(CLUSTER, 4096));
        client.ask(4, Question::Read(4 << 20, 4096));
        assert!(matches!(client.next(), (Slot(4), Answer::Extent(..))));
        drop(hold);
        let mut late: Vec<_> = (0..3).map(|_| client.next()).collect();
        late.sort_by_key(|(Slot(slot), _)| *slot);
        assert_eq!(late[0], (Slot(0), Answer::Done(CLUSTER)));
        assert_eq!(late[1], (Slot(2), Answer::Done(CLUSTER)));
        assert!(matches!(late[2], (Slot(3), Answer::Zero(4096, ..))), "{:?}", late[2]);
    }

    /// imago writes changed tables out to make room for others, which a commit of entries alone leaves changed.
    #[test]
    fn pieces_of_more_tables_than_imago_keeps_are_told_while_a_commit_hangs() {
        const TABLES: u64 = 140;
        const TABLE: u64 = 512 * 4096;
        let directory = tempfile::tempdir().expect("a directory");
        let path = make(directory.path(), "cluster_size=4k", First::Nowhere, 1 << 30);
        let crate::crash_tests::Writer { mut image, log, .. } = writer(&path);
        for table in 0..TABLES {
            let placed = image.answer(Question::Place(table * TABLE, 4096));
            assert!(matches!(placed, Answer::Extent(..)), "{placed:?}");
        }
        assert_eq!(image.commit(), Ok(()));
        image.access.flush().expect("a good file");
        let client = Client::of(image);
        let hold = log.lock().unwrap_or_else(PoisonError::into_inner);
        client.ask(0, Question::Place((TABLES - 1) * TABLE + 4096, 4096));
        let told: Vec<_> = (0..TABLES)
            .map(|table| {
                let (reply, told) = channel();
                let tell = Work::Tell(Of::Disk, table * TABLE, 4096, reply);
                client.work.send(tell).expect("the thread of the disk");
                told
            })
            .collect();
        // It is answered at once, after all before it.
        client.ask(1, Question::Read(0, 4096));
        assert!(matches!(client.next(), (Slot(1), Answer::Extent(..))));
        drop(hold);
        let (slot, placed) = client.next();
        assert!(slot == Slot(0) && matches!(placed, Answer::Extent(..)), "{placed:?}");
        for told in told {
            let piece = told.recv_timeout(PATIENCE).expect("an answer");
            assert!(matches!(piece, Ok(Piece::At(0, ..))), "{piece:?}");
        }
    }
}
