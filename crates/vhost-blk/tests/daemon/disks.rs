// SPDX-License-Identifier: Apache-2.0
//! Disks come and go, and each verb does its work or says why not.

use crate::common::{self, Daemon};
use crate::rig::{Rig, run_line, scrape};
use driver::{Device, Request};
use serde_json::{Value, json};
use std::os::fd::AsRawFd;
use std::path::Path;

#[test]
fn disks_are_added_served_and_removed_and_leave_nothing() {
    let rig = Rig::new();
    assert_eq!(rig.names(), [""; 0]);
    rig.add("a", "--serial first");
    rig.add("b", "");
    assert_eq!(rig.names(), ["a", "b"]);
    for name in ["a", "b"] {
        rig.guest(name).write(1, &[name.as_bytes()[0]; 512]).unwrap();
    }
    assert_eq!(rig.guest("a").get_id().unwrap()[..5], *b"first");
    for name in ["a", "b"] {
        let image = std::fs::read(rig.path(&format!("{name}.img"))).unwrap();
        assert_eq!(image[512..1024], [name.as_bytes()[0]; 512]);
    }
    let _connected = rig.guest("a");
    assert_eq!(rig.ok("remove a"), "done\n");
    assert_eq!(rig.names(), ["b"]);
    assert!(!rig.path("a.sock").exists());
    // The lock is free, and the name.
    rig.ok("add a --blk-file a.img --socket-path a.sock --num-queues 1");
    rig.guest("a").read(1, &mut [0; 512]).unwrap();
}

#[test]
fn a_disk_that_does_not_start_says_why_and_hurts_no_other() {
    let mut rig = Rig::new();
    rig.add("a", "");
    std::os::unix::fs::symlink("a.img", rig.path("link.img")).unwrap();
    let mut guest = rig.guest("a");
    for (words, code, reason) in [
        ("add a --blk-file disk.img --socket-path x.sock", 1, "there is a disk of this name"),
        (
            "add b --blk-file a.img --socket-path x.sock",
            1,
            "a.img: the disk a of this daemon has it; remove that disk (vhost-blk ctl remove a), or \
             name another image",
        ),
        (
            "add b --read-only --blk-file link.img --socket-path x.sock",
            1,
            "the disk a of this daemon",
        ),
        ("add b --blk-file none.img --socket-path x.sock", 1, "none.img"),
        (
            "add b --blk-file disk.img --socket-path a.sock",
            1,
            "a.sock: the disk a of this daemon has it; remove that disk (vhost-blk ctl remove a), or \
             name another socket",
        ),
        ("add b --blk-file disk.img --socket-path ctl", 2, "same path"),
        ("add b --blk-file disk.img --socket-path conf", 1, "it is a directory"),
        ("add b --blk-file disk.img", 2, "--socket-path"),
        ("add b --socket-path x.sock", 2, "--blk-file"),
        ("add b --blk-file disk.img --socket-path x.sock --queue-size 3", 2, "power of two"),
        ("add b/c --blk-file disk.img --socket-path x.sock", 2, "letters, digits"),
        ("add b --blk-file disk.img --socket-path x.sock --threads 2", 2, "--threads"),
    ] {
        let line = rig.refused(words, code);
        assert!(line.contains(reason), "{words}: {line}");
        assert!(!rig.path("x.sock").exists(), "{words}");
    }
    assert_eq!(rig.names(), ["a"]);
    guest.write(0, &[1; 512]).unwrap();
    assert_eq!(rig.json("status a")["front_ends"], 1, "the daemon has looked at its own socket");
    // Nothing of the failed ones holds the image.
    rig.ok("add b --blk-file disk.img --socket-path x.sock --num-queues 1");
    // An image of another disk is not waited for.
    drop(guest);
    rig.ok("stop");
    rig.daemon.wait();
    let log = rig.daemon.rest_of_stderr();
    assert!(!log.contains("waits at most"), "{log}");
}

#[test]
fn a_backing_file_of_another_disk_is_refused_with_the_name_of_that_disk() {
    let rig = Rig::new();
    let made = run_line(&format!(
        "create --format qcow2 --backing disk.img --backing-format raw {}",
        rig.path("top").display()
    ));
    assert!(made.status.success(), "{made:?}");
    let qcow2 = "--format qcow2 --allow-backing same-dir --num-queues 1";
    rig.ok(&format!("add a --blk-file top --socket-path a.sock {qcow2}"));
    let line = rig.refused("add b --blk-file disk.img --socket-path b.sock", 1);
    assert!(
        line.contains("disk.img: the disk a of this daemon has it; remove that disk"),
        "{line}"
    );
    rig.ok("remove a");
    rig.ok("add b --blk-file disk.img --socket-path b.sock --num-queues 1");
    // The image has no other disk, and its backing file has one.
    let line = rig.refused(&format!("add a --blk-file top --socket-path a.sock {qcow2}"), 1);
    assert!(line.contains("disk.img: the disk b of this daemon has it"), "{line}");
}

