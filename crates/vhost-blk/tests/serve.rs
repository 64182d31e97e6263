// SPDX-License-Identifier: Apache-2.0
//! The life of the daemon: its socket, its end, and who may pass it one.

mod common;

use common::{Daemon, Place, finish, one_line, program};
use driver::{Device, Options, Request};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use virtio_spec::blk::S_OK;

/// Has the child find `fd` under the number `number`, as a service manager would pass it.
fn pass(command: &mut Command, fd: &impl AsRawFd, number: i32) {
    let fd = fd.as_raw_fd();
    // UNSAFETY: a child's descriptors are numbered between fork and exec, which has no safe form.
    #[expect(unsafe_code)]
    // SAFETY: only dup2 and fcntl are called there, which are signal-safe.
    unsafe {
        command.pre_exec(move || {
            let done = match fd == number {
                true => libc::fcntl(fd, libc::F_SETFD, 0),
                false => libc::dup2(fd, number),
            };
            if done < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        });
    }
}

/// `serve` on a null disk, with no socket yet.
fn null_disk() -> Command {
    let mut command = program();
    command.args(["serve", "--backend", "null", "--size", "1M", "--num-queues", "1"]);
    command
}

/// The journal takes the severity from the begin of a line, and has a time of its own.
#[test]
fn lines_for_the_journal_begin_with_their_severity_and_have_no_time() {
    use std::os::unix::fs::MetadataExt;
    let place = Place::new();
    std::fs::File::options().write(true).open(&place.image).unwrap().set_len(700).unwrap();
    let path = place.path("journal");
    for (is_named, begin) in [(true, "<4> WARN "), (false, "20")] {
        let journal = std::fs::File::create(&path).unwrap();
        let meta = journal.metadata().unwrap();
        let inode = if is_named { meta.ino() } else { 1 };
        let mut command = place.serve();
        command.env("JOURNAL_STREAM", format!("{}:{inode}", meta.dev())).stderr(journal);
        let mut child = command.spawn().unwrap();
        let text = || std::fs::read_to_string(&path).unwrap();
        place.wait_until("the disk is served", || text().contains("serving"));
        child.kill().unwrap();
        child.wait().unwrap();
        let text = text();
        let line = text.lines().find(|line| line.contains("188 bytes")).unwrap();
        assert!(line.starts_with(begin), "{line}");
    }
}

#[test]
fn sigterm_and_sigint_end_the_daemon_with_0_and_remove_the_socket() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let place = Place::new();
        let mut daemon = Daemon::start(&mut place.serve(), &place.socket);
        daemon.signal(signal);
        assert_eq!(daemon.wait().code(), Some(0));
        assert_eq!(place.files(), ["disk.img"]);
    }
}

/// A terminal that goes sends SIGHUP. The request in flight is complete for the guest.
#[test]
fn a_terminal_that_goes_ends_serve_in_order_and_with_nohup_not_at_all() {
    let place = Place::new();
    let mut command = place.serve();
    let mut daemon =
        Daemon::start(command.args(["--wrap", "delay:us=300000,ops=write"]), &place.socket);
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    let layout = device.layout();
    device.queue(0).submit(&Request::write(0, &[1; 512]), &layout).unwrap();
    // The write is taken before a later request is.
    device.read(8, &mut [0; 512]).unwrap();
    daemon.signal(libc::SIGHUP);
    assert_eq!(device.queue(0).collect().unwrap().1.status, Some(S_OK));
    assert_eq!(daemon.wait().code(), Some(0));
    assert_eq!(place.files(), ["disk.img"]);
    let mut nohup = Command::new("nohup");
    let serve = place.serve();
    nohup.arg(serve.get_program()).args(serve.get_args()).stdout(Stdio::null());
    let mut daemon = Daemon::start(nohup.stdin(Stdio::null()), &place.socket);
    daemon.signal(libc::SIGHUP);
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    device.write(0, &[2; 512]).unwrap();
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
}

#[test]
fn sigterm_ends_a_silent_front_ends_connection() {
    let place = Place::new();
    let mut daemon = Daemon::start(&mut place.serve(), &place.socket);
    let mut front_end = UnixStream::connect(&place.socket).unwrap();
    daemon.log_line("disconnected"); // `Daemon::start` connected once, as a probe.
    daemon.log_line("front-end connected");
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert_eq!(front_end.read(&mut [0]).unwrap(), 0);
    assert!(!place.socket.exists());
    assert!(!daemon.rest_of_stderr().contains("in flight"));
}

