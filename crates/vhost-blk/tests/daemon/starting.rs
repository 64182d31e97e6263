// SPDX-License-Identifier: Apache-2.0
//! Disks of the directory that cannot be opened, or whose opening hangs: a qcow2 image gets a mark while it is in
//! use, and its file system is frozen.

use crate::common::{self, Daemon, Place};
use crate::mount::{Frozen, Mount, may_not_mount, run};
use crate::rig::{Rig, command, place_of, scrape};
use serde_json::json;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::Duration;

/// The file of a disk whose opening waits for the file system of its image.
const HANGS: &str = "blk-file = '@/hangs.qcow2'\nformat = 'qcow2'\nsocket-path = '@/hangs.sock'\n\
                     num-queues = 1\ndata-plane = 'uring'\n";

/// Makes the image of that disk.
fn image(place: &Place) -> Mount {
    let mount = Mount::ext4(64);
    let image = mount.path("image");
    run(&["qemu-img", "create", "-qf", "qcow2", image.to_str().unwrap(), "1M"]);
    std::os::unix::fs::symlink(image, place.path("hangs.qcow2")).unwrap();
    mount
}

/// A daemon whose directory has the disks `a`, `b` and `hangs`; returns at once.
fn started(place: Place, options: &[&str], manager: Option<&str>) -> Rig {
    let conf = place.path("conf");
    let mut command =
        command(&place, &[&["--config-dir", conf.to_str().unwrap()], options].concat());
    if let Some(manager) = manager {
        command.env("NOTIFY_SOCKET", place.path(manager));
    }
    Rig { daemon: Daemon::start(&mut command, &place.path("ctl")), place }
}

/// The file of a disk that starts at once.
fn file(name: &str, more: &str) -> String {
    format!("backend = 'null'\nsize = '1M'\nsocket-path = '@/{name}.sock'\nnum-queues = 1\n{more}")
}

fn three() -> Place {
    place_of(&[("a", &file("a", "")), ("b", &file("b", "")), ("hangs", HANGS)])
}

fn received(inbox: &UnixDatagram) -> String {
    let mut text = [0; 256];
    let len = inbox.recv(&mut text).unwrap();
    String::from_utf8(text[..len].to_vec()).unwrap()
}

#[test]
fn an_image_whose_opening_hangs_delays_neither_the_others_nor_the_control_nor_the_boot() {
    if may_not_mount() {
        return;
    }
    let place = three();
    let mount = image(&place);
    let inbox = UnixDatagram::bind(place.path("manager")).unwrap();
    inbox.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let frozen = Frozen::of(&mount);
    let metrics = format!("unix:{}", place.path("m").display());
    let rig = started(place, &["--metrics", &metrics], Some("manager"));
    let frozen = frozen; // dropped before the daemon, which does not end before
    rig.wait_for("a", "serving");
    rig.wait_for("b", "serving");
    rig.guest("b").write(0, &[1; 512]).unwrap();
    assert_eq!(rig.row("hangs")["state"], "starting");
    assert_eq!(rig.row("hangs")["socket"], json!(rig.path("hangs.sock")));
    for verb in ["pause", "resume"] {
        let all = rig.ctl(&format!("{verb} --all"));
        assert_eq!((all.status.code(), &*common::stdout(&all)), (Some(1), "a: done\nb: done\n"));
        let told = String::from_utf8(all.stderr).unwrap();
        assert!(told.contains(&format!("cannot {verb} the disk hangs: ")), "{told}");
    }
    assert!(rig.ok("status hangs").contains("state       starting since "));
    assert!(scrape(&rig.path("m")).contains("vhost_blk_disk_starting{disk=\"hangs\"} 1"));
    assert!(rig.refused("pause hangs", 1).contains("it is being opened"));
    assert!(!rig.path("hangs.sock").exists());
    // The manager goes on although the disk does not.
    assert_eq!(received(&inbox), "READY=1\nSTATUS=2 disks are served, 1 starting");
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("the disk hangs cannot be passed on: it is being added"), "{line}");
    // A removal leaves the opening to its thread.
    assert_eq!(rig.ok("remove hangs").split(':').next(), Some("given up"));
    assert_eq!(rig.row("hangs")["state"], "given_up");
    assert_eq!(received(&inbox), "STATUS=2 disks are served");
    let line = rig.refused("upgrade", 1);
    assert!(line.contains("the storage of the disk hangs"), "{line}");
    drop(frozen);
    rig.place.wait_until("the end of the opening", || rig.row("hangs").is_null());
    assert!(!rig.path("hangs.sock").exists());
    // Nothing of it holds the image.
    assert_eq!(rig.ok("reload"), "hangs: added\n");
    rig.guest("hangs").write(0, &[1; 512]).unwrap();
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    rig.ok("upgrade");
}

