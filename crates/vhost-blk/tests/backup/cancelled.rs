// SPDX-License-Identifier: Apache-2.0
//! Backups that do not end well leave no target and hurt no guest.

use crate::common::{Daemon, one_line, program, wait_until};
use crate::load::under_load;
use crate::mount::{Mount, may_not_mount};
use crate::rig::{Raw, Rig};
use crate::served::{Served, served};
use crate::{Client, SLOW, assert_same, fill, is_backed_up, parts, wait_for_end};
use driver::{Device, Options, Request};
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;
use virtio_spec::blk::S_OK;

const SEEDS: u64 = 30;

fn guest(served: &Served) -> Device {
    let options = Options { num_queues: 2, ..Options::default() };
    Device::connect(&served.place.socket, &options).unwrap()
}

/// A complete backup, after all others.
fn backup_again(served: &Served) {
    let target = served.place.path("again");
    let reply = Client::start(&served.control, &target, json!({})).finish();
    assert!(reply["error"].is_null(), "{reply}");
    let content = std::fs::read(&served.place.image).unwrap();
    assert_same(&std::fs::read(target).unwrap(), &content);
}

#[test]
fn a_client_that_is_killed_at_any_moment_leaves_no_target_and_the_guest_goes_on() {
    let served = served(&[]);
    fill(&served.place.image);
    let mut events = Raw::connect(&served.control).subscribed();
    let mut device = guest(&served);
    // The load expects zeroes in its part.
    device.write_zeroes(0, 8192, 0).unwrap();
    let (done, _session) = under_load(device, 2, |loaded| {
        for seed in 0..SEEDS {
            let mut command = program();
            command.args(["ctl", "--control-path"]).arg(&served.control).args(["backup", "--to"]);
            // They end in no test but by a cancel.
            let bandwidth = if seed % 2 == 0 { "1M" } else { "16K" };
            command.arg(served.place.path("copy")).args(["--bandwidth", bandwidth]);
            let mut client = Daemon::spawn(&mut command);
            // Random moments, from the start of the client until the copy has begun, and one within the copy.
            match seed + 1 == SEEDS {
                false => std::thread::sleep(Duration::from_millis(seed * 7919 % 200)),
                true => wait_until("the copy", || is_backed_up(&served)),
            }
            client.signal(libc::SIGKILL);
            client.wait();
            loaded.wait_for_progress(5);
            wait_for_end(&served);
        }
    });
    assert!(done.iter().all(|done| done.writes > 0));
    backup_again(&served);
    let mut files = served.place.files();
    files.retain(|name| !name.ends_with("sock"));
    assert_eq!(files, ["again", "disk.img"]);
    let cancelled = cancelled_before(&mut events, &served.place.path("again"));
    println!("{cancelled} of {SEEDS} backups had begun");
    assert!(cancelled > 0, "no kill has met a backup");
}

/// The number of backups that were cancelled until the one to `last` was complete.
fn cancelled_before(events: &mut Raw, last: &Path) -> u64 {
    let mut cancelled = 0;
    loop {
        let event = events.next_event();
        match event["event"].as_str().unwrap() {
            "backup_ended" => cancelled += u64::from(event["cancelled"] == true),
            "backup_completed" if event["target"] == last.to_str().unwrap() => return cancelled,
            _ => {}
        }
    }
}

#[test]
fn a_full_target_fails_the_backup_and_no_request_of_the_guest() {
    if may_not_mount() {
        return;
    }
    let served = served(&[]);
    fill(&served.place.image);
    let small = Mount::tmpfs(4);
    let mut device = guest(&served);
    // The load expects zeroes in its part.
    device.write_zeroes(0, 8192, 0).unwrap();
    let (_, _session) = under_load(device, 2, |loaded| {
        for format in ["raw", "qcow2"] {
            let target = small.path("copy");
            let words = ["backup", "--to", target.to_str().unwrap(), "--format", format];
            let told = one_line(&served.ctl(&words), 1);
            assert!(told.contains("copy") && told.contains("space"), "{told}");
            assert_eq!(std::fs::read_dir(small.place.path()).unwrap().count(), 0);
            loaded.wait_for_progress(20);
        }
    });
    backup_again(&served);
}

