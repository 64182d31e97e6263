// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl commit`: the image of a running disk is merged into its backing file.

use crate::load::under_load;
use crate::moments::Moments;
use crate::mount::{Mount, may_not_mount, run};
use crate::rig::Rig;
use crate::stamped::Writer;
use crate::{
    BYTES, QUEUES, add, add_raw, begin, check_after_kill, content, error_of, fill, guest, image,
    mark, text, while_rewritten,
};
use driver::Device;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

const ROUNDS: u64 = 8;
const KILLS: u64 = 12;

/// Waits until the disk `a` is being merged.
fn wait_for_merge(rig: &Rig) {
    rig.place.wait_until("the merge", || {
        rig.json("status a")["disk"].as_str().unwrap().contains("being merged")
    });
}

/// Waits until the next commit of the disk `a` may begin: the disk is in its image before that.
fn wait_for_end(rig: &Rig) {
    let is_done = || rig.ctl("commit a --cancel").stdout == b"nothing to do\n";
    rig.place.wait_until("the end of the merge", is_done);
}

fn is_marked_as_merged(path: &Path) -> bool {
    let found = backend::mark::refusal(&File::open(path).unwrap(), path).unwrap();
    found.is_some_and(|marked| marked.to_string().contains("it was merged into"))
}

#[test]
fn snapshots_and_commits_in_turn_under_load_keep_every_byte() {
    for format in ["raw", "qcow2"] {
        let rig = Rig::new();
        let first = image(&rig, "a.img", format);
        add(&rig, "a", &format!("--blk-file a.img --format {format}"));
        let device = guest(&rig, "a");
        let mut options = String::new();
        let (_, session) = under_load(device, QUEUES.into(), |loaded| {
            for n in 0..ROUNDS {
                let overlay = rig.path(&format!("{n}.qcow2"));
                loaded.wait_for_progress(20);
                rig.ok(&format!("snapshot a --to {n}.qcow2"));
                loaded.wait_for_progress(20);
                let told = rig.json("commit a");
                println!("pause: {} us", told["pause_us"]);
                assert_eq!(
                    (&told["image"], &told["merged"]),
                    (&text(&first).into(), &text(&overlay).into())
                );
                options = told["options"].as_str().unwrap().to_owned();
                assert_eq!(options, format!("--blk-file {} --format {format}", text(&first)));
                assert!(mark(&first).is_none() && is_marked_as_merged(&overlay));
                fs::remove_file(&overlay).unwrap();
                assert_eq!(rig.json("snapshots a").as_array().unwrap().len(), 1);
            }
            loaded.wait_for_progress(20);
        });
        drop(session);
        let before = content(&mut guest(&rig, "a"));
        rig.ok("remove a");
        let flat = rig.path("flat");
        run(&["qemu-img", "convert", "-f", format, "-O", "raw", text(&first), text(&flat)]);
        assert!(fs::read(&flat).unwrap() == before, "{format}");
        if format == "qcow2" {
            run(&["qemu-img", "check", "-q", text(&first)]);
        }
        add(&rig, "again", &options);
        assert!(content(&mut guest(&rig, "again")) == before);
    }
}

/// The guest changes the whole disk in each pass, which takes 2 s at this bandwidth: the brake ends that.
#[test]
fn a_commit_ends_although_the_guest_writes_faster_than_it_copies_and_keeps_every_byte() {
    let mut rig = Rig::new();
    let device = in_overlay(&rig);
    let committed = while_rewritten(device, || rig.json("commit a --bandwidth 8M"));
    let line = rig.daemon.log_line("copied while drained");
    let bytes = line.split_once("rest_bytes=").unwrap().1.trim().parse::<u64>().unwrap();
    println!("pause: {} us, {bytes} bytes", committed["pause_us"]);
    assert!(bytes <= 4 << 20, "{bytes}");
}

