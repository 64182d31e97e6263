// SPDX-License-Identifier: Apache-2.0
//! One thread's handle on a qcow2 disk.
//!
//! An I/O proceeds from its start in pieces, one at a time: each piece lies in a known extent and is
//! an I/O of the file's own lane, or is a question to the thread of the disk. States of a slot:
//!
//! ```text
//! (none) -> File  <-> Asked     a piece in an extent; a question in flight
//!        -> Sync                a FLUSH; the end of a write-through write whose tables are not durable
//! ```

use crate::disk_thread::{Reply, ToLane, Work};
use crate::extents::{Extent, Extents, ZEROES};
use crate::image::{Answer, COPY_MAX, Question};
use crate::pages::CLUSTERS;
use crate::piece::Piece;
use crate::shifted::Shifted;
use crate::versions::User;
use backend::wrap::BySlot;
use backend::{Engine, Io, IoError, IoKind, Lane, Remote, Slot, Step, Token};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::mpsc::{Receiver, Sender, channel};

const SECTOR: u64 = 512;
/// Clusters around a position whose places the lane asks for, if it knows none of them.
const WINDOW_MIN: u64 = 64;

/// Properties of the disk that a lane needs.
pub(crate) struct Limits {
    pub(crate) capacity_bytes: u64,
    pub(crate) cluster_bytes: u64,
    pub(crate) read_only: bool,
    /// A new place may hide content of a backing file: most questions of a write have its data.
    pub(crate) has_backing: bool,
    pub(crate) discard: bool,
    /// Data that was punched out of the file is unmapped later.
    pub(crate) unmaps: bool,
}

/// The lane of one file of the chain.
struct FileLane {
    lane: Box<dyn Lane>,
    first_file: u32,
}

/// State of a pending I/O.
enum Active {
    File {
        io: Io,
        file: usize,
        _piece: Option<Piece>,
    },
    /// The sync of a FLUSH, or of a write-through write, and the commits before it.
    Sync {
        io: Io,
        commits: u64,
    },
    Asked,
}

pub(crate) struct Qcow2Lane {
    limits: Limits,
    files: Vec<FileLane>,
    extents: Extents,
    /// The use of places by I/Os.
    user: User,
    /// The epoch in which an I/O began, until its end.
    epochs: BySlot<u64>,
    active: BySlot<Active>,
    work: Sender<Work>,
    answers: (Sender<ToLane>, Receiver<ToLane>),
    /// Answers whose event has not come yet.
    early: BySlot<Answer>,
    remote: Option<Remote>,
}

/// Reads the next bytes as zeroes, as far as the I/O has as many.
fn zero(io: &mut Io, len: u64) {
    let end = io.done_bytes.saturating_add(len).min(io.len_bytes);
    io.bufs.zero(io.done_bytes, (end - io.done_bytes) as usize);
    io.done_bytes = end;
}

/// Progress of an I/O after a piece.
enum Next {
    Piece,
    Step(Step),
}

impl Qcow2Lane {
    pub(crate) fn new(
        limits: Limits,
        lanes: Vec<Box<dyn Lane>>,
        user: User,
        work: Sender<Work>,
    ) -> Self {
        let mut first_file = 0;
        let files = lanes.into_iter().map(|lane| {
            let file = FileLane { first_file, lane };
            first_file += file.lane.files().len() as u32;
            file
        });
        Qcow2Lane {
            files: files.collect(),
            extents: Extents::new(limits.cluster_bytes),
            limits,
            user,
            epochs: BySlot::new(),
            active: BySlot::new(),
            work,
            answers: channel(),
            early: BySlot::new(),
            remote: None,
        }
    }

    fn own_layer(&self) -> u8 {
        self.files.len() as u8
    }

    fn check(&self, io: &Io) -> Result<(), IoError> {
        let is_offered = match io.kind {
            IoKind::Read | IoKind::Write | IoKind::Flush => true,
            IoKind::WriteZeroes { .. } => !self.limits.read_only,
            IoKind::Discard => self.limits.discard,
            IoKind::SecureErase => false,
        };
        if !is_offered {
            return Err(IoError::Unsupported);
        }
        if (io.offset_bytes | io.len_bytes) & (SECTOR - 1) != 0 {
            return Err(IoError::Errno(libc::EINVAL));
        }
        if io.writes() && self.limits.read_only {
            return Err(IoError::Errno(libc::EROFS));
        }
        match io.fits(self.limits.capacity_bytes) {
            true => Ok(()),
            false => Err(IoError::EndOfStorage),
        }
    }