#[test]
fn the_removal_of_the_disk_and_the_end_of_the_daemon_cancel_its_backup() {
    let mut rig = Rig::new();
    for name in ["a", "b"] {
        rig.add(name, "");
        fill(&rig.path(&format!("{name}.img")));
    }
    let (mut a, mut b) = (rig.guest("a"), rig.guest("b"));
    let slow = json!({"name": "a", "bandwidth": SLOW});
    let mut client = Client::start(&rig.path("ctl"), &rig.path("copy"), slow);
    a.write(2000, &[1; 512]).unwrap();
    rig.ok("remove a");
    assert!(client.finish()["parameters"]["why"].as_str().unwrap().contains("cancelled"));
    assert_eq!(parts(&rig.place), [""; 0]);
    b.write(2000, &[1; 512]).unwrap();
    let slow = json!({"name": "b", "bandwidth": SLOW});
    let _client = Client::start(&rig.path("ctl"), &rig.path("copy"), slow);
    assert_eq!(parts(&rig.place).len(), 1);
    rig.daemon.signal(libc::SIGTERM);
    assert!(rig.daemon.wait().success());
    assert_eq!(parts(&rig.place), [""; 0]);
    assert!(!rig.path("copy").exists());
}

#[test]
fn after_sigterm_there_is_no_incomplete_target_each_of_20_times() {
    for _ in 0..20 {
        let mut served = served(&[]);
        fill(&served.place.image);
        let slow = json!({"bandwidth": SLOW});
        let _client = Client::start(&served.control, &served.place.path("copy"), slow);
        served.daemon.signal(libc::SIGTERM);
        assert!(served.daemon.wait_at_once().success());
        assert_eq!(parts(&served.place), [""; 0]);
    }
}

#[test]
fn a_guest_that_moves_to_another_host_ends_its_backup_and_another_one_works_if_it_returns() {
    for lock in ["auto", "off"] {
        let mut served = served(&["--lock", lock]);
        fill(&served.place.image);
        let options = Options { limit: Duration::from_secs(20), ..Options::default() };
        let mut device = Device::connect(&served.place.socket, &options).unwrap();
        let [full, other] = ["full", "other"].map(|name| served.place.path(name));
        let [full, other] = [&full, &other].map(|path| path.to_str().unwrap());
        assert!(served.ctl(&["backup", "--to", full, "--bitmap", "b"]).status.success());
        let slow = json!({"bandwidth": SLOW});
        let mut client = Client::start(&served.control, &served.place.path("copy"), slow);
        let _log = device.start_log().unwrap();
        device.session().stop_queue(0).unwrap();
        if lock == "auto" {
            served.daemon.log_line("gave the lock of the image up");
        }
        let reply = client.finish();
        assert!(reply["parameters"]["why"].to_string().contains("another host"), "{lock}: {reply}");
        assert_eq!(parts(&served.place), [""; 0]);
        let told = one_line(&served.ctl(&["backup", "--to", other]), 1);
        assert!(told.contains("the guest runs elsewhere"), "{lock}: {told}");
        device.reconnect(&served.place.socket).unwrap();
        if lock == "auto" {
            served.daemon.log_line("took the lock of the image");
        }
        device.write(100, &[8; 512]).unwrap();
        // The bitmap lacks the writes of the guest elsewhere.
        let told = one_line(&served.ctl(&["backup", "--to", other, "--incremental", "b"]), 1);
        assert!(told.contains("was on another host"), "{lock}: {told}");
        backup_again(&served);
    }
}