#[test]
fn warnings_of_a_start_reach_its_command() {
    let rig = Rig::of_directory(&[]);
    std::fs::write(rig.path("odd.img"), [1; 700]).unwrap();
    let told = "the last 188 bytes of";
    let output = rig.ctl("add a --blk-file odd.img --socket-path a.sock --num-queues 1");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(common::stdout(&output), "done\n");
    assert!(stderr.starts_with("vhost-blk: warning: ") && stderr.contains(told), "{stderr}");
    rig.ok("remove a");
    let reply = rig.json("add a --blk-file odd.img --socket-path a.sock --num-queues 1");
    assert!(reply["warnings"][0].as_str().unwrap().contains(told), "{reply}");
    rig.ok("remove a");
    rig.write_file("a", "blk-file = '@/odd.img'\nsocket-path = '@/a.sock'\nnum-queues = 1\n");
    let text = rig.ok("reload");
    assert!(text.starts_with("a: added\na: warning: ") && text.contains(told), "{text}");
}

#[test]
fn a_disk_without_a_file_names_the_way_to_another_size_and_image() {
    let rig = Rig::new();
    rig.ok("add n --backend null --size 1M --socket-path n.sock --num-queues 1");
    let line = rig.refused("resize n 2M", 1);
    assert!(line.contains("remove the disk, and add it with another --size"), "{line}");
    rig.add("a", "");
    let line = rig.refused("commit a", 1);
    let told = "cannot commit the image of the disk a: its image has no backing file; there is nothing to commit";
    assert!(line.contains(told), "{line}");
}

#[test]
fn a_socket_of_a_disk_is_told_from_a_control_socket() {
    let rig = Rig::new();
    rig.add("a", "");
    let mut command = common::program();
    command.current_dir(rig.place.dir.path()).args(["ctl", "--control-path", "a.sock", "list"]);
    let line = common::one_line(&common::finish(&mut command), 3);
    let told = "this is the vhost-user socket of a disk, not a control socket; give the daemon's";
    assert!(line.contains(told), "{line}");
    rig.guest("a").write(0, &[1; 512]).unwrap();
}

