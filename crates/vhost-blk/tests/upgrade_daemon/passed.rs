// SPDX-License-Identifier: Apache-2.0
//! The parts of a daemon that pass on to its new program.

use crate::loads::{add_passed, file, image, write_and_read};
use crate::rig::Rig;
use driver::{Device, Options, RawChannel, Request};
use serde_json::{Value, json};
use std::time::Duration;

#[test]
fn each_disk_keeps_its_pause_its_limits_its_cache_mode_its_rules_for_errors_and_its_counters() {
    let rig = Rig::new();
    ["a", "b", "c"].iter().for_each(|name| rig.add(name, "--limit-iops 500"));
    let mut guests = ["a", "b", "c"].map(|name| rig.guest(name));
    guests.iter_mut().for_each(|guest| write_and_read(guest, 0));
    rig.ok("pause a");
    rig.ok("limit b --iops 77 --burst-seconds 2");
    rig.ok("set-cache c writethrough");
    rig.ok("set-errors c --on-error stop --on-read-error report --io-timeout 5");
    let of = |name: &str| {
        let status = rig.json(&format!("status {name}"));
        let options = &status["options"];
        let errors = json!([options["on_error"], options["on_read_error"], options["io_timeout"]]);
        json!([
            status["paused"],
            status["limits"],
            status["writeback"],
            status["front_ends"],
            errors
        ])
    };
    let requests = |name: &str| rig.json(&format!("stats {name}"))["queues"][0]["chains"].clone();
    let names = ["a", "b", "c"];
    let before = names.map(|name| (of(name), requests(name)));
    rig.upgrade();
    assert_eq!(names.map(|name| (of(name), requests(name))), before);
    assert_eq!(
        (&of("a")[0], &of("b")[1]["iops"], &of("c")[2]),
        (&json!(true), &json!(77), &json!(false))
    );
    assert_eq!(of("c")[4], json!(["stop", "report", 5.0]));
    let layout = guests[0].layout();
    guests[0].queue(0).submit(&Request::write(3, &[3; 512]), &layout).unwrap();
    guests[1..].iter_mut().for_each(|guest| write_and_read(guest, 1));
    assert!(guests[0].queue(0).try_collect().unwrap().is_none(), "the pause has ended");
    rig.ok("resume a");
    guests[0].queue(0).collect().unwrap();
}

#[test]
fn halts_failures_and_the_counters_of_polls_and_errors_pass_on() {
    let rig = Rig::new();
    rig.add("a", "--wrap fault:ops=flush,errno=EIO");
    let mut guest = rig.guest("a");
    write_and_read(&mut guest, 0);
    (0..3).for_each(|_| drop(guest.flush().unwrap_err()));
    let counted = || {
        let stats = rig.json("stats a")["queues"][0].clone();
        let counters = ["failed_io", "failed", "suppressed"].map(|name| stats[name].clone());
        (rig.json("status a")["failures"].clone(), counters)
    };
    let polls = || rig.json("stats a")["queues"][0]["polls"].as_u64().unwrap();
    let before = (counted(), polls());
    assert_eq!((&before.0.0["io"], &before.0.1[0]), (&json!(3), &json!(3)));
    rig.upgrade();
    assert_eq!(counted(), before.0);
    assert!(polls() >= before.1, "a poll may have ended meanwhile");
    guest.flush().unwrap_err();
    assert_eq!(counted().0["io"], 4);
}

#[test]
fn the_groups_of_the_running_disks_pass_on_whatever_their_options_say() {
    let rig = Rig::new();
    let options = "--limit-group old --limit-iops 500";
    ["stays", "leaves", "moves"].iter().for_each(|name| rig.add(name, options));
    rig.add("joins", "");
    rig.ok("limit leaves --none");
    rig.ok("limit moves --group new --iops 70");
    rig.ok("limit joins --group new");
    rig.ok("limit stays --iops 400");
    let names = ["stays", "leaves", "moves", "joins"];
    let limits = || names.map(|name| rig.json(&format!("status {name}"))["limits"].clone());
    let before = limits();
    let groups = ["old", "", "new", "new"];
    let shown = |limits: &Value| {
        (limits["group"].as_str().unwrap_or("").to_owned(), limits["iops"].as_u64())
    };
    let expected = [Some(400), None, Some(70), Some(70)];
    for (n, of_disk) in before.iter().enumerate() {
        assert_eq!(shown(of_disk), (groups[n].to_owned(), expected[n]), "{}", names[n]);
    }
    rig.upgrade();
    assert_eq!(limits(), before);
    // They share them still.
    rig.ok("limit joins --iops 90");
    assert_eq!(
        limits().map(|limits| limits["iops"].as_u64()),
        [Some(400), None, Some(90), Some(90)]
    );
}

