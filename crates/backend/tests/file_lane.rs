// SPDX-License-Identifier: Apache-2.0
//! Which ops a file's lane asks for, and what it makes of each result; the test is the kernel.

mod common;

use backend::conformance::{ManualEngine, Memory};
use backend::{
    BufList, Disk, File, FileIndex, FileOptions, Io, IoError, IoKind, Lane, Op, Slot, Step, Token,
};
use common::{DISK, Image, TMPFS, loop_device};
use std::fs;
use std::path::Path;

const FAILED: fn(i32) -> Step = |errno| Step::Done(Err(IoError::Errno(errno)));
const FINE: Step = Step::Done(Ok(()));

struct Bench {
    disk: File,
    lane: Box<dyn Lane>,
    engine: ManualEngine,
    _image: Image,
}

fn bench() -> Bench {
    bench_with(FileOptions::default())
}

fn bench_with(options: FileOptions) -> Bench {
    let image = Image::new(DISK, 16 << 20).expect("an image can be made");
    let disk = File::open(&image.path, options).expect("the image opens");
    assert!(!disk.fell_back_from_direct(), "the build directory's file system has O_DIRECT");
    let lane = disk.open_lane().expect("the lane opens");
    Bench { disk, lane, engine: ManualEngine::new(), _image: image }
}

impl Bench {
    fn start(&mut self, io: &mut Io) -> Step {
        self.lane.start(io, Slot(3), &mut self.engine)
    }

    /// Starts an io that has to push exactly one op.
    fn started(&mut self, io: &mut Io) -> Op {
        assert_eq!(self.start(io), Step::Pending);
        self.next_op()
    }

    fn next_op(&mut self) -> Op {
        let (op, token) = self.engine.take_one();
        assert_eq!(token, Token { slot: Slot(3), layer: 0 });
        op
    }

    fn event(&mut self, io: &mut Io, result: i32) -> Step {
        let token = Token { slot: Slot(3), layer: 0 };
        self.lane.event(io, token, result, &mut self.engine)
    }

    /// An event after which exactly one more op is pushed.
    fn continued(&mut self, io: &mut Io, result: i32) -> Op {
        assert_eq!(self.event(io, result), Step::Pending, "after {result}");
        self.next_op()
    }
}

fn command(kind: IoKind, len: u64) -> Io {
    Io::new(kind, 4096, len, BufList::EMPTY)
}

/// Offset and length of a read or write of file 0.
fn transfer(op: Op) -> (u64, u64) {
    match op {
        Op::Read { file: FileIndex(0), bufs, offset }
        | Op::Write { file: FileIndex(0), bufs, offset, .. } => (offset, bufs.total_bytes()),
        op => panic!("not a transfer of file 0: {op:?}"),
    }
}

fn mode_of(op: Op) -> i32 {
    match op {
        Op::Fallocate { file: FileIndex(0), mode, offset: 4096, len: 8192 } => mode,
        op => panic!("not a fallocate of the range: {op:?}"),
    }
}

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// A lane's file for its syncs, behind the file itself and the one for its tail.
const SYNCED: FileIndex = FileIndex(2);

fn is_sync(op: Op) -> bool {
    matches!(op, Op::Fdatasync { file } if file == SYNCED)
}

#[test]
fn a_lane_names_all_files_that_its_ops_use() {
    assert_eq!(bench().lane.files().len(), SYNCED.0 as usize + 1);
}

#[test]
fn a_short_transfer_goes_on_where_it_ended() {
    for kind in [IoKind::Read, IoKind::Write] {
        let (mut bench, mut memory) = (bench(), Memory::new(&[4096, 4096], 0));
        let mut io = Io::new(kind, 4096, 8192, memory.bufs());
        let second = io.bufs.iovs()[1].iov_base as usize;
        assert_eq!(transfer(bench.started(&mut io)), (4096, 8192));
        assert_eq!(transfer(bench.continued(&mut io, 512)), (4608, 7680));
        let op = bench.continued(&mut io, 4608);
        assert_eq!(transfer(op), (9216, 3072));
        let (Op::Read { bufs, .. } | Op::Write { bufs, .. }) = op else { unreachable!() };
        assert_eq!(bufs.iovs()[0].iov_base as usize, second + 1024);
        assert_eq!(bench.event(&mut io, 3072), FINE);
    }
}