#[test]
fn the_only_disk_is_removed_by_its_name_alone() {
    let rig = Rig::new();
    rig.add("a", "");
    assert!(rig.refused("remove", 2).contains("<NAME>"));
    let reply = rig.connect().call(r#"{"method":"io.vhostblk.Remove","parameters":{}}"#);
    assert_eq!(reply["parameters"]["parameter"], "name", "{reply}");
    assert_eq!(rig.names(), ["a"]);
    assert!(rig.refused("remove b", 1).contains("there is none of this name"));
    rig.ok("remove a");
}

#[test]
fn verbs_for_a_disk_that_is_not_there_or_not_named_say_so() {
    let rig = Rig::new();
    rig.add("a", "");
    rig.add("b", "");
    for verb in [
        "status",
        "stats",
        "resize",
        "pause",
        "resume",
        "limit --iops 1",
        "switch uring",
        "set-cache writethrough",
    ] {
        let line = rig.refused(verb, 1);
        assert!(line.contains("none is named, and there are 2"), "{verb}: {line}");
    }
    for verb in [
        "remove c",
        "status c",
        "stats c",
        "resize c",
        "pause c",
        "resume c",
        "limit c --iops 1",
        "switch c uring",
        "set-cache c writeback",
    ] {
        let line = rig.refused(verb, 1);
        assert!(line.contains("disk c: there is none of this name"), "{verb}: {line}");
    }
    assert_eq!(rig.names(), ["a", "b"]);
}

#[test]
fn verbs_change_their_disk_only() {
    let rig = Rig::new();
    rig.add("a", "");
    rig.add("b", "");
    rig.ok("resize a 2M");
    rig.ok("limit a --iops 77");
    rig.ok("set-cache a writethrough");
    rig.ok("pause a");
    let (a, b) = (rig.json("status a"), rig.json("status b"));
    let of = |status: &Value| {
        json!([
            status["capacity_bytes"],
            status["limits"]["iops"],
            status["writeback"],
            status["paused"]
        ])
    };
    assert_eq!(of(&a), json!([2 << 20, 77, false, true]));
    assert_eq!(of(&b), json!([1 << 20, null, true, false]));
    assert!(rig.ok("list").contains("a     paused   none       uring  2M"), "{}", rig.ok("list"));
    rig.ok("resume a");
    assert!(rig.refused("resize a 1M", 1).contains("cut its end off"));
    let is_loaded = Path::new("/dev/vhost-blk").exists();
    assert!(is_loaded || rig.refused("switch a kernel", 1).contains("modprobe"));
    is_loaded.then(|| println!("PARTLY SKIPPED: the module is loaded here"));
    assert_eq!(rig.ok("switch a uring"), "done; 0 running queues were moved\n");
}

#[test]
fn write_through_reaches_a_running_guest_and_write_back_waits_for_its_end() {
    let rig = Rig::new();
    rig.add("a", "");
    let mut guest = rig.guest("a");
    assert_eq!(rig.ok("set-cache writethrough"), "done\n");
    assert_eq!(rig.ok("set-cache writethrough"), "nothing to do\n");
    assert_eq!(guest.config().unwrap().writeback, 0);
    let line = rig.refused("set-cache a writeback", 1);
    assert!(line.contains("sends no FLUSH"), "{line}");
    guest.write(0, &[1; 512]).unwrap();
    drop(guest);
    rig.place
        .wait_until("the guest has gone", || rig.json("status")["front_end_connected"] == false);
    assert_eq!(rig.ok("set-cache writeback"), "done\n");
}

#[test]
fn counters_of_a_disk_outlive_its_guests() {
    let rig = Rig::new();
    rig.add("a", "");
    for _ in 0..2 {
        (0..3).for_each(|sector| rig.guest("a").write(sector, &[1; 512]).unwrap());
    }
    let stats = rig.json("stats a");
    assert_eq!((&stats["name"], &stats["queues"][0]["chains"]), (&json!("a"), &json!(6)));
    assert_eq!(stats["queues"][0]["write_bytes"], 6 * 512);
    assert_eq!(stats["queues"][0]["latency"]["write"]["count"], 6);
    assert!(rig.ok("stats").starts_with("QUEUE  REQUESTS  "));
}

#[test]
fn a_loaded_disk_loses_nothing_while_others_come_and_go() {
    let rig = Rig::new();
    rig.add("busy", "");
    let mut guest = rig.guest("busy");
    let layout = guest.layout();
    let done = std::thread::scope(|scope| {
        let others = scope.spawn(|| {
            for round in 0..10 {
                rig.add("other", "");
                rig.guest("other").write(round, &[round as u8; 512]).unwrap();
                rig.ok("remove other");
            }
        });
        let mut done = 0_u64;
        while !others.is_finished() {
            for n in 0..16 {
                let sector = (done + n) % 1024;
                let data = [(done + n) as u8; 512];
                guest.queue(0).submit(&Request::write(sector, &data), &layout).unwrap();
            }
            for _ in 0..16 {
                assert_eq!(guest.queue(0).collect().unwrap().1.status, Some(0));
            }
            done += 16;
        }
        others.join().unwrap();
        done
    });
    let image = std::fs::read(rig.path("busy.img")).unwrap();
    for n in done.saturating_sub(1024)..done {
        let at = (n % 1024) as usize * 512;
        assert_eq!(image[at..at + 512], [n as u8; 512], "write {n} of {done}");
    }
}

#[test]
fn a_disk_whose_storage_hangs_delays_no_other_and_goes_when_it_answers() {
    let metrics = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", metrics.path().join("m").display());
    let rig = Rig::with(&["--metrics", &address]);
    rig.add("stuck", "--wrap delay:us=3600000000");
    rig.add("quick", "");
    let mut guests = vec![submitted(&rig, "stuck")];
    // The pause drains: the disk answers nothing until its storage does.
    let line = rig.refused("--timeout 1 pause stuck", 3);
    assert!(line.contains("no answer in 1 s"), "{line}");
    let list = rig.json("list");
    assert_eq!((&list[0]["state"], &list[1]["state"]), (&json!("serving"), &json!("silent")));
    let all = rig.ctl("status --all");
    let [told, failed] = [&all.stdout, &all.stderr].map(|text| String::from_utf8_lossy(text));
    assert_eq!(all.status.code(), Some(1), "{failed}");
    assert!(told.starts_with("name        quick\n"), "{told}");
    assert!(failed.contains("the disk stuck: it does not answer"), "{failed}");
    let page = scrape(&metrics.path().join("m"));
    assert!(page.contains("vhost_blk_disk_up{disk=\"quick\"} 1"), "{page}");
    assert!(page.contains("vhost_blk_disk_up{disk=\"stuck\"} 0"), "{page}");
    assert!(page.contains("vhost_blk_capacity_bytes{disk=\"quick\"}"), "{page}");
    rig.guest("quick").write(0, &[1; 512]).unwrap();
    rig.ok("remove quick");
    rig.add("slow", "--wrap delay:us=20000000");
    guests.push(submitted(&rig, "slow"));
    let line = rig.refused("--timeout 1 remove slow", 3);
    assert!(line.contains("no answer in 1 s"), "{line}");
    rig.place.wait_until("the disk goes by itself", || rig.names() == ["stuck"]);
    assert!(!rig.path("slow.sock").exists());
}

/// A guest with a write that the storage works on.
pub(crate) fn submitted(rig: &Rig, name: &str) -> Device {
    let mut guest = rig.guest(name);
    rig.submit(name, &mut guest, &Request::write(0, &[1; 512]));
    guest
}

#[test]
fn sixty_four_disks_in_one_process_answer_each_with_its_own_image() {
    const DISKS: u64 = 64;
    let mut rig = Rig::with(&["--threads", "1"]);
    (0..DISKS).for_each(|n| rig.add(&format!("d{n}"), ""));
    assert_eq!(rig.names().len() as u64, DISKS);
    let mut guests: Vec<_> = (0..DISKS).map(|n| rig.guest(&format!("d{n}"))).collect();
    for (n, guest) in (0..).zip(&mut guests) {
        guest.write(n, &[n as u8 + 1; 512]).unwrap();
    }
    let told = rig.json("status --all");
    let told = told.as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap());
    assert_eq!(told.collect::<Vec<_>>(), rig.names());
    for n in 0..DISKS {
        let image = std::fs::read(rig.path(&format!("d{n}.img"))).unwrap();
        let written = (0..).zip(image.chunks(512)).filter(|(_, sector)| sector[0] != 0);
        assert_eq!(written.map(|(n, _)| n).collect::<Vec<u64>>(), [n], "disk {n}");
    }
    rig.daemon.signal(libc::SIGTERM);
    assert_eq!(rig.daemon.wait().code(), Some(0));
    assert!(!rig.place.files().iter().any(|name| name.ends_with(".sock")));
    assert!(!rig.path("ctl").exists());
}