#[test]
fn a_reload_after_an_upgrade_compares_the_files_with_the_options_of_before() {
    let rig = Rig::of_directory(&[]);
    for name in ["same", "live", "idle", "gone", "late"] {
        image(&rig, name);
        rig.write_file(name, &file(name, ""));
    }
    rig.ok("reload");
    rig.add("own", "");
    rig.ok("limit same --iops 9");
    // Changed before the upgrade, which does not read the directory.
    rig.write_file("late", &file("late", "serial = 'new'"));
    rig.upgrade();
    assert_eq!(rig.guest("late").get_id().unwrap()[..3], *b"\0\0\0");
    // Until its front-end has gone, it is not restarted.
    rig.place.wait_until("the restart", || {
        crate::common::stdout(&rig.ctl("reload")) == "late: restarted\n"
    });
    assert_eq!(rig.guest("late").get_id().unwrap()[..3], *b"new");
    rig.upgrade();
    assert_eq!(rig.ok("reload"), "nothing to do\n");
    rig.write_file("live", &file("live", "limit-iops = 7"));
    rig.write_file("idle", &file("idle", "serial = 'idle'"));
    std::fs::remove_file(rig.path("conf").join("gone.toml")).unwrap();
    let told = rig.ok("reload");
    for line in ["live: changed", "idle: restarted", "gone: removed"] {
        assert!(told.contains(line), "{told}");
    }
    assert_eq!(told.lines().count(), 3, "{told}");
    assert_eq!(rig.names(), ["idle", "late", "live", "own", "same"]);
    assert_eq!(rig.json("status same")["limits"]["iops"], 9);
    rig.write_file("own", &file("own", ""));
    let told = crate::common::stdout(&rig.ctl("reload"));
    assert!(told.contains("a command has added another disk"), "{told}");
}

#[test]
fn an_image_that_came_as_a_descriptor_or_has_moved_passes_on() {
    let rig = Rig::new();
    add_passed(&rig, "passed");
    rig.add("moved", "");
    let mut guests = ["passed", "moved"].map(|name| rig.guest(name));
    std::fs::remove_file(rig.path("passed.img")).unwrap();
    std::fs::rename(rig.path("moved.img"), rig.path("other.img")).unwrap();
    for n in 0..3 {
        rig.upgrade();
        guests.iter_mut().for_each(|guest| write_and_read(guest, n));
    }
    // The lock of the moved one is still held.
    let line = rig.refused("add x --blk-file other.img --socket-path x.sock", 1);
    assert!(line.contains("the disk moved of this daemon has it"), "{line}");
}

#[test]
fn a_daemon_that_is_killed_after_an_upgrade_is_followed_by_one_that_completes_every_request() {
    let mut rig = Rig::of_directory(&[]);
    for name in ["a", "b"] {
        image(&rig, name);
        let slow = "wrap = ['delay:us=20000,ops=write']";
        rig.write_file(name, &file(name, slow));
    }
    rig.ok("reload");
    let options = Options { inflight: true, ..Options::default() };
    let mut guests = ["a", "b"]
        .map(|name| (name, Device::connect(rig.path(&format!("{name}.sock")), &options).unwrap()));
    rig.upgrade();
    for (_, guest) in &mut guests {
        let layout = guest.layout();
        for n in 0..8 {
            guest.queue(0).submit(&Request::write(n, &[n as u8 + 1; 512]), &layout).unwrap();
        }
    }
    rig.daemon.signal(libc::SIGKILL);
    rig.daemon.wait();
    let conf = rig.path("conf");
    rig.restart(&["--config-dir", conf.to_str().unwrap()]);
    for (name, guest) in &mut guests {
        guest.reconnect(rig.path(&format!("{name}.sock"))).unwrap();
        (0..8).for_each(|_| assert_eq!(guest.queue(0).collect().unwrap().1.status, Some(0)));
        assert!(guest.queue(0).try_collect().unwrap().is_none(), "{name}: completed twice");
        let mut data = [0; 512];
        for n in 0..8 {
            guest.read(n, &mut data).unwrap();
            assert_eq!(data, [n as u8 + 1; 512], "{name}: sector {n}");
        }
    }
    rig.upgrade();
    guests.iter_mut().for_each(|(_, guest)| write_and_read(guest, 0));
}

