// SPDX-License-Identifier: Apache-2.0
//! The locks of a chain, and files of it that have moved.

use crate::load::under_load;
use crate::locks::{self, End};
use crate::{QUEUES, Rig, chain, read_and_write, text, upgrade, upgrade_under_load};
use backend::file::{File, FileError, FileOptions};
use backend::lock::LockError;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// Tries to get the lock of a file.
fn lock(path: &Path, read_only: bool) -> Result<(), FileError> {
    let lock = Some(Duration::ZERO);
    // The lock refuses it, not the mark of a backing file.
    let options = FileOptions { read_only, lock, ignores_mark: true, ..FileOptions::default() };
    File::open(path, options).map(drop)
}

#[track_caller]
fn assert_locked(path: &Path, read_only: bool, attempt: usize) {
    let outcome = lock(path, read_only);
    assert!(
        matches!(outcome, Err(FileError::Lock(LockError::InUse { .. }))),
        "attempt {attempt} at {}: {outcome:?}",
        path.display()
    );
}

#[test]
fn no_program_gets_the_lock_of_a_file_of_the_chain_during_upgrades() {
    for format in ["raw", "qcow2"] {
        let rig = Rig::new();
        let device = chain(&rig, format);
        let files = ["top", "middle", "a.img"].map(|name| rig.path(name));
        let stop = AtomicBool::new(false);
        let goes_on = || !stop.load(Ordering::Relaxed);
        let attempts = [const { AtomicUsize::new(0) }; 2];
        let intrude = || {
            while goes_on() {
                let attempt = attempts[0].load(Ordering::Relaxed);
                files.iter().for_each(|file| assert_locked(file, false, attempt));
                assert_locked(&files[0], true, attempt);
                attempts[0].fetch_add(1, Ordering::Relaxed);
            }
        };
        let run_qemu = || {
            while goes_on() {
                let mut qemu = Command::new("qemu-io");
                let file = text(&files[attempts[1].load(Ordering::Relaxed) % 2]);
                qemu.args(["-f", "qcow2", "-c", "write 0 512", file]);
                let output = qemu.output().unwrap();
                let told = String::from_utf8_lossy(&output.stderr);
                assert!(told.contains("lock"), "QEMU gets the lock: {output:?}");
                attempts[1].fetch_add(1, Ordering::Relaxed);
            }
        };
        let (_, session) = under_load(device, QUEUES.into(), |loaded| {
            std::thread::scope(|scope| {
                let intruders = [scope.spawn(intrude), scope.spawn(run_qemu)];
                let (end, mut expected) = (End(&stop), None);
                upgrade_under_load(&rig, 10, |attempt| {
                    loaded.wait_for_progress(5);
                    let marks = locks::marks(&rig.daemon);
                    assert_eq!(*expected.get_or_insert_with(|| marks.clone()), marks);
                    expected = Some(locks::mark(&rig.daemon, attempt as u64 + 1));
                });
                assert_eq!(expected, Some(locks::marks(&rig.daemon)));
                // QEMU tries both of its files.
                let done = [11, 2];
                rig.place.wait_until("the attempts", || {
                    let mut attempts = attempts.iter().zip(done);
                    intruders.iter().any(ScopedJoinHandle::is_finished)
                        || attempts.all(|(n, least)| n.load(Ordering::Relaxed) >= least)
                });
                drop(end);
                intruders.into_iter().for_each(|intruder| intruder.join().unwrap());
            });
        });
        drop(session);
        // Others may read the backing files, and have all files after the end of the disk.
        files[1..].iter().for_each(|file| lock(file, true).unwrap());
        rig.ok("remove a");
        files.iter().for_each(|file| lock(file, false).unwrap());
    }
}

#[test]
fn files_that_were_renamed_or_removed_pass_on_with_their_locks() {
    for format in ["raw", "qcow2"] {
        let rig = Rig::new();
        let mut device = chain(&rig, format);
        std::fs::rename(rig.path("top"), rig.path("moved")).unwrap();
        std::fs::rename(rig.path("middle"), rig.path("also")).unwrap();
        std::fs::remove_file(rig.path("a.img")).unwrap();
        // Another file in the place of a backing file is not read.
        std::fs::write(rig.path("middle"), "nothing").unwrap();
        for n in 1..4 {
            upgrade(&rig);
            read_and_write(&mut device, n);
        }
        assert_locked(&rig.path("moved"), true, 0);
        assert_locked(&rig.path("also"), false, 0);
    }
}
