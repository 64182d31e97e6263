// SPDX-License-Identifier: Apache-2.0
//! The thread of a disk that works on its tables. It takes all waiting questions, makes their
//! changes durable with one commit, and then answers. A question about a part of the disk that has not changed
//! since the last commit is answered at once, also while a commit is in progress, whose writes another thread
//! carries out ([`Committer`]). In between it unmaps what was discarded.
//!
//! First it looks at all L2 tables of an image that may be written ([`crate::guard`]), a part of them between two
//! batches. Reads are answered meanwhile; changes wait.

use crate::committer::Committer;
use crate::extents::Extent;
use crate::image::{Answer, Image, Piece, Question};
use crate::storage::{CommitError, Store};
use crate::tables::Run;
use crate::unmap::Progress;
use crate::versions::Version;
use backend::{File, Remote, Slot, Token};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum questions of one commit.
pub(crate) const BATCH_MAX: usize = 64;

/// Work for the thread.
pub(crate) enum Work {
    /// A question, and the way of its answer.
    Ask(Question, Reply),
    /// Enlarge the disk to this many bytes.
    Grow(u64, Sender<io::Result<(u64, io::Result<()>)>>),
    /// Tell when the tables are durable, and leave what was discarded in its place: the next change of
    /// the file follows a request.
    Settle(Sender<io::Result<()>>),
    /// The data of so many bytes at a position was punched out of the file.
    Discarded(u64, u64),
    /// A user of places has ended its old uses.
    Left,
    /// The thread of commits has carried out the writes of one ([`Committer`]).
    Written(Result<(), CommitError>),
    /// Tell the claimed clusters.
    Known(Sender<io::Result<Option<Vec<u8>>>>),
    /// Clusters may be reserved: the image has a mark.
    Reserve,
    /// Unmap what was discarded, at once, and tell.
    Unmap(Sender<io::Result<()>>),
    /// Keep the file open, with its lock, as long as the thread runs.
    Hold(Arc<File>),
    /// Tell the next piece at a position, of at most so many bytes.
    Tell(Of, u64, u64, Sender<io::Result<Piece>>),
}

impl Work {
    /// Returns whether it changes the image.
    fn changes(&self) -> bool {
        match self {
            Work::Ask(question, _) => question.changes(),
            Work::Grow(..) => true,
            _ => false,
        }
    }
}

/// The content of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Of {
    /// As far as the image has it itself.
    Image,
    /// As the guest sees it.
    Disk,
}

/// The answer to the question of a slot.
pub(crate) struct ToLane {
    pub(crate) slot: Slot,
    pub(crate) answer: Answer,
    /// Other extents of the window, and their version.
    pub(crate) others: (Vec<Extent>, Version),
}

/// The way back to a lane.
pub(crate) struct Reply {
    pub(crate) token: Token,
    pub(crate) remote: Remote,
    /// The range of the disk whose places the lane wants to know, too.
    pub(crate) window: Range<u64>,
    pub(crate) answers: Sender<ToLane>,
}

impl Reply {
    fn send(self, answer: Answer) {
        self.send_with(answer, Default::default());
    }

    fn send_with(self, answer: Answer, others: (Vec<Extent>, Version)) {
        // Fails only if the lane is gone, which then waits for nothing.
        let _ = self.answers.send(ToLane { slot: self.token.slot, answer, others });
        self.remote.complete(self.token, 0);
    }
}

/// Starts the thread. It ends with the last sender. `failed` learns of a commit that has failed for
/// ever.
///
/// # Errors
/// The error of the system call.
pub(crate) fn start(
    image: Image,
    failed: impl Fn(i32) + Send + 'static,
) -> io::Result<Arc<Mutex<Sender<Work>>>> {
    let (sender, work) = channel();
    let sender = Arc::new(Mutex::new(sender));
    let committer = Committer::new(Arc::downgrade(&sender));
    let body = move || run(Thread::new(image, work, committer), &failed);
    thread::Builder::new().name("qcow2".into()).spawn(body)?;
    Ok(sender)
}

/// Pause before discarded data is unmapped, so that one commit serves many discards.
const UNMAP_PAUSE: Duration = Duration::from_millis(100);

fn run(mut thread: Thread, failed: &dyn Fn(i32)) {
    let mut progress = Progress::Nothing;
    thread.look();
    while let Ok(first) = thread.receive(progress) {
        thread.look();
        // Work that is answered at once counts, too: other work waits for the commit.
        let left = BATCH_MAX - thread.answered.len() - first.iter().len();
        let rest: Vec<_> = thread.work.try_iter().take(left).collect();
        first.into_iter().chain(rest).for_each(|work| thread.take(work));
        thread.answer(failed);
        progress = thread.unmap(failed);
    }
}

/// Takes the message that data was punched out of the file.
fn discarded(image: &mut Image, at: u64, len: u64) {
    image.versions().took_discard();
    image.note_discarded(at, len);
}

