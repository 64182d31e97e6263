// SPDX-License-Identifier: Apache-2.0
//! Finds the holder of a lock for the error message.
//!
//! Neither `fcntl` nor `/proc/locks` shows the process of a lock of an open file description, but
//! `/proc/PID/fdinfo` shows the locks of each descriptor.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Name and process id of the first process found that holds a lock on the image `file`.
pub(super) fn of_locks_on(file: &File) -> Option<String> {
    let image = file.metadata().ok()?;
    let image = (image.dev(), image.ino());
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|b| b.is_ascii_digit()))
        else {
            continue;
        };
        if holds_lock(&process.path(), image) {
            if *pid == *std::process::id().to_string() {
                return Some("another disk of this program".to_owned());
            }
            let program = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("{} (process {pid})", program.trim()));
        }
    }
    None
}

fn holds_lock(process: &Path, image: (u64, u64)) -> bool {
    let Ok(descriptors) = fs::read_dir(process.join("fd")) else { return false };
    descriptors.flatten().any(|descriptor| {
        let same = fs::metadata(descriptor.path()).is_ok_and(|m| (m.dev(), m.ino()) == image);
        let info = || process.join("fdinfo").join(descriptor.file_name());
        same && fs::read_to_string(info()).is_ok_and(|text| text.contains("lock:"))
    })
}
