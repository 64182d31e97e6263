// SPDX-License-Identifier: Apache-2.0
//! Upgrades at particular moments.

use crate::common::{Daemon, Place, own_path, program, run};
use crate::locks::{self, End};
use crate::moments::Moments;
use crate::served::{Served, ctl, served};
use driver::{Device, Options, QueueSetup};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

#[test]
fn without_a_front_end_the_sockets_and_the_lock_pass_on() {
    let mut served = served(&[]);
    for _ in 0..3 {
        served.upgrade();
    }
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    device.write(0, &[1; 512]).unwrap();
    assert_eq!(served.status()["front_end_connected"], true);
    drop(device);
    // The new program owns the socket files, too.
    served.daemon.signal(libc::SIGTERM);
    assert!(served.daemon.wait().success());
    assert_eq!(served.place.files(), ["disk.img"]);
}

#[test]
fn a_pause_a_limit_and_the_cache_mode_pass_on() {
    let served = served(&[]);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    device.session().set_config(32, &[0]).unwrap();
    assert!(served.ctl(&["limit", "--iops", "1000", "--burst-seconds", "2"]).status.success());
    assert!(served.ctl(&["pause"]).status.success());
    let layout = device.layout();
    device.queue(0).submit(&driver::Request::write(3, &[3; 512]), &layout).unwrap();
    served.upgrade();
    let told = served.status();
    assert_eq!(told["paused"], true);
    assert_eq!(told["writeback"], false);
    assert_eq!(told["limits"]["iops"], 1000);
    assert_eq!(told["limits"]["burst_ms"], 2000);
    assert_eq!(device.queue(0).try_collect().unwrap().map(|(id, _)| id), None);
    assert!(served.ctl(&["resume"]).status.success());
    device.queue(0).collect().unwrap();
    let mut data = [0; 512];
    device.read(3, &mut data).unwrap();
    assert_eq!(data, [3; 512]);
}

#[test]
fn a_handshake_goes_on_across_upgrades_of_the_daemon() {
    let served = served(&[]);
    let options = Options { num_queues: 2, setup: QueueSetup::Untouched, ..Options::default() };
    let mut device = Device::connect(&served.place.socket, &options).unwrap();
    served.upgrade();
    let memory = device.memory().clone();
    device.session().share_memory(&memory, false).unwrap();
    served.upgrade();
    device.set_up_queues().unwrap();
    served.upgrade();
    (0..2).for_each(|index| device.session().enable(index, true).unwrap());
    device.write(0, &[1; 512]).unwrap();
    // An answer shows that the handler has the protocol features.
    assert_eq!(device.session().queue_num().unwrap(), 2);
    assert_eq!(device.capacity_sectors().unwrap(), 16384);
    device.write(1, &[1; 512]).unwrap();
}

#[test]
fn a_message_of_which_a_part_was_sent_is_not_lost() {
    use std::io::{Read, Write};
    let served = served(&[]);
    let mut stream = std::os::unix::net::UnixStream::connect(&served.place.socket).unwrap();
    // GET_FEATURES: code 1, version 1, no payload.
    let message = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    let (mut answer, mut first) = ([0; 20], None);
    let mut check = |answer: &[u8; 20]| {
        assert_eq!(answer[..4], message[..4], "an answer to GET_FEATURES");
        assert_eq!(answer, first.get_or_insert(*answer), "the same features");
    };
    for _ in 0..3 {
        stream.write_all(&message).unwrap();
        stream.read_exact(&mut answer).unwrap();
        check(&answer);
        served.upgrade();
    }
    // Five bytes stay in the socket: the daemon peeks, so the next program reads the whole message.
    stream.write_all(&message[..5]).unwrap();
    std::thread::scope(|scope| {
        let upgrade = scope.spawn(|| served.upgrade());
        std::thread::sleep(Duration::from_millis(200));
        stream.write_all(&message[5..]).unwrap();
        stream.read_exact(&mut answer).unwrap();
        upgrade.join().unwrap();
    });
    check(&answer);
    stream.write_all(&message).unwrap();
    stream.read_exact(&mut answer).unwrap();
    check(&answer);
}

