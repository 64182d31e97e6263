// SPDX-License-Identifier: Apache-2.0
//! Runs the backend's conformance suite on the io_uring engine.

use crate::event::Event;
use crate::uring::Uring;
use backend::conformance::{Target, TestEngine};
use backend::wrap::{Delay, Fault, FaultRule, Limit, OpSet, Rates, Record};
use backend::{
    Disk, Engine, File, FileIndex, FileOptions, IoError, Mem, Null, Op, Remote, Slot, Token,
};
use backend::{conformance, conformance_without_data};
use kit::loop_device::LoopDevice;
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;
/// A directory in memory.
const TMPFS: &str = "/dev/shm";

/// Adapts the data plane's engine to the suite.
struct Waited {
    uring: Uring,
    events: VecDeque<(Token, i32)>,
    outstanding: usize,
    /// Other threads deliver events that `outstanding` does not count.
    has_remote: bool,
}

impl Waited {
    fn new() -> Self {
        let uring = Uring::new().expect("an io_uring");
        Waited { uring, events: VecDeque::new(), outstanding: 0, has_remote: false }
    }

    fn reap(&mut self) {
        let mut events = Vec::new();
        self.uring.reap(&mut events, usize::MAX);
        self.events.extend(events.into_iter().filter_map(|(event, result)| match event {
            Event::Lane { token, .. } => Some((token, result)),
            // The removal of a timer that has ended.
            Event::Ignored => None,
            other => panic!("an unexpected event: {other:?}"),
        }));
    }
}

impl Engine for Waited {
    fn push(&mut self, op: Op, token: Token) {
        self.outstanding += usize::from(!matches!(op, Op::EndTimer));
        self.uring.of_disk(0).push(op, token);
    }

    fn remote(&mut self) -> Remote {
        self.has_remote = true;
        self.uring.of_disk(0).remote()
    }
}

impl TestEngine for Waited {
    fn register(&mut self, files: &[RawFd]) -> io::Result<()> {
        self.uring.open_port(0, files, crate::plane::IoPoll::Off)
    }

    fn next_event(&mut self, limit: Duration) -> Option<(Token, i32)> {
        if self.outstanding == 0 && !self.has_remote {
            return None;
        }
        if self.events.is_empty() {
            self.uring.submit();
            self.reap();
        }
        // A wait may end without an event (EINTR): repeat it, like the loop of the data plane.
        let deadline = Instant::now() + limit;
        while self.events.is_empty() && Instant::now() < deadline {
            self.uring.wait(Some(limit));
            self.reap();
        }
        let event = self.events.pop_front()?;
        self.outstanding = self.outstanding.saturating_sub(1);
        Some(event)
    }
}

fn on_uring(target: Target) -> Target {
    target.run_by(|| Box::new(Waited::new()))
}

/// The directory of this program, on a real file system.
fn beside_the_program() -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    program.parent().expect("it lies in a directory").to_owned()
}

fn image(place: &Path, options: FileOptions) -> Result<(File, TempDir), String> {
    let directory = TempDir::new_in(place).map_err(|why| format!("{}: {why}", place.display()))?;
    let path = directory.path().join("image.raw");
    fs::File::create(&path).and_then(|file| file.set_len(SIZE)).map_err(|why| why.to_string())?;
    Ok((File::open(&path, options).map_err(|why| why.to_string())?, directory))
}

fn file(place: impl AsRef<Path>, options: FileOptions) -> Result<Target, String> {
    let (disk, directory) = image(place.as_ref(), options)?;
    Ok(on_uring(Target::new(disk).keeping(directory)))
}

/// A direct file with a wrapper.
fn wrapped(wrap: impl Fn(Arc<dyn Disk>) -> Arc<dyn Disk>) -> Result<Target, String> {
    let (disk, directory) = image(Path::new(TMPFS), direct())?;
    Ok(on_uring(Target::of(wrap(Arc::new(disk))).keeping(directory)))
}

fn direct() -> FileOptions {
    FileOptions::default()
}

fn cached() -> FileOptions {
    FileOptions { direct: false, ..direct() }
}

fn blocks_of_4k() -> FileOptions {
    FileOptions { logical_block_bytes: Some(4096), ..direct() }
}