/// Data, zeroes and holes of three layers, with clusters of other sizes, as QEMU sees them.
#[test]
fn the_layers_of_a_chain_are_merged_one_after_the_other() {
    for (format, cluster) in [("raw", "64k"), ("qcow2", "4k"), ("qcow2", "2M")] {
        let rig = Rig::new();
        let base = image(&rig, "a.img", "raw");
        File::options()
            .write(true)
            .open(&base)
            .unwrap()
            .write_all_at(&[9; 6 << 20], 1 << 20)
            .unwrap();
        let base = rig.path("base");
        let at = |name: &str| text(&rig.path(name)).to_owned();
        let (source, target, top) = (at("a.img"), at("base"), at("top"));
        run(&["qemu-img", "convert", "-f", "raw", "-O", format, &source, &target]);
        let size = format!("cluster_size={cluster}");
        let backing = ["-b", "base", "-F", format];
        let create = ["qemu-img", "create", "-qf", "qcow2", "-o", &size, backing[0], backing[1]];
        run(&[&create[..], &backing[2..], &[&top, "20M"]].concat());
        for command in ["write -P 5 2M 300k", "write -z 3M 1M", "write -P 7 17M 5000"] {
            run(&["qemu-io", "-f", "qcow2", "-c", command, &top]);
        }
        add(&rig, "a", "--blk-file top --format qcow2 --allow-backing same-dir");
        let mut device = guest(&rig, "a");
        rig.ok("snapshot a --to third");
        device.write(4096, &[3; 512]).unwrap(); // a part of a cluster
        let all = |device: &mut Device| {
            let mut data = vec![0; 20 << 20];
            for (part, bytes) in (0..).zip(data.chunks_mut(256 << 10)) {
                device.read(part * 512, bytes).unwrap_or_else(|why| panic!("{part}: {why}"));
            }
            data
        };
        let before = all(&mut device);
        for image in ["top", "base"] {
            assert_eq!(rig.json("commit a")["image"], text(&rig.path(image)));
            assert!(all(&mut device) == before, "{format} {cluster} {image}");
            device.write(8, &[8; 512]).unwrap();
            device.write(8, &before[4096..4608]).unwrap();
        }
        let line = rig.refused("commit a", 1);
        assert!(line.contains("its image has no backing file"), "{line}");
        drop(device);
        rig.ok("remove a");
        let flat = at("flat");
        run(&["qemu-img", "convert", "-f", format, "-O", "raw", &target, &flat]);
        assert!(fs::read(&flat).unwrap() == before, "{format} {cluster}");
        if format == "qcow2" {
            run(&["qemu-img", "check", "-q", text(&base)]);
        }
        // The one in the middle was merged; its data is old.
        let line = rig.refused(
            "add b --blk-file top --format qcow2 --allow-backing same-dir --socket-path b.sock",
            1,
        );
        assert!(line.contains("it was merged into") && line.contains("base"), "{line}");
    }
}

/// A disk `a` in an overlay that is full, over an image.
fn in_overlay(rig: &Rig) -> Device {
    image(rig, "a.img", "raw");
    add(rig, "a", "--blk-file a.img --wrap delay:us=1");
    let mut device = guest(rig, "a");
    rig.ok("snapshot a --to b");
    fill(&mut device, 1);
    device
}