#[test]
fn of_two_upgrades_at_once_each_is_done_or_refused_with_a_reason() {
    let served = served(&[]);
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    for round in 0..5 {
        let outputs = std::thread::scope(|scope| {
            let all = [(); 2].map(|()| scope.spawn(|| served.ctl(&["upgrade"])));
            all.map(|one| one.join().unwrap())
        });
        assert!(outputs.iter().any(|output| output.status.success()));
        for output in outputs.iter().filter(|output| !output.status.success()) {
            let told = String::from_utf8_lossy(&output.stderr);
            // The program before has ended the connection of the other client.
            let gone = ["ended without an answer", "reset by peer", "Broken pipe"];
            let expected = [&gone[..], &["another upgrade"]].concat();
            assert!(expected.iter().any(|words| told.contains(words)), "{told}");
        }
        device.write(round, &[1; 512]).unwrap();
    }
}

/// Tries to serve the image as well, again and again, until `stop`. Counts the attempts.
fn intrude(place: &Place, stop: &AtomicBool, attempts: &AtomicUsize) {
    while !stop.load(Ordering::Relaxed) {
        let options =
            backend::FileOptions { lock: Some(Duration::ZERO), ..backend::FileOptions::default() };
        let opened = backend::file::File::open(&place.image, options);
        let attempt = attempts.fetch_add(1, Ordering::Relaxed);
        assert!(opened.is_err(), "the image was not locked at attempt {attempt}");
    }
}

/// Upgrades during which the intruder has made an attempt.
const DISTURBED: usize = 10;

/// The lock is that of an open file description, which the new program inherits: it is never released.
#[test]
fn the_image_is_locked_at_every_moment_of_an_upgrade() {
    let served = served(&[]);
    let (stop, attempts) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let intruder = scope.spawn(|| intrude(&served.place, &stop, &attempts));
        let _end = End(&stop);
        let mut disturbed = 0;
        for n in 1.. {
            let marks = locks::mark(&served.daemon, n);
            assert_eq!(marks.keys().collect::<Vec<_>>(), [&served.place.image]);
            let before = attempts.load(Ordering::Relaxed);
            served.upgrade();
            assert_eq!(locks::marks(&served.daemon), marks, "another description has the lock");
            assert!(!intruder.is_finished());
            // Without a CPU for the intruder the upgrade shows nothing.
            disturbed += usize::from(attempts.load(Ordering::Relaxed) > before);
            if disturbed == DISTURBED {
                break;
            }
        }
    });
}

#[test]
fn a_lock_that_waits_for_its_guest_is_not_taken_by_an_upgrade() {
    let served = served(&["--incoming", "on"]);
    served.upgrade();
    let open = || {
        let options =
            backend::FileOptions { lock: Some(Duration::ZERO), ..backend::FileOptions::default() };
        backend::file::File::open(&served.place.image, options)
    };
    drop(open().expect("nobody has locked the image"));
    let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
    device.write(0, &[1; 512]).unwrap();
    assert!(open().is_err(), "the guest runs without the lock");
    served.upgrade();
    assert!(open().is_err(), "the upgrade has lost the lock");
    device.write(1, &[1; 512]).unwrap();
}

#[test]
fn a_stop_during_upgrades_ends_the_daemon() {
    let first = served(&[]);
    let mut moments = Moments::of(|| {
        first.upgrade();
    });
    for _ in 0..15 {
        let mut served = served(&[]);
        let mut device = Device::connect(&served.place.socket, &Options::default()).unwrap();
        device.write(0, &[1; 512]).unwrap();
        let control = served.control.clone();
        let upgrade = std::thread::spawn(move || ctl(&control, &["upgrade"]));
        moments.wait();
        served.daemon.signal(libc::SIGTERM);
        assert!(served.daemon.wait().success());
        moments.learn(upgrade.join().unwrap().status.success());
        assert_eq!(served.place.files(), ["disk.img"]);
    }
    moments.assert_both();
}

