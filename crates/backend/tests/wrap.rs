// SPDX-License-Identifier: Apache-2.0
//! Wrappers pass the suite around other disks, and do what they are for.

mod common;

use backend::conformance::{ManualEngine, Memory, Request, Rig, Target};
use backend::wrap::{Delay, Growth, Limit, OpSet, Rates, Record, Track, Written, from_spec};
use backend::{
    BufList, Disk, File, FileOptions, Io, IoError, IoKind, Mem, Op, Slot, Step, conformance,
};
use common::{DISK, Image};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 16 << 20;

fn mem() -> Arc<dyn Disk> {
    Arc::new(Mem::new(SIZE).unwrap())
}

fn wrapped(spec: &str, inner: Arc<dyn Disk>) -> Arc<dyn Disk> {
    from_spec(spec, inner).unwrap_or_else(|why| panic!("{spec}: {why}"))
}

fn around_mem(spec: &str) -> Result<Target, String> {
    Ok(Target::of(wrapped(spec, mem())))
}

/// Around a disk whose I/Os wait for bounce buffers at times.
fn around_direct_file(spec: &str) -> Result<Target, String> {
    let image = Image::new(DISK, SIZE)?;
    let file = File::open(&image.path, FileOptions::default()).expect("the image opens");
    Ok(Target::of(wrapped(spec, Arc::new(file))).keeping(image))
}

const LIMIT: &str = "limit:iops=100000,mbps=5000,burst-ms=1";
/// A rule that chooses ios and fails none of those that the suite sends.
const FAULT: &str = "fault:every=1000000000";

conformance!(delay_around_mem, around_mem("delay:us=20"));
conformance!(delay_around_file, around_direct_file("delay:us=20,ops=read+write"));
conformance!(fault_around_mem, around_mem(FAULT));
conformance!(fault_around_file, around_direct_file(FAULT));
conformance!(limit_around_mem, around_mem(LIMIT));
conformance!(limit_around_file, around_direct_file(LIMIT));
conformance!(record_around_mem, Ok(Target::new(Record::in_memory(mem()))));
conformance!(record_around_file, around_direct_file("record:path=/dev/null"));
conformance!(track_around_mem, Ok(Target::new(tracked(mem()).0)));
conformance!(all_wrappers_around_file, {
    around_direct_file("delay:us=20").map(|target| {
        let disk = wrapped(LIMIT, wrapped("record:path=/dev/null", wrapped(FAULT, target.disk)));
        Target { disk, ..target }
    })
});

/// A disk whose changes are noted twice.
fn tracked(inner: Arc<dyn Disk>) -> (Track, [Arc<Written>; 2]) {
    let noted = [SIZE, SIZE].map(|bytes| Arc::new(Written::new(bytes)));
    (Track::new(inner, noted.to_vec(), Growth::Allowed), noted)
}

fn command(kind: IoKind) -> Io {
    let len = if kind == IoKind::Flush { 0 } else { 512 };
    Io::new(kind, 0, len, BufList::EMPTY)
}

fn timer(engine: &mut ManualEngine) -> (Duration, backend::Token) {
    match engine.take_one() {
        (Op::Timer { delay }, token) => (delay, token),
        (op, _) => panic!("not a timer: {op:?}"),
    }
}

#[test]
fn delay_ends_chosen_ios_only_when_the_timer_has_run() {
    let disk = Delay::new(mem(), Duration::from_micros(77), OpSet::parse("flush").unwrap());
    let (mut lane, mut engine) = (disk.open_lane().unwrap(), ManualEngine::new());
    let mut discard = command(IoKind::Discard);
    assert_eq!(lane.start(&mut discard, Slot(0), &mut engine), Step::Done(Ok(())));
    let mut flush = command(IoKind::Flush);
    assert_eq!(lane.start(&mut flush, Slot(5), &mut engine), Step::Pending);
    let (delay, token) = timer(&mut engine);
    assert_eq!((delay, token.slot, token.layer), (Duration::from_micros(77), Slot(5), 1));
    assert_eq!(lane.event(&mut flush, token, 0, &mut engine), Step::Done(Ok(())));
}

