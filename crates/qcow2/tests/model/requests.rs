// SPDX-License-Identifier: Apache-2.0
//! Requests of lanes, alone and at once.

use crate::common::{PATIENCE, rig};
use crate::steps::{Part, Request, Step};
use crate::world::{World, stamped};
use backend::conformance::Request as LaneRequest;
use backend::{Disk, IoKind};
use qcow2::Qcow2Disk;
use std::thread;

/// Threads of [`Step::Threads`], and the pieces of which each has every third.
const THREADS: u64 = 3;
const PIECE: u64 = 4 << 10;
/// Requests of a thread.
const ROUNDS: u64 = 12;
/// Pieces of a request at most.
const PIECES_MAX: u64 = 12;

impl World {
    /// Carries a step out, and compares the content.
    pub(crate) fn carry_out(&mut self, step: &Step) {
        match step {
            Step::Request(lane, request, part) => self.request(*lane, request, *part),
            Step::Together(lane, byte, parts) => self.together(*lane, *byte, parts),
            Step::Threads(seed) => self.threads(*seed),
            Step::Flush(lane) => {
                let flushed = self.rigs[*lane].run(&mut LaneRequest::command(IoKind::Flush, 0, 0));
                assert_eq!(flushed, Ok(()));
            }
            Step::Grow(sectors) => self.grow(sectors * 512),
            Step::Unmap => {
                self.disk().unmap_discarded(PATIENCE).expect("the clusters leave");
                self.compare(0..self.model.len() as u64);
            }
            Step::Kill => self.kill(),
            Step::Reopen => self.reopen(),
            Step::Snapshot(format, is_ours) => self.snapshot(*format, *is_ours),
            Step::Commit(kib, requests) => self.commit(kib << 10, requests),
            Step::CommitByQemu => self.commit_by_qemu(),
            Step::ByQemu(commands) => self.by_qemu(commands),
        }
    }

    /// One request. A discard may leave a sector as it is, or zero it.
    pub(crate) fn request(&mut self, lane: usize, request: &Request, part: Part) {
        let range = self.range(part);
        let (at, len) = (range.start, range.end - range.start);
        let (rig, bytes) = (&mut self.rigs[lane], at as usize..range.end as usize);
        let mut run = |request: &mut LaneRequest| {
            assert_eq!(rig.run(request), Ok(()), "{len} bytes at {at}");
        };
        let write = |byte| {
            let data = stamped(byte, at, len);
            (LaneRequest::write(at, &data, &[data.len()], 0), data)
        };
        match request {
            Request::Write(byte) => {
                let (mut write, data) = write(*byte);
                run(&mut write);
                self.model[bytes].copy_from_slice(&data);
            }
            Request::WriteThrough(byte) => {
                let (write, data) = write(*byte);
                run(&mut write.durable());
                self.model[bytes].copy_from_slice(&data);
            }
            Request::Zero(unmap) => {
                run(&mut LaneRequest::command(IoKind::WriteZeroes { unmap: *unmap }, at, len));
                self.model[bytes].fill(0);
            }
            Request::Discard => {
                run(&mut LaneRequest::command(IoKind::Discard, at, len));
                let found = rig.read(at, len as usize);
                discarded(&found, &mut self.model[bytes]);
            }
        }
        self.compare(range);
    }

    /// Writes of parts that do not overlap: each begins behind the one before.
    fn together(&mut self, lane: usize, byte: u8, parts: &[Part]) {
        let (mut from, mut requests) = (0, Vec::new());
        for (number, part) in (0..).zip(parts) {
            let mut range = self.range(*part);
            range.start = range.start.max(from);
            if range.is_empty() {
                continue;
            }
            from = range.end;
            let data = stamped(byte.wrapping_add(number), range.start, range.end - range.start);
            self.model[range.start as usize..range.end as usize].copy_from_slice(&data);
            requests.push(LaneRequest::write(range.start, &data, &[data.len()], 0));
        }
        let ended = self.rigs[lane].run_all(&mut requests);
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
        self.compare(0..self.model.len() as u64);
    }

    fn threads(&mut self, seed: u64) {
        let (disk, model) = (self.disk().clone(), &self.model);
        let changed: Vec<_> = thread::scope(|scope| {
            let work = |thread| {
                scope.spawn({
                    let disk = &disk;
                    move || load(disk, model, thread, seed)
                })
            };
            let running: Vec<_> = (0..THREADS).map(work).collect();
            running.into_iter().map(|thread| thread.join().expect("a good end")).collect()
        });
        for (thread, content) in (0..).zip(changed) {
            for at in own_pieces(thread, self.model.len()) {
                let piece = at..(at + PIECE as usize).min(content.len());
                self.model[piece.clone()].copy_from_slice(&content[piece]);
            }
        }
        drop(disk);
        self.compare(0..self.model.len() as u64);
    }

    fn grow(&mut self, bytes: u64) {
        let size = self.model.len() as u64 + bytes;
        self.disk().resize(Some(size)).expect("it grows");
        self.model.resize(size as usize, 0);
        // A lane keeps its size.
        self.rigs = (0..self.rigs.len()).map(|_| rig(self.disk())).collect();
        self.compare(size - bytes..size);
    }
}

/// The sectors that a discard has left are the content from now on.
pub(crate) fn discarded(found: &[u8], model: &mut [u8]) {
    for (sector, old) in found.chunks(512).zip(model.chunks(512)) {
        assert!(sector == old || sector.iter().all(|byte| *byte == 0), "another content");
    }
    model.copy_from_slice(found);
}

/// The whole pieces of a thread, by their positions.
fn own_pieces(thread: u64, len: usize) -> impl Iterator<Item = usize> {
    let pieces = len as u64 / PIECE;
    (0..pieces).filter(move |piece| piece % THREADS == thread).map(|piece| (piece * PIECE) as usize)
}

/// Requests of a thread on its pieces. Returns the disk with its changes.
fn load(disk: &Qcow2Disk, model: &[u8], thread: u64, seed: u64) -> Vec<u8> {
    let (mut rig, mut content) = (rig(disk), model.to_vec());
    let mut numbers = fastrand::Rng::with_seed(seed ^ thread);
    for _ in 0..ROUNDS {
        let from = numbers.u64(..content.len() as u64 / PIECE);
        let (count, kind, byte) = (numbers.u64(1..=PIECES_MAX), numbers.u8(..6), numbers.u8(1..));
        let pieces: Vec<usize> = own_pieces(thread, content.len())
            .skip((from / THREADS) as usize)
            .take(count as usize)
            .collect();
        for at in pieces {
            let (range, place) = (at..at + PIECE as usize, at as u64);
            let zeroes = IoKind::WriteZeroes { unmap: kind == 3 };
            match kind {
                0..3 => {
                    let data = stamped(byte, place, PIECE);
                    rig.write(place, &data);
                    content[range.clone()].copy_from_slice(&data);
                }
                3 | 4 => {
                    assert_eq!(rig.run(&mut LaneRequest::command(zeroes, place, PIECE)), Ok(()));
                    content[range.clone()].fill(0);
                }
                _ => {
                    let mut discard = LaneRequest::command(IoKind::Discard, place, PIECE);
                    assert_eq!(rig.run(&mut discard), Ok(()));
                    let found = rig.read(place, PIECE as usize);
                    discarded(&found, &mut content[range.clone()]);
                }
            }
            assert!(rig.read(place, PIECE as usize) == content[range], "thread {thread}: {at}");
        }
    }
    content
}