#[test]
fn the_connection_of_an_inherited_descriptor_passes_on() {
    use std::os::fd::AsRawFd;
    use std::os::unix::process::CommandExt;
    let place = Place::new();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let control = place.path("control.sock");
    let mut command = program();
    command.args(["serve", "--blk-file"]).arg(&place.image).args(["--fd", "3"]);
    command.arg("--control-path").arg(&control);
    let number = theirs.as_raw_fd();
    // UNSAFETY: the standard library passes no other descriptors.
    #[expect(unsafe_code)]
    // SAFETY: dup2 is async-signal-safe.
    unsafe {
        command.pre_exec(move || match libc::dup2(number, 3) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let mut daemon = Daemon::spawn(&mut command);
    drop(theirs);
    let mut device = Device::from_stream(ours, &Options::default()).unwrap();
    let served = Served {
        place,
        control,
        daemon: {
            daemon.close_stderr();
            daemon
        },
    };
    let listens = || std::os::unix::net::UnixStream::connect(&served.control).is_ok();
    served.place.wait_until("the control socket", listens);
    served.upgrade();
    device.write(0, &[1; 512]).unwrap();
    served.upgrade();
    let mut data = [0; 512];
    device.read(0, &mut data).unwrap();
    assert_eq!(data, [1; 512]);
    drop(device);
    let mut served = served;
    assert!(served.daemon.wait().success());
}

#[test]
fn metrics_are_served_on_at_the_same_place() {
    use std::io::{Read, Write};
    let place = Place::new();
    let metrics = place.path("metrics.sock");
    let served = served(&["--metrics", &format!("unix:{}", metrics.display())]);
    let scrape = || {
        let mut stream = std::os::unix::net::UnixStream::connect(&metrics).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    assert!(scrape().contains("# EOF"));
    served.upgrade();
    assert!(scrape().contains("# EOF"));
}

#[test]
fn a_program_that_was_replaced_on_disk_is_the_default() {
    let place = Place::new();
    let installed = place.path("vhost-blk");
    std::fs::copy(own_path(), &installed).unwrap();
    let control = place.path("control.sock");
    let mut command = Command::new(&installed);
    command.arg("serve").arg("--blk-file").arg(&place.image);
    command.arg("--socket-path").arg(&place.socket).arg("--control-path").arg(&control);
    let daemon = Daemon::start(&mut command, &control);
    // As a package manager does it.
    let new = place.path("vhost-blk.new");
    std::fs::copy(own_path(), &new).unwrap();
    std::fs::rename(&new, &installed).unwrap();
    let exe = format!("/proc/{}/exe", daemon.id());
    assert!(std::fs::read_link(&exe).unwrap().to_str().unwrap().ends_with(" (deleted)"));
    let output =
        run(["ctl".as_ref(), "--control-path".as_ref(), control.as_os_str(), "upgrade".as_ref()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_link(&exe).unwrap(), installed);
}

#[test]
fn a_migration_log_is_written_on() {
    for packed in [false, true] {
        let served = served(&[]);
        let options = Options { packed, ..Options::default() };
        let mut device = Device::connect(&served.place.socket, &options).unwrap();
        let log = device.start_log().unwrap();
        device.write(0, &[1; 512]).unwrap();
        served.upgrade();
        log.clear();
        device.write(1, &[1; 512]).unwrap();
        let used = device.queue(0).queue().addresses()[if packed { 0 } else { 2 }];
        // The mark of the ring may come after the completion.
        served.place.wait_until("a mark", || log.dirty_pages().contains(&(used / 4096 * 4096)));
    }
}

#[test]
fn a_resize_after_an_upgrade_is_announced_on_the_same_channel() {
    use std::io::Read;
    use std::os::fd::AsFd;
    const SET_BACKEND_REQ_FD: u32 = 21;
    const PROTOCOL_F_BACKEND_REQ: u64 = 1 << 5;
    const CONFIG_CHANGE: [u8; 12] = [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    let served = served(&[]);
    let options = Options::default();
    let protocol_features = options.protocol_features | PROTOCOL_F_BACKEND_REQ;
    let options = Options { protocol_features, ..options };
    let mut device = Device::connect(&served.place.socket, &options).unwrap();
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    device.session().raw().message(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).unwrap();
    let before = device.capacity_sectors().unwrap();
    served.upgrade();
    ours.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut message = [0; 12];
    ours.read_exact(&mut message).expect_err("the capacity is the same");
    assert!(served.ctl(&["resize", "16M"]).status.success());
    ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    ours.read_exact(&mut message).unwrap();
    assert_eq!(message, CONFIG_CHANGE);
    assert_eq!(device.capacity_sectors().unwrap(), 2 * before);
}

#[test]
fn memory_that_is_unplugged_after_an_upgrade_leaves_the_table() {
    let served = served(&[]);
    let options = Options {
        mem_slots: true,
        regions: vec![(0, 16 << 20), (1 << 30, 2 << 20)],
        ..Options::default()
    };
    let mut device = Device::connect(&served.place.socket, &options).unwrap();
    device.write(0, &[1; 512]).unwrap();
    served.upgrade();
    let memory = device.memory().clone();
    let last = &memory.regions()[1];
    device.session().unshare_region(last).unwrap();
    device.write(1, &[2; 512]).unwrap();
    // A second removal would be an error: the table of the new program has lost the region.
    assert!(device.session().unshare_region(last).is_err());
}