#[test]
fn a_direct_transfer_that_ends_inside_a_block_goes_on_at_the_block() {
    let (mut bench, mut memory) = (bench(), Memory::new(&[4096], 0));
    let mut io = Io::new(IoKind::Read, 0, 4096, memory.bufs());
    bench.started(&mut io);
    assert_eq!(transfer(bench.continued(&mut io, 1000)), (512, 3584));
    assert_eq!(bench.event(&mut io, 100), Step::Done(Err(IoError::EndOfStorage)));
}

#[test]
fn nothing_read_is_the_end_and_nothing_written_an_error() {
    for (kind, wanted) in
        [(IoKind::Read, Step::Done(Err(IoError::EndOfStorage))), (IoKind::Write, FAILED(libc::EIO))]
    {
        let (mut bench, mut memory) = (bench(), Memory::new(&[512], 0));
        let mut io = Io::new(kind, 0, 512, memory.bufs());
        bench.started(&mut io);
        assert_eq!(bench.event(&mut io, 0), wanted);
    }
}

#[test]
fn interruptions_are_retried_with_a_bound() {
    for errno in [libc::EINTR, libc::EAGAIN, libc::ECANCELED] {
        let (mut bench, mut memory) = (bench(), Memory::new(&[1024], 0));
        let mut io = Io::new(IoKind::Write, 512, 1024, memory.bufs());
        bench.started(&mut io);
        for _ in 0..15 {
            assert_eq!(transfer(bench.continued(&mut io, -errno)), (512, 1024));
        }
        // Progress starts the count anew.
        assert_eq!(transfer(bench.continued(&mut io, 512)), (1024, 512));
        for _ in 0..15 {
            assert_eq!(transfer(bench.continued(&mut io, -errno)), (1024, 512));
        }
        assert_eq!(bench.event(&mut io, -errno), FAILED(errno));
    }
}

#[test]
fn an_error_ends_the_io_with_its_errno() {
    let kinds = [IoKind::Flush, IoKind::Discard, IoKind::WriteZeroes { unmap: true }];
    for kind in kinds {
        let mut bench = bench();
        let mut io = command(kind, if kind == IoKind::Flush { 0 } else { 8192 });
        bench.started(&mut io);
        assert_eq!(bench.event(&mut io, -libc::ENOSPC), FAILED(libc::ENOSPC), "{kind:?}");
    }
}

#[test]
fn flush_is_one_fdatasync() {
    let mut bench = bench();
    let mut io = command(IoKind::Flush, 0);
    let op = bench.started(&mut io);
    assert!(is_sync(op), "{op:?}");
    assert_eq!(bench.event(&mut io, 0), FINE);
}

