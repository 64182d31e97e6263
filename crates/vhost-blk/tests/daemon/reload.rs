// SPDX-License-Identifier: Apache-2.0
//! The directory of configuration files.

use crate::mount::{Frozen, Mount, may_not_mount};
use crate::rig::Rig;
use backend::{File, FileOptions};
use rustix::fs::{FileType, Mode};
use serde_json::json;
use std::time::Duration;

pub(crate) fn file(name: &str, more: &str) -> String {
    format!(
        "backend = 'mem'\nsize = '1M'\nsocket-path = '@/{name}.sock'\nnum-queues = 1\n\
         data-plane = 'uring'\n{more}"
    )
}

#[test]
fn the_directory_s_disks_are_served_from_the_start_and_a_bad_file_hurts_no_other() {
    let mut rig = Rig::of_directory(&[
        ("a", &file("a", "")),
        ("b", &file("b", "serial = 'B'")),
        ("bad", "blk-file = 5 5"),
        ("unknown", &file("u", "threads = 2")),
    ]);
    assert_eq!(rig.names(), ["a", "b", "bad", "unknown"]);
    assert!(["a", "b"].iter().all(|name| rig.row(name)["state"] == "serving"));
    // They are tried again.
    ["bad", "unknown"].iter().for_each(|name| rig.wait_for(name, "failed"));
    assert_eq!(rig.guest("b").get_id().unwrap()[..1], *b"B");
    let [bad, unknown] = rig.daemon.log_lines(["bad.toml", "unknown.toml"]);
    assert!(bad.contains("line 1"), "{bad}");
    assert!(unknown.contains("unknown key `threads`"), "{unknown}");
}

#[test]
fn a_hidden_file_is_no_disk() {
    let rig = Rig::of_directory(&[("a", &file("a", ""))]);
    rig.write_file(".#a", "the lock of an editor");
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    assert_eq!(rig.names(), ["a"]);
}