#[test]
fn metrics_are_served_on_for_all_disks() {
    use std::io::{Read, Write};
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("metrics");
    let rig = Rig::with(&["--metrics", &format!("unix:{}", socket.display())]);
    ["a", "b"].iter().for_each(|name| rig.add(name, ""));
    write_and_read(&mut rig.guest("a"), 0);
    let scrape = || {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        let of_disk = |line: &&str| line.contains("disk=\"a\"") && line.contains("requests");
        let lines: Vec<String> = page.lines().filter(of_disk).map(str::to_owned).collect();
        assert!(page.contains("vhost_blk_disk_up{disk=\"b\"} 1"), "{page}");
        lines
    };
    let before = scrape();
    assert!(!before.is_empty());
    rig.upgrade();
    assert_eq!(scrape(), before);
}

#[test]
fn calls_that_follow_an_upgrade_on_the_same_connection_are_answered() {
    let mut rig = Rig::new();
    rig.add("a", "");
    let mut raw = rig.connect();
    let upgrade = r#"{"method":"io.vhostblk.Upgrade"}"#;
    let list = r#"{"method":"io.vhostblk.List"}"#;
    let names = |reply: &Value| reply["parameters"]["disks"][0]["name"].clone();
    // All in one write, and the last one in two parts.
    let (first, rest) = list.split_at(9);
    let bytes = format!("{upgrade}\0{list}\0{upgrade}\0{first}");
    std::io::Write::write_all(&mut raw.stream, bytes.as_bytes()).unwrap();
    assert!(raw.receive()["parameters"]["pause_us"].is_u64());
    assert_eq!(names(&raw.receive()), "a");
    assert!(raw.receive()["parameters"]["pause_us"].is_u64());
    raw.send(rest);
    assert_eq!(names(&raw.receive()), "a");
    // A client that wants no answer gets none.
    let oneway = r#"{"method":"io.vhostblk.Upgrade","oneway":true}"#;
    std::io::Write::write_all(&mut raw.stream, format!("{oneway}\0{list}\0").as_bytes()).unwrap();
    assert_eq!(names(&raw.receive()), "a");
    (0..3).for_each(|_| _ = rig.daemon.log_line("the program was upgraded"));
}

#[test]
fn a_subscription_of_events_ends_with_the_program_and_a_new_one_holds() {
    let rig = Rig::new();
    rig.add("a", "");
    let mut raw = rig.events();
    rig.upgrade();
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut raw.reader, &mut rest).unwrap();
    assert_eq!(rest, b"");
    let mut raw = rig.events();
    rig.ok("pause a");
    let names = [(); 2].map(|()| raw.next_event()["event"].clone());
    assert_eq!(names, ["upgraded", "paused"]);
}

#[test]
fn a_front_end_that_waits_is_served_by_the_new_program() {
    const GET_FEATURES: u32 = 1;
    let rig = Rig::new();
    rig.add("a", "");
    let guest = rig.guest("a");
    let waiting = RawChannel::connect(rig.path("a.sock")).unwrap();
    waiting.message(GET_FEATURES, &[], &[]).unwrap();
    // The daemon has time to accept it; in the backlog it would pass on with the socket.
    std::thread::sleep(Duration::from_millis(100));
    rig.upgrade();
    drop(guest);
    assert!(waiting.reply(Duration::from_secs(60)).unwrap().value().is_some());
}