#[test]
fn a_failed_sync_is_never_forgotten_on_any_lane() {
    let mut bench = bench();
    let mut other = bench.disk.open_lane().expect("the lane opens");
    let mut running = command(IoKind::Flush, 0);
    assert_eq!(other.start(&mut running, Slot(1), &mut bench.engine), Step::Pending);
    let (_, token) = bench.engine.take_one();
    let mut failing = command(IoKind::Flush, 0);
    assert!(is_sync(bench.started(&mut failing)));
    assert_ne!(bench.lane.files()[2], other.files()[2], "each open file gets the error once");
    assert_eq!(bench.event(&mut failing, -libc::EIO), FAILED(libc::EIO));
    // The kernel reported success for one that ran meanwhile, which does not count.
    assert_eq!(other.event(&mut running, token, 0, &mut bench.engine), FAILED(libc::EIO));
    for _ in 0..2 {
        let mut again = command(IoKind::Flush, 0);
        assert_eq!(other.start(&mut again, Slot(1), &mut bench.engine), FAILED(libc::EIO));
        assert_eq!(bench.start(&mut command(IoKind::Flush, 0)), FAILED(libc::EIO));
    }
    assert!(bench.engine.pushed.is_empty(), "no sync is tried any more");
    assert!(bench.disk.kernel_file().is_err(), "the kernel's data plane would forget it");
    let mut memory = Memory::new(&[512], 0);
    let mut write = Io::new(IoKind::Write, 0, 512, memory.bufs());
    bench.started(&mut write);
    assert_eq!(bench.event(&mut write, 512), FINE);
}

#[test]
fn a_failed_sync_of_a_write_through_command_is_remembered_too() {
    let zeroes = IoKind::WriteZeroes { unmap: false };
    let mut bench_of_zeroes = bench();
    let mut io = Io { durable: true, ..command(zeroes, 8192) };
    bench_of_zeroes.started(&mut io);
    bench_of_zeroes.continued(&mut io, 0);
    assert_eq!(bench_of_zeroes.event(&mut io, -libc::EIO), FAILED(libc::EIO));
    assert_eq!(bench_of_zeroes.start(&mut command(IoKind::Flush, 0)), FAILED(libc::EIO));
    // Without space nothing was sent to the storage, so nothing that was there is lost.
    for (errno, flushes) in [(libc::EIO, false), (libc::ENOSPC, true)] {
        let (mut bench, mut memory) = (bench(), Memory::new(&[512], 0));
        let mut io = Io { durable: true, ..Io::new(IoKind::Write, 0, 512, memory.bufs()) };
        bench.started(&mut io);
        assert_eq!(bench.event(&mut io, -errno), FAILED(errno));
        let flush = bench.start(&mut command(IoKind::Flush, 0));
        assert_eq!(flush, if flushes { Step::Pending } else { FAILED(errno) });
    }
}

#[test]
fn a_write_through_write_of_the_page_cache_is_a_write_and_a_sync() {
    let mut bench = bench_with(FileOptions { direct: false, ..FileOptions::default() });
    let mut memory = Memory::new(&[512], 0);
    let mut io = Io { durable: true, ..Io::new(IoKind::Write, 0, 512, memory.bufs()) };
    let op = bench.started(&mut io);
    assert!(matches!(op, Op::Write { dsync: false, .. }), "{op:?}");
    let op = bench.continued(&mut io, 512);
    assert!(is_sync(op), "{op:?}");
    assert_eq!(bench.event(&mut io, -libc::ENOSPC), FAILED(libc::ENOSPC));
    assert_eq!(bench.start(&mut command(IoKind::Flush, 0)), FAILED(libc::ENOSPC));
}

/// Starts a FLUSH, and more that wait. Returns the running one, and the others.
fn flushes_that_wait(bench: &mut Bench, slots: &[u32]) -> (Io, Vec<(Io, Slot)>) {
    let mut running = command(IoKind::Flush, 0);
    bench.started(&mut running);
    let wait = |&slot: &u32| {
        let mut io = command(IoKind::Flush, 0);
        assert_eq!(bench.lane.start(&mut io, Slot(slot), &mut bench.engine), Step::Pending);
        assert!(bench.engine.pushed.is_empty(), "it waits for an event, not for a time");
        (io, Slot(slot))
    };
    let waiting = slots.iter().map(wait).collect();
    (running, waiting)
}