#[test]
fn a_reload_treats_each_disk_by_its_change() {
    let rig = Rig::of_directory(&[
        ("same", &file("same", "")),
        ("live", &file("live", "")),
        ("idle", &file("idle", "")),
        ("used", &file("used", "")),
        ("gone", &file("gone", "")),
        ("bad", &file("bad", "")),
    ]);
    rig.ok("add own --backend null --size 1M --socket-path own.sock --num-queues 1");
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    let mut guests: Vec<_> =
        ["same", "live", "used", "bad", "own"].map(|name| (name, rig.guest(name))).into();
    rig.ok("limit same --iops 9");
    rig.write_file("live", &file("live", "limit-iops = 7\ncache = 'writethrough'"));
    rig.write_file("idle", &file("idle", "serial = 'new'"));
    rig.write_file("used", &file("used", "serial = 'new'"));
    rig.write_file("bad", "serial =");
    rig.write_file("new", &file("new", ""));
    std::fs::remove_file(rig.path("conf").join("gone.toml")).unwrap();
    let output = rig.ctl("--json reload");
    assert_eq!(output.status.code(), Some(1), "two files could not be used");
    let changes: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let outcome = |disk: &str| {
        let of_disk = changes.as_array().unwrap().iter().find(|change| change["disk"] == disk);
        of_disk.map(|change| (change["outcome"].clone(), change["reason"].to_string()))
    };
    for (disk, expected, reason) in [
        ("live", "changed", "null"),
        ("idle", "restarted", "null"),
        ("used", "failed", "a front-end is connected"),
        ("gone", "removed", "null"),
        ("bad", "failed", "line 1"),
        ("new", "added", "null"),
    ] {
        let (outcome, told) = outcome(disk).unwrap();
        assert_eq!(outcome, expected, "{disk}: {told}");
        assert!(told.contains(reason), "{disk}: {told}");
    }
    assert_eq!((outcome("same"), outcome("own")), (None, None));
    assert_eq!(rig.names(), ["bad", "idle", "live", "new", "own", "same", "used"]);
    for (name, guest) in &mut guests {
        guest.write(0, &[1; 512]).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let live = rig.json("status live");
    assert_eq!((&live["limits"]["iops"], &live["writeback"]), (&json!(7), &json!(false)));
    // A command's change holds while the file is the same.
    assert_eq!(rig.json("status same")["limits"]["iops"], 9);
    assert_eq!(rig.guest("idle").get_id().unwrap()[..3], *b"new");
    // The used one is restarted as soon as its front-end has gone.
    guests.clear();
    rig.write_file("bad", &file("bad", ""));
    rig.place.wait_until("the restart", || {
        crate::common::stdout(&rig.ctl("reload")).contains("used: restarted")
    });
    assert_eq!(rig.guest("used").get_id().unwrap()[..3], *b"new");
}

/// Limits and the cache mode of a disk.
pub(crate) fn live_options(rig: &Rig, name: &str) -> [serde_json::Value; 3] {
    let status = rig.json(&format!("status {name}"));
    let limits = &status["limits"];
    [limits["iops"].clone(), limits["group"].clone(), status["writeback"].clone()]
}

#[test]
fn a_refused_change_of_limits_and_cache_mode_changes_neither() {
    let through = "cache = 'writethrough'\n";
    let rig = Rig::of_directory(&[
        ("busy", &file("busy", &format!("limit-iops = 5\n{through}"))),
        ("idle", &file("idle", through)),
        ("gold", &file("gold", "limit-iops = 9\nlimit-group = 'gold'\n")),
    ]);
    let _guest = rig.guest("busy");
    let no_group = "limit-group = 'none'\n";
    for (name, more, told) in [
        // A front-end refuses the cache mode, ...
        ("busy", "limit-iops = 7\ncache = 'writeback'", "sends no FLUSH"),
        // ... and a group without limits refuses a disk, ...
        ("idle", &*format!("{no_group}cache = 'writeback'"), "none"),
        // ... also after a command to leave another group.
        ("gold", &*format!("{no_group}{through}"), "none"),
    ] {
        let before = live_options(&rig, name);
        rig.write_file(name, &file(name, more));
        let output = rig.ctl("reload");
        let text = crate::common::stdout(&output);
        assert!(text.starts_with(&format!("{name}: failed: ")) && text.contains(told), "{text}");
        assert!(!text.contains("stays"), "{text}");
        assert_eq!(live_options(&rig, name), before, "{name}");
        // The next reload tries it again.
        assert_eq!(crate::common::stdout(&rig.ctl("reload")), text);
        std::fs::remove_file(rig.path(&format!("conf/{name}.toml"))).unwrap();
        rig.ok("reload");
    }
}

/// A disk of the directory that does not end before its file system is thawed, because its bitmaps cannot be kept,
/// and a reload that restarts it. `meanwhile` is called while the reload waits. Returns the text of the reload, too.
fn slow_to_end<'a>(
    rig: &Rig,
    mount: &'a Mount,
    meanwhile: impl FnOnce(Frozen<'a>) -> Option<Frozen<'a>>,
) -> (Option<Frozen<'a>>, String) {
    let image = mount.path("image");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let text = |serial: &str| {
        format!(
            "blk-file = '{}'\nsocket-path = '@/a.sock'\nserial = '{serial}'\nnum-queues = 1\n\
             data-plane = 'uring'",
            image.display()
        )
    };
    rig.write_file("a", &text("old"));
    rig.ok("reload");
    rig.ok("backup a --to full --bitmap b");
    let frozen = Frozen::of(mount);
    rig.write_file("a", &text("new"));
    std::thread::scope(|scope| {
        let reload = scope.spawn(|| crate::common::stdout(&rig.ctl("reload")));
        rig.wait_for("a", "stopping");
        let frozen = meanwhile(frozen);
        (frozen, reload.join().unwrap())
    })
}

#[test]
fn a_disk_that_is_stopping_is_added_again_by_its_file() {
    if may_not_mount() {
        return;
    }
    for is_late in [false, true] {
        let rig = Rig::of_directory(&[]);
        let mount = Mount::ext4(64);
        let (frozen, text) = slow_to_end(&rig, &mount, Some);
        assert!(text.starts_with("a: failed: "), "{text}");
        rig.refused("--timeout 1 remove a", 3);
        std::thread::scope(|scope| {
            let reload = scope.spawn(|| crate::common::stdout(&rig.ctl("reload")));
            if !is_late {
                drop(frozen);
                assert_eq!(reload.join().unwrap(), "a: added\n");
                return;
            }
            let text = reload.join().unwrap();
            assert!(text.starts_with("a: failed: "), "{text}");
            drop(frozen);
        });
        rig.wait_for("a", "serving");
    }
}

const COMES_BACK: &str = "it starts with the options of its file after that";

#[test]
fn a_disk_that_ends_too_late_for_its_restart_is_served_after_its_end() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::of_directory(&[]);
    let mount = Mount::ext4(64);
    let (frozen, text) = slow_to_end(&rig, &mount, Some);
    assert!(text.starts_with("a: failed: ") && text.contains(COMES_BACK), "{text}");
    assert_eq!(rig.row("a")["state"], "stopping");
    let mut told = rig.events();
    drop(frozen);
    rig.wait_for("a", "serving");
    assert_eq!(rig.guest("a").get_id().unwrap()[..3], *b"new");
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    let names = [(); 3].map(|()| told.next_event()["event"].clone());
    assert_eq!(names, ["removed", "start_failed", "added"]);
}