#[test]
fn delay_keeps_the_error_of_the_inner_disk() {
    let failing = wrapped("fault:errno=ENOSPC", mem());
    let disk = wrapped("delay:us=5", failing);
    let (mut lane, mut engine) = (disk.open_lane().unwrap(), ManualEngine::new());
    let mut io = command(IoKind::Discard);
    assert_eq!(lane.start(&mut io, Slot(0), &mut engine), Step::Pending);
    let (_, token) = timer(&mut engine);
    assert_eq!(token.layer, 2, "mem is layer 0, fault layer 1");
    let failed = Step::Done(Err(IoError::Errno(libc::ENOSPC)));
    assert_eq!(lane.event(&mut io, token, 0, &mut engine), failed);
}

#[test]
fn fault_fails_ios_that_touch_its_sectors_and_writes_nothing() {
    let inner = mem();
    let target = Target::of(wrapped("fault:ops=write,sectors=8-15,errno=5", Arc::clone(&inner)));
    let mut rig = Rig::new(&target);
    let failed = Err(IoError::Errno(libc::EIO));
    let data = [7; 1024];
    for (sector, outcome) in [(6, Ok(())), (7, failed), (8, failed), (15, failed), (16, Ok(()))] {
        let mut write = Request::write(sector * 512, &data, &[1024], 0);
        assert_eq!(rig.run(&mut write), outcome, "sectors {sector} and {}", sector + 1);
    }
    let mut plain = Rig::new(&Target::of(inner));
    assert_eq!(plain.read(8 * 512, 8 * 512), [0; 8 * 512], "a failed write left data");
    assert_eq!(rig.read(8 * 512, 512), [0; 512], "reads do not fail");
}

#[test]
fn fault_fails_every_third_of_the_chosen_ios_over_all_lanes() {
    let target = Target::of(wrapped("fault:ops=flush,every=3", mem()));
    let mut lanes = [Rig::new(&target), Rig::new(&target)];
    let mut flush = |n: usize| lanes[n % 2].run(&mut Request::command(IoKind::Flush, 0, 0)).is_ok();
    let outcomes: Vec<bool> = (0..7).map(&mut flush).collect();
    assert_eq!(outcomes, [true, true, false, true, true, false, true]);
}

fn limit(ios: Option<u64>, bytes: Option<u64>) -> Limit {
    let (ios, bytes) = (ios.and_then(NonZeroU64::new), bytes.and_then(NonZeroU64::new));
    Limit::new(mem(), Rates { ios, bytes, burst: Duration::ZERO })
}

#[test]
fn limit_starts_ios_in_the_order_in_which_they_came_over_all_lanes() {
    let disk = wrapped("limit:iops=1,burst-ms=1", mem());
    let (mut one, mut other) = (disk.open_lane().unwrap(), disk.open_lane().unwrap());
    let mut engine = ManualEngine::new();
    let mut io = command(IoKind::Discard);
    assert_eq!(one.start(&mut io, Slot(0), &mut engine), Step::Done(Ok(())), "nothing to wait for");
    let mut before = Duration::ZERO;
    for n in 1..6 {
        let lane = if n % 2 == 0 { &mut one } else { &mut other };
        assert_eq!(lane.start(&mut io, Slot(n), &mut engine), Step::Pending);
        let (delay, token) = timer(&mut engine);
        assert!(delay > before && delay <= Duration::from_secs(n.into()), "io {n}: {delay:?}");
        assert_eq!(lane.event(&mut io, token, 0, &mut engine), Step::Done(Ok(())));
        before = delay;
    }
}