    /// Continues the I/O until it waits or ends.
    fn advance(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        self.extents.refresh(self.user.versions());
        while io.done_bytes < io.len_bytes {
            let at = io.offset_bytes + io.done_bytes;
            let usable = |extent: &Extent| !io.writes() || extent.file == 0;
            let len = io.len_bytes - io.done_bytes;
            let Some(extent) = self.extents.find(at, len).filter(usable) else {
                return self.ask(io, slot, engine);
            };
            if extent.file == ZEROES {
                zero(io, extent.end - at);
                continue;
            }
            if let Next::Step(step) = self.start_piece(extent, io, slot, engine) {
                return step;
            }
        }
        let is_durable = io.durable && io.writes() && self.user.versions().need_sync();
        match io.kind == IoKind::Flush || is_durable {
            true => self.sync(slot, engine),
            false => Step::Done(Ok(())),
        }
    }

    /// Starts the I/O of the part of `io` that lies in `extent`.
    fn start_piece(
        &mut self,
        extent: Extent,
        io: &mut Io,
        slot: Slot,
        engine: &mut dyn Engine,
    ) -> Next {
        let at = io.offset_bytes + io.done_bytes;
        let len = (extent.end - at).min(io.len_bytes - io.done_bytes);
        let moves_data = matches!(io.kind, IoKind::Read | IoKind::Write);
        let (piece, bufs) = if !moves_data || len == io.len_bytes {
            (None, io.bufs)
        } else {
            let (piece, bufs) = Piece::of(&io.bufs, io.done_bytes as usize, len as usize);
            (Some(piece), bufs)
        };
        let mut inner = Io::new(io.kind, extent.host + (at - extent.start), len, bufs);
        inner.durable = io.durable;
        let file = extent.file as usize;
        let step =
            self.with_file(file, engine, |lane, engine| lane.start(&mut inner, slot, engine));
        self.piece_step(step, inner, file, piece, io, slot)
    }

    /// Takes the outcome of a piece.
    fn piece_step(
        &mut self,
        step: Step,
        inner: Io,
        file: usize,
        piece: Option<Piece>,
        io: &mut Io,
        slot: Slot,
    ) -> Next {
        match step {
            Step::Done(Ok(())) => {
                self.tell_discarded(io, inner.len_bytes);
                io.done_bytes += inner.len_bytes;
                Next::Piece
            }
            Step::Pending => {
                self.active.put(slot, Active::File { io: inner, file, _piece: piece });
                Next::Step(Step::Pending)
            }
            step => Next::Step(step),
        }
    }

    /// Tells the thread of the disk that the next piece was punched out of the file.
    fn tell_discarded(&self, io: &Io, len: u64) {
        let punches = matches!(io.kind, IoKind::Discard | IoKind::WriteZeroes { unmap: true });
        if punches && self.limits.unmaps {
            self.user.tell_discarded(io.offset_bytes + io.done_bytes, len);
        }
    }

    fn with_file(
        &mut self,
        file: usize,
        engine: &mut dyn Engine,
        act: impl FnOnce(&mut dyn Lane, &mut dyn Engine) -> Step,
    ) -> Step {
        let FileLane { lane, first_file } = &mut self.files[file];
        act(&mut **lane, &mut Shifted { engine, first_file: *first_file, layer: file as u8 })
    }

    /// Sends the question of the next piece to the thread of the disk.
    fn ask(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        let at = io.offset_bytes + io.done_bytes;
        let len = io.len_bytes - io.done_bytes;
        let question = match io.kind {
            IoKind::Write if !self.limits.has_backing => Question::Place(at, len),
            IoKind::Write => Self::write_question(io),
            IoKind::Discard => Question::Discard(at, len),
            IoKind::WriteZeroes { .. } => Question::Zero(at, len),
            _ => Question::Read(at, len),
        };
        self.send(question, slot, engine)
    }

    /// The question of the next piece of a write, with its data.
    fn write_question(io: &Io) -> Question {
        let len = io.len_bytes - io.done_bytes;
        let mut data = vec![0; len.min(COPY_MAX) as usize];
        io.bufs.copy_out(io.done_bytes, &mut data);
        Question::Write(io.offset_bytes + io.done_bytes, data)
    }

    fn send(&mut self, question: Question, slot: Slot, engine: &mut dyn Engine) -> Step {
        let remote = self.remote.get_or_insert_with(|| engine.remote()).clone();
        let token = Token { slot, layer: self.own_layer() };
        let window = self.window(&question);
        let reply = Reply { token, remote, window, answers: self.answers.0.clone() };
        if self.work.send(Work::Ask(question, reply)).is_err() {
            return Step::Done(Err(IoError::Errno(libc::EIO))); // the thread has panicked
        }
        self.user.asks();
        self.active.put(slot, Active::Asked);
        Step::Pending
    }