#[test]
fn one_sync_is_for_all_that_came_after_the_start_of_the_running_one() {
    let mut bench = bench();
    let (mut running, mut waiting) = flushes_that_wait(&mut bench, &[20, 10, 30]);
    assert_eq!(bench.event(&mut running, 0), FINE);
    let (op, token) = bench.engine.take_one();
    assert!(is_sync(op), "{op:?}");
    assert_eq!(token, Token { slot: Slot(20), layer: 0 });
    // The running sync may not cover the data of this one.
    let mut late = command(IoKind::Flush, 0);
    assert_eq!(bench.lane.start(&mut late, Slot(40), &mut bench.engine), Step::Pending);
    let step = bench.lane.event(&mut waiting[0].0, token, -libc::EINTR, &mut bench.engine);
    assert_eq!((step, bench.engine.take_one().1), (Step::Pending, token), "it is repeated");
    assert_eq!(bench.lane.event(&mut waiting[0].0, token, 0, &mut bench.engine), FINE);
    // It has completed the others, and made room for the late one.
    let pushed = std::mem::take(&mut bench.engine.pushed);
    let slots: Vec<Slot> = pushed.iter().map(|(_, token)| token.slot).collect();
    assert_eq!(slots, [Slot(10), Slot(30), Slot(40)]);
    for ((io, slot), (op, token)) in waiting[1..].iter_mut().zip(&pushed) {
        assert!(matches!(op, Op::Nop) && *slot == token.slot, "{op:?}");
        assert_eq!(bench.lane.event(io, *token, 0, &mut bench.engine), FINE);
    }
    let (op, token) = pushed[2];
    assert!(is_sync(op), "{op:?}");
    assert_eq!(bench.lane.event(&mut late, token, 0, &mut bench.engine), FINE);
    assert!(bench.engine.pushed.is_empty());
    // The next one runs at once, and another one waits again.
    flushes_that_wait(&mut bench, &[50]);
}

#[test]
fn a_sync_that_fails_fails_for_all_that_it_was_for() {
    let mut bench = bench();
    let (mut running, mut waiting) = flushes_that_wait(&mut bench, &[10, 20]);
    assert_eq!(bench.event(&mut running, 0), FINE);
    let (_, token) = bench.engine.take_one();
    let step = bench.lane.event(&mut waiting[0].0, token, -libc::EIO, &mut bench.engine);
    assert_eq!(step, FAILED(libc::EIO));
    let (_, token) = bench.engine.take_one();
    assert_eq!(token.slot, Slot(20));
    let step = bench.lane.event(&mut waiting[1].0, token, 0, &mut bench.engine);
    assert_eq!(step, FAILED(libc::EIO));
}

#[test]
fn only_a_durable_write_is_synchronous() {
    for (durable, misalign) in [(false, 0), (true, 0), (false, 1), (true, 1)] {
        let (mut bench, mut memory) = (bench(), Memory::new(&[512], misalign));
        let mut io = Io { durable, ..Io::new(IoKind::Write, 0, 512, memory.bufs()) };
        let op = bench.started(&mut io);
        assert!(matches!(op, Op::Write { dsync, .. } if dsync == durable), "{op:?}");
        assert_eq!(bench.event(&mut io, 512), FINE);
    }
}

#[test]
fn a_durable_zeroing_syncs_after_it() {
    for kind in [IoKind::WriteZeroes { unmap: true }, IoKind::WriteZeroes { unmap: false }] {
        let mut bench = bench();
        let mut io = Io { durable: true, ..command(kind, 8192) };
        bench.started(&mut io);
        let op = bench.continued(&mut io, 0);
        assert!(is_sync(op), "{op:?}");
        assert_eq!(bench.event(&mut io, 0), FINE);
    }
}