/// Subscribers know its failure, so that they learn of its end, too.
#[test]
fn a_failed_disk_that_is_removed_while_another_try_hangs_is_told_as_removed() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::of_directory(&[("hangs", &HANGS.replace("hangs.qcow2", "none.qcow2"))]);
    rig.wait_for("hangs", "failed");
    let mount = image(&rig.place);
    let frozen = Frozen::of(&mount);
    let mut events = rig.events();
    // No try sees a part of the file.
    rig.write_file("part", HANGS);
    std::fs::rename(rig.path("conf/part.toml"), rig.path("conf/hangs.toml")).unwrap();
    let hangs = |(name, state): &(String, String)| name == "opening" && state == "D";
    rig.place.wait_until("the next try", || rig.daemon.threads().iter().any(hangs));
    rig.ok("pause --all");
    assert_eq!(rig.ok("remove hangs").split(':').next(), Some("given up"));
    assert_eq!(events.next_event()["event"], "removed");
    drop(frozen);
    rig.place.wait_until("the end of the try", || rig.row("hangs").is_null());
    rig.add("a", "");
    assert_eq!(events.next_event()["event"], "added", "the removal is one event");
}

/// More than the control socket has places for commands.
const HANGING: usize = 26;

#[test]
fn disks_that_are_added_on_dead_storage_keep_no_place_of_the_control_socket() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    rig.add("a", "");
    let mount = Mount::ext4(64);
    let image = |number: usize| mount.path(&format!("{number}.qcow2"));
    for number in 0..HANGING {
        run(&["qemu-img", "create", "-qf", "qcow2", image(number).to_str().unwrap(), "1M"]);
    }
    let frozen = Frozen::of(&mount);
    for number in 0..HANGING {
        let image = image(number).display().to_string();
        let add = format!("add d{number} --blk-file {image} --format qcow2 --num-queues 1");
        let mut client = rig.command(&format!("{add} --socket-path d{number}.sock"));
        let mut client = client.stderr(Stdio::null()).spawn().unwrap();
        rig.wait_for(&format!("d{number}"), "starting");
        client.kill().unwrap();
        client.wait().unwrap();
    }
    // The place of the last client ends with its connection.
    rig.place.wait_until("a place", || rig.ctl("pause a").status.success());
    rig.ok("resume a");
    drop(frozen);
    for number in 0..HANGING {
        rig.wait_for(&format!("d{number}"), "serving");
    }
}

#[test]
fn a_stop_does_not_wait_for_an_image_whose_opening_hangs() {
    if may_not_mount() {
        return;
    }
    let place = three();
    let mount = image(&place);
    let frozen = Frozen::of(&mount);
    let mut rig = started(place, &[], None);
    let frozen = frozen; // dropped before the daemon
    rig.wait_for("a", "serving");
    rig.ok("stop");
    // The process itself ends as soon as the kernel lets its thread go.
    rig.place.wait_until("the removal of the sockets", || !rig.path("ctl").exists());
    assert!(!rig.path("a.sock").exists());
    drop(frozen);
    assert_eq!(rig.daemon.wait().code(), Some(0));
    assert!(!rig.path("hangs.sock").exists());
}

#[test]
fn a_reload_opens_others_beside_images_that_hang_and_these_when_their_storage_answers() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::of_directory(&[]);
    let mount = image(&rig.place);
    // More of them than threads have a turn, and the first ones of the directory.
    let hanging: Vec<String> = (0..10).map(|n| format!("a{n}")).collect();
    for name in &hanging {
        std::fs::copy(mount.path("image"), mount.path(name)).unwrap();
        let file = mount.path(name);
        let text = HANGS.replace("@/hangs.qcow2", file.to_str().unwrap());
        rig.write_file(name, &text.replace("hangs", name));
    }
    let others: Vec<String> = (0..6).map(|n| format!("d{n}")).collect();
    others.iter().for_each(|name| rig.write_file(name, &file(name, "")));
    let frozen = Frozen::of(&mount);
    let reload = rig.command("reload").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    rig.place.wait_until("the others", || {
        let list = rig.json("list");
        let is = |name: &String, state: &str| {
            let mut rows = list.as_array().unwrap().iter();
            rows.any(|row| row["name"] == **name && row["state"] == state)
        };
        others.iter().all(|name| is(name, "serving"))
            && hanging.iter().all(|name| is(name, "starting"))
    });
    drop(frozen);
    let output = reload.unwrap().wait_with_output().unwrap();
    let text = common::stdout(&output);
    assert!(output.status.success(), "{text}");
    assert_eq!(text.lines().filter(|line| line.ends_with(": added")).count(), 16, "{text}");
    hanging.iter().for_each(|name| rig.wait_for(name, "serving"));
    rig.guest("a3").write(0, &[1; 512]).unwrap();
    assert_eq!(rig.ok("reload"), "nothing to do\n");
}