    /// The clusters whose places the answer to a question shall tell, too: the more the lane knows around it, the more
    /// of them. So an image in order costs few questions, and a single request of a large one little time.
    fn window(&mut self, question: &Question) -> Range<u64> {
        let (at, _) = question.range();
        let pages = self.extents.pages();
        let clusters = (pages.known(at) as u64 + WINDOW_MIN).next_power_of_two();
        let bytes = clusters.min(CLUSTERS) * self.limits.cluster_bytes;
        let start = at - at % bytes;
        let window = start..(start + bytes).min(self.limits.capacity_bytes);
        // The answer to a change tells them only if its own cluster has a place.
        match question.changes() || pages.asks(&window) {
            true => window,
            false => at..at,
        }
    }

    fn take_answer(&mut self, slot: Slot) -> Answer {
        for ToLane { slot, answer, others: (others, version) } in self.answers.1.try_iter() {
            self.early.put(slot, answer);
            for extent in others {
                self.extents.add(extent, version, self.user.versions());
            }
        }
        self.early.take(slot).unwrap_or(Answer::Failed(libc::EIO))
    }

    fn answered(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        match self.take_answer(slot) {
            Answer::Extent(extent, version) => {
                // One of an epoch before still serves this I/O, which holds its place.
                self.extents.add(extent, version, self.user.versions());
                if let Next::Step(step) = self.start_piece(extent, io, slot, engine) {
                    return step;
                }
            }
            Answer::Zero(len, extent, version) => {
                self.extents.add(extent, version, self.user.versions());
                zero(io, len);
            }
            Answer::Data(data) => {
                io.bufs.copy_in(io.done_bytes, &data);
                io.done_bytes += data.len() as u64;
            }
            Answer::Done(len) => io.done_bytes += len,
            Answer::NeedsData => return self.send(Self::write_question(io), slot, engine),
            Answer::Failed(errno) => return Step::Done(Err(IoError::Errno(errno))),
        }
        self.advance(io, slot, engine)
    }

    /// Continues the I/O after an event.
    fn continued(
        &mut self,
        io: &mut Io,
        token: Token,
        result: i32,
        engine: &mut dyn Engine,
    ) -> Step {
        let slot = token.slot;
        match self.active.take(slot) {
            Some(Active::Asked) => self.answered(io, slot, engine),
            Some(Active::File { io: mut inner, file, _piece }) => {
                let token = Token { slot, layer: 0 };
                let step = self.with_file(file, engine, |lane, engine| {
                    lane.event(&mut inner, token, result, engine)
                });
                match self.piece_step(step, inner, file, _piece, io, slot) {
                    Next::Step(step) => step,
                    Next::Piece => self.advance(io, slot, engine),
                }
            }
            Some(Active::Sync { io: mut inner, commits }) => {
                let token = Token { slot, layer: 0 };
                let step = self.with_file(0, engine, |lane, engine| {
                    lane.event(&mut inner, token, result, engine)
                });
                self.sync_step(step, inner, commits, slot)
            }
            None => Step::Done(Err(IoError::Errno(libc::EIO))), // a foreign event
        }
    }

    /// Makes the data and the tables durable, and ends the I/O.
    fn sync(&mut self, slot: Slot, engine: &mut dyn Engine) -> Step {
        let commits = self.user.versions().commits();
        let mut inner = Io::new(IoKind::Flush, 0, 0, backend::BufList::EMPTY);
        let step = self.with_file(0, engine, |lane, engine| lane.start(&mut inner, slot, engine));
        self.sync_step(step, inner, commits, slot)
    }

    /// Takes the outcome of a sync that began when there were so many commits.
    fn sync_step(&mut self, step: Step, inner: Io, commits: u64, slot: Slot) -> Step {
        match step {
            Step::Done(Ok(())) => self.user.versions().synced(commits),
            Step::Pending => self.active.put(slot, Active::Sync { io: inner, commits }),
            Step::Done(Err(_)) => {}
        }
        step
    }
}

impl Lane for Qcow2Lane {
    fn files(&self) -> Vec<RawFd> {
        self.files.iter().flat_map(|file| file.lane.files()).collect()
    }

    fn moves_data_itself(&self) -> bool {
        self.files[0].lane.moves_data_itself()
    }

    fn start(&mut self, io: &mut Io, slot: Slot, engine: &mut dyn Engine) -> Step {
        if let Err(why) = self.check(io) {
            return Step::Done(Err(why));
        }
        if io.kind == IoKind::Flush {
            return self.sync(slot, engine);
        }
        let epoch = self.user.enter();
        let step = self.advance(io, slot, engine);
        match step {
            Step::Pending => self.epochs.put(slot, epoch),
            _ => self.user.leave(epoch),
        }
        step
    }

    fn event(&mut self, io: &mut Io, token: Token, result: i32, engine: &mut dyn Engine) -> Step {
        let step = self.continued(io, token, result, engine);
        if step != Step::Pending
            && let Some(epoch) = self.epochs.take(token.slot)
        {
            self.user.leave(epoch);
        }
        step
    }
}