#[test]
fn zeroing_falls_back_to_what_the_file_system_knows_and_remembers() {
    let mut bench = bench();
    let mut io = Io { durable: true, ..command(IoKind::WriteZeroes { unmap: true }, 8192) };
    assert_eq!(mode_of(bench.started(&mut io)), PUNCH);
    assert_eq!(mode_of(bench.continued(&mut io, -libc::EOPNOTSUPP)), ZERO);
    let op = bench.continued(&mut io, -libc::EOPNOTSUPP);
    assert!(matches!(op, Op::Write { dsync: true, .. }), "{op:?}");
    assert_eq!(transfer(op), (4096, 8192));
    assert_eq!(transfer(bench.continued(&mut io, 1024)), (5120, 7168));
    assert_eq!(bench.event(&mut io, 7168), FINE);
    let mut again = command(IoKind::WriteZeroes { unmap: true }, 8192);
    assert_eq!(transfer(bench.started(&mut again)), (4096, 8192));
}

#[test]
fn zeroes_are_written_in_parts_of_4_mib_at_most() {
    let mut bench = bench();
    let len = (9 << 20) + 512;
    let mut io = command(IoKind::WriteZeroes { unmap: false }, len);
    bench.started(&mut io);
    let mut op = bench.continued(&mut io, -libc::EOPNOTSUPP);
    let mut parts = Vec::new();
    loop {
        let (offset, part) = transfer(op);
        parts.push((offset - 4096, part));
        assert!(op_is_all_zero(op));
        if offset - 4096 + part == len {
            break;
        }
        op = bench.continued(&mut io, part as i32);
    }
    let mib = 1 << 20;
    assert_eq!(parts, [(0, 4 * mib), (4 * mib, 4 * mib), (8 * mib, mib), (9 * mib, 512)]);
}

fn op_is_all_zero(op: Op) -> bool {
    let Op::Write { bufs, .. } = op else { return false };
    let mut bytes = vec![1; bufs.total_bytes() as usize];
    bufs.copy_out(0, &mut bytes) == bytes.len() && bytes.iter().all(|byte| *byte == 0)
}

#[test]
fn discard_that_the_file_system_does_not_know_is_unsupported() {
    let mut bench = bench();
    let mut io = command(IoKind::Discard, 8192);
    assert_eq!(mode_of(bench.started(&mut io)), PUNCH);
    assert_eq!(bench.event(&mut io, -libc::EOPNOTSUPP), Step::Done(Err(IoError::Unsupported)));
}

#[test]
fn ios_that_find_no_bounce_buffer_get_one_in_their_order() {
    let Bench { mut lane, mut engine, .. } = bench();
    let mut memories: Vec<Memory> = (0..12).map(|_| Memory::new(&[1, 511], 0)).collect();
    let read = |memory: &mut Memory| Io::new(IoKind::Read, 0, 512, memory.bufs());
    let mut ios: Vec<Io> = memories.iter_mut().map(read).collect();
    let token = |n: usize| Token { slot: Slot(n as u32), layer: 0 };
    for (n, io) in ios[..10].iter_mut().enumerate() {
        assert_eq!(lane.start(io, Slot(n as u32), &mut engine), Step::Pending);
    }
    let began: Vec<Token> = engine.pushed.drain(..).map(|(_, token)| token).collect();
    assert_eq!(began, [0, 1, 2, 3].map(token), "four buffers");
    // Results that end an io well and badly.
    for (n, result) in [512, 0, -libc::EIO, 512, 512, 0].into_iter().enumerate() {
        assert!(matches!(lane.event(&mut ios[n], token(n), result, &mut engine), Step::Done(_)));
        let (op, next) = engine.take_one();
        assert!(matches!(op, Op::Nop) && next == token(n + 4), "{op:?} for {next:?}");
        if n == 0 {
            // The free buffer is that of another io.
            assert_eq!(lane.start(&mut ios[10], Slot(10), &mut engine), Step::Pending);
            assert!(engine.pushed.is_empty());
        }
        assert_eq!(lane.event(&mut ios[n + 4], next, 0, &mut engine), Step::Pending);
        assert!(matches!(engine.take_one(), (Op::Read { .. }, read) if read == next));
    }
    let mut aligned = Memory::new(&[512], 0);
    let mut io = Io::new(IoKind::Read, 0, 512, aligned.bufs());
    assert_eq!(lane.start(&mut io, Slot(11), &mut engine), Step::Pending);
    assert!(matches!(engine.take_one(), (Op::Read { .. }, read) if read == token(11)));
}

