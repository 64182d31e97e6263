// SPDX-License-Identifier: Apache-2.0
//! A disk that moves keeps every byte, and its guest goes on all the time.

use crate::load::under_load;
use crate::mount::{Mount, may_not_mount, run};
use crate::rig::Rig;
use crate::{
    BYTES, PART, QUEUES, add, add_raw, content, fill, guest, image, mirror, moved_to, text,
    wait_until, while_rewritten,
};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;

/// The content of an image as QEMU sees it.
fn flat(rig: &Rig, name: &str, format: &str) -> Vec<u8> {
    let (source, flat) = (rig.path(name), rig.path("flat"));
    run(&["qemu-img", "convert", "-f", format, "-O", "raw", text(&source), text(&flat)]);
    fs::read(&flat).unwrap()
}

#[test]
fn a_disk_that_moves_again_and_again_under_load_keeps_every_byte() {
    let rig = Rig::new();
    image(&rig, "0", "raw");
    add(&rig, "a", "--blk-file 0");
    let device = guest(&rig, "a");
    let moves = [("1", "raw"), ("2", "qcow2"), ("3", "qcow2"), ("4", "raw"), ("5", "qcow2")];
    let mut options = String::new();
    let (_, session) = under_load(device, QUEUES.into(), |loaded| {
        let mut before = rig.path("0");
        for (name, format) in moves {
            if name == "3" {
                // The content is that of a chain.
                rig.ok("snapshot a --to over");
                before = rig.path("over");
            }
            loaded.wait_for_progress(20);
            rig.ok(&format!("mirror a --to {name} --format {format}"));
            loaded.wait_for_progress(20);
            let told = rig.json("mirror a --complete");
            println!("{name}: pause {} us", told["pause_us"]);
            let path = rig.path(name);
            assert_eq!(told["image"], text(&path));
            assert_eq!(told["before"], text(&before));
            assert_eq!(told["marked"], true);
            options = told["options"].as_str().unwrap().to_owned();
            assert_eq!(options, format!("--blk-file {} --format {format}", text(&path)));
            assert_eq!(moved_to(&before).as_deref(), Some(text(&path)));
            assert!(mirror(&rig).is_null());
            before = path;
            loaded.wait_for_progress(20);
        }
    });
    drop(session);
    let last = content(&mut guest(&rig, "a"));
    rig.ok("remove a");
    assert!(flat(&rig, "5", "qcow2") == last);
    run(&["qemu-img", "check", "-q", text(&rig.path("5"))]);
    let line = rig.refused("add b --socket-path b.sock --blk-file 4", 1);
    assert!(line.contains("its disk was mirrored to") && line.contains("/5, which"), "{line}");
    add(&rig, "again", &options);
    assert!(content(&mut guest(&rig, "again")) == last);
}

/// The guest changes more in each pass than is few: without the brake no pass is the last one.
#[test]
fn a_mirror_is_completed_although_the_guest_writes_all_the_time_and_keeps_every_byte() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    fill(&mut device, 1);
    let told = while_rewritten(device, || rig.json("mirror a --to b --bandwidth 128M --complete"));
    println!("pause: {} us", told["pause_us"]);
}

#[test]
fn holes_and_zeroes_take_no_space() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    device.write(0, &[1; 4096]).unwrap();
    device.write(8192, &vec![0; PART as usize]).unwrap();
    device.write(16_384, &vec![2; PART as usize]).unwrap();
    rig.ok("mirror a --to b --wait");
    // A part that was copied becomes zero again.
    device.write(16_384, &vec![0; PART as usize]).unwrap();
    let before = content(&mut device);
    rig.ok("mirror a --complete");
    assert!(content(&mut device) == before);
    let found = File::open(rig.path("b")).unwrap().metadata().unwrap();
    assert_eq!(found.len(), BYTES);
    assert!(found.blocks() * 512 <= 16 << 10, "{} blocks", found.blocks());
}

