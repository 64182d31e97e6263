// SPDX-License-Identifier: Apache-2.0
//! Work on running disks, as others see it: `vhost-blk ctl jobs` and events.

mod common;
#[path = "common/images.rs"]
mod images;
#[path = "common/rig.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod rig;

use common::wait_until;
use images::{BYTES, add, add_raw, begin, error_of, fill, guest, image};
use kit::mount;
use rig::{Raw, Rig};
use serde_json::{Value, json};

/// The next event about work.
#[track_caller]
fn next(raw: &mut Raw) -> Value {
    loop {
        let event = raw.next_event();
        let name = event["event"].as_str().unwrap().to_owned();
        if ["_begun", "_ended", "_completed", "_ready"].iter().any(|end| name.ends_with(end)) {
            return event;
        }
    }
}

/// Expects the next event about work on the disk `a`: its name, and the file of its target.
#[track_caller]
fn expect(rig: &Rig, raw: &mut Raw, name: &str, target: &str) -> Value {
    let event = next(raw);
    assert_eq!(event["event"], name, "{event}");
    assert_eq!(event["disk"], "a");
    assert_eq!(event["target"], rig.path(target).to_str().unwrap(), "{event}");
    event
}

fn jobs(rig: &Rig) -> Vec<Value> {
    rig.json("jobs a").as_array().unwrap().clone()
}

/// Waits for a job with some progress.
fn wait_for_job(rig: &Rig, kind: &str) -> Value {
    let mut found = Value::Null;
    wait_until("the progress", || {
        let jobs = jobs(rig);
        let job = jobs.into_iter().find(|job| job["kind"] == kind);
        found = job.unwrap_or_default();
        found["done_bytes"].as_u64().is_some_and(|bytes| bytes > 0)
    });
    found
}

#[test]
fn a_backup_is_seen_and_its_result_can_be_used_when_its_completion_is_told() {
    let rig = Rig::new();
    add_raw(&rig);
    fill(&mut guest(&rig, "a"), 1);
    let mut raw = rig.events();
    assert_eq!(jobs(&rig), [] as [Value; 0]);
    // It takes longer than this part of the test.
    let client = begin(&rig, "backup a --to b.img --bandwidth 1K");
    expect(&rig, &mut raw, "backup_begun", "b.img");
    let job = wait_for_job(&rig, "backup");
    let target = rig.path("b.img").display().to_string();
    assert_eq!((&job["disk"], &job["target"]), (&json!("a"), &json!(target)));
    assert_eq!((&job["total_bytes"], &job["state"]), (&json!(BYTES), &json!("copying")));
    assert!(
        job["bytes_per_s"].as_u64().unwrap() > 0
            && job["since"].as_str() > Some("2026-11-01T00:00:00Z")
    );
    let table = rig.ok("jobs");
    assert!(table.starts_with("DISK  JOB     STATE    DONE"), "{table}");
    assert!(table.contains(&target), "{table}");
    assert_eq!(rig.json("list")[0]["jobs"][0]["kind"], "backup");
    rig.ok("jobs a --bandwidth off");
    expect(&rig, &mut raw, "backup_completed", "b.img");
    assert!(std::fs::read(rig.path("b.img")).unwrap().iter().all(|byte| *byte == 1));
    // The client of the first one may not have its answer yet.
    rig.ok("backup a --to c.img");
    assert!(client.wait_with_output().unwrap().status.success());
    assert_eq!(jobs(&rig), [] as [Value; 0]);
    assert!(rig.refused("jobs x", 1).contains("there is none of this name"));
}