#[test]
fn a_disk_that_fails_is_listed_with_its_error_and_served_as_soon_as_it_can_be() {
    let place = place_of(&[
        ("late", "blk-file = '@/late.img'\nsocket-path = '@/late.sock'\nnum-queues = 1\n"),
        ("wrong", "blk-file = 5 5"),
        ("a", &file("a", "")),
    ]);
    let metrics = format!("unix:{}", place.path("m").display());
    let mut rig = started(place, &["--metrics", &metrics], None);
    rig.wait_for("late", "failed");
    rig.wait_for("wrong", "failed");
    rig.wait_for("a", "serving");
    // It is tried again meanwhile: each look may find it `starting`.
    let failure = rig.row("late")["start"]["failure"].clone();
    assert_eq!(failure["what"], "open the disk");
    assert!(failure["why"].as_str().unwrap().contains("late.img"), "{failure}");
    assert!(rig.row("wrong")["start"]["failure"]["why"].as_str().unwrap().contains("line 1"));
    rig.place.wait_until("the state", || rig.json("status late")["state"] == "failed");
    for (words, told) in [
        ("status late", "late.img"),
        ("list", "late: failed since "),
        ("top --once", "late   failed "),
    ] {
        let text = || match words.strip_prefix("top") {
            Some(rest) => {
                let mut top = common::program();
                top.args(["top", "--interval", "0.1", "--control-path"]).arg(rig.path("ctl"));
                common::stdout(&common::finish(top.args(rest.split_whitespace())))
            }
            None => rig.ok(words),
        };
        rig.place.wait_until(words, || text().contains(told));
    }
    for (words, told) in [
        ("pause late", "it has failed to start: cannot open the disk"),
        (
            "add late --backend null --size 1M --socket-path x.sock",
            "the directory of configuration files has a disk of this name",
        ),
    ] {
        rig.place.wait_until(words, || rig.refused(words, 1).contains(told));
    }
    rig.place.wait_until("the metrics", || {
        let page = scrape(&rig.path("m"));
        assert!(page.contains("vhost_blk_disk_failed{disk=\"a\"} 0"), "{page}");
        page.contains("vhost_blk_disk_failed{disk=\"late\"} 1")
    });
    let mut events = rig.events();
    std::fs::remove_file(rig.path("conf/wrong.toml")).unwrap();
    // No attempt sees an empty file.
    std::fs::File::create(rig.path("part.img")).unwrap().set_len(1 << 20).unwrap();
    std::fs::rename(rig.path("part.img"), rig.path("late.img")).unwrap();
    // Without a reload. The failed disk whose file has gone leaves the list, too.
    rig.wait_for("late", "serving");
    rig.place.wait_until("the end of the failed one", || rig.row("wrong").is_null());
    let mut told = [events.next_event(), events.next_event()].map(|event| {
        (event["disk"].as_str().unwrap().to_owned(), event["event"].as_str().unwrap().to_owned())
    });
    told.sort();
    assert_eq!(told, [("late".into(), "added".into()), ("wrong".into(), "removed".into())]);
    rig.guest("late").write(0, &[1; 512]).unwrap();
    // Each failure is logged once, and not at each try.
    rig.ok("stop");
    rig.daemon.wait();
    let log = rig.daemon.rest_of_stderr();
    assert_eq!(log.lines().filter(|line| line.contains("ERROR")).count(), 2, "{log}");
}

#[test]
fn a_failed_disk_is_removed_by_command_and_outlives_an_upgrade() {
    let rig = Rig::of_directory(&[
        ("late", "blk-file = '@/late.img'\nsocket-path = '@/late.sock'\nnum-queues = 1\n"),
        ("gone", "blk-file = '@/gone.img'\nsocket-path = '@/gone.sock'\nnum-queues = 1\n"),
    ]);
    ["late", "gone"].iter().for_each(|name| rig.wait_for(name, "failed"));
    let mut events = rig.events();
    assert!(rig.ok("remove gone").contains("gone.toml stays, and a reload adds the disk again"));
    assert_eq!(events.next_event()["event"], "removed");
    rig.ok("upgrade");
    rig.wait_for("late", "failed");
    assert_eq!(rig.names(), ["late"]);
    std::fs::File::create(rig.path("late.img")).unwrap().set_len(1 << 20).unwrap();
    rig.wait_for("late", "serving");
    let output = rig.ctl("reload");
    let text = common::stdout(&output);
    assert!(text.starts_with("gone: failed: ") && text.contains("gone.img"), "{text}");
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("failed: gone;"), "{told}");
}

/// A connection would be a front-end of the disk that has the socket.
#[test]
fn a_disk_with_the_socket_of_another_one_does_not_connect_to_it() {
    let rig = Rig::of_directory(&[("a", &file("x", "")), ("b", &file("x", ""))]);
    let has = |state: &str| ["a", "b"].into_iter().find(|name| rig.row(name)["state"] == state);
    let (mut served, mut failed) = (None, None);
    rig.place.wait_until("one disk of both", || {
        (served, failed) = (has("serving"), has("failed"));
        served.is_some() && failed.is_some()
    });
    let tries = || rig.row(failed.unwrap())["start"]["failed_tries"].as_u64();
    rig.place.wait_until("another try", || tries() > Some(1));
    let why = rig.row(failed.unwrap()).to_string();
    assert!(why.contains("this daemon"), "{why}");
    assert_eq!(rig.json(&format!("status {}", served.unwrap()))["front_ends"], 0);
}
