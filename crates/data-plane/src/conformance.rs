// SPDX-License-Identifier: Apache-2.0
//! Every disk passes the backend's suite on the real io_uring engine as well.

use crate::event::Event;
use crate::uring::Uring;
use backend::conformance::{Target, TestEngine};
use backend::wrap::{Delay, Fault, FaultRule, Limit, OpSet, Rates, Record};
use backend::{Disk, Engine, File, FileOptions, IoError, Mem, Null, Op, Token};
use backend::{conformance, conformance_without_data};
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, io};
use tempfile::TempDir;

const SIZE: u64 = 16 << 20;
/// A folder in memory, which every Linux has.
const TMPFS: &str = "/dev/shm";

/// The data plane's engine, waited on as the suite wants it.
struct Waited {
    uring: Uring,
    events: VecDeque<(Token, i32)>,
    outstanding: usize,
}

impl Waited {
    fn new() -> Self {
        let uring = Uring::new(false).expect("an io_uring");
        Waited { uring, events: VecDeque::new(), outstanding: 0 }
    }

    fn reap(&mut self) {
        let mut events = Vec::new();
        self.uring.reap(&mut events);
        self.events.extend(events.into_iter().map(|(event, result)| match event {
            Event::Lane(token) => (token, result),
            other => panic!("nobody asked for {other:?}"),
        }));
    }
}

impl Engine for Waited {
    fn push(&mut self, op: Op, token: Token) {
        self.outstanding += 1;
        self.uring.push(op, token);
    }
}

impl TestEngine for Waited {
    fn register(&mut self, files: &[RawFd]) -> io::Result<()> {
        self.uring.register_files(files)
    }

    fn next_event(&mut self, limit: Duration) -> Option<(Token, i32)> {
        if self.outstanding == 0 {
            return None;
        }
        if self.events.is_empty() {
            self.uring.submit();
            self.reap();
        }
        // A wait may end without an event (EINTR); the loop of the data plane goes on then, too.
        let deadline = Instant::now() + limit;
        while self.events.is_empty() && Instant::now() < deadline {
            self.uring.wait(Some(limit));
            self.reap();
        }
        let event = self.events.pop_front()?;
        self.outstanding -= 1;
        Some(event)
    }
}

fn on_uring(target: Target) -> Target {
    target.run_by(|| Box::new(Waited::new()))
}

/// Where this program lies: a real file system.
fn beside_the_program() -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    program.parent().expect("it lies in a folder").to_owned()
}

fn image(place: &Path, options: FileOptions) -> Result<(File, TempDir), String> {
    let folder = TempDir::new_in(place).map_err(|why| format!("{}: {why}", place.display()))?;
    let path = folder.path().join("image.raw");
    fs::File::create(&path).and_then(|file| file.set_len(SIZE)).map_err(|why| why.to_string())?;
    Ok((File::open(&path, options).map_err(|why| why.to_string())?, folder))
}

fn file(place: impl AsRef<Path>, options: FileOptions) -> Result<Target, String> {
    let (disk, folder) = image(place.as_ref(), options)?;
    Ok(on_uring(Target::new(disk).keeping(folder)))
}

/// A direct file with something around it.
fn wrapped(wrap: impl Fn(Arc<dyn Disk>) -> Arc<dyn Disk>) -> Result<Target, String> {
    let (disk, folder) = image(Path::new(TMPFS), direct())?;
    Ok(on_uring(Target::of(wrap(Arc::new(disk))).keeping(folder)))
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

/// With a rule that never applies.
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
