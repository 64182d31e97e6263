// SPDX-License-Identifier: Apache-2.0
//! The open file descriptions of a daemon that hold its locks. The daemon neither uses nor changes
//! the position of a description: a mark that tells the description from one that was opened later.

use crate::common::Daemon;
use rustix::fs::{SeekFrom, seek};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Position of the description with the lock of each file.
pub(crate) type Marks = BTreeMap<PathBuf, u64>;

/// Number, file and position of each locked descriptor of the daemon.
fn locked(daemon: &Daemon) -> Vec<(i32, PathBuf, u64)> {
    let process = PathBuf::from(format!("/proc/{}", daemon.id()));
    let entries = std::fs::read_dir(process.join("fdinfo")).unwrap();
    let described = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.ok()?;
        let text = std::fs::read_to_string(entry.path()).ok()?;
        let position = text.lines().find_map(|line| line.strip_prefix("pos:"))?;
        let name = entry.file_name().into_string().ok()?;
        let file = std::fs::read_link(process.join("fd").join(&name)).ok()?;
        let is_locked = text.contains("OFDLCK");
        is_locked.then(|| (name.parse().unwrap(), file, position.trim().parse().unwrap()))
    };
    entries.filter_map(described).collect()
}

/// The present marks. All locks of one file are held by one description.
#[track_caller]
pub(crate) fn marks(daemon: &Daemon) -> Marks {
    let mut marks = Marks::new();
    for (_, file, position) in locked(daemon) {
        let other = marks.insert(file.clone(), position);
        assert!(other.is_none_or(|other| other == position), "{file:?}: {other:?}, {position}");
    }
    marks
}

/// Gives each description with a lock the mark `position`. Returns the marks.
#[track_caller]
pub(crate) fn mark(daemon: &Daemon, position: u64) -> Marks {
    let id = Pid::from_raw(daemon.id() as i32).unwrap();
    let process = pidfd_open(id, PidfdFlags::empty()).unwrap();
    for (number, ..) in locked(daemon) {
        let shared = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).unwrap();
        seek(&shared, SeekFrom::Start(position)).unwrap();
    }
    let marks = marks(daemon);
    assert!(!marks.is_empty() && marks.values().all(|found| *found == position), "{marks:?}");
    marks
}

/// Ends the threads that want the lock, also if the test fails.
pub(crate) struct End<'a>(pub(crate) &'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