#[test]
fn failed_and_cancelled_backups_tell_their_reason() {
    let rig = Rig::new();
    image(&rig, "a.img", "raw");
    add(&rig, "a", "--blk-file a.img");
    fill(&mut guest(&rig, "a"), 1);
    let mut raw = rig.events();
    rig.refused("backup a --to a.img", 1);
    let mut client = begin(&rig, "backup a --to b.img --bandwidth 1M");
    expect(&rig, &mut raw, "backup_begun", "b.img");
    client.kill().unwrap();
    client.wait().unwrap();
    let ended = expect(&rig, &mut raw, "backup_ended", "b.img");
    assert_eq!(ended["cancelled"], true, "{ended}");
    assert!(
        ended["reason"].as_str().unwrap().contains("cancelled: its client has gone"),
        "{ended}"
    );
    if mount::may_not_mount() {
        return;
    }
    let full = mount::Mount::tmpfs(4);
    let to = full.path("b.img").display().to_string();
    rig.refused(&format!("backup a --to {to}"), 1);
    assert_eq!(next(&mut raw)["event"], "backup_begun");
    let ended = next(&mut raw);
    assert_eq!((&ended["event"], &ended["target"]), (&json!("backup_ended"), &json!(to)));
    assert_eq!(ended["cancelled"], false, "{ended}");
    assert!(ended["reason"].as_str().unwrap().contains("not enough space"), "{ended}");
}

#[test]
fn snapshots_and_commits_tell_their_begin_and_end() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut guest = guest(&rig, "a");
    let mut raw = rig.events();
    rig.ok("snapshot a --to b.qcow2");
    expect(&rig, &mut raw, "snapshot_begun", "b.qcow2");
    expect(&rig, &mut raw, "snapshot_completed", "b.qcow2");
    fill(&mut guest, 2);
    let client = begin(&rig, "commit a --bandwidth 1K");
    expect(&rig, &mut raw, "commit_begun", "a.img");
    let job = wait_for_job(&rig, "commit");
    assert_eq!((&job["total_bytes"], &job["state"]), (&json!(BYTES), &json!("copying")));
    assert_eq!(job["target"], rig.path("a.img").to_str().unwrap());
    rig.ok("commit a --cancel");
    let ended = expect(&rig, &mut raw, "commit_ended", "a.img");
    assert_eq!(ended["cancelled"], true, "{ended}");
    error_of(client);
    rig.ok("commit a");
    expect(&rig, &mut raw, "commit_begun", "a.img");
    expect(&rig, &mut raw, "commit_completed", "a.img");
    assert_eq!(jobs(&rig), [] as [Value; 0]);
}

#[test]
fn a_mirror_is_seen_and_the_next_one_can_begin_when_its_end_is_told() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut raw = rig.events();
    rig.ok("mirror a --to b.img --wait");
    expect(&rig, &mut raw, "mirror_begun", "b.img");
    assert_eq!(next(&mut raw)["event"], "mirror_ready");
    let job = wait_for_job(&rig, "mirror");
    assert_eq!((&job["done_bytes"], &job["state"]), (&json!(BYTES), &json!("ready")));
    rig.ok("mirror a --complete");
    expect(&rig, &mut raw, "mirror_completed", "b.img");
    for (n, to) in ["c.img", "d.img", "e.img"].iter().enumerate() {
        rig.ok(&format!("mirror a --to {to} --wait"));
        expect(&rig, &mut raw, "mirror_begun", to);
        assert_eq!(next(&mut raw)["event"], "mirror_ready");
        let client = begin(&rig, if n == 2 { "remove a" } else { "mirror a --cancel" });
        let ended = expect(&rig, &mut raw, "mirror_ended", to);
        assert_eq!(ended["cancelled"], true, "{ended}");
        if n == 0 {
            rig.ok("mirror a --to now.img --wait");
            expect(&rig, &mut raw, "mirror_begun", "now.img");
            assert_eq!(next(&mut raw)["event"], "mirror_ready");
            rig.ok("mirror a --cancel");
            expect(&rig, &mut raw, "mirror_ended", "now.img");
        }
        assert!(client.wait_with_output().unwrap().status.success());
    }
}

/// The jobs of each kind on a disk with data, as their clients begin them: so slow that none would end.
const SLOW_JOBS: [(&str, &str); 3] = [
    ("backup", "backup a --to c.img --bandwidth 1K"),
    ("commit", "commit a --bandwidth 1K"),
    ("mirror", "mirror a --to c.img --wait --bandwidth 1K"),
];