/// A question with its answer, which waits for the commit.
struct Answered {
    reply: Reply,
    answer: Answer,
    /// The question changes something.
    changes: bool,
    at: u64,
    len: u64,
}

/// A piece that was asked for, which waits for the commit.
struct Told {
    reply: Sender<io::Result<Piece>>,
    of: Of,
    at: u64,
    len: u64,
    piece: io::Result<Piece>,
}

impl Told {
    /// The piece as it is now.
    fn now(image: &mut Image, of: Of, at: u64, len: u64, reply: Sender<io::Result<Piece>>) -> Told {
        let piece = tell(image, of, at, len);
        Told { reply, of, at, len, piece }
    }
}

/// The state of the thread.
struct Thread {
    image: Image,
    work: Receiver<Work>,
    committer: Committer,
    /// Changes that wait until all L2 tables were looked at, or work that waits for the end of a commit: the lanes
    /// bound its amount.
    held: VecDeque<Work>,
    /// A table could not be read: the next change tries again.
    is_stuck: bool,
    answered: Vec<Answered>,
    told: Vec<Told>,
    settled: Vec<Sender<io::Result<()>>>,
    /// They wait until everything that was discarded is unmapped.
    hurried: Vec<Sender<io::Result<()>>>,
    /// The time to unmap what was discarded.
    unmaps_at: Option<Instant>,
    /// Files that are kept open.
    held_files: Vec<Arc<File>>,
}

impl Thread {
    fn new(image: Image, work: Receiver<Work>, committer: Committer) -> Thread {
        Thread {
            image,
            work,
            committer,
            held: VecDeque::new(),
            is_stuck: false,
            answered: Vec::with_capacity(BATCH_MAX),
            told: Vec::new(),
            settled: Vec::new(),
            hurried: Vec::new(),
            unmaps_at: None,
            held_files: Vec::new(),
        }
    }

    /// Returns whether L2 tables are to be looked at, or work is held.
    fn has_more(&self) -> bool {
        !self.held.is_empty() || (!self.is_stuck && self.image.is_looking())
    }