#[test]
fn a_commit_that_is_cancelled_leaves_the_disk_in_its_image() {
    let rig = Rig::new();
    let mut device = in_overlay(&rig);
    let again = |device: &mut Device| {
        fs::remove_file(rig.path("b")).unwrap();
        rig.ok("snapshot a --to b");
        fill(device, 1);
    };
    let mut moments = Moments::of(|| drop(rig.ok("commit a")));
    again(&mut device);
    let mut before = content(&mut device);
    assert_eq!(rig.ok("commit a --cancel"), "nothing to do\n");
    for round in 0..20 {
        let mut client = begin(&rig, "commit a");
        moments.wait();
        match round % 2 {
            0 => drop(rig.ctl("commit a --cancel")), // it may come too late
            _ => client.kill().unwrap(),
        }
        let ended = client.wait_with_output().unwrap();
        let line = String::from_utf8(ended.stderr).unwrap();
        wait_for_end(&rig);
        let is_merged = rig.json("snapshots a").as_array().unwrap().len() == 1;
        moments.learn(is_merged);
        if is_merged {
            // The client may have gone before the answer.
            again(&mut device);
            before.fill(1);
        } else {
            // A client that was killed says nothing.
            assert!(
                if round % 2 == 0 { line.contains("it was cancelled") } else { line.is_empty() },
                "{line}"
            );
            assert_eq!(mark(&rig.path("a.img")), Some(rig.path("b")));
        }
        device.write(round, &[round as u8; 512]).unwrap();
        before[round as usize * 512..][..512].fill(round as u8);
        assert!(content(&mut device) == before, "round {round}");
    }
    moments.assert_both();
    // At this rate the commit does not end before it is cancelled.
    let client = begin(&rig, "commit a --bandwidth 4K");
    wait_for_merge(&rig);
    assert_ne!(rig.ok("commit a --cancel"), "nothing to do\n");
    wait_for_end(&rig);
    let line = error_of(client);
    assert!(line.contains("it was cancelled"), "{line}");
    assert!(content(&mut device) == before);
    rig.ok("resize a 17M");
}

#[test]
fn other_commands_are_refused_while_a_commit_copies() {
    let rig = Rig::new();
    let mut device = in_overlay(&rig);
    // 16 MiB at this rate take longer than this test, so that only the end of the client ends it.
    let mut client = begin(&rig, "commit a --bandwidth 4K");
    wait_for_merge(&rig);
    for (words, reason) in [
        ("commit a", "of it is in progress"),
        ("snapshot a --to c", "a commit of it is in progress"),
        ("resize a 17M", "being merged into its backing file"),
        ("upgrade", "the disk a cannot be passed on: a commit of it is in progress"),
    ] {
        let line = rig.refused(words, 1);
        assert!(line.contains(reason), "{words}: {line}");
    }
    fill(&mut device, 2);
    client.kill().unwrap();
    client.wait().unwrap();
    wait_for_end(&rig);
    assert!(content(&mut device).iter().all(|byte| *byte == 2));
    rig.ok("resize a 17M");
    rig.ok("commit a");
    assert!(content(&mut device).iter().all(|byte| *byte == 2));
}

#[test]
fn the_removal_of_a_disk_ends_its_commit() {
    let rig = Rig::new();
    for _ in 0..5 {
        let device = in_overlay(&rig);
        // At this rate the commit does not end before it is seen.
        let client = begin(&rig, "commit a --bandwidth 4K");
        wait_for_merge(&rig);
        drop(device);
        rig.ok("remove a");
        drop(client.wait_with_output().unwrap());
        // Nothing is locked.
        add(&rig, "a", "--blk-file b --format qcow2 --allow-backing same-dir");
        assert!(content(&mut guest(&rig, "a")).iter().all(|byte| *byte == 1));
        rig.ok("remove a");
        ["a.img", "b"].iter().for_each(|name| fs::remove_file(rig.path(name)).unwrap());
    }
}

