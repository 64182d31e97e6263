// SPDX-License-Identifier: Apache-2.0
//! Upgrades that are refused: the old program serves on.

use crate::common::{Daemon, Place, USELESS, one_line, own_path, program};
use crate::served::{Served, ctl, served};
use driver::{Device, Options, Request};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

#[track_caller]
fn refused(served: &Served, program: &Path, words: &str) {
    let program = program.to_str().unwrap();
    let line = one_line(&served.ctl(&["upgrade", "--program", program]), 1);
    assert!(line.starts_with("vhost-blk: cannot upgrade the daemon: "), "{line}");
    assert!(line.contains(words), "{line}");
}

#[test]
fn a_program_that_cannot_take_over_is_refused_and_the_guest_notices_nothing() {
    let served = served(&[]);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    device.write(0, &[1; 512]).unwrap();
    let running = served.status()["queues"][0]["chains"].clone();
    let failing = served.place.script("failing", "echo it is broken >&2; exit 1");
    refused(&served, &failing, "it is broken");
    // Each of its runs succeeds, so that an exec of it would end the daemon.
    let other = served.place.script("succeeds", "exit 0");
    refused(&served, &other, "it has not answered the check");
    refused(&served, &served.place.path("missing"), "No such file");
    refused(&served, Path::new("vhost-blk"), "not absolute");
    refused(&served, served.place.dir.path(), "no regular file");
    let plain = served.place.path("plain");
    fs::write(&plain, "").unwrap();
    refused(&served, &plain, "not executable");
    let loose = served.place.script("loose", "exit 0");
    fs::set_permissions(&loose, fs::Permissions::from_mode(0o777)).unwrap();
    refused(&served, &loose, "others may write it");
    // The queue was not even stopped: a stop begins new counters.
    assert_eq!(served.status()["queues"][0]["chains"], running);
    device.write(1, &[2; 512]).unwrap();
}

#[test]
fn a_program_that_passes_its_check_and_cannot_be_executed_leaves_the_old_one_running() {
    let served = served(&[]);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    device.write(0, &[1; 512]).unwrap();
    served.upgrade(); // closes what the test's own parents left open
    let before = served.daemon.settled_descriptors();
    // It makes itself useless for the kernel after the check.
    let program = served.place.script("once", USELESS);
    refused(&served, &program, "the old program serves on");
    served.daemon.assert_descriptors(&before);
    device.write(1, &[2; 512]).unwrap();
    let mut data = [0; 512];
    device.read(0, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
    served.upgrade();
    served.daemon.assert_descriptors(&before);
    device.read(1, &mut data).unwrap();
    assert_eq!(data, [2; 512]);
}

/// The file of the options is read again: an error in it would end the daemon after the point of no return.
#[test]
fn options_that_the_start_would_refuse_are_refused_before() {
    let place = Place::new();
    let file = place.path("disk.toml");
    let write = |more: &str| fs::write(&file, format!("serial = \"a\"\n{more}")).unwrap();
    write("");
    let served = served(&["--config", file.to_str().unwrap()]);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    for (sector, (more, why)) in [
        ("wrap = [\"nonsense\"]", "use --wrap nonsense"),
        ("socket-group = \"no-such-group\"", "there is no such group"),
        ("control-group = \"no-such-group\"", "there is no such group"),
    ]
    .into_iter()
    .enumerate()
    {
        write(more);
        let line = one_line(&served.ctl(&["upgrade"]), 1);
        assert!(line.contains(why) && line.contains("nothing was changed"), "{more}: {line}");
        device.write(sector as u64, &[1; 512]).unwrap();
    }
    write("");
    served.upgrade();
    device.write(0, &[1; 512]).unwrap();
}

#[test]
fn options_that_changed_for_the_guest_are_refused() {
    let served = served(&[]);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    let own = own_path();
    let wrapper = |name: &str, more: &str| {
        let text = format!("command=$1; shift; exec {} $command \"$@\" {more}", own.display());
        served.place.script(name, &text)
    };
    for (name, more, words) in [
        ("queues", "--num-queues=3", "cannot be used multiple times"),
        ("serial", "--read-only", "--read-only"),
        ("block", "--logical-block-size 4096", "logical block size"),
        ("size", "--queue-size 64", "--queue-size says 64"),
        ("direct", "--direct off", "another file than the open one"),
    ] {
        refused(&served, &wrapper(name, more), words);
    }
    device.write(1, &[2; 512]).unwrap();
}

#[test]
fn a_disk_in_the_memory_of_the_program_is_not_thrown_away() {
    let place = Place::new();
    let control = place.path("control.sock");
    let mut command = program();
    command.args(["serve", "--backend", "mem", "--size", "1M", "--socket-path"]);
    command.arg(&place.socket).arg("--control-path").arg(&control);
    let _daemon = Daemon::start(&mut command, &control);
    let line = one_line(&ctl(&control, &["upgrade"]), 1);
    assert!(line.contains("remove the disk first, or restart the daemon instead"), "{line}");
}

#[test]
fn a_halted_disk_keeps_its_requests_and_its_program() {
    let served = served(&["--on-error", "stop", "--wrap", "fault:ops=write,errno=EIO"]);
    let options = Options { inflight: true, ..Options::default() };
    let mut device = Device::connect(&served.place.socket, &options).unwrap();
    let layout = device.layout();
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    served.place.wait_until("the halt", || !served.status()["halted"].is_null());
    let line = one_line(&served.ctl(&["upgrade"]), 1);
    assert!(line.contains("resume it before the upgrade"), "{line}");
    assert!(!served.status()["halted"].is_null());
    device.queue(0).submit(&Request::read(1, 512), &layout).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let answer = device.queue(0).try_collect().unwrap();
    assert!(answer.is_none(), "a halted disk keeps its request and takes no other");
}