#[test]
fn limit_counts_the_bytes_of_reads_and_writes_only() {
    let disk = limit(None, Some(1));
    let (mut lane, mut engine) = (disk.open_lane().unwrap(), ManualEngine::new());
    let mut memory = Memory::new(&[512], 0);
    let mut read = Io::new(IoKind::Read, 0, 512, memory.bufs());
    assert_eq!(lane.start(&mut read, Slot(0), &mut engine), Step::Done(Ok(())));
    let mut discard = command(IoKind::Discard);
    for slot in [Slot(1), Slot(2)] {
        // It waits for its turn behind the read, but the next does not wait for it.
        assert_eq!(lane.start(&mut discard, slot, &mut engine), Step::Pending);
        assert!(timer(&mut engine).0 <= Duration::from_secs(512));
    }
}

#[test]
fn record_notes_starts_and_ends_in_order_with_a_checksum_of_what_is_written() {
    let record = Record::in_memory(wrapped("fault:ops=discard", mem()));
    let log = record.log();
    let mut rig = Rig::new(&Target::new(record));
    let mut data = [0; 1024];
    data[0] = b'a';
    let mut split = Request::write(1024, &data, &[1, 1022, 1], 3).durable();
    assert_eq!(rig.run(&mut split), Ok(()));
    assert!(rig.run(&mut Request::command(IoKind::Discard, 0, 512)).is_err());
    assert_eq!(rig.run(&mut Request::command(IoKind::Flush, 0, 0)), Ok(()));
    let fnv1a = |bytes: &[u8]| {
        let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
    };
    assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c, "the published vector");
    let sum = fnv1a(&data);
    let lines: Vec<String> = log.entries().iter().map(ToString::to_string).collect();
    let wanted = [
        format!("start 0 write sector=2 sectors=2 durable fnv1a={sum:016x}"),
        format!("end 0 write sector=2 sectors=2 durable fnv1a={sum:016x} ok"),
        "start 1 discard sector=0 sectors=1".into(),
        "end 1 discard sector=0 sectors=1 failed: storage error: Input/output error (os error 5)"
            .into(),
        "start 2 flush sector=0 sectors=0".into(),
        "end 2 flush sector=0 sectors=0 ok".into(),
    ];
    assert_eq!(lines, wanted);
}

#[test]
fn record_adds_lines_to_its_file() {
    let image = Image::new(DISK, 0).expect("a file can be made");
    let spec = format!("record:path={}", image.path.display());
    for _ in 0..2 {
        let mut rig = Rig::new(&Target::of(wrapped(&spec, mem())));
        assert_eq!(rig.run(&mut Request::command(IoKind::Flush, 0, 0)), Ok(()));
    }
    let once = "start 0 flush sector=0 sectors=0\nend 0 flush sector=0 sectors=0 ok\n";
    assert_eq!(std::fs::read_to_string(&image.path).unwrap(), once.repeat(2));
}

#[test]
fn record_keeps_serving_when_its_file_is_full_and_tells_the_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
    let record = Record::to_file(mem(), full);
    let log = record.log();
    let mut rig = Rig::new(&Target::new(record));
    assert_eq!(rig.run(&mut Request::command(IoKind::Flush, 0, 0)), Ok(()));
    let why = log.take_error().expect("the write failed");
    assert_eq!(why.raw_os_error(), Some(libc::ENOSPC));
}

#[test]
fn wrappers_add_a_layer_and_a_word_to_the_description() {
    let disk = wrapped("delay:us=1", wrapped("fault:every=9", wrapped("limit:iops=1", mem())));
    assert_eq!(disk.layers(), 4);
    assert_eq!(disk.info().description, "mem (lost at exit), limited, with faults, delayed");
    assert_eq!(disk.info().capacity_sectors, SIZE / 512);
}