#[test]
fn changes_after_the_first_copy_arrive_before_the_completion() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    fill(&mut device, 1);
    assert!(rig.ok("mirror a").contains("there is no mirror"));
    let told = rig.ok("mirror a --to b --wait");
    assert!(told.contains("mirror --complete"), "{told}");
    fill(&mut device, 2);
    crate::wait_until("the copy of the changes", || mirror(&rig)["changed_bytes"] == 0);
    let status = rig.json("status a");
    assert_eq!(status["mirror"], mirror(&rig));
    assert_eq!(status["mirror"]["state"], "ready");
    assert_eq!(status["mirror"]["copied_bytes"], BYTES);
    assert_eq!(status["mirror"]["target"], text(&rig.path("b")));
    assert!(rig.ok("status a").contains("mirror      to "));
    assert_eq!(rig.json("list")[0]["mirror"], status["mirror"]);
    assert!(rig.json("list")[0]["disk"].as_str().unwrap().contains("being mirrored"));
    fill(&mut device, 3);
    rig.ok("mirror a --complete");
    assert!(content(&mut device).iter().all(|byte| *byte == 3));
    assert!(fs::read(rig.path("a.img")).unwrap().iter().all(|byte| *byte == 3));
    fill(&mut device, 4);
    assert!(fs::read(rig.path("a.img")).unwrap().iter().all(|byte| *byte == 3));
    // It can go back to the content of that moment, if its user wants that.
    drop(device);
    rig.ok("remove a");
    rustix::fs::removexattr(rig.path("a.img"), "user.vhost-blk.moved").unwrap();
    add(&rig, "a", "--blk-file a.img");
    assert!(content(&mut guest(&rig, "a")).iter().all(|byte| *byte == 3));
}

#[test]
fn a_completion_may_be_ordered_during_the_first_copy() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    fill(&mut device, 7);
    // 16 MiB at this rate take a few seconds.
    rig.ok("mirror a --to b --bandwidth 4M");
    assert_eq!(mirror(&rig)["state"], "copying");
    let mut raw = rig.connect();
    let call = r#"{"method":"io.vhostblk.CompleteMirror","parameters":{"name":"a"}}"#;
    let reply = raw.call(call);
    assert_eq!(reply["parameters"]["image"], text(&rig.path("b")), "{reply}");
    assert!(content(&mut device).iter().all(|byte| *byte == 7));
}

#[test]
fn a_disk_of_the_directory_goes_on_in_its_new_storage_after_an_upgrade_and_a_restart() {
    let file = "blk-file = '@/a.img' # the image\nsocket-path = '@/a.sock'\nnum-queues = 2\n";
    let mut rig = Rig::of_directory(&[("a", file)]);
    image(&rig, "a.img", "raw");
    rig.ok("reload");
    let mut device = guest(&rig, "a");
    device.write(1, &[1; 512]).unwrap();
    let line = rig.refused("mirror a --to b --complete", 1);
    assert!(line.contains("give --update-config"), "{line}");
    assert!(mirror(&rig).is_null(), "it is refused before the copy");
    rig.ok("mirror a --to b --format qcow2 --wait");
    let line = rig.refused("mirror a --complete", 1);
    assert!(line.contains("give --update-config"), "{line}");
    assert_eq!(mirror(&rig)["state"], "ready", "it goes on");
    // A change of the running disk reaches it during a mirror, and stays.
    rig.write_file("a", &format!("{file}limit-iops = 100000\n"));
    assert_eq!(rig.json("reload")[0]["outcome"], "changed");
    rig.ok("mirror a --complete --update-config");
    let config = fs::read_to_string(rig.path("conf/a.toml")).unwrap();
    assert!(config.contains("/b'") || config.contains("/b\""), "{config}");
    assert!(config.contains("qcow2") && config.contains("# the image"), "{config}");
    assert_eq!(rig.json("reload"), serde_json::json!([]));
    rig.ok("upgrade");
    device.write(2, &[2; 512]).unwrap();
    drop(device);
    rig.ok("stop");
    rig.daemon.wait();
    let conf = rig.path("conf");
    rig.restart(&["--config-dir", text(&conf)]);
    let mut data = [0; 512];
    for sector in [1, 2] {
        guest(&rig, "a").read(sector, &mut data).unwrap();
        assert_eq!(data, [sector as u8; 512]);
    }
}

#[test]
fn bitmaps_go_on_through_a_mirror() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    fill(&mut device, 1);
    rig.ok("backup a --to full --format qcow2 --bitmap n");
    device.write(0, &[2; 512]).unwrap();
    rig.ok("mirror a --to b --format qcow2 --wait");
    device.write(8192, &[3; 512]).unwrap();
    rig.ok("mirror a --complete");
    device.write(16_384, &[4; 512]).unwrap();
    let told = rig.json("backup a --to next --incremental n");
    assert_eq!(told["copied_bytes"], 3 * (64 << 10), "{told}");
    assert!(flat(&rig, "next", "qcow2") == content(&mut device));
}

#[test]
fn events_tell_the_course_of_a_mirror() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut events = rig.events();
    rig.ok("mirror a --to b --wait");
    rig.ok("mirror a --cancel");
    rig.ok("mirror a --to c --complete");
    let mut told = Vec::new();
    while told.last().is_none_or(|(name, _)| name != "mirror_completed") {
        let event = events.next_event();
        let name = event["event"].as_str().unwrap().to_owned();
        let detail = event["reason"].as_str().or(event["target"].as_str()).unwrap_or("");
        told.push((name, detail.to_owned()));
    }
    let names: Vec<_> = told.iter().map(|(name, _)| name.as_str()).collect();
    let expected = [
        "mirror_begun",
        "mirror_ready",
        "mirror_ended",
        "mirror_begun",
        "mirror_ready",
        "mirror_completed",
    ];
    assert_eq!(names, expected);
    assert!(told[2].1.contains("the mirror was cancelled"), "{told:?}");
    assert_eq!(told[5].1, text(&rig.path("c")));
}

