// SPDX-License-Identifier: Apache-2.0
//! Snapshots of a loaded disk, and the next start of a disk that has some.

use crate::common::{self, Daemon, Place, program};
use crate::load::under_load;
use crate::mount::run;
use crate::rig::Rig;
use crate::{QUEUES, add, add_raw, content, guest, image, mark, text, unmark};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

const SNAPSHOTS: usize = 20;

/// The options for the next start.
#[track_caller]
fn snapshot(rig: &Rig, words: &str) -> String {
    let told = rig.json(&format!("snapshot {words}"));
    assert_eq!(told["marked"], true, "{told}");
    println!("pause: {} us", told["pause_us"]);
    told["options"].as_str().unwrap().to_owned()
}

#[test]
fn twenty_snapshots_under_load_keep_every_byte_and_every_older_image() {
    for format in ["raw", "qcow2"] {
        let rig = Rig::new();
        let first = image(&rig, "a.img", format);
        add(&rig, "a", &format!("--blk-file a.img --format {format}"));
        let device = guest(&rig, "a");
        let mut frozen: Vec<(PathBuf, Vec<u8>)> = Vec::new();
        let mut options = String::new();
        let (done, session) = under_load(device, QUEUES.into(), |loaded| {
            let mut image = first.clone();
            for n in 0..SNAPSHOTS {
                loaded.wait_for_progress(5);
                let overlay = rig.path(&format!("{n}.qcow2"));
                options = snapshot(&rig, &format!("a --to {n}.qcow2"));
                frozen.push((image.clone(), fs::read(&image).unwrap()));
                assert_eq!(mark(&image), Some(overlay.clone()));
                if n > 0 || format == "qcow2" {
                    run(&["qemu-img", "check", "-qU", "-f", "qcow2", text(&image)]);
                }
                image = overlay;
            }
            loaded.wait_for_progress(5);
        });
        assert!(done.iter().all(|done| done.reads + done.writes >= 5 * SNAPSHOTS as u64));
        drop(session);
        let before = content(&mut guest(&rig, "a"));
        let chain = rig.json("snapshots a");
        assert_eq!(chain.as_array().unwrap().len(), SNAPSHOTS + 1);
        assert_eq!(chain[SNAPSHOTS]["path"], text(&first));
        rig.ok("remove a");
        for (path, bytes) in frozen {
            assert!(fs::read(&path).unwrap() == bytes, "{} has changed", path.display());
        }
        for n in 0..SNAPSHOTS {
            run(&["qemu-img", "check", "-q", text(&rig.path(&format!("{n}.qcow2")))]);
        }
        add(&rig, "again", &options);
        assert!(content(&mut guest(&rig, "again")) == before);
        let (last, flat) = (rig.path(&format!("{}.qcow2", SNAPSHOTS - 1)), rig.path("flat"));
        run(&["qemu-img", "convert", "-U", "-O", "raw", text(&last), text(&flat)]);
        assert!(fs::read(&flat).unwrap() == before);
    }
}

/// Every way to open an image for writing.
#[test]
fn an_image_with_an_overlay_is_not_opened_for_writing_again() {
    let rig = Rig::new();
    let path = add_raw(&rig);
    guest(&rig, "a").write(7, &[7; 512]).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let options = snapshot(&rig, "a --to over.qcow2");
    let overlay = rig.path("over.qcow2");
    assert_eq!(rig.json("status a")["image_lock"], "held");
    assert_eq!(
        options,
        format!("--blk-file {} --format qcow2 --allow-backing same-dir", text(&overlay))
    );
    assert_eq!(fs::metadata(&overlay).unwrap().permissions().mode() & 0o777, 0o640);
    // Another program may read the image, and none may write to it.
    let line = rig.refused("add b --blk-file a.img --socket-path b.sock", 1);
    assert!(line.contains("the disk a of this daemon has it"), "{line}");
    rig.ok("add b --blk-file a.img --socket-path b.sock --read-only");
    rig.ok("remove b");
    rig.ok("remove a");
    let remedy = format!("serve {} with `--format qcow2 --allow-backing same-dir`", text(&overlay));
    rig.write_file("c", "blk-file = '@/a.img'\nsocket-path = '@/c.sock'\n");
    let conf = rig.path("conf");
    let other = rig.path("other.ctl");
    let mut of_directory = program();
    of_directory.arg("daemon").arg("--control-path").arg(&other).arg("--config-dir").arg(&conf);
    let mut daemon = Daemon::start(&mut of_directory, &other);
    let mut serve = program();
    serve.arg("serve").arg("--blk-file").arg(&path).arg("--socket-path").arg(rig.path("d.sock"));
    fs::write(rig.path("source"), vec![1; 1 << 20]).unwrap();
    let mut of_raw = program();
    of_raw.args(["convert", "--overwrite"]).arg(rig.path("source")).arg(&path);
    for line in [
        rig.refused("add a --blk-file a.img --socket-path a.sock", 1),
        rig.refused("add a --blk-file a.img --socket-path a.sock --lock off", 1),
        rig.refused("add a --blk-file a.img --socket-path a.sock --incoming on", 1),
        rig.refused("add a --pass-file --blk-file a.img --socket-path a.sock", 1),
        common::one_line(&common::finish(&mut serve), 1),
        common::one_line(&common::finish(&mut of_raw), 1),
        daemon.log_line("configuration"),
    ] {
        assert!(line.contains(&remedy) && line.contains("setfattr -x user.vhost-blk"), "{line}");
    }
    let told = common::run(["info".as_ref(), path.as_os_str()]);
    let told = common::stdout(&told);
    assert!(told.contains("over.qcow2") && told.contains("--read-only"), "{told}");
    // The image as it was when the snapshot was taken.
    add(&rig, "old", "--blk-file a.img --read-only");
    let mut data = [0; 512];
    guest(&rig, "old").read(7, &mut data).unwrap();
    assert_eq!(data, [7; 512]);
    rig.ok("remove old");
    unmark(&path);
    add(&rig, "a", "--blk-file a.img");
    guest(&rig, "a").write(8, &[8; 512]).unwrap();
}