#[test]
fn bad_specifications_say_what_to_write_instead() {
    let table = [
        ("dealy:us=1", "there is no wrapper `dealy`; known are delay, fault, limit and record"),
        ("", "there is no wrapper ``; known are delay, fault, limit and record"),
        ("delay", "wrapper delay: needs us=MICROSECONDS; add it"),
        ("delay:us=", "wrapper delay: us= is not a whole number from 1 to 3600000000 (an hour)"),
        ("delay:us=0", "wrapper delay: us=0 is not a whole number from 1 to 3600000000 (an hour)"),
        (
            "delay:us=99999999999999999999",
            "wrapper delay: us=99999999999999999999 is not a whole number from 1 to 3600000000 \
             (an hour)",
        ),
        ("delay:us=1,us=2", "wrapper delay: `us` is given twice; give it once"),
        ("delay:ms=1", "wrapper delay: there is no key `ms`; known are us and ops"),
        ("delay:us", "wrapper delay: `us` is not of the form KEY=VALUE; known keys are us and ops"),
        (
            "delay:us=1,ops=read+wirte",
            "wrapper delay: ops=read+wirte is not all, or read, write, flush, discard, \
             write-zeroes, secure-erase joined by +",
        ),
        (
            "fault:sectors=9-2",
            "wrapper fault: sectors=9-2 is not of the form FIRST-LAST, such as 0-7",
        ),
        ("fault:every=0", "wrapper fault: every=0 is not a whole number above 0"),
        (
            "fault:errno=EBLA",
            "wrapper fault: errno=EBLA is not EIO, ENOSPC, ETIMEDOUT, another errno or its number",
        ),
        ("limit:", "wrapper limit: needs iops=NUMBER or mbps=NUMBER; add it"),
        ("limit:mbps=x", "wrapper limit: mbps=x is not a whole number above 0"),
        ("record", "wrapper record: needs path=FILE; add it"),
        ("record:path=", "wrapper record: path= is not a path"),
        (
            "record:path=/dev/null/x",
            "wrapper record: cannot write /dev/null/x: Not a directory (os error 20); name a file \
             that this user may write",
        ),
    ];
    for (spec, wanted) in table {
        let Err(why) = from_spec(spec, mem()) else { panic!("`{spec}` was taken") };
        assert_eq!(why.to_string(), wanted, "{spec}");
    }
}

#[test]
fn wrappers_are_bounded() {
    let mut disk = mem();
    for n in 0..16 {
        disk = from_spec("delay:us=1", disk).unwrap_or_else(|why| panic!("wrapper {n}: {why}"));
    }
    let Err(why) = from_spec("delay:us=1", disk) else { panic!("17 wrappers were taken") };
    assert_eq!(why.to_string(), "more than 16 wrappers around one disk; use fewer");
}

#[test]
fn every_change_is_noted_in_each_of_the_notes_also_a_failed_one() {
    const PART: u64 = 64 << 10;
    let failing = wrapped("fault:ops=write,errno=EIO", mem());
    let (disk, noted) = tracked(failing);
    let (mut lane, mut engine) = (disk.open_lane().unwrap(), ManualEngine::new());
    let kinds = [
        IoKind::Read,
        IoKind::Flush,
        IoKind::Write,
        IoKind::Discard,
        IoKind::WriteZeroes { unmap: false },
        IoKind::WriteZeroes { unmap: true },
    ];
    for (at, kind) in (0..).step_by(2).zip(kinds) {
        let len = if kind == IoKind::Flush { 0 } else { 512 };
        let mut io = Io::new(kind, at * PART, len, BufList::EMPTY);
        let step = lane.start(&mut io, Slot(0), &mut engine);
        assert!(matches!(step, Step::Done(_)), "{kind:?}");
        assert_eq!(step == Step::Done(Ok(())), kind != IoKind::Write, "{kind:?}");
    }
    for written in noted {
        let parts = Vec::from_iter(written.take(u64::MAX));
        assert_eq!(parts, [4, 6, 8, 10].map(|at| at * PART..(at + 1) * PART));
    }
}
