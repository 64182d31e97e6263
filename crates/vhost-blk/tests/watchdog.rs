// SPDX-License-Identifier: Apache-2.0
//! The pings for the service manager's watchdog come from a working data plane.

mod common;

use common::{Daemon, Place, program, run};
use driver::{Device, Options, Request};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The manager's period: the daemon pings each tenth of a second.
const PERIOD: &str = "300000";

/// A service manager that watches the daemon of `command`.
fn manager(place: &Place, command: &mut Command) -> UnixDatagram {
    let path = place.path("manager");
    let inbox = UnixDatagram::bind(&path).unwrap();
    inbox.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", PERIOD);
    inbox
}

fn received(inbox: &UnixDatagram) -> String {
    let mut text = [0; 64];
    let len = inbox.recv(&mut text).unwrap();
    String::from_utf8(text[..len].to_vec()).unwrap()
}

/// Takes all messages that have arrived; returns their number.
fn drain(inbox: &UnixDatagram) -> usize {
    inbox.set_nonblocking(true).unwrap();
    let count = std::iter::from_fn(|| inbox.recv(&mut [0; 64]).ok()).count();
    inbox.set_nonblocking(false).unwrap();
    count
}

#[test]
fn pings_come_although_a_request_hangs_in_the_storage() {
    let place = Place::new();
    let mut command = place.serve();
    command.args(["--wrap", "delay:us=20000000,ops=read"]);
    let inbox = manager(&place, &mut command);
    let _daemon = Daemon::start(&mut command, &place.socket);
    assert_eq!(received(&inbox), "READY=1");
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    let layout = device.layout();
    device.queue(0).submit(&Request::read(0, 512), &layout).unwrap();
    // The thread has the request when it has answered another one.
    device.queue(0).submit(&Request::write(8, &[1; 512]), &layout).unwrap();
    device.queue(0).collect().unwrap();
    drain(&inbox);
    for _ in 0..5 {
        assert_eq!(received(&inbox), "WATCHDOG=1");
    }
}

#[test]
fn pings_come_from_a_daemon_without_a_disk() {
    let place = Place::new();
    let control = place.path("control.sock");
    let mut command = program();
    command.arg("daemon").arg("--control-path").arg(&control);
    let inbox = manager(&place, &mut command);
    let _daemon = Daemon::start(&mut command, &control);
    assert_eq!(received(&inbox), "READY=1\nSTATUS=0 disks are served");
    assert_eq!(received(&inbox), "WATCHDOG=1");
}

/// The number of the only thread of the data plane.
fn data_plane_thread(daemon: &Daemon) -> Pid {
    let tasks = format!("/proc/{}/task", daemon.id());
    let mut tasks = fs::read_dir(tasks).unwrap().map(|task| task.unwrap().path());
    let name = |task: &PathBuf| fs::read_to_string(task.join("comm"));
    let is_it = |task: &PathBuf| name(task).is_ok_and(|name| name == "vhost-blk-0\n");
    let task = tasks.find(is_it).expect("a thread of the data plane");
    Pid::from_raw(task.file_name().unwrap().to_str().unwrap().parse().unwrap())
}

/// A thread that a debugger has stopped. It goes on when this is dropped, also in a test that fails: the end of the
/// daemon would otherwise wait for it.
struct Stopped(Pid);

impl Stopped {
    fn new(thread: Pid) -> Stopped {
        ptrace::seize(thread, ptrace::Options::empty()).unwrap();
        let stopped = Stopped(thread);
        ptrace::interrupt(thread).unwrap();
        waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
        stopped
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // A thread that does not go on sends no ping.
        let _ = ptrace::detach(self.0, None);
    }
}

#[test]
fn pings_stop_while_a_thread_is_stuck() {
    let place = Place::new();
    let mut command = place.serve();
    let inbox = manager(&place, &mut command);
    let mut daemon = Daemon::start(&mut command, &place.socket);
    assert_eq!(received(&inbox), "READY=1");
    assert_eq!(received(&inbox), "WATCHDOG=1");
    // A debugger can stop one thread of a process.
    let stopped = Stopped::new(data_plane_thread(&daemon));
    // A ping may precede the stop, and so may a line.
    while {
        daemon.log_line("does not answer");
        drain(&inbox) > 0
    } {}
    daemon.log_line("does not answer");
    assert_eq!(drain(&inbox), 0);
    drop(stopped);
    assert_eq!(received(&inbox), "WATCHDOG=1");
}

#[test]
fn pings_go_on_after_an_upgrade() {
    let place = Place::new();
    let control = place.path("control.sock");
    let mut command = place.serve();
    command.arg("--control-path").arg(&control);
    let inbox = manager(&place, &mut command);
    let _daemon = Daemon::start(&mut command, &control);
    let words = ["ctl", "--control-path", control.to_str().unwrap(), "upgrade"];
    let reader = std::thread::spawn(move || {
        while !received(&inbox).starts_with("RELOADING=1") {}
        while received(&inbox) != "READY=1" {}
        received(&inbox)
    });
    assert!(run(words).status.success());
    assert_eq!(reader.join().unwrap(), "WATCHDOG=1");
}

#[test]
fn without_a_period_there_is_no_ping_and_a_wrong_one_is_told() {
    let place = Place::new();
    let mut command = place.serve();
    let inbox = manager(&place, &mut command);
    command.env("WATCHDOG_USEC", "soon");
    let mut daemon = Daemon::start(&mut command, &place.socket);
    let line = daemon.log_line("the watchdog is off");
    assert!(line.contains("WATCHDOG_USEC"), "{line}");
    daemon.signal(libc::SIGTERM);
    assert!(daemon.wait().success());
    assert_eq!(received(&inbox), "READY=1");
    assert_eq!(received(&inbox), "STOPPING=1");
    assert_eq!(drain(&inbox), 0);
}