/// The first copy of a cluster that the new image does not have is in its tables only, until they are
/// written.
#[test]
fn a_part_that_is_copied_again_and_again_has_its_last_content() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    rig.ok("mirror a --to b --format qcow2 --wait");
    for round in 1..4 {
        for part in 0..16 {
            device.write(part * 128 + round * 8, &[round as u8; 4096]).unwrap();
        }
        crate::wait_until("the copy of the changes", || mirror(&rig)["changed_bytes"] == 0);
    }
    let before = content(&mut device);
    rig.ok("mirror a --complete");
    assert!(content(&mut device) == before);
}

/// The data of the sparse source begins and ends inside of the target's clusters, and the guest writes
/// beside it during the copy.
#[test]
fn a_sparse_disk_whose_data_fits_no_cluster_keeps_every_byte() {
    for (source, target) in [("raw", "qcow2"), ("qcow2", "qcow2"), ("qcow2", "raw")] {
        let rig = Rig::new();
        let path = rig.path("a.img");
        let options = if source == "qcow2" { "cluster_size=4k" } else { "preallocation=off" };
        run(&["qemu-img", "create", "-qf", source, "-o", options, text(&path), "16M"]);
        add(&rig, "a", &format!("--blk-file a.img --format {source}"));
        let mut device = guest(&rig, "a");
        let mut before = vec![0; BYTES as usize];
        let mut write = |device: &mut driver::Device, cluster: u64, block: u64, byte: u8| {
            let at = cluster * (64 << 10) + block % 16 * 4096;
            device.write(at / 512, &[byte; 4096]).unwrap();
            before[at as usize..][..4096].fill(byte);
        };
        for cluster in (0..256).filter(|cluster| cluster % 5 != 0) {
            write(&mut device, cluster, cluster * 7, 1);
        }
        rig.ok(&format!("mirror a --to b --format {target} --bandwidth 4M"));
        for round in 0..4 {
            for cluster in (round..256).step_by(3) {
                write(&mut device, cluster, cluster * 7 + round + 1, round as u8 + 2);
            }
        }
        rig.ok("mirror a --wait");
        for cluster in (0..256).step_by(11) {
            write(&mut device, cluster, cluster * 7 + 8, 9);
        }
        rig.ok("mirror a --complete");
        assert!(content(&mut device) == before, "{source} to {target}");
        drop(device);
        rig.ok("remove a");
        assert!(flat(&rig, "b", target) == before, "{source} to {target}, for QEMU");
    }
}

/// The mark needs a block of the file system for a long path.
#[test]
fn a_disk_moves_away_from_a_full_file_system_without_a_mark() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    let small = Mount::ext4(64);
    let old = small.path("a.img");
    File::create(&old).unwrap().set_len(BYTES).unwrap();
    add(&rig, "a", &format!("--blk-file {}", text(&old)));
    let mut device = guest(&rig, "a");
    fill(&mut device, 1);
    let mut filler = File::create(small.path("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    filler.sync_all().unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    let to = "b".repeat(250);
    let told = rig.json(&format!("mirror a --to {to} --complete"));
    assert_eq!(told["marked"], false);
    assert_eq!(moved_to(&old), None);
    assert!(content(&mut device).iter().all(|byte| *byte == 1));
    device.write(0, &[2; 512]).unwrap();
    assert_eq!(fs::read(rig.path(&to)).unwrap()[0], 2);
    assert_eq!(fs::read(&old).unwrap()[0], 1);
}

/// The copied piece uses the bandwidth up for 64 s.
#[test]
fn a_completion_does_not_wait_for_the_bandwidth() {
    let rig = Rig::new();
    File::create(rig.path("a.img")).unwrap().set_len(BYTES).unwrap();
    add(&rig, "a", "--blk-file a.img");
    let mut device = guest(&rig, "a");
    rig.ok("mirror a --to b --bandwidth 1K --wait");
    (0..4).for_each(|part| device.write(part * PART / 512, &[3; 512]).unwrap());
    wait_until("the copy of the first piece", || mirror(&rig)["changed_bytes"] == 3 * (64 << 10));
    let before = content(&mut device);
    rig.ok("--timeout 20 mirror a --complete");
    assert!(content(&mut device) == before);
}
