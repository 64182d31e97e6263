// SPDX-License-Identifier: Apache-2.0
//! Upgrades beside other commands and signals.

use crate::common::own_path;
use crate::loads::{file, image, write_and_read};
use crate::moments::Moments;
use crate::rig::Rig;
use driver::RawChannel;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::Scope;
use std::time::Duration;

/// Maximum wait for a reply.
const PATIENCE: Duration = Duration::from_secs(60);

/// An upgrade whose check has begun and waits.
struct Waiting<'a> {
    rig: &'a Rig,
    upgrade: std::thread::ScopedJoinHandle<'a, std::process::Output>,
}

impl<'a> Waiting<'a> {
    /// Begins an upgrade to the same program.
    fn begin<'env>(rig: &'a Rig, scope: &'a Scope<'a, 'env>) -> Waiting<'a> {
        let (begun, goes_on) = (rig.path("begun"), rig.path("goes-on"));
        [&begun, &goes_on].into_iter().for_each(|path| _ = std::fs::remove_file(path));
        let text = format!(
            "if [ \"$1\" = upgrade-check ]; then\n    touch {}\n    until [ -e {} ]; do sleep 0.01; \
             done\nfi\nexec {} \"$@\"",
            begun.display(),
            goes_on.display(),
            own_path().display()
        );
        let program: PathBuf = rig.place.script("waits", &text);
        let words = format!("upgrade --program {}", program.display());
        let upgrade = scope.spawn(move || rig.ctl(&words));
        rig.place.wait_until("the check has begun", || begun.exists());
        Waiting { rig, upgrade }
    }

    /// Lets it go on, and waits for its success.
    fn finish(self) {
        std::fs::write(self.rig.path("goes-on"), "").unwrap();
        let output = self.upgrade.join().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn during_an_upgrade_disks_neither_come_nor_go_and_no_other_upgrade_begins() {
    let rig = Rig::new();
    ["a", "b"].iter().for_each(|name| rig.add(name, ""));
    let mut guest = rig.guest("a");
    std::thread::scope(|scope| {
        let waiting = Waiting::begin(&rig, scope);
        for words in ["add c --blk-file disk.img --socket-path c.sock", "remove b", "remove a"] {
            let line = rig.refused(words, 1);
            assert!(line.contains("an upgrade is in progress; try again after it"), "{line}");
        }
        let line = rig.refused("upgrade", 1);
        assert!(line.contains("another upgrade is in progress"), "{line}");
        // Disks are served on and controlled meanwhile.
        rig.ok("limit b --iops 5");
        write_and_read(&mut guest, 0);
        waiting.finish();
    });
    assert_eq!(rig.names(), ["a", "b"]);
    assert_eq!(rig.json("status b")["limits"]["iops"], 5);
    assert!(!rig.path("c.sock").exists());
    write_and_read(&mut guest, 1);
    rig.ok("remove b");
    rig.add("c", "");
}

#[test]
fn a_reload_by_signal_during_an_upgrade_is_done_by_the_new_program() {
    let rig = Rig::of_directory(&[]);
    image(&rig, "a");
    rig.write_file("a", &file("a", ""));
    rig.ok("reload");
    image(&rig, "b");
    std::thread::scope(|scope| {
        let waiting = Waiting::begin(&rig, scope);
        rig.write_file("b", &file("b", ""));
        rig.daemon.signal(libc::SIGHUP);
        // Its reload waits.
        rig.daemon.wait_for_signal(libc::SIGHUP);
        assert_eq!(rig.names(), ["a"]);
        waiting.finish();
    });
    rig.wait_for("b", "serving");
    write_and_read(&mut rig.guest("b"), 0);
}

#[test]
fn a_disk_that_is_being_added_refuses_the_upgrade() {
    let mut rig = Rig::new();
    rig.add("a", "");
    // Another program has the image: the disk waits for it.
    let options = backend::FileOptions {
        lock: Some(std::time::Duration::ZERO),
        ..backend::FileOptions::default()
    };
    let lock = backend::file::File::open(&rig.place.image, options).unwrap();
    let mut command = crate::common::program();
    command.current_dir(rig.place.dir.path()).args(["ctl", "--control-path", "ctl"]);
    command.args("add b --blk-file disk.img --socket-path b.sock".split(' '));
    let mut adding = command.spawn().unwrap();
    rig.daemon.log_line("waits at most");
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("the disk b cannot be passed on: it is being added"), "{line}");
    drop(lock);
    assert!(adding.wait().unwrap().success());
    rig.upgrade();
    assert_eq!(rig.names(), ["a", "b"]);
}

#[test]
fn upgrades_while_disks_come_and_go_are_done_or_refused_with_a_reason() {
    const UPGRADES: usize = 12;
    let rig = Rig::new();
    rig.add("busy", "");
    let mut guest = rig.guest("busy");
    let done = AtomicBool::new(false);
    let changes = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                changes.fetch_add(usize::from(come_and_go(&rig)), Relaxed);
            }
        });
        let mut upgraded = 0;
        let mut n = 0;
        // Each refuses the other meanwhile: until both have succeeded.
        while upgraded < UPGRADES || changes.load(Relaxed) == 0 {
            upgraded += usize::from(upgrade_or_reason(&rig));
            write_and_read(&mut guest, n % 200);
            n += 1;
        }
        done.store(true, Relaxed);
    });
    // A disk that a lost answer left behind goes as usual.
    if rig.names().contains(&"other".to_owned()) {
        rig.ok("remove other");
    }
    assert_eq!(rig.names(), ["busy"]);
    assert!(!rig.path("other.sock").exists());
}