#[test]
fn an_image_is_passed_by_descriptor() {
    let rig = Rig::new();
    let hidden = tempfile::tempdir().unwrap();
    let image = hidden.path().join("hidden.img");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let words = format!(
        "add a --pass-file --blk-file {} --socket-path a.sock --num-queues 1 --data-plane uring",
        image.display()
    );
    rig.ok(&words);
    let moved = hidden.path().join("moved.img");
    std::fs::rename(&image, &moved).unwrap();
    rig.guest("a").write(0, &[7; 512]).unwrap();
    assert_eq!(std::fs::read(&moved).unwrap()[..512], [7; 512]);
    assert!(rig.json("status a")["disk"].as_str().unwrap().contains("hidden.img"));
    let line = rig.refused("add b --pass-file --backend null --size 1M --socket-path b.sock", 2);
    assert!(line.contains("--blk-file"), "{line}");
    let line = rig.refused("add b --pass-file --blk-file none.img --socket-path b.sock", 1);
    assert!(line.contains("none.img"), "{line}");
}

#[test]
fn a_passed_descriptor_needs_no_path_that_the_daemon_can_see() {
    let rig = Rig::new();
    let image = std::fs::File::options().read(true).write(true).open(rig.path("disk.img")).unwrap();
    let call = json!({"method": "io.vhostblk.Add", "parameters": {
        "name": "a", "image": 0,
        "options": {"blk_file": "/not/here.img", "socket_path": rig.path("a.sock"),
                    "num_queues": 1, "data_plane": "uring"},
    }});
    let mut raw = rig.connect();
    let bytes = format!("{call}\0");
    common::send_with_descriptor(&raw.stream, bytes.as_bytes(), image.as_raw_fd());
    assert_eq!(raw.receive(), json!({"parameters": {"warnings": []}}));
    rig.guest("a").write(0, &[7; 512]).unwrap();
    assert_eq!(std::fs::read(rig.path("disk.img")).unwrap()[..512], [7; 512]);
}