#[test]
fn a_commit_that_cannot_be_done_says_why() {
    let rig = Rig::new();
    add_raw(&rig);
    let mut device = guest(&rig, "a");
    let refused = |words: &str, reason: &str| {
        let line = rig.refused(words, 1);
        assert!(line.contains(reason), "{words}: {line}");
    };
    refused("commit a", "its image has no backing file");
    refused("commit x", "there is none of this name");
    rig.ok("snapshot a --to b");
    device.write(1, &[1; 512]).unwrap();
    refused("commit a --update-config", "drop --update-config");
    // Another disk has the backing file.
    add(&rig, "r", "--blk-file a.img --read-only");
    refused("commit a", "remove that disk (vhost-blk ctl remove r)");
    rig.ok("remove r");
    fs::rename(rig.path("a.img"), rig.path("moved")).unwrap();
    refused("commit a", "a.img: No such file");
    fs::rename(rig.path("moved"), rig.path("a.img")).unwrap();
    rig.ok("commit a");
    let mut data = [0; 512];
    device.read(1, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
}

#[test]
fn a_full_file_system_ends_a_commit_and_the_disk_goes_on() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::new();
    let small = Mount::tmpfs(8);
    let below = small.path("a.img");
    File::create(&below).unwrap().set_len(BYTES).unwrap();
    add(&rig, "a", &format!("--blk-file {}", text(&below)));
    let mut device = guest(&rig, "a");
    rig.ok("snapshot a --to b");
    fill(&mut device, 4);
    let line = rig.refused("commit a", 1);
    assert!(line.contains("the backing file cannot be written: No space"), "{line}");
    assert!(content(&mut device).iter().all(|byte| *byte == 4));
    assert_eq!(mark(&below), Some(rig.path("b")));
    device.write(0, &[5; 512]).unwrap();
    run(&["mount", "-o", "remount,size=32M", text(small.place.path())]);
    rig.ok("commit a");
    device.write(8, &[6; 512]).unwrap();
    drop(device);
    rig.ok("remove a");
    let bytes = fs::read(&below).unwrap();
    assert_eq!((bytes[0], bytes[512], bytes[8 * 512]), (5, 4, 6));
}

#[test]
fn a_disk_of_the_directory_goes_on_in_its_backing_file_after_a_restart() {
    let file = "blk-file = '@/a.img' # the image\nsocket-path = '@/a.sock'\nnum-queues = 2\n";
    let mut rig = Rig::of_directory(&[("a", file)]);
    image(&rig, "a.img", "raw");
    rig.ok("reload");
    let mut device = guest(&rig, "a");
    rig.ok("snapshot a --to b --update-config");
    device.write(1, &[1; 512]).unwrap();
    let line = rig.refused("commit a", 1);
    assert!(line.contains("give --update-config"), "{line}");
    rig.ok("commit a --update-config");
    let config = fs::read_to_string(rig.path("conf/a.toml")).unwrap();
    assert!(config.contains("a.img") && config.contains("# the image"), "{config}");
    assert_eq!(rig.json("reload"), serde_json::json!([]));
    rig.ok("upgrade");
    device.write(2, &[2; 512]).unwrap();
    drop(device);
    rig.ok("stop");
    rig.daemon.wait();
    let conf = rig.path("conf");
    rig.restart(&["--config-dir", text(&conf)]);
    let mut data = [0; 512];
    guest(&rig, "a").read(2, &mut data).unwrap();
    assert_eq!(data, [2; 512]);
}

/// The guest writes; a kill leaves the image or the backing file with everything acknowledged.
#[test]
fn a_kill_at_any_moment_of_a_commit_loses_no_acknowledged_write() {
    let mut rig = Rig::new();
    drop(in_overlay(&rig));
    let below = "--blk-file a.img --format raw";
    let over = "--blk-file b --format qcow2 --allow-backing same-dir";
    let mut moments = Moments::of(|| drop(rig.ok("commit a")));
    fs::remove_file(rig.path("b")).unwrap();
    for _ in 0..KILLS {
        let mut device = guest(&rig, "a");
        if !rig.path("b").exists() {
            rig.ok("snapshot a --to b");
            fill(&mut device, 0);
        }
        let writer = Writer::start(device);
        writer.wait_for_two_rounds();
        let client = begin(&rig, "commit a");
        moments.wait();
        rig.daemon.signal(libc::SIGKILL);
        rig.daemon.wait();
        let written = writer.stop();
        drop(client.wait_with_output().unwrap());
        rig.restart(&[]);
        let is_merged = is_marked_as_merged(&rig.path("b"));
        moments.learn(is_merged);
        // With both marks, that of the backing file is void.
        add(&rig, "a", if is_merged { below } else { over });
        written.check(&mut guest(&rig, "a"));
        if is_merged {
            fs::remove_file(rig.path("b")).unwrap();
        } else {
            check_after_kill(&rig.path("b"));
        }
    }
    moments.assert_both();
}