#[test]
fn a_large_unaligned_transfer_goes_through_one_buffer_in_parts() {
    let (mut bench, mut memory) = (bench(), Memory::new(&[(600 << 10) - 1, 1], 0));
    let mut io = Io::new(IoKind::Write, 0, 600 << 10, memory.bufs());
    let part = 256 << 10;
    assert_eq!(transfer(bench.started(&mut io)), (0, part));
    assert_eq!(transfer(bench.continued(&mut io, part as i32)), (part, part));
    assert_eq!(transfer(bench.continued(&mut io, part as i32)), (2 * part, 88 << 10));
    assert_eq!(bench.event(&mut io, 88 << 10), FINE);
}

#[test]
fn a_flush_of_a_file_in_memory_needs_no_kernel_thread() {
    let image = Image::new(TMPFS, 16 << 20).expect("an image can be made");
    let file = File::open(&image.path, FileOptions::default()).expect("the image opens");
    let (mut lane, mut engine) = (file.open_lane().expect("the lane opens"), ManualEngine::new());
    assert_eq!(lane.start(&mut command(IoKind::Flush, 0), Slot(3), &mut engine), FINE);
    assert!(engine.pushed.is_empty());
}

#[test]
fn a_flush_of_a_write_through_device_needs_no_kernel_thread() {
    let device = match loop_device(16 << 20, &[]) {
        Ok(device) => device,
        Err(reason) => return println!("SKIP: {reason}"),
    };
    let name = device.path.file_name().expect("a device has a name");
    let cache = Path::new("/sys/block").join(name).join("queue/write_cache");
    let file = File::open(&device.path, FileOptions::default()).expect("the device opens");
    let (mut lane, mut engine) = (file.open_lane().expect("the lane opens"), ManualEngine::new());
    for (kind, at_once) in [("write through", true), ("write back", false), ("write through", true)]
    {
        fs::write(&cache, kind).expect("the kind of the cache can be set");
        let mut io = command(IoKind::Flush, 0);
        let step = lane.start(&mut io, Slot(3), &mut engine);
        assert_eq!(step, if at_once { FINE } else { Step::Pending }, "{kind}");
        if !at_once {
            let (op, token) = engine.take_one();
            assert!(is_sync(op), "{op:?}");
            assert_eq!(lane.event(&mut io, token, 0, &mut engine), FINE);
        }
        let opened = File::open(&device.path, FileOptions::default()).expect("it opens again");
        assert_eq!(opened.info().volatile_cache, !at_once, "{kind}");
    }
}

#[test]
fn transfers_of_a_file_in_memory_run_at_once_up_to_a_bound() {
    let image = Image::new(TMPFS, 16 << 20).expect("an image can be made");
    let file = File::open(&image.path, FileOptions::default()).expect("the image opens");
    let (mut lane, mut engine) = (file.open_lane().expect("the lane opens"), ManualEngine::new());
    // Four system calls of 1024 segments copy 2 MiB.
    let mut memory = Memory::new(&[512; 4 * 1024 + 1], 0);
    for (segments, wanted) in [(1024, FINE), (4 * 1024, FINE), (4 * 1024 + 1, Step::Pending)] {
        let bufs = memory.bufs().first(segments);
        let mut io = Io::new(IoKind::Write, 0, u64::from(segments) * 512, bufs);
        assert_eq!(lane.start(&mut io, Slot(3), &mut engine), wanted, "{segments}");
        if wanted == Step::Pending {
            let (op, token) = engine.take_one();
            assert_eq!(transfer(op), (4 * 1024 * 512, 512));
            assert_eq!(lane.event(&mut io, token, 512, &mut engine), FINE);
        }
    }
}