    /// Waits for work, or until there is something to look at or to unmap.
    fn receive(&self, progress: Progress) -> Result<Option<Work>, RecvTimeoutError> {
        let wait = match progress {
            _ if self.has_more() => Duration::ZERO,
            Progress::Leaving { are_free: true } => Duration::ZERO,
            Progress::Noted if !self.hurried.is_empty() => Duration::ZERO,
            Progress::Noted => self
                .unmaps_at
                .map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now())),
            Progress::Leaving { are_free: false } | Progress::Nothing => {
                return Ok(Some(self.work.recv().map_err(|_| RecvTimeoutError::Disconnected)?));
            }
        };
        match self.work.recv_timeout(wait) {
            Ok(work) => Ok(Some(work)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(gone) => Err(gone),
        }
    }

    /// Looks at a few L2 tables, and then takes most of a batch of the work that is held.
    fn look(&mut self) {
        if !self.is_stuck
            && let Err(why) = self.image.look()
        {
            self.is_stuck = true;
            self.image.complain(&why);
            let errno = why.raw_os_error().unwrap_or(libc::EIO);
            for work in self.held.drain(..) {
                match work {
                    Work::Ask(_, reply) => reply.send(Answer::Failed(errno)),
                    Work::Grow(_, reply) => {
                        let failed = Err(io::Error::from_raw_os_error(errno));
                        let _ = reply.send(Ok((self.image.size_bytes(), failed))); // the control plane waits
                    }
                    _ => {}
                }
            }
        }
        if !self.image.is_looking() {
            let batch: Vec<_> = self.held.drain(..self.held.len().min(BATCH_MAX - 1)).collect();
            batch.into_iter().for_each(|work| self.take(work));
        }
    }

    fn take(&mut self, work: Work) {
        let image = &mut self.image;
        if work.changes() && image.is_looking() {
            self.is_stuck = false;
            self.held.push_back(work);
            return;
        }
        match work {
            Work::Ask(question, reply) => ask(image, &mut self.answered, question, reply),
            Work::Tell(of, at, len, reply) => {
                self.told.push(Told::now(image, of, at, len, reply));
            }
            Work::Settle(reply) => {
                // A commit may hold discards that came before.
                self.held.retain(|work| match *work {
                    Work::Discarded(at, len) => {
                        discarded(image, at, len);
                        false
                    }
                    _ => true,
                });
                image.forget_discarded();
                self.settled.push(reply);
            }
            Work::Grow(bytes, reply) => {
                let grown = image.grow(bytes);
                // The next question may follow in this batch.
                image.end_batch();
                let _ = reply.send(Ok((image.size_bytes(), grown))); // the control plane waits
            }
            Work::Discarded(at, len) => discarded(image, at, len),
            Work::Known(reply) => {
                let known = image.store().map(Store::known);
                let _ = reply.send(known); // an upgrade waits
            }
            Work::Reserve => {
                if let Err(why) = image.store().map(Store::may_reserve) {
                    image.complain(&why);
                }
            }
            // The thread of commits has gone back to sleep.
            Work::Left | Work::Written(_) => {}
            Work::Unmap(reply) => self.hurried.push(reply),
            Work::Hold(file) => self.held_files.push(file),
        }
    }

    /// Lets the image commit changes. Reads are answered meanwhile if their part of the disk has not changed; the
    /// others join the batch, because nothing changes before its end.
    fn committing<T>(&mut self, act: impl FnOnce(&mut Image, Run<'_>) -> T) -> T {
        let Thread { image, work, committer, answered, told, held, .. } = self;
        act(image, &mut |image, job| {
            committer.carry_out(job, work, &mut |work| match work {
                Work::Ask(question, reply) if !question.changes() => {
                    ask(image, answered, question, reply);
                }
                Work::Tell(of, at, len, reply) => {
                    told.push(Told::now(image, of, at, len, reply));
                }
                work => held.push_back(work),
            })
        })
    }

    /// Makes the changes durable, and answers. Without a change in the batch, a commit that has found no room
    /// is not repeated.
    fn answer(&mut self, failed: &dyn Fn(i32)) {
        let changes = || self.answered.iter().any(|asked| asked.changes);
        let committed = match () {
            () if !self.settled.is_empty() => self.committing(Image::settle_by),
            () if !self.hurried.is_empty() || changes() => self.committing(Image::commit_by),
            () => {
                self.image.end_batch();
                Ok(())
            }
        };
        self.image.lost().into_iter().for_each(failed);
        for reply in self.settled.drain(..) {
            let _ = reply.send(committed.map_err(io::Error::from_raw_os_error)); // an upgrade waits
        }
        self.reply(committed);
    }

    /// Answers what has waited for a commit, with this outcome.
    fn reply(&mut self, committed: Result<(), i32>) {
        let image = &mut self.image;
        for Told { reply, of, at, len, piece } in self.told.drain(..) {
            // Before the commit, a part of a new cluster may not be in the file.
            let piece = match (image.lost(), committed) {
                (Some(errno), _) => Err(io::Error::from_raw_os_error(errno)),
                (None, Err(_)) => tell(image, of, at, len),
                (None, Ok(())) => piece,
            };
            let _ = reply.send(piece); // a copier waits
        }
        for Answered { reply, answer, changes, at, len } in self.answered.drain(..) {
            reply.send(match committed {
                Ok(()) => answer,
                Err(errno) if changes => image.fail_change(answer, at, errno),
                Err(_) => image.read_again(answer, at, len),
            });
        }
    }

    /// Unmaps a part of what was discarded.
    fn unmap(&mut self, failed: &dyn Fn(i32)) -> Progress {
        let is_time = self.unmaps_at.is_some_and(|at| at <= Instant::now());
        let may_begin = is_time || !self.hurried.is_empty();
        let unmapped = self.committing(|image, run| image.unmap_discarded(may_begin, run));
        self.image.lost().into_iter().for_each(failed);
        self.reply(unmapped.map(drop));
        let progress = unmapped.unwrap_or_else(|_| {
            self.image.forget_discarded();
            Progress::Nothing
        });
        if progress == Progress::Nothing || unmapped.is_err() {
            for reply in self.hurried.drain(..) {
                let told = unmapped.map(drop).map_err(io::Error::from_raw_os_error);
                let _ = reply.send(told); // the end of the disk waits
            }
        }
        self.unmaps_at = match progress {
            Progress::Noted => self.unmaps_at.or(Some(Instant::now() + UNMAP_PAUSE)),
            _ => None,
        };
        progress
    }
}

/// Answers a question at once, or adds it to those that wait for the commit.
fn ask(image: &mut Image, answered: &mut Vec<Answered>, question: Question, reply: Reply) {
    let changes = question.changes();
    let (at, len) = question.range();
    // The answer may commit.
    let version = image.versions().now();
    let others = image.around(&question, &reply.window);
    let answer = match image.answer_by(&others, &question, &reply.window) {
        Some(answer) => Ok(answer),
        None => {
            let answer = image.answer(question);
            image.answer_at_once(answer, at)
        }
    };
    match answer {
        Ok(answer) => reply.send_with(answer, (others, version)),
        Err(answer) => answered.push(Answered { reply, answer, changes, at, len }),
    }
}

fn tell(image: &mut Image, of: Of, at: u64, len: u64) -> io::Result<Piece> {
    match of {
        Of::Image => image.own(at, len),
        Of::Disk => image.visible(at, len),
    }
}

#[cfg(test)]
mod tests;