fn delayed(disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
    Arc::new(Delay::new(disk, Duration::from_micros(50), OpSet::ALL))
}

fn limited(disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
    let rates = Rates { ios: NonZeroU64::new(50_000), bytes: None, burst: Duration::ZERO };
    Arc::new(Limit::new(disk, rates))
}

fn recorded(disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
    Arc::new(Record::in_memory(disk))
}

/// A wrapper with a rule that never applies.
fn faultless(disk: Arc<dyn Disk>) -> Arc<dyn Disk> {
    let error = IoError::Errno(libc::EIO);
    let sectors = Some(u64::MAX - 1..=u64::MAX - 1);
    Arc::new(Fault::new(disk, FaultRule { ops: OpSet::ALL, sectors, every: 1, error }))
}

conformance_without_data!(null, Ok(on_uring(Target::new(Null::new(SIZE)))));
conformance!(mem, Ok(on_uring(Target::new(Mem::new(SIZE).unwrap()))));
conformance!(direct_file_on_tmpfs, file(TMPFS, direct()));
conformance!(direct_file_on_disk, file(beside_the_program(), direct()));
conformance!(direct_file_with_4k_blocks, file(beside_the_program(), blocks_of_4k()));
conformance!(cached_file_on_tmpfs, file(TMPFS, cached()));
conformance!(cached_file_on_disk, file(beside_the_program(), cached()));
conformance!(delayed_file, wrapped(delayed));
conformance!(limited_file, wrapped(limited));
conformance!(recorded_file, wrapped(recorded));
conformance!(faultless_file, wrapped(faultless));
conformance!(wrapped_four_times, wrapped(|disk| recorded(limited(faultless(delayed(disk))))));

#[test]
fn a_block_device_is_discarded_without_waiting() {
    let directory = TempDir::new_in(beside_the_program()).expect("a directory");
    let image = directory.path().join("image.raw");
    fs::write(&image, vec![0xaa; SIZE as usize]).expect("an image");
    let device = match LoopDevice::attach(&image, &[]) {
        Ok(device) => device,
        Err(why) => return println!("SKIP: no loop device: {why:#}"),
    };
    let file = fs::OpenOptions::new().write(true).open(&device.path).expect("the device opens");
    let mut engine = Waited::new();
    engine.register(&[file.as_raw_fd()]).expect("the engine takes the file");
    let token = Token { slot: Slot(7), layer: 0 };
    let (offset, len) = (SIZE / 4, SIZE / 2);
    engine.push(Op::Discard { file: FileIndex(0), offset, len }, token);
    let event = engine.next_event(Duration::from_secs(30));
    if event == Some((token, -libc::EOPNOTSUPP)) {
        return println!("SKIP: this kernel is older than Linux 6.12");
    }
    assert_eq!(event, Some((token, 0)));
    let found = fs::read(&device.path).expect("the device can be read");
    let (before, rest) = found.split_at(offset as usize);
    let (range, behind) = rest.split_at(len as usize);
    assert!(before.iter().chain(behind).all(|byte| *byte == 0xaa), "it changed its neighbours");
    assert!(range.iter().all(|byte| *byte == 0), "a loop device punches a hole");
}

#[test]
fn other_threads_deliver_events_to_a_sleeping_ring() {
    let mut engine = Waited::new();
    let remote = engine.remote();
    let delivers = |first: u32| {
        let remote = remote.clone();
        std::thread::spawn(move || {
            for n in first..first + 500 {
                remote.complete(Token { slot: Slot(n), layer: 3 }, n as i32);
            }
        })
    };
    let threads = [delivers(0), delivers(500)];
    let mut found: Vec<i32> = (0..1000)
        .map(|_| {
            let event = engine.next_event(Duration::from_secs(30));
            let (token, result) = event.expect("each delivery is an event");
            assert_eq!(token, Token { slot: Slot(result as u32), layer: 3 });
            result
        })
        .collect();
    found.sort_unstable();
    assert_eq!(found, (0..1000).collect::<Vec<_>>());
    assert!(threads.into_iter().all(|thread| thread.join().is_ok()));
}
