// SPDX-License-Identifier: Apache-2.0
//! Disks and options that outlive a restart of the daemon.

use crate::common;
use crate::reload::{file, live_options};
use crate::rig::Rig;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;

/// The text of the file of a disk.
pub(crate) fn text_of(rig: &Rig, name: &str) -> String {
    std::fs::read_to_string(rig.path(&format!("conf/{name}.toml"))).unwrap()
}

/// Starts the daemon again, with the same directory.
pub(crate) fn restart(rig: &mut Rig) {
    rig.ok("stop");
    rig.daemon.wait();
    let conf = rig.path("conf");
    rig.restart(&["--config-dir", conf.to_str().unwrap()]);
}

fn origin(rig: &Rig, name: &str) -> Value {
    rig.row(name)["origin"].clone()
}

#[test]
fn a_saved_disk_is_of_the_directory_and_is_served_again_after_a_restart() {
    let mut rig = Rig::of_directory(&[]);
    rig.add("kept", "--save --serial S --limit-iops 9 --wrap delay:us=1");
    rig.add("later", "");
    rig.add("lost", "");
    assert_eq!(
        (origin(&rig, "kept"), origin(&rig, "later")),
        (json!("directory"), json!("command"))
    );
    let text = text_of(&rig, "kept");
    for line in ["serial = \"S\"\n", "limit-iops = 9\n", "wrap = [\"delay:us=1\"]\n"] {
        assert!(text.contains(line), "{text}");
    }
    let image = rig.path("kept.img");
    assert!(text.contains(&format!("blk-file = \"{}\"", image.display())), "{text}");
    let mode = std::fs::metadata(rig.path("conf/kept.toml")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
    // With the changes of commands.
    rig.ok("limit later --iops 7 --bandwidth 1M --burst-seconds 0.5");
    rig.ok("set-cache later writethrough");
    let told = rig.ok("save later");
    assert!(told.contains("later.toml"), "{told}");
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    let status = rig.json("status later");
    assert_eq!(
        (&status["origin"], &status["options"]["limit_iops"]),
        (&json!("directory"), &json!(7))
    );
    assert_eq!(status["options"]["cache"], "writethrough");
    let text = rig.ok("status later");
    assert!(text.contains("origin      a file of --config-dir\n"), "{text}");
    assert!(text.contains("limit-iops=7") && !text.contains("queue-size"), "{text}");
    // A change of a disk of a command makes it one of the directory.
    rig.add("third", "");
    let file = rig.path("conf/third.toml").display().to_string();
    let told = format!("done; limits: 3 requests/s, burst 100 ms; saved in {file}\n");
    assert_eq!(rig.ok("limit third --iops 3 --save"), told);
    let told = rig.json("set-cache third writethrough --save");
    assert_eq!(told, json!({"changed": true, "config": file}));
    assert_eq!(origin(&rig, "third"), json!("directory"));
    rig.ok("remove third --save");
    restart(&mut rig);
    assert_eq!(rig.names(), ["kept", "later"]);
    assert_eq!(rig.guest("kept").get_id().unwrap()[..1], *b"S");
    let status = rig.json("status later");
    assert_eq!((&status["limits"]["iops"], &status["writeback"]), (&json!(7), &json!(false)));
    assert_eq!(status["limits"]["burst_ms"], 500);
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    // A removal without --save ends with the next start.
    let told = format!(
        "done; its file {} stays, and a reload adds the disk again; --save removes it\n",
        rig.path("conf/kept.toml").display()
    );
    assert_eq!(rig.ok("remove kept"), told);
    assert_eq!(rig.ok("remove later --save"), "done\n");
    assert!(!rig.path("conf/later.toml").exists());
    assert_eq!(rig.ok("reload"), "kept: added\n");
}

#[test]
fn limits_and_the_cache_mode_are_saved_into_the_file_of_a_disk_with_its_comments() {
    let more = "limit-iops = 5 # slow\n# The end.\n";
    let mut rig = Rig::of_directory(&[("a", &file("a", more)), ("b", &file("b", ""))]);
    rig.ok("limit a --iops 9");
    assert!(text_of(&rig, "a").contains("limit-iops = 5 # slow"));
    rig.ok("limit a --iops 8 --save");
    rig.ok("limit b --group gold --iops 3 --save");
    // A default that the file does not name.
    assert!(!text_of(&rig, "a").contains("cache"), "{}", text_of(&rig, "a"));
    rig.ok("set-cache a writethrough --save");
    let text = text_of(&rig, "a");
    for part in ["limit-iops = 8 # slow\n", "# The end.\n", "cache = \"writethrough\"\n"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    restart(&mut rig);
    assert_eq!(rig.json("status a")["limits"]["iops"], 8);
    assert_eq!(rig.json("status b")["limits"]["group"], "gold");
    rig.ok("limit b --none --save");
    assert!(!text_of(&rig, "b").contains("limit"), "{}", text_of(&rig, "b"));
    assert_eq!(rig.ok("reload"), "nothing to do\n");
}

#[test]
fn the_saving_of_a_change_leaves_other_changes_of_the_running_disk_out() {
    let mut rig = Rig::of_directory(&[("a", &file("a", ""))]);
    rig.ok("limit a --iops 9");
    rig.ok("set-errors a --on-error stop");
    rig.ok("set-cache a writethrough --save");
    let text = text_of(&rig, "a");
    assert!(text.contains("cache = \"writethrough\"\n"), "{text}");
    assert!(!text.contains("limit") && !text.contains("on-error"), "{text}");
    // The running disk keeps them.
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    assert_eq!(rig.json("status a")["limits"]["iops"], 9);
    rig.ok("set-errors a --io-timeout 5 --save");
    let text = text_of(&rig, "a");
    assert!(!text.contains("limit") && text.contains("on-error = \"stop\"\n"), "{text}");
    restart(&mut rig);
    let status = rig.json("status a");
    assert_eq!((&status["limits"]["iops"], &status["writeback"]), (&Value::Null, &json!(false)));
    rig.ok("limit a --iops 9");
    rig.ok("save a");
    assert!(text_of(&rig, "a").contains("limit-iops = 9\n"));
}

#[test]
fn a_disk_that_cannot_be_saved_says_why_and_an_added_one_is_not_served() {
    let rig = Rig::new();
    rig.add("a", "");
    let null = "--backend null --size 1M --num-queues 1";
    for words in [
        "save a",
        "limit a --iops 5 --save",
        "set-cache a writethrough --save",
        "remove a --save",
        &format!("add b --save --socket-path b.sock {null}"),
    ] {
        let line = rig.refused(words, 1);
        assert!(line.contains("start vhost-blk daemon with --config-dir"), "{words}: {line}");
        assert_eq!(live_options(&rig, "a"), [Value::Null, Value::Null, json!(true)], "{words}");
    }
    assert_eq!(rig.names(), ["a"]);
    let rig = Rig::of_directory(&[]);
    rig.add("a", "");
    rig.write_file("a", "# another one");
    rig.write_file("b", "# another one");
    for words in [
        "save a",
        "limit a --iops 5 --save",
        "set-cache a writethrough --save",
        &format!("add b --save --socket-path b.sock {null}"),
    ] {
        let line = rig.refused(words, 1);
        assert!(line.contains("exists; remove or rename that file"), "{words}: {line}");
        assert_eq!(live_options(&rig, "a"), [Value::Null, Value::Null, json!(true)], "{words}");
    }
    assert_eq!(text_of(&rig, "a"), "# another one");
    // A descriptor is not necessarily that of its path.
    let words = "add c --save --pass-file --blk-file disk.img --socket-path c.sock --num-queues 1";
    rig.ok(words);
    assert_eq!(rig.ok("remove c --save"), "done\n");
    std::fs::rename(rig.path("disk.img"), rig.path("moved.img")).unwrap();
    std::os::unix::fs::symlink(rig.path("a.img"), rig.path("disk.img")).unwrap();
    rig.ok("add c --pass-file --blk-file moved.img --socket-path c.sock --num-queues 1");
    std::fs::rename(rig.path("moved.img"), rig.path("again.img")).unwrap();
    let line = rig.refused("save c", 1);
    assert!(line.contains("moved.img"), "{line}");
    assert_eq!(rig.names(), ["a", "c"]);
    let line = rig.refused("remove c --save", 1);
    assert!(line.contains("drop --save for a disk without a file"), "{line}");
    assert_eq!(rig.names(), ["a", "c"]);
    assert!(!common::stdout(&rig.ctl("reload")).contains("c: "));
}

#[test]
fn a_change_whose_file_cannot_be_rewritten_is_refused_before_it_holds() {
    let rig = Rig::of_directory(&[("a", &file("a", ""))]);
    let path = rig.path("conf/a.toml");
    let before = text_of(&rig, "a");
    for (spoil, told) in [("x = [", "write KEY = VALUE lines"), ("", "write it again")] {
        match spoil {
            "" => std::fs::remove_file(&path).unwrap(),
            text => std::fs::write(&path, text).unwrap(),
        }
        for words in ["limit a --iops 5 --save", "set-cache a writethrough --save"] {
            let line = rig.refused(words, 1);
            assert!(line.contains(told) && !line.contains("the change holds"), "{line}");
            assert_eq!(live_options(&rig, "a"), [Value::Null, Value::Null, json!(true)], "{words}");
        }
    }
    std::fs::write(&path, before).unwrap();
    rig.ok("limit a --iops 5 --save");
    let names = std::fs::read_dir(rig.path("conf")).unwrap();
    assert_eq!(names.count(), 1, "a file of a check remains");
}

/// A disk whose image is locked: the reload that adds it has the turn until the result is dropped.
fn reload_that_waits(rig: &Rig) -> backend::File {
    let image = rig.path("locked.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let options =
        backend::FileOptions { lock: Some(std::time::Duration::ZERO), ..Default::default() };
    let locked = backend::File::open(&image, options).unwrap();
    rig.write_file("locked", "blk-file = '@/locked.img'\nsocket-path = '@/locked.sock'");
    rig.daemon.signal(libc::SIGHUP);
    rig.wait_for("locked", "starting");
    locked
}

#[test]
fn of_two_changes_that_wait_to_be_saved_the_file_has_both() {
    let rig = Rig::of_directory(&[("a", &file("a", ""))]);
    let locked = reload_that_waits(&rig);
    std::thread::scope(|scope| {
        scope.spawn(|| rig.ok("limit a --iops 5 --save"));
        rig.place.wait_until("the change", || live_options(&rig, "a")[0] == 5);
        scope.spawn(|| rig.ok("limit a --iops 9 --bandwidth 1M --save"));
        rig.place.wait_until("the other change", || live_options(&rig, "a")[0] == 9);
        drop(locked);
    });
    let text = text_of(&rig, "a");
    assert!(text.contains("limit-iops = 9\n") && text.contains("limit-bandwidth"), "{text}");
    assert_eq!(rig.ok("reload"), "nothing to do\n");
}

#[test]
fn limits_that_no_file_can_hold_are_refused() {
    let rig = Rig::of_directory(&[("a", &file("a", ""))]);
    for (key, value) in [("iops", 1_000_000_001), ("bandwidth", 1_u64 << 63)] {
        let parameters = json!({"name": "a", key: value, "save": true});
        let call = json!({"method": "io.vhostblk.Limit", "parameters": parameters});
        let reply = rig.connect().call(&call.to_string());
        assert_eq!(reply["error"], "org.varlink.service.InvalidParameter", "{reply}");
    }
    assert_eq!(rig.ok("reload"), "nothing to do\n");
}

#[test]
fn a_cache_mode_that_the_guest_has_chosen_is_not_saved() {
    let rig = Rig::of_directory(&[("a", &file("a", "cache = 'writethrough'"))]);
    let mut guest = rig.guest("a");
    guest.session().set_config(32, &[1]).unwrap();
    rig.place.wait_until("the mode", || rig.json("status a")["writeback"] == true);
    rig.ok("save a");
    assert!(text_of(&rig, "a").contains("writethrough"), "{}", text_of(&rig, "a"));
    assert_eq!(rig.json("status a")["options"]["cache"], "writethrough");
    drop(guest);
    rig.ok("set-cache a writeback");
    rig.ok("save a");
    assert!(text_of(&rig, "a").contains("cache = \"writeback\""), "{}", text_of(&rig, "a"));
}

#[test]
fn a_file_of_another_disk_survives_the_removal() {
    let rig = Rig::of_directory(&[]);
    rig.add("a", "");
    rig.write_file("a", &file("a", ""));
    let line = rig.refused("remove a --save", 1);
    assert!(line.contains("a command has added the disk; drop --save"), "{line}");
    assert!(rig.path("conf/a.toml").exists());
    assert_eq!(rig.names(), ["a"]);
}

#[test]
fn a_change_that_holds_and_is_not_saved_says_so() {
    let rig = Rig::of_directory(&[("b", &file("b", ""))]);
    rig.add("a", "");
    let locked = reload_that_waits(&rig);
    std::thread::scope(|scope| {
        let limited = scope.spawn(|| rig.refused("limit a --iops 5 --save", 1));
        rig.place.wait_until("the change", || live_options(&rig, "a")[0] == 5);
        rig.write_file("a", "# another one");
        drop(locked);
        let line = limited.join().unwrap();
        for part in ["the change holds until the disk ends, and is not saved: ", "a.toml exists; "]
        {
            assert!(line.contains(part), "{line}");
        }
    });
    assert_eq!(live_options(&rig, "a")[0], 5);
}