#[test]
fn a_daemon_whose_log_is_not_read_serves_on_and_ends_as_asked() {
    let place = Place::new();
    let mut daemon = Daemon::start(place.serve().arg("--log-level=trace"), &place.socket);
    daemon.close_stderr();
    for _ in 0..2 {
        let mut guest =
            driver::Device::connect(&place.socket, &driver::Options::default()).unwrap();
        guest.read(0, &mut [0; 512]).unwrap();
    }
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(!place.socket.exists());
}

/// A write to the pipe waits for a reader.
#[test]
fn a_daemon_whose_log_is_full_serves_on_and_ends_as_asked() {
    let place = Place::new();
    let (reader, mut log) = std::io::pipe().unwrap();
    let size = rustix::pipe::fcntl_setpipe_size(&log, 4096).unwrap();
    log.write_all(&vec![b'x'; size]).unwrap();
    let mut command = place.serve();
    command.arg("--log-level=trace");
    let mut daemon = Daemon::start_with_log(&mut command, &place.socket, log.into());
    drop(command); // its copy of the pipe's end
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    device.write(0, &[1; 512]).unwrap();
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert_eq!(place.files(), ["disk.img"]);
    drop(reader);
}

#[test]
fn a_second_front_end_waits_and_is_served_after_the_first() {
    let place = Place::new();
    let mut daemon = Daemon::start(&mut place.serve(), &place.socket);
    daemon.log_line("disconnected");
    let first = UnixStream::connect(&place.socket).unwrap();
    let _second = UnixStream::connect(&place.socket).unwrap();
    daemon.log_line("front-end connected");
    drop(first);
    daemon.log_line("disconnected");
    daemon.log_line("front-end connected");
}

#[test]
fn a_stale_socket_is_replaced() {
    let place = Place::new();
    drop(UnixListener::bind(&place.socket).unwrap());
    Daemon::start(&mut place.serve(), &place.socket);
}

#[test]
fn a_killed_daemons_socket_is_replaced() {
    let place = Place::new();
    let mut first = Daemon::start(&mut place.serve(), &place.socket);
    first.signal(libc::SIGKILL);
    first.wait();
    assert!(place.socket.exists());
    Daemon::start(&mut place.serve(), &place.socket);
}

#[test]
fn a_socket_that_someone_serves_is_not_stolen() {
    let place = Place::new();
    let owner = UnixListener::bind(&place.socket).unwrap();
    let line = one_line(&finish(&mut place.serve()), 1);
    assert!(line.contains("another process serves this socket"), "{line}");
    let _ = owner.accept().unwrap(); // The look of the daemon that was refused.
    let _client = UnixStream::connect(&place.socket).unwrap();
    owner.accept().unwrap();
}

#[test]
fn a_second_daemon_for_one_socket_is_refused_and_the_first_goes_on() {
    let place = Place::new();
    let mut first = Daemon::start(&mut place.serve(), &place.socket);
    let mut second = null_disk();
    second.arg("--socket-path").arg(&place.socket);
    let line = one_line(&finish(&mut second), 1);
    assert!(line.contains("another process serves"), "{line}");
    UnixStream::connect(&place.socket).unwrap();
    first.signal(libc::SIGTERM);
    assert_eq!(first.wait().code(), Some(0));
}

#[test]
fn a_file_in_the_sockets_place_is_refused_and_kept() {
    let place = Place::new();
    std::fs::write(&place.socket, "precious").unwrap();
    let line = one_line(&finish(&mut place.serve()), 1);
    assert!(line.contains("not a socket"), "{line}");
    assert_eq!(std::fs::read_to_string(&place.socket).unwrap(), "precious");
}

#[test]
fn a_socket_in_a_directory_that_is_not_there_is_refused() {
    let place = Place::new();
    let mut command = null_disk();
    command.arg("--socket-path").arg(place.path("none/disk.sock"));
    let line = one_line(&finish(&mut command), 1);
    let directory = place.path("none");
    assert!(
        line.contains(&format!("there is no directory {}; make it", directory.display())),
        "{line}"
    );
}

#[test]
fn a_socket_path_that_the_kernel_does_not_take_is_refused() {
    let mut command = null_disk();
    command.arg("--socket-path").arg("x".repeat(120));
    let line = one_line(&finish(&mut command), 1);
    assert!(line.contains("120 bytes"), "{line}");
}

#[test]
fn a_passed_listening_socket_is_served_and_its_file_is_kept() {
    let place = Place::new();
    let listener = UnixListener::bind(&place.socket).unwrap();
    let mut command = null_disk();
    command.args(["--fd", "9"]);
    pass(&mut command, &listener, 9);
    let mut daemon = Daemon::start(&mut command, &place.socket);
    daemon.log_line("front-end connected");
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(place.socket.exists());
}