#[test]
fn a_disk_of_the_directory_goes_on_in_its_overlay_after_a_restart() {
    let text_of_file = "# The disk of the database.\nblk-file = '@/a.img' # raw\n\
                        socket-path = '@/a.sock'\nnum-queues = 2\nserial = 'db'\n";
    let mut rig = Rig::of_directory(&[("a", text_of_file)]);
    image(&rig, "a.img", "raw");
    rig.ok("reload");
    let mut device = guest(&rig, "a");
    device.write(1, &[1; 512]).unwrap();
    let line = rig.refused("snapshot a --to b.qcow2", 1);
    assert!(line.contains("give --update-config") && !rig.path("b.qcow2").exists(), "{line}");
    let file = rig.path("conf/a.toml");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o604)).unwrap();
    let told = rig.json("snapshot a --to b.qcow2 --update-config");
    assert_eq!(told["config"], text(&file));
    device.write(2, &[2; 512]).unwrap();
    let config = fs::read_to_string(&file).unwrap();
    for words in ["# The disk of the database.\n", "# raw\n", "b.qcow2", "serial = 'db'\n"] {
        assert!(config.contains(words), "{words}: {config}");
    }
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o604);
    assert_eq!(fs::read_dir(rig.path("conf")).unwrap().count(), 1);
    // The file and the running disk agree.
    assert_eq!(rig.json("reload"), json!([]));
    device.write(3, &[3; 512]).unwrap();
    drop(device);
    rig.ok("stop");
    rig.daemon.wait();
    let conf = rig.path("conf");
    rig.restart(&["--config-dir", text(&conf)]);
    let mut device = guest(&rig, "a");
    for sector in 1..4 {
        let mut data = [0; 512];
        device.read(sector, &mut data).unwrap();
        assert_eq!(data, [sector as u8; 512]);
    }
    assert_eq!(device.get_id().unwrap()[..3], *b"db\0");
}

#[test]
fn the_disk_of_serve_gets_snapshots_and_tells_the_next_options() {
    let place = Place::new();
    let control = place.path("ctl");
    let mut command = place.serve();
    command.args(["--logical-block-size", "4096", "--control-path"]).arg(&control);
    let daemon = Daemon::start(&mut command, &control);
    let mut rig = Rig { daemon, place };
    rig.ok("pause");
    let far = tempfile::tempdir().unwrap();
    let overlay = far.path().canonicalize().unwrap().join("b.qcow2");
    let told = rig.ok(&format!("snapshot --to {}", text(&overlay)));
    let options = "--format qcow2 --allow-backing any --logical-block-size 4096";
    let options = format!("--blk-file {} {options}", text(&overlay));
    let goes_on = format!("done; the guest goes on in {}, after a pause of ", text(&overlay));
    assert!(told.starts_with(&goes_on), "{told}");
    assert!(told.ends_with(&format!(" ms\nits next start needs {options}\n")), "{told}");
    let status = rig.json("status");
    assert_eq!((&status["paused"], &status["capacity_bytes"]), (&json!(true), &json!(1 << 20)));
    assert!(status["disk"].as_str().unwrap().contains("with 1 backing file"), "{status}");
    rig.ok("resume");
    let chain = rig.ok("snapshots");
    let rows: Vec<Vec<&str>> = chain.lines().map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["FILE", "FORMAT", "SIZE", "ON", "DISK"]);
    assert_eq!(rows[1][..3], [text(&overlay), "qcow2", "1M"]);
    assert_eq!(rows[2][..3], [text(&rig.path("disk.img")), "raw", "1M"]);
    assert_eq!(rows.len(), 3);
    rig.ok("resize 2M");
    rig.ok("stop");
    assert!(rig.daemon.wait().success());
    let mut again = program();
    again.arg("serve").arg("--socket-path").arg(&rig.place.socket).arg("--control-path");
    again.arg(&control).args(options.split(' '));
    rig.daemon = Daemon::start(&mut again, &control);
    assert_eq!(rig.json("status")["capacity_bytes"], 2 << 20);
}

#[test]
fn wrappers_and_limits_of_a_disk_hold_for_its_overlay() {
    let rig = Rig::new();
    image(&rig, "a.img", "raw");
    add(&rig, "a", "--blk-file a.img --limit-iops 100000 --wrap delay:us=1 --on-error stop");
    let mut device = guest(&rig, "a");
    device.write(1, &[1; 512]).unwrap();
    snapshot(&rig, "a --to b.qcow2");
    let status: Value = rig.json("status a");
    assert!(status["disk"].as_str().unwrap().contains("delayed"), "{status}");
    assert_eq!(status["limits"]["iops"], 100_000);
    let mut data = [0; 512];
    device.read(1, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
}