#[test]
fn a_disk_that_is_removed_while_its_restart_waits_does_not_come_back() {
    if may_not_mount() {
        return;
    }
    for is_late in [false, true] {
        let rig = Rig::of_directory(&[]);
        let mount = Mount::ext4(64);
        let remove = || drop(rig.refused("--timeout 1 remove a", 3));
        let (frozen, text) = slow_to_end(&rig, &mount, |frozen| {
            if !is_late {
                remove();
            }
            Some(frozen)
        });
        assert!(text.starts_with("a: failed: "), "{text}");
        assert_eq!(text.contains(COMES_BACK), is_late, "{text}");
        if is_late {
            remove();
        }
        let mut told = rig.events();
        drop(frozen);
        assert_eq!(told.next_event()["event"], "removed");
        assert_eq!(rig.names(), [""; 0]);
    }
}

#[test]
fn a_disk_that_is_removed_and_ends_in_time_for_its_restart_does_not_come_back() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::of_directory(&[]);
    let mount = Mount::ext4(64);
    let (_, text) = slow_to_end(&rig, &mount, |frozen| {
        rig.refused("--timeout 1 remove a", 3);
        drop(frozen);
        None
    });
    assert_eq!(text, "a: removed\n");
    assert_eq!(rig.names(), [""; 0]);
}

#[test]
fn sighup_reloads_and_a_disk_that_does_not_restart_comes_back_as_it_was() {
    let rig = Rig::of_directory(&[("a", &file("a", "serial = 'old'"))]);
    rig.write_file("b", &file("b", ""));
    rig.daemon.signal(libc::SIGHUP);
    rig.wait_for("b", "serving");
    rig.write_file("a", "blk-file = '@/none.img'\nsocket-path = '@/a.sock'");
    let output = rig.ctl("reload");
    let text = crate::common::stdout(&output);
    assert!(text.starts_with("a: failed: ") && text.contains("none.img"), "{text}");
    assert_eq!(rig.guest("a").get_id().unwrap()[..3], *b"old");
}

#[test]
fn a_file_of_the_name_of_an_added_disk_and_a_directory_that_has_gone_change_nothing() {
    let rig = Rig::of_directory(&[]);
    rig.ok("add a --backend null --size 1M --socket-path a.sock --num-queues 1");
    rig.write_file("a", &file("x", ""));
    let output = rig.ctl("reload");
    let text = crate::common::stdout(&output);
    assert!(text.contains("a command has added another disk"), "{text}");
    std::fs::remove_dir_all(rig.path("conf")).unwrap();
    let line = rig.refused("reload", 1);
    assert!(line.contains("--config-dir"), "{line}");
    assert_eq!(rig.names(), ["a"]);
}

/// The images `a.img` and `b.img`, which another program has locked, and the files of disks in them.
fn locked(rig: &Rig) -> [File; 2] {
    ["a", "b"].map(|name| {
        let image = rig.path(&format!("{name}.img"));
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let options = FileOptions { lock: Some(Duration::ZERO), ..FileOptions::default() };
        let locked = File::open(image, options).unwrap();
        let text = format!("blk-file = '@/{name}.img'\nsocket-path = '@/{name}.sock'");
        rig.write_file(name, &text);
        locked
    })
}

#[test]
fn a_locked_image_keeps_no_disk_whose_file_comes_later() {
    let mut rig = Rig::of_directory(&[]);
    let [a, b] = locked(&rig);
    rig.write_file("c", &file("c", ""));
    rig.daemon.signal(libc::SIGHUP);
    rig.daemon.log_line("waits at most");
    rig.wait_for("c", "serving");
    rig.guest("c").write(0, &[1; 512]).unwrap();
    drop((a, b));
    ["a", "b", "c"].iter().for_each(|name| rig.wait_for(name, "serving"));
}

#[test]
fn locked_images_are_waited_for_together() {
    let mut rig = Rig::of_directory(&[]);
    let _held = locked(&rig);
    rig.daemon.signal(libc::SIGHUP);
    // Both of them, before one has failed.
    (0..2).for_each(|_| drop(rig.daemon.log_line("waits at most")));
    for _ in 0..2 {
        let line = rig.daemon.log_line("ERROR");
        assert!(line.contains("in use"), "{line}");
    }
    ["a", "b"].iter().for_each(|name| rig.wait_for(name, "failed"));
}

