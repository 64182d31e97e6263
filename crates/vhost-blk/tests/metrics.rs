// SPDX-License-Identifier: Apache-2.0
//! `--metrics`.

mod common;

use common::{Daemon, Place, finish, one_line, run};
use driver::{Device, Options};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: disk\r\n\r\n";

/// A daemon with metrics on a UNIX socket.
fn served(place: &Place, more: &[&str]) -> (Daemon, PathBuf) {
    let path = place.path("metrics.sock");
    let mut command = place.serve();
    command.args(["--data-plane", "uring", "--num-queues", "2", "--metrics"]);
    command.arg(format!("unix:{}", path.display())).args(more);
    let daemon = Daemon::start(&mut command, &path);
    (daemon, path)
}

/// Time limit of a read: a daemon that does not answer fails the test.
const LIMIT: Duration = Duration::from_secs(30);

fn connect(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// The address that the daemon logs.
fn tcp_address(daemon: &mut Daemon) -> String {
    let line = daemon.log_line("\"metrics\"");
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    line["address"].as_str().unwrap().to_owned()
}

fn ask(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn scrape(path: &Path) -> String {
    let answer = ask(connect(path), GET);
    let (head, page) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", page.len())), "{head}");
    assert!(page.ends_with("# EOF\n"), "{page}");
    page.to_owned()
}

/// The value of a metric of queue 0, or of one without a queue.
#[track_caller]
fn value(page: &str, name: &str) -> u64 {
    let names = [
        format!("vhost_blk_{name}{{disk=\"disk\",queue=\"0\"}} "),
        format!("vhost_blk_{name}{{disk=\"disk\"}} "),
    ];
    let of = |line: &str| names.iter().find_map(|name| line.strip_prefix(name)?.parse().ok());
    page.lines().find_map(of).unwrap_or_else(|| panic!("no {name} in:\n{page}"))
}

#[test]
fn counters_follow_the_requests_and_outlive_connections() {
    let place = Place::new();
    let (_daemon, path) = served(&place, &["--wrap", "fault:ops=flush,errno=EIO"]);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let page = scrape(&path);
    assert_eq!(value(&page, "capacity_bytes"), 1 << 20);
    assert_eq!(value(&page, "front_end_connected"), 0);
    assert_eq!(value(&page, "queue_requests_total"), 0);
    for round in 1..=2 {
        let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
        (0..5).for_each(|sector| device.write(sector, &[1; 512]).unwrap());
        device.read(0, &mut [0; 1024]).unwrap();
        device.flush().unwrap_err();
        device.write(1 << 20, &[1; 512]).unwrap_err();
        let page = scrape(&path);
        for (name, expected) in [
            ("front_end_connected", 1),
            ("front_ends_total", round),
            ("queue_running", 1),
            ("queue_inflight_requests", 0),
            ("queue_requests_total", 8 * round),
            ("queue_completed_requests_total", 8 * round),
            ("queue_refused_requests_total", round),
            ("queue_failed_requests_total", round),
            ("queue_written_bytes_total", 5 * 512 * round),
            ("queue_read_bytes_total", 1024 * round),
        ] {
            assert_eq!(value(&page, name), expected, "{name}, round {round}");
        }
        assert!(value(&page, "queue_kicks_total") >= round);
        drop(device);
        place.wait_until("the end of the connection", || {
            value(&scrape(&path), "front_end_connected") == 0
        });
        let page = scrape(&path);
        assert_eq!(value(&page, "queue_running"), 0);
        assert_eq!(value(&page, "queue_requests_total"), 8 * round);
    }
}

#[test]
fn requests_in_flight_are_seen() {
    let place = Place::new();
    // The end of the test ends the daemon, and with it the read.
    let (_daemon, path) = served(&place, &["--wrap", "delay:us=60000000"]);
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    assert_eq!(value(&scrape(&path), "queue_inflight_requests"), 0);
    std::thread::spawn(move || device.read(0, &mut [0; 512]));
    place.wait_until("a request in flight", || {
        value(&scrape(&path), "queue_inflight_requests") == 1
    });
}

#[test]
fn a_tcp_port_is_logged_and_serves_the_same_page() {
    let place = Place::new();
    let mut command = place.serve();
    command.args(["--metrics", "127.0.0.1:0", "--log-format", "json"]);
    let mut daemon = Daemon::start(&mut command, &place.socket);
    let address = tcp_address(&mut daemon);
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let answer = ask(stream, GET);
    assert!(answer.contains("\nvhost_blk_capacity_bytes{disk=\"disk\"} 1048576\n"), "{answer}");
}

#[test]
fn other_requests_get_an_error_and_broken_ones_harm_nothing() {
    let place = Place::new();
    let (_daemon, path) = served(&place, &[]);
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), "404"),
        ("PUT /metrics HTTP/1.1\r\n\r\n".to_owned(), "405"),
        ("\0\0\0\0".to_owned(), "400"),
        (format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(8192)), "431"),
    ] {
        let answer = ask(connect(&path), &request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(answer.contains("GET /metrics"), "{answer}");
        assert_eq!(answer.contains("\r\nAllow: GET, HEAD\r\n"), status == "405", "{answer}");
    }
    let answer = ask(connect(&path), "HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n"), "{answer}");
    // One that leaves, and one that leaves before it reads its answer.
    drop(connect(&path));
    let mut hasty = connect(&path);
    hasty.write_all(GET.as_bytes()).unwrap();
    hasty.shutdown(Shutdown::Both).unwrap();
    scrape(&path);
}

