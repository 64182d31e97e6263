// SPDX-License-Identifier: Apache-2.0
//! Commands during a backup.

use crate::common::{one_line, program, wait_until};
use crate::served::served;
use crate::{Client, MIB, SLOW, assert_same, fill, wait_for_end};
use driver::{Device, Options};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[test]
fn a_running_backup_delays_no_write_for_its_bandwidth_and_refuses_other_commands_or_not() {
    let served = served(&[]);
    fill(&served.place.image);
    let options = Options { limit: Duration::from_secs(20), ..Options::default() };
    let mut device = Device::connect(&served.place.socket, &options).unwrap();
    let slow = json!({"bandwidth": SLOW});
    let client = Client::start(&served.control, &served.place.path("copy"), slow);
    assert!(served.status()["disk"].to_string().contains("backed up"));
    for sector in (0..8192).step_by(331) {
        device.write(sector, &[3; 512]).unwrap();
    }
    device.discard(0, 6000).unwrap();
    device.write_zeroes(3000, 6000, 0).unwrap();
    let refused = |words: &[&str]| one_line(&served.ctl(words), 1);
    let other = served.place.path("other");
    let told = refused(&["backup", "--to", other.to_str().unwrap()]);
    assert!(told.contains("another backup of it is in progress"), "{told}");
    let told = refused(&["upgrade"]);
    assert!(told.contains("it is being backed up"), "{told}");
    let overlay = served.place.path("overlay");
    let told = refused(&["snapshot", "--to", overlay.to_str().unwrap()]);
    assert!(told.contains("it is being backed up") && !overlay.exists(), "{told}");
    let told = refused(&["switch", "kernel"]);
    assert!(told.contains("during a backup"), "{told}");
    for words in [
        &["pause"][..],
        &["resume"],
        &["limit", "--iops", "1000000"],
        &["limit", "--none"],
        &["set-cache", "writethrough"],
        &["switch", "uring"],
        &["status"],
    ] {
        assert!(served.ctl(words).status.success(), "{words:?}");
        if words != ["pause"] {
            device.write(16_000, &[4; 512]).unwrap();
        }
    }
    drop(client);
    wait_for_end(&served);
    assert!(!served.place.path("copy").exists());
    served.upgrade();
    device.write(16_000, &[5; 512]).unwrap();
}

#[test]
fn a_paused_disk_is_copied() {
    let served = served(&[]);
    let content = fill(&served.place.image);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    device.flush().unwrap();
    assert!(served.ctl(&["pause"]).status.success());
    let target = served.place.path("copy");
    Client::start(&served.control, &target, json!({})).finish();
    assert_same(&std::fs::read(target).unwrap(), &content);
    assert!(served.ctl(&["resume"]).status.success());
    device.write(0, &[1; 512]).unwrap();
}

#[test]
fn a_disk_that_grows_is_copied_with_the_size_of_the_start() {
    let served = served(&[]);
    let content = fill(&served.place.image);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    let (target, options) = (served.place.path("copy"), json!({"bandwidth": 16 * MIB}));
    let mut client = Client::start(&served.control, &target, options);
    assert!(served.ctl(&["resize", "12M"]).status.success());
    device.write(20_000, &[1; 512]).unwrap();
    device.write(16_000, &[2; 512]).unwrap();
    assert_eq!(client.finish()["parameters"]["total_bytes"], 8 * MIB);
    assert_same(&std::fs::read(target).unwrap(), &content);
    let mut data = [0; 512];
    device.read(20_000, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
    // The next one has the new size.
    let target = served.place.path("next");
    assert_eq!(
        Client::start(&served.control, &target, json!({})).finish()["parameters"]["total_bytes"],
        12 * MIB
    );
    assert_eq!(std::fs::metadata(target).unwrap().len(), 12 * MIB);
}

#[test]
fn the_progress_is_drawn_on_a_terminal() {
    let served = served(&[]);
    fill(&served.place.image);
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
    let end = OpenOptions::new().read(true).write(true).open(name).unwrap();
    let mut command = program();
    command.args(["ctl", "--control-path"]).arg(&served.control).args(["backup", "--to"]);
    command.arg(served.place.path("copy")).args(["--bandwidth", "16M"]).env("TERM", "xterm");
    let mut child = command.stdout(end.try_clone().unwrap()).stderr(end).spawn().unwrap();
    drop(command);
    let drawn = Arc::new(Mutex::new(Vec::new()));
    let (mut terminal, output) = (File::from(terminal), Arc::clone(&drawn));
    let reader = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        // EIO: the program has ended.
        while let Ok(count @ 1..) = terminal.read(&mut bytes) {
            output.lock().unwrap().extend_from_slice(&bytes[..count]);
        }
    });
    let text = || String::from_utf8_lossy(&drawn.lock().unwrap()).into_owned();
    wait_until("the progress is drawn", || text().contains("of 8.00 MiB"));
    assert!(child.wait().unwrap().success());
    reader.join().unwrap();
    assert!(text().contains("done; the copy has"), "{}", text());
}

#[test]
fn a_backup_and_a_commit_exclude_each_other() {
    let served = served(&[]);
    fill(&served.place.image);
    let path = |name: &str| served.place.path(name).to_str().unwrap().to_owned();
    let taken = served.ctl(&["snapshot", "--to", &path("overlay")]);
    assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
    let slow = json!({"bandwidth": SLOW});
    let client = Client::start(&served.control, &served.place.path("copy"), slow);
    let told = one_line(&served.ctl(&["commit"]), 1);
    assert!(told.contains("it is being backed up; wait"), "{told}");
    drop(client);
    wait_for_end(&served);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    for part in 0..24 {
        device.write(part * 512, &[7; 256 << 10]).unwrap();
    }
    let mut command = program();
    command.args(["ctl", "--control-path"]).arg(&served.control);
    let mut commit = command.args(["commit", "--bandwidth", "4K"]).spawn().unwrap();
    wait_until("the commit", || served.status()["disk"].to_string().contains("being merged"));
    let told = one_line(&served.ctl(&["backup", "--to", &path("copy")]), 1);
    assert!(told.contains("a commit of it is in progress; wait"), "{told}");
    commit.kill().unwrap();
    commit.wait().unwrap();
    assert!(!served.place.path("copy").exists());
}