#[test]
fn with_a_passed_connection_the_daemon_ends_when_it_ends() {
    let (front_end, daemons_end) = UnixStream::pair().unwrap();
    let (place, mut command) = (Place::new(), null_disk());
    let control = place.path("ctl");
    command.args(["--fd", "9", "--control-path"]).arg(&control);
    pass(&mut command, &daemons_end, 9);
    let mut daemon = Daemon::start(&mut command, &control);
    drop(daemons_end);
    daemon.log_line("front-end connected");
    let mut events = UnixStream::connect(&control).unwrap();
    events.write_all(b"{\"method\":\"io.vhostblk.Events\",\"more\":true}\0").unwrap();
    let mut events = BufReader::new(events);
    let mut next = || {
        let mut reply = Vec::new();
        events.read_until(0, &mut reply).unwrap();
        String::from_utf8(reply).unwrap()
    };
    next();
    drop(front_end);
    let last = std::iter::from_fn(|| Some(next()).filter(|reply| !reply.is_empty())).last();
    let last = last.expect("the event of the end");
    for part in ["\"event\":\"stopped\"", "\"reason\":\"connection\""] {
        assert!(last.contains(part) && !last.contains("continues"), "{last}");
    }
    assert_eq!(daemon.wait().code(), Some(0));
}

#[test]
fn a_descriptor_that_is_no_unix_stream_socket_is_refused() {
    let place = Place::new();
    let closed = finish(null_disk().args(["--fd", "912"]));
    assert!(one_line(&closed, 1).contains("descriptor 912"));

    let (datagram, _other) = UnixDatagram::pair().unwrap();
    let image = std::fs::File::open(&place.image).unwrap();
    for (fd, words) in
        [(OwnedFd::from(image), "not a socket"), (OwnedFd::from(datagram), "stream socket")]
    {
        let mut command = null_disk();
        command.args(["--fd", "9"]);
        pass(&mut command, &fd, 9);
        let line = one_line(&finish(&mut command), 1);
        assert!(line.contains(words), "{line}");
    }
}

/// Runs `serve` through a shell that sets LISTEN_PID to the number of the very process.
fn activated(fds: &str, more: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = r#"LISTEN_PID=$$ exec "$0" serve --backend null --size 1M "$@""#;
    command.args(["-c", script, env!("CARGO_BIN_EXE_vhost-blk")]).args(more);
    command.env("LISTEN_FDS", fds).env_remove("NOTIFY_SOCKET");
    command
}

#[test]
fn a_service_managers_socket_is_served() {
    let place = Place::new();
    let listener = UnixListener::bind(&place.socket).unwrap();
    let mut command = activated("1", &[]);
    pass(&mut command, &listener, 3);
    let mut daemon = Daemon::start(&mut command, &place.socket);
    daemon.log_line("front-end connected");
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0));
    UnixStream::connect(&place.socket).unwrap(); // Still listening, for the next start.
}

#[test]
fn a_service_managers_socket_and_an_option_contradict() {
    let line = one_line(&finish(&mut activated("1", &["--fd", "9"])), 2);
    assert!(line.contains("LISTEN_FDS"), "{line}");
    let line = one_line(&finish(&mut activated("2", &[])), 2);
    assert!(line.contains("LISTEN_FDS says 2"), "{line}");
}

#[test]
fn sockets_passed_to_another_process_are_not_taken() {
    let mut command = null_disk();
    command.env("LISTEN_FDS", "1").env("LISTEN_PID", "1");
    let line = one_line(&finish(&mut command), 2);
    assert!(line.contains("none is given"), "{line}");
}

#[test]
fn the_service_manager_is_told_when_the_socket_listens() {
    let place = Place::new();
    let manager = place.path("manager");
    let inbox = UnixDatagram::bind(&manager).unwrap();
    let mut command = place.serve();
    command.env("NOTIFY_SOCKET", &manager);
    let daemon = Daemon::spawn(&mut command);
    let mut text = [0; 64];
    let len = inbox.recv(&mut text).unwrap();
    assert_eq!(&text[..len], b"READY=1");
    UnixStream::connect(&place.socket).unwrap();
    daemon.signal(libc::SIGTERM);
    let len = inbox.recv(&mut text).unwrap();
    assert_eq!(&text[..len], b"STOPPING=1");
}

#[test]
fn auto_says_which_data_plane_it_means_and_why() {
    let mut command = program();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("disk.sock");
    command.args(["serve", "--backend", "null", "--size", "1M", "--socket-path"]).arg(&socket);
    let mut daemon = Daemon::start(&mut command, &socket);
    let line = daemon.log_line("data plane");
    assert!(line.contains("plane=uring") && line.contains("--backend file"), "{line}");
}

