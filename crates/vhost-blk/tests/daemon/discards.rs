// SPDX-License-Identifier: Apache-2.0
//! `ctl discard-stats`: the discards of a disk, and the space of its files.

use crate::rig::Rig;
use serde_json::{Value, json};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

const MIB: u64 = 1 << 20;

fn allocated(rig: &Rig, file: &str) -> u64 {
    std::fs::metadata(rig.path(file)).unwrap().blocks() * 512
}

fn qemu_img(rig: &Rig, args: &[&str]) {
    let ran = Command::new("qemu-img").current_dir(rig.place.dir.path()).args(args).output();
    let ran = ran.expect("qemu-img runs; scripts/setup.sh installs it");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

/// Writes the first MiB of a disk, and discards a half of it in two requests.
fn write_and_discard(rig: &Rig, name: &str) {
    let mut guest = rig.guest(name);
    guest.write(0, &vec![1; MIB as usize]).unwrap();
    guest.discard(0, 512).unwrap();
    guest.discard(512, 512).unwrap();
    guest.discard(1 << 40, 8).unwrap_err(); // counts nothing
}

fn counts(stats: &Value) -> Value {
    json!([stats["virtual_bytes"], stats["discards"], stats["discarded_bytes"]])
}

#[test]
fn discards_of_a_raw_disk_and_its_space_are_told_and_outlive_the_guest() {
    let rig = Rig::new();
    rig.add("a", "");
    write_and_discard(&rig, "a");
    let stats = rig.json("discard-stats a");
    assert_eq!(counts(&stats), json!([MIB, 2, MIB / 2]));
    assert_eq!((&stats["name"], &stats["unmapped_bytes"]), (&json!("a"), &Value::Null));
    let [file] = &stats["files"].as_array().unwrap()[..] else { panic!("{stats}") };
    assert_eq!((&file["format"], &file["virtual_bytes"]), (&json!("raw"), &json!(MIB)));
    assert_eq!(file["allocated_bytes"], allocated(&rig, "a.img"));
    assert_eq!(rig.json("stats")["queues"][0]["discards"], 2);
    let text = rig.ok("discard-stats");
    for line in ["size        1M\n", "discards    2 requests, 512K\n", "unmapped    -\n"] {
        assert!(text.contains(line), "{text}");
    }
    assert!(rig.refused("discard-stats b", 1).contains("b"));
}

#[test]
fn each_file_of_a_qcow2_disk_and_its_unmapped_clusters_are_told() {
    let rig = Rig::new();
    qemu_img(&rig, &["create", "-qf", "raw", "base.img", "2M"]);
    let create = ["create", "-qf", "qcow2", "-b", "base.img", "-F", "raw", "top.qcow2"];
    qemu_img(&rig, &create);
    rig.ok(
        "add q --blk-file top.qcow2 --format qcow2 --allow-backing same-dir --socket-path q.sock \
         --num-queues 1",
    );
    write_and_discard(&rig, "q");
    rig.place.wait_until("the clusters have left", || {
        rig.json("discard-stats q")["unmapped_bytes"] == MIB / 2
    });
    let stats = rig.json("discard-stats q");
    assert_eq!(counts(&stats), json!([2 * MIB, 2, MIB / 2]));
    let files = stats["files"].as_array().unwrap();
    let formats: Vec<_> = files.iter().map(|file| file["format"].as_str().unwrap()).collect();
    assert_eq!(formats, ["qcow2", "raw"]);
    for (file, name) in files.iter().zip(["top.qcow2", "base.img"]) {
        assert!(file["path"].as_str().unwrap().ends_with(name), "{stats}");
    }
    // A sync may change the number of blocks.
    rig.place.wait_until("the allocated bytes", || {
        let stats = rig.json("discard-stats q");
        let is_same =
            |(number, name)| stats["files"][number]["allocated_bytes"] == allocated(&rig, name);
        ["top.qcow2", "base.img"].into_iter().enumerate().all(is_same)
    });
    let text = rig.ok("discard-stats q");
    assert!(text.contains("unmapped    512K\nFILE") && text.contains("base.img"), "{text}");
}

#[test]
fn a_disk_in_memory_and_one_of_nothing_have_no_file() {
    let rig = Rig::new();
    for (name, backend) in [("m", "mem"), ("n", "null")] {
        rig.ok(&format!(
            "add {name} --backend {backend} --size 1M --socket-path {name}.sock --num-queues 1"
        ));
        write_and_discard(&rig, name);
        let stats = rig.json(&format!("discard-stats {name}"));
        assert_eq!(counts(&stats), json!([MIB, 2, MIB / 2]), "{name}");
        assert_eq!((&stats["files"], &stats["unmapped_bytes"]), (&json!([]), &Value::Null));
        assert!(!rig.ok(&format!("discard-stats {name}")).contains("FILE"));
    }
}