#[test]
fn a_silent_client_is_dropped() {
    let place = Place::new();
    let (_daemon, path) = served(&place, &[]);
    let mut silent = connect(&path);
    silent.write_all(b"GET /metrics").unwrap();
    scrape(&path);
    let mut rest = Vec::new();
    assert_eq!(silent.read_to_end(&mut rest).unwrap(), 0);
}

#[test]
fn a_client_that_does_not_read_is_dropped() {
    let place = Place::new();
    let mut command = place.serve();
    command.args(["--data-plane", "uring", "--num-queues", "64"]);
    command.args(["--metrics", "127.0.0.1:0", "--log-format", "json", "--log-level", "debug"]);
    let mut daemon = Daemon::start(&mut command, &place.socket);
    let address: SocketAddr = tcp_address(&mut daemon).parse().unwrap();
    let deaf = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    deaf.set_recv_buffer_size(1).unwrap();
    deaf.connect(&address.into()).unwrap();
    (&deaf).write_all(GET.as_bytes()).unwrap();
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    assert!(ask(stream, GET).ends_with("# EOF\n"));
}

#[test]
fn a_client_that_sends_a_little_at_a_time_does_not_keep_others_waiting() {
    let place = Place::new();
    let (_daemon, path) = served(&place, &[]);
    // Before its answer, and after it.
    for start in ["GET /metrics HTTP/1.1\r\nslow: ", GET] {
        let slow = UnixStream::connect(&path).unwrap();
        (&slow).write_all(start.as_bytes()).unwrap();
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Each byte restarts a limit that counts from the last progress.
                while !end.load(Ordering::Relaxed) && (&slow).write_all(b"x").is_ok() {
                    std::thread::sleep(Duration::from_millis(50));
                }
            });
            let stream = UnixStream::connect(&path).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
            let mut page = String::new();
            let read = (&stream).write_all(GET.as_bytes());
            let read = read.and_then(|()| (&stream).read_to_string(&mut page));
            end.store(true, Ordering::Relaxed);
            read.unwrap();
            assert!(page.ends_with("# EOF\n"));
        });
    }
}

#[test]
fn a_ring_fault_is_seen() {
    let place = Place::new();
    let (_daemon, path) = served(&place, &[]);
    let mut device = Device::connect(&place.socket, &Options::default()).unwrap();
    device.write(0, &[1; 512]).unwrap();
    assert_eq!(value(&scrape(&path), "queue_faulted"), 0);
    // More chains than the ring has entries.
    device.queue(0).queue().split().write_avail_idx(0x8000);
    device.queue(0).queue().kick();
    place.wait_until("the fault", || value(&scrape(&path), "queue_faulted") == 1);
    let page = scrape(&path);
    assert_eq!(value(&page, "queue_running"), 1);
    assert_eq!(value(&page, "queue_requests_total"), 1);
}

#[test]
fn an_address_that_cannot_be_had_ends_the_start_and_leaves_nothing() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let line = one_line(&finish(place.serve().args(["--metrics", &address])), 1);
    assert!(line.contains(&address) && line.contains("--metrics"), "{line}");
    let same = format!("unix:{}", place.socket.display());
    let line = one_line(&finish(place.serve().args(["--metrics", &same])), 2);
    assert!(line.contains("--socket-path") && line.contains("the same path"), "{line}");
    let line = one_line(&run(["serve", "--backend", "mem", "--metrics", "localhost:1"]), 2);
    assert!(line.contains("127.0.0.1:9100"), "{line}");
    assert_eq!(place.files(), ["disk.img"]);
}