#[test]
fn a_daemon_killed_during_a_backup_loses_no_request() {
    let mut served = served(&[]);
    fill(&served.place.image);
    let options = Options {
        num_queues: 2,
        inflight: true,
        limit: Duration::from_secs(20),
        ..Options::default()
    };
    let mut device = Device::connect(&served.place.socket, &options).unwrap();
    let layout = device.layout();
    let mut stored = HashMap::new();
    for round in 1..=5u8 {
        let slow = json!({"bandwidth": SLOW});
        let target = served.place.path(&format!("copy-{round}"));
        let _client = Client::start(&served.control, &target, slow);
        for n in 0..20 {
            // Each in another cluster that is not copied yet, or shared with one before.
            let sector = u64::from(n) * 611 % 16_384;
            let data = [round ^ n; 512];
            device.queue(0).submit(&Request::write(sector, &data), &layout).unwrap();
            stored.insert(sector, data);
        }
        served.daemon.signal(libc::SIGKILL);
        served.daemon.wait();
        let mut command = program();
        command.args(["serve", "--num-queues", "2", "--threads", "2", "--data-plane", "uring"]);
        command.arg("--blk-file").arg(&served.place.image).arg("--control-path");
        command.arg(&served.control).arg("--socket-path").arg(&served.place.socket);
        served.daemon = Daemon::start(&mut command, &served.control);
        device.reconnect(&served.place.socket).unwrap();
        for _ in 0..20 {
            assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
        }
        assert!(!target.exists());
    }
    for (sector, expected) in stored {
        let mut data = [0; 512];
        device.read(sector, &mut data).unwrap();
        assert_eq!(data, expected, "sector {sector}");
    }
    backup_again(&served);
}

#[test]
fn a_backup_of_a_disk_whose_storage_hangs_does_not_begin_and_holds_nothing_else() {
    let rig = Rig::new();
    rig.add("a", "--wrap delay:us=600000000,ops=write");
    rig.add("b", "");
    let (mut a, mut b) = (rig.guest("a"), rig.guest("b"));
    let layout = a.layout();
    a.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    b.write(0, &[2; 512]).unwrap();
    let told = rig.refused("backup a --to copy", 1);
    assert!(told.contains("did not complete in 10 s; check its storage"), "{told}");
    assert!(!rig.path("copy").exists() && parts(&rig.place).is_empty());
    rig.ok("backup b --to copy");
    b.write(0, &[3; 512]).unwrap();
}

#[test]
fn the_copy_of_a_disk_that_cannot_be_read_fails() {
    let served = served(&[]);
    let mut device = guest(&served);
    fill(&served.place.image);
    let slow = json!({"bandwidth": SLOW});
    let mut client = Client::start(&served.control, &served.place.path("copy"), slow);
    let file = std::fs::File::options().write(true).open(&served.place.image).unwrap();
    file.set_len(4 << 20).unwrap();
    // The write makes the copier read behind the end of the file.
    device.queue(0).submit(&Request::write(16_000, &[1; 512]), &Default::default()).unwrap();
    let reply = client.finish();
    let why = reply["parameters"]["why"].as_str().unwrap();
    assert!(why.contains("reading at 8192000"), "{reply}");
    device.queue(0).collect().expect("the guest's write does not wait any more");
    wait_for_end(&served);
}

#[test]
fn bad_input_is_refused_with_reason_and_remedy() {
    let rig = Rig::new();
    rig.add("a", "");
    rig.ok("add mem --backend mem --size 1M --socket-path mem.sock");
    std::fs::write(rig.path("there"), "data").unwrap();
    std::os::unix::fs::symlink("nowhere", rig.path("link")).unwrap();
    for (words, code, why) in [
        ("backup a --to there", 1, "exists already; choose another name"),
        ("backup a --to link", 1, "exists already"),
        ("backup a --to a.img", 1, "exists already"),
        ("backup a --to none/copy", 1, "cannot be created"),
        ("backup none --to copy", 1, "there is none of this name"),
        ("backup --to copy", 1, "none is named"),
        ("backup mem --to copy", 1, "it has no image"),
        ("backup a --to copy --bandwidth 0", 2, "at least 1"),
        ("backup a --to copy --format vmdk", 2, "possible values"),
        ("backup a", 2, "--to"),
    ] {
        let told = rig.refused(words, code);
        assert!(told.contains(why), "{words}: {told}");
    }
    assert_eq!(std::fs::read(rig.path("there")).unwrap(), b"data");
    let mut raw = rig.connect();
    for target in ["copy", ""] {
        let call = json!({"method": "io.vhostblk.Backup",
                          "parameters": {"name": "a", "target": target}});
        let reply = raw.call(&call.to_string());
        assert_eq!(reply["error"], "org.varlink.service.InvalidParameter");
    }
    assert!(!rig.path("copy").exists() && parts(&rig.place).is_empty());
}
