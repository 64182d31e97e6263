// SPDX-License-Identifier: Apache-2.0
//! The file of the process id.

use crate::common::{self, Daemon, Place};
use crate::rig::{Rig, command};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

fn id_in(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.strip_suffix('\n')?.parse().ok()
}

/// A daemon with a file `pid`, which it has written.
fn started(place: Place) -> (Rig, PathBuf) {
    let path = place.path("pid");
    let daemon = Daemon::start(
        &mut command(&place, &["--pidfile", path.to_str().unwrap()]),
        &place.path("ctl"),
    );
    let rig = Rig { daemon, place };
    rig.place.wait_until("the file has the id", || id_in(&path) == Some(rig.daemon.id()));
    (rig, path)
}

/// A second daemon with the same file is refused, and leaves nothing.
#[track_caller]
fn excludes_another(rig: &Rig, path: &Path) {
    let other = rig.path("other");
    let mut command = common::program();
    command.arg("daemon").arg("--control-path").arg(&other).arg("--pidfile").arg(path);
    let line = common::one_line(&common::finish(&mut command), 1);
    let why = format!("the live process {} has it; stop that process", rig.daemon.id());
    assert!(line.contains("cannot use the pid file ") && line.contains(&why), "{line}");
    assert!(!other.exists());
    assert_eq!(id_in(path), Some(rig.daemon.id()));
}

#[test]
fn the_file_says_that_the_daemon_is_ready_and_goes_with_a_stop() {
    let (mut rig, path) = started(Place::new());
    UnixStream::connect(rig.path("ctl")).unwrap();
    excludes_another(&rig, &path);
    rig.ok("stop");
    assert_eq!(rig.daemon.wait().code(), Some(0));
    assert!(!path.exists());
}

#[test]
fn the_file_of_a_killed_daemon_is_replaced() {
    let (mut rig, path) = started(Place::new());
    rig.daemon.signal(libc::SIGKILL);
    rig.daemon.wait();
    assert_eq!(id_in(&path), Some(rig.daemon.id()));
    let (mut next, path) = started(rig.place);
    next.daemon.signal(libc::SIGTERM);
    assert_eq!(next.daemon.wait().code(), Some(0));
    assert!(!path.exists());
}

#[test]
fn an_upgrade_keeps_the_file_and_its_lock() {
    let (mut rig, path) = started(Place::new());
    let before = std::fs::metadata(&path).unwrap().ino();
    for _ in 0..2 {
        rig.ok("upgrade");
        excludes_another(&rig, &path);
    }
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), before);
    rig.ok("stop");
    assert_eq!(rig.daemon.wait().code(), Some(0));
    assert!(!path.exists());
}

#[test]
fn serve_has_the_file_from_its_socket_to_its_end() {
    let place = Place::new();
    let path = place.path("pid");
    let mut daemon = Daemon::spawn(place.serve().arg("--pidfile").arg(&path));
    place.wait_until("the file", || path.exists());
    assert_eq!(id_in(&path), Some(daemon.id()));
    UnixStream::connect(&place.socket).unwrap();
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(!path.exists());
}

#[test]
fn a_wrong_file_is_refused_and_stays() {
    let place = Place::new();
    let refused = |path: &Path, code: i32| {
        let mut command = command(&place, &["--pidfile", path.to_str().unwrap()]);
        common::one_line(&common::finish(&mut command), code)
    };
    let path = place.path("text");
    std::fs::write(&path, "no id").unwrap();
    let line = refused(&path, 1);
    assert!(line.contains("the file there has no process id; name another"), "{line}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "no id");
    let line = refused(&place.path("none").join("pid"), 1);
    assert!(line.contains("there is no such directory; make it"), "{line}");
    let line = refused(&place.path("ctl"), 2);
    assert!(line.contains("--pidfile") && line.contains("--control-path"), "{line}");
    assert!(!place.path("ctl").exists());
}