/// A disk whose image and backing file have data.
fn overlaid() -> Rig {
    let rig = Rig::new();
    add_raw(&rig);
    rig.ok("snapshot a --to b.qcow2");
    fill(&mut guest(&rig, "a"), 2);
    rig
}

#[test]
fn another_client_changes_the_bandwidth_of_each_job() {
    for (kind, command) in SLOW_JOBS {
        let rig = overlaid();
        let mut raw = rig.events();
        let client = begin(&rig, command);
        assert_eq!(next(&mut raw)["event"], format!("{kind}_begun"));
        assert_eq!(wait_for_job(&rig, kind)["bandwidth"], 1024);
        assert!(rig.ok("jobs").contains("1.00 KiB/s"), "{kind}");
        assert_eq!(rig.json("jobs a --bandwidth 2K"), json!({"changed": true}));
        assert_eq!(rig.json("jobs a --bandwidth 2K"), json!({"changed": false}));
        assert_eq!(jobs(&rig)[0]["bandwidth"], 2048);
        rig.ok("jobs a --bandwidth off");
        assert!(client.wait_with_output().unwrap().status.success(), "{kind}");
    }
    let rig = overlaid();
    let refused = rig.refused("jobs a --bandwidth 1M", 1);
    assert!(refused.contains("no backup, no commit and no mirror in progress"), "{refused}");
}

#[test]
fn another_client_cancels_each_job() {
    let rig = overlaid();
    let mut raw = rig.events();
    for (kind, command) in SLOW_JOBS {
        for cancel in [format!("{kind} a --cancel"), "jobs a --cancel".to_owned()] {
            let client = begin(&rig, command);
            assert_eq!(next(&mut raw)["event"], format!("{kind}_begun"));
            wait_for_job(&rig, kind);
            for (other, _) in SLOW_JOBS.iter().filter(|(other, _)| *other != kind) {
                assert_eq!(rig.ok(&format!("{other} a --cancel")), "nothing to do\n");
            }
            assert_eq!(rig.json(&cancel), json!({"changed": true}), "{cancel}");
            let ended = next(&mut raw);
            assert_eq!(ended["event"], format!("{kind}_ended"), "{ended}");
            assert_eq!(ended["cancelled"], true, "{ended}");
            let told = error_of(client);
            let reason = if kind == "backup" { "cancelled by a client" } else { "was cancelled" };
            assert!(told.contains(reason), "{kind}: {told}");
            wait_until("the end", || jobs(&rig).is_empty());
            assert!(!rig.path("c.img").exists());
        }
    }
    assert_eq!(rig.ok("jobs a --cancel"), "nothing to do\n");
    rig.ok("backup a --to c.img");
}

#[test]
fn the_client_of_a_job_learns_of_the_end_of_the_daemon() {
    for (kind, command) in SLOW_JOBS {
        let mut rig = overlaid();
        let mut raw = rig.events();
        let client = begin(&rig, command);
        assert_eq!(next(&mut raw)["event"], format!("{kind}_begun"));
        rig.daemon.signal(libc::SIGKILL);
        rig.daemon.wait();
        let ended = client.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(3), "{kind}: {ended:?}");
    }
}

#[test]
fn a_target_with_a_line_break_is_refused() {
    let rig = overlaid();
    let mut raw = rig.connect();
    for (method, name) in [("Backup", "target"), ("Mirror", "target"), ("Snapshot", "overlay")] {
        let path = rig.path("b\nforged");
        let parameters = json!({"name": "a", name: path.to_str()});
        let call = json!({"method": format!("io.vhostblk.{method}"), "parameters": parameters});
        let reply = raw.call(&call.to_string());
        assert_eq!(reply["error"], "org.varlink.service.InvalidParameter", "{reply}");
        assert_eq!(reply["parameters"]["parameter"], name, "{reply}");
    }
}