#[test]
fn descriptors_that_no_command_takes_are_closed() {
    let rig = Rig::new();
    let descriptors =
        || std::fs::read_dir(format!("/proc/{}/fd", rig.daemon.id())).unwrap().count();
    rig.names();
    rig.place.wait_until("its connection has gone", || descriptors() < 40);
    let before = descriptors();
    for _ in 0..20 {
        let mut raw = rig.connect();
        common::send_with_descriptor(
            &raw.stream,
            b"{\"method\":\"io.vhostblk.List\"}\0",
            std::io::stdin().as_raw_fd(),
        );
        assert_eq!(raw.receive()["parameters"]["disks"], json!([]));
    }
    rig.place.wait_until("they are closed", || descriptors() <= before);
}

#[test]
fn the_daemon_stops_by_command_and_by_signal_and_its_disks_with_it() {
    for by_command in [true, false] {
        let mut rig = Rig::new();
        rig.add("a", "");
        let _guest = rig.guest("a");
        match by_command {
            true => drop(rig.ok("stop")),
            false => rig.daemon.signal(libc::SIGINT),
        }
        assert_eq!(rig.daemon.wait().code(), Some(0));
        assert_eq!(rig.place.files(), ["a.img", "conf", "disk.img"]);
    }
}

#[test]
fn storage_that_hangs_does_not_keep_the_daemon_from_its_end() {
    let mut rig = Rig::new();
    rig.add("stuck", "--wrap delay:us=3600000000");
    rig.add("quick", "");
    let _guest = submitted(&rig, "stuck");
    rig.daemon.signal(libc::SIGTERM);
    assert_eq!(rig.daemon.wait().code(), Some(0));
    assert!(!rig.place.files().iter().any(|name| name.ends_with(".sock") || name == "ctl"));
}

#[test]
fn the_sockets_of_the_process_have_the_wanted_mode_and_group() {
    use std::os::unix::fs::{MetadataExt, chown};
    let place = common::Place::new();
    let (ctl, metrics) = (place.path("ctl"), place.path("metrics"));
    // Only root gives a file to a group of others.
    let group = std::fs::metadata(place.dir.path()).unwrap().gid();
    let group = chown(place.dir.path(), None, Some(1)).map_or(group, |()| 1).to_string();
    let start = |options: &[&str]| {
        let mut command = common::program();
        command.arg("daemon").arg("--control-path").arg(&ctl).args(options);
        command.arg("--metrics").arg(format!("unix:{}", metrics.display()));
        let daemon = Daemon::start(&mut command, &ctl);
        let access = |path: &Path| {
            let meta = std::fs::metadata(path).unwrap();
            (meta.mode() & 0o777, meta.gid().to_string())
        };
        let found = [access(&ctl), access(&metrics)];
        drop(daemon);
        found
    };
    let of = |mode: u32| (mode, group.clone());
    let found = start(&["--control-mode", "0620", "--control-group", &group]);
    assert_eq!(found.map(|(mode, _)| mode), [0o620, 0o600]);
    let found = start(&["--metrics-group", &group]);
    assert_eq!((found[0].0, found[1].clone()), (0o600, of(0o660)));
    let found = start(&["--metrics-group", &group, "--metrics-mode", "0640"]);
    assert_eq!(found[1], of(0o640));
    for (line, reason) in [
        ("daemon --metrics-group no-such-group --metrics unix:m --control-path c", "no-such-group"),
        (
            "daemon --control-path c --metrics 127.0.0.1:0 --metrics-mode 600",
            "give --metrics unix:PATH",
        ),
        ("daemon --control-path c --metrics-group 0", "there is none"),
        ("daemon --control-path c --control-group no-such-group", "--control-group no-such-group"),
        ("daemon --control-path c --metrics unix:c", "same path"),
        ("daemon --control-path c --blk-file disk.img", "--blk-file"),
        ("serve --backend null --size 1M --socket-path s --control-mode 600", "there is none"),
    ] {
        let line = common::one_line(&run_line(line), 2);
        assert!(line.contains(reason), "{line}");
    }
}

#[test]
fn serve_has_one_disk_under_its_name() {
    let place = common::Place::new();
    let mut command = place.serve();
    command.args(["--name", "db", "--control-path"]).arg(place.path("ctl"));
    let daemon = Daemon::start(&mut command, &place.path("ctl"));
    let rig = Rig { daemon, place };
    assert_eq!(rig.names(), ["db"]);
    assert_eq!(rig.json("status db")["name"], "db");
    for verb in ["remove db", "add x --backend null --size 1M --socket-path x.sock"] {
        assert!(rig.refused(verb, 1).contains("use vhost-blk daemon"), "{verb}");
    }
    assert!(rig.refused("reload", 1).contains("--config-dir"));
    assert_eq!(rig.names(), ["db"]);
}