#[test]
fn an_image_that_a_daemon_serves_is_not_served_twice() {
    let place = Place::new();
    let _first = Daemon::start(&mut place.serve(), &place.socket);
    let mut second = program();
    second.arg("--blk-file").arg(&place.image).arg("--socket-path").arg(place.path("other.sock"));
    let output = finish(&mut second);
    let text = String::from_utf8(output.stderr).unwrap();
    let [waits, refused] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}") };
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(waits.contains("waits at most 5 s for"), "{waits}");
    assert!(refused.starts_with("vhost-blk: cannot lock the image"), "{refused}");
    assert!(refused.contains("disk.img") && refused.contains("--lock off"), "{refused}");
    assert!(!place.path("other.sock").exists());

    second.args(["--lock", "off"]);
    Daemon::start(&mut second, &place.path("other.sock"));
}

#[test]
fn a_front_end_that_says_nothing_makes_room_for_one_that_waits() {
    let place = Place::new();
    let mut daemon = Daemon::start(&mut place.serve(), &place.socket);
    daemon.log_line("disconnected"); // `Daemon::start` connected once, as a probe.
    let silent = UnixStream::connect(&place.socket).unwrap();
    daemon.log_line("front-end connected");
    let mut device = driver::Device::connect(&place.socket, &driver::Options::default()).unwrap();
    device.write(0, &[1; 512]).unwrap();
    let line = daemon.log_line("connection ended");
    assert!(line.contains("said nothing"), "{line}");
    drop(silent);
}

#[test]
fn what_a_front_end_did_wrong_is_logged_by_name() {
    const SET_VRING_NUM: u32 = 8;
    let place = Place::new();
    let mut daemon = Daemon::start(&mut place.serve(), &place.socket);
    let channel = driver::RawChannel::connect(&place.socket).unwrap();
    channel.message(SET_VRING_NUM, &[0; 4], &[]).unwrap();
    let line = daemon.log_line("connection ended");
    assert!(line.contains("SET_VRING_NUM: size: 4 bytes of payload"), "{line}");
}

#[test]
fn a_guest_that_breaks_its_ring_in_a_loop_does_not_flood_the_log() {
    const ROUNDS: usize = 50;
    let place = Place::new();
    let mut daemon = Daemon::start(&mut place.serve(), &place.socket);
    let mut device = driver::Device::connect(&place.socket, &driver::Options::default()).unwrap();
    let begin = Instant::now();
    for _ in 0..ROUNDS {
        device.queue(0).queue().split().write_avail_idx(0x7fff);
        device.queue(0).queue().kick();
        assert!(device.queue(0).queue().wait_err(Duration::from_secs(60)).unwrap());
        device.session().stop_queue(0).unwrap();
        device.queue(0).queue().split().reset();
        device.start_queue(0).unwrap();
    }
    let due_max = begin.elapsed().as_secs() as usize + 2;
    drop(device);
    daemon.signal(libc::SIGTERM);
    let lines = daemon.rest_of_stderr().matches("ring fault: the queue is stopped").count();
    assert!((1..=due_max).contains(&lines), "{lines} lines of {ROUNDS} faults, {due_max} due");
}

#[test]
fn a_front_end_that_starts_a_queue_in_a_loop_does_not_flood_the_log() {
    const ROUNDS: usize = 200; // the pipe of the log has room for as many lines
    const SET_INFLIGHT_FD: u32 = 32;
    /// The part of a queue of one descriptor.
    const REGION_BYTES: u64 = 64;
    let place = Place::new();
    let mut daemon = Daemon::start(&mut place.serve(), &place.socket);
    let mut device = driver::Device::connect(&place.socket, &driver::Options::default()).unwrap();
    let region = tempfile::tempfile_in("/dev/shm").unwrap();
    region.set_len(REGION_BYTES).unwrap();
    let size_and_offset = [REGION_BYTES, 0].map(u64::to_ne_bytes).concat();
    let queues_and_size = [1_u16, 1, 0, 0].map(u16::to_ne_bytes).concat();
    let message = [size_and_offset, queues_and_size].concat();
    device.session().raw().message(SET_INFLIGHT_FD, &message, &[region.as_fd()]).unwrap();
    let begin = Instant::now();
    for _ in 0..ROUNDS {
        device.session().enable(0, false).unwrap();
        device.session().enable(0, true).unwrap();
    }
    device.write(0, &[1; 512]).unwrap(); // the daemon has had all messages
    let due_max = begin.elapsed().as_secs() as usize + 2;
    drop(device);
    daemon.signal(libc::SIGTERM);
    let lines = daemon.rest_of_stderr().matches("has no room for this queue").count();
    assert!((1..=due_max).contains(&lines), "{lines} lines of {ROUNDS} starts, {due_max} due");
}