#[test]
fn many_signals_have_one_reload_and_one_that_waits() {
    let mut rig = Rig::of_directory(&[]);
    let held = locked(&rig);
    rig.daemon.signal(libc::SIGHUP);
    rig.daemon.log_line("waits at most");
    rig.write_file("c", &file("c", ""));
    for _ in 0..50 {
        rig.daemon.signal(libc::SIGHUP);
        // It has been read: the next one is another signal.
        rig.daemon.wait_for_signal(libc::SIGHUP);
        assert!(rig.daemon.threads_named("reload") <= 2, "{:?}", rig.daemon.threads());
    }
    drop(held);
    rig.place.wait_until("the second reload", || rig.names() == ["a", "b", "c"]);
}

#[test]
fn a_check_of_the_directory_prints_each_error_and_serves_nothing() {
    let place = crate::rig::place_of(&[
        ("a", &file("a", "")),
        ("b", "blk-file = '/x'\nsocket-path = '@/b.sock'\n"),
        ("c", "blk-file = '/x'\nsocket-path = '@/a.sock'\n"),
        ("d", "blk-file = 5 5"),
        ("e", "blk-file = '/y'"),
        ("f", "blk-file = '/z'\nsocket-path = '@/f.sock'\nnum-queues = 1000"),
    ]);
    std::fs::create_dir(place.path("conf/g.toml")).unwrap();
    let fifo = place.path("conf/h.toml");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).unwrap();
    let check = || {
        let mut command = crate::common::program();
        command.args(["daemon", "--check", "--config-dir"]).arg(place.path("conf"));
        crate::common::finish(&mut command)
    };
    let output = check();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    for told in [
        "serve a and c: both have the socket",
        "serve b and c: both have the image /x",
        "d.toml: line 1",
        "e.toml: cannot choose a socket: none is given; give `socket-path`\n",
        "f.toml: line 3: `num-queues` is '1000'; give a number from 1 to 64\n",
        "g.toml: it is a directory",
        "h.toml: it is no regular file",
        "7 errors in 8 files",
    ] {
        assert!(text.contains(told), "{told}: {text}");
    }
    assert_eq!(text.lines().count(), 8, "{text}");
    std::fs::remove_file(fifo).unwrap();
    std::fs::remove_dir(place.path("conf/g.toml")).unwrap();
    ["c", "d", "e", "f"].iter().for_each(|name| {
        std::fs::remove_file(place.path(&format!("conf/{name}.toml"))).unwrap();
    });
    let output = check();
    assert_eq!(crate::common::stdout(&output), "2 files can be used\n");
    assert_eq!(output.status.code(), Some(0));
    std::fs::remove_file(place.path("conf/b.toml")).unwrap();
    assert_eq!(crate::common::stdout(&check()), "1 file can be used\n");
    std::fs::remove_dir_all(place.path("conf")).unwrap();
    let line = crate::common::one_line(&check(), 2);
    assert!(line.contains("check --config-dir"), "{line}");
    assert!(!place.path("a.sock").exists());
}

#[test]
fn a_restart_ends_no_pause_and_keeps_what_commands_have_changed() {
    let rig = Rig::of_directory(&[("a", &file("a", "limit-iops = 50"))]);
    rig.ok("limit a --iops 80");
    rig.ok("set-errors a --on-error stop");
    rig.ok("pause a");
    rig.write_file("a", &file("a", "limit-iops = 50\nserial = 'new'"));
    let text = crate::common::stdout(&rig.ctl("reload"));
    assert!(text.starts_with("a: failed: ") && text.contains("paused"), "{text}");
    assert_eq!(rig.json("status a")["paused"], true);
    rig.ok("resume a");
    assert_eq!(rig.ok("reload"), "a: restarted\n");
    let status = rig.json("status a");
    assert_eq!(status["options"]["serial"], "new");
    assert_eq!(
        (&status["limits"]["iops"], &status["options"]["on_error"]),
        (&80.into(), &"stop".into())
    );
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    // A limit of the file that changes with the restart takes the place of the command's.
    rig.write_file("a", &file("a", "limit-iops = 60\nserial = 'newer'"));
    assert_eq!(rig.ok("reload"), "a: restarted\n");
    assert_eq!(rig.json("status a")["limits"]["iops"], 60);
}