/// Returns whether an upgrade was done; otherwise it has been refused because of the other disk.
fn upgrade_or_reason(rig: &Rig) -> bool {
    let output = rig.ctl("upgrade");
    let told = String::from_utf8_lossy(&output.stderr);
    let expected = ["disk other cannot be passed on: it is being"];
    assert!(output.status.success() || expected.iter().any(|words| told.contains(words)), "{told}");
    output.status.success()
}

/// Adds a disk, uses it and removes it. Returns whether nothing came in between: an upgrade refuses
/// a call, or ends its connection.
fn come_and_go(rig: &Rig) -> bool {
    let is_done = |words: &str| {
        let output = rig.ctl(words);
        let told = String::from_utf8_lossy(&output.stderr);
        let expected = [
            "an upgrade is in progress",
            "ended without an answer",
            "reset by peer",
            "Broken pipe",
            "there is a disk of this name",
            "there is none of this name",
        ];
        let is_known = expected.iter().any(|words| told.contains(words));
        assert!(output.status.success() || is_known, "{words}: {told}");
        output.status.success()
    };
    let added = is_done("add other --blk-file disk.img --socket-path other.sock --num-queues 1");
    let removed = is_done("remove other");
    added && removed
}

#[test]
fn a_stop_during_upgrades_ends_the_daemon_with_all_of_its_disks() {
    let served = || {
        let rig = Rig::new();
        ["a", "b", "c"].iter().for_each(|name| rig.add(name, ""));
        rig
    };
    let rig = served();
    let mut moments = Moments::of(|| drop(rig.ok("upgrade")));
    drop(rig);
    for _ in 0..12 {
        let mut rig = served();
        let mut guests = ["a", "b"].map(|name| rig.guest(name));
        guests.iter_mut().for_each(|guest| write_and_read(guest, 0));
        let is_upgraded = std::thread::scope(|scope| {
            let upgrade = scope.spawn(|| rig.ctl("upgrade"));
            moments.wait();
            rig.daemon.signal(libc::SIGTERM);
            upgrade.join().unwrap().status.success()
        });
        assert!(rig.daemon.wait().success());
        let files = rig.place.files();
        assert!(!files.iter().any(|name| name.ends_with(".sock") || name == "ctl"), "{files:?}");
        moments.learn(is_upgraded);
    }
    moments.assert_both();
}

#[test]
fn a_half_message_of_a_vmm_delays_no_upgrade_and_its_rest_reaches_the_new_program() {
    let rig = Rig::new();
    rig.add("a", "");
    let vmm = RawChannel::connect(rig.path("a.sock")).unwrap();
    let get_features = [1, 1, 0].map(u32::to_ne_bytes).concat();
    vmm.send_bytes(&get_features, &[]).unwrap();
    let features = vmm.reply(PATIENCE).unwrap().value().unwrap();
    for length in [1, 11] {
        vmm.send_bytes(&get_features[..length], &[]).unwrap();
        rig.upgrade();
        vmm.send_bytes(&get_features[length..], &[]).unwrap();
        assert_eq!(vmm.reply(PATIENCE).unwrap().value(), Some(features));
    }
}
