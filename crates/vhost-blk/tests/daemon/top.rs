// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk top` against real daemons, on a pseudoterminal and without one.

use crate::common::{self, program};
use crate::rig::Rig;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A program on a pseudoterminal, and what its screen shows.
struct Screen {
    child: Child,
    terminal: File,
    shown: Arc<Mutex<vt100::Parser>>,
    reader: Option<JoinHandle<()>>,
}

impl Screen {
    /// `vhost-blk top` for the daemon of `rig`.
    fn top(rig: &Rig) -> Screen {
        let terminal =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&terminal, size).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
        let end = || Stdio::from(OpenOptions::new().read(true).write(true).open(&name).unwrap());
        // The terminal becomes the controlling one, so that a new size raises a signal.
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(program().get_program()).env("TERM", "xterm");
        command.args(["top", "--interval", "0.1", "--control-path"]).arg(rig.path("ctl"));
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let terminal = File::from(terminal);
        let shown = Arc::new(Mutex::new(vt100::Parser::new(24, 100, 0)));
        let (mut output, parser) = (terminal.try_clone().unwrap(), Arc::clone(&shown));
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // EIO: the program has ended.
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                parser.lock().unwrap().process(&bytes[..count]);
            }
        });
        Screen { child, terminal, shown, reader: Some(reader) }
    }

    fn text(&self) -> String {
        self.shown.lock().unwrap().screen().contents()
    }

    fn has_alternate_screen(&self) -> bool {
        self.shown.lock().unwrap().screen().alternate_screen()
    }

    #[track_caller]
    fn shows(&self, rig: &Rig, text: &str) {
        rig.place.wait_until(&format!("the screen shows {text}"), || self.text().contains(text));
    }

    fn press(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).unwrap();
    }

    fn resize(&mut self, rows: u16, columns: u16) {
        // Empty, so that only a new drawing of everything fills it.
        let mut shown = vt100::Parser::new(rows, columns, 0);
        shown.process(b"\x1b[?1049h\x1b[?25l");
        *self.shown.lock().unwrap() = shown;
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.terminal, size).unwrap();
    }

    /// Waits for the end of the program, which leaves the terminal as it was.
    #[track_caller]
    fn end(mut self) -> ExitStatus {
        let status = self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        assert!(!self.has_alternate_screen(), "the terminal is not as it was");
        assert!(!self.shown.lock().unwrap().screen().hide_cursor(), "the cursor is hidden");
        status
    }
}

/// A failed test ends the program.
impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

#[test]
fn the_screen_shows_disks_queues_and_the_loss_of_the_daemon() {
    let mut rig = Rig::new();
    rig.add("data", "");
    rig.add("logs", "");
    rig.ok("pause logs");
    let mut screen = Screen::top(&rig);
    screen.shows(&rig, "2 disks, by iops");
    screen.shows(&rig, "data     serving  uring  no");
    screen.shows(&rig, "logs     paused");
    assert!(screen.has_alternate_screen());
    let mut guest = rig.guest("data");
    screen.shows(&rig, "data     serving  uring  yes");
    while !screen.text().contains('<') {
        guest.write(0, &[1; 512]).unwrap(); // until a latency is shown
    }
    screen.press("n\r");
    screen.shows(&rig, "data: serving, data plane uring");
    screen.shows(&rig, "LIMITED");
    screen.resize(10, 30);
    screen.shows(&rig, "data: serving");
    assert!(!screen.text().contains("LIMITED"));
    screen.resize(24, 100);
    screen.shows(&rig, "LIMITED");
    drop(guest);
    rig.daemon.signal(libc::SIGKILL);
    rig.daemon.wait();
    screen.shows(&rig, "no daemon, tries again: ");
    screen.press("\x1b[A");
    rig.restart(&[]);
    screen.shows(&rig, "0 disks, by name");
    screen.press("q");
    assert!(screen.end().success());
}

#[test]
fn a_signal_restores_the_terminal() {
    let rig = Rig::new();
    for number in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        let screen = Screen::top(&rig);
        screen.shows(&rig, "0 disks");
        let pid = rustix::process::Pid::from_child(&screen.child);
        let signal = rustix::process::Signal::from_named_raw(number).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
        assert!(screen.end().success(), "{number}");
    }
}

/// A stopped or hung terminal emulator reads nothing: the program waits in its output.
#[test]
fn a_signal_ends_a_program_whose_terminal_takes_no_output() {
    let rig = Rig::new();
    let mut screen = Screen::top(&rig);
    screen.shows(&rig, "0 disks");
    let shown = Arc::clone(&screen.shown);
    let held = shown.lock().unwrap(); // the reader waits for it
    let (mut rows, mut seen) = ((10..60).cycle(), vec![0]);
    rig.place.wait_until("the terminal is full", || {
        let ws_row = rows.next().unwrap();
        let size = Winsize { ws_row, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&screen.terminal, size).unwrap(); // a new size is drawn whole
        seen.push(rustix::io::ioctl_fionread(&screen.terminal).unwrap());
        let last = &seen[seen.len().saturating_sub(100)..];
        last[0] > 0 && last.iter().all(|count| *count == last[0])
    });
    let pid = rustix::process::Pid::from_child(&screen.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let mut ended = None;
    rig.place.wait_until("the program ends", || {
        ended = screen.child.try_wait().unwrap();
        ended.is_some()
    });
    let code = ended.and_then(|status| status.code());
    assert!([Some(0), Some(128 + libc::SIGTERM)].contains(&code), "{code:?}");
    drop(held);
    screen.reader.take().unwrap().join().unwrap();
}

#[test]
fn once_prints_the_rates_of_one_interval() {
    let rig = Rig::new();
    rig.add("a", "");
    rig.add("b", "");
    let mut guest = rig.guest("a");
    let top = |options: &str| {
        let mut command = program();
        command.args(["top", "--once", "--interval", "0.5", "--control-path"]);
        common::finish(command.arg(rig.path("ctl")).args(options.split_whitespace()))
    };
    let writer = std::thread::scope(|scope| {
        let run = scope.spawn(|| top("--json"));
        while !run.is_finished() {
            guest.write(0, &[1; 4096]).unwrap();
        }
        run.join().unwrap()
    });
    assert!(writer.status.success(), "{writer:?}");
    let disks: serde_json::Value = serde_json::from_slice(&writer.stdout).unwrap();
    let (a, b) = (&disks[0], &disks[1]);
    assert_eq!((&a["name"], &b["name"]), (&"a".into(), &"b".into()), "the busy one is first");
    let (iops, bytes) = (a["iops"].as_f64().unwrap(), a["write_bytes"].as_f64().unwrap());
    assert!(iops > 0.0 && (bytes / iops - 4096.0).abs() < 500.0, "{a}");
    assert!(a["p99_below_us"].as_u64() >= a["p50_below_us"].as_u64(), "{a}");
    assert_eq!((&a["queues"][0]["iops"], &b["iops"]), (&a["iops"], &0.0.into()));
    assert!(b["p50_below_us"].is_null(), "{b}");
    let text = common::stdout(&top("--sort name"));
    assert!(text.starts_with("NAME  STATE    PLANE  IOPS"), "{text}");
    assert!(text.contains("\nb     serving  uring  0     0       0        -    -\n"), "{text}");
}

#[test]
fn bad_calls_of_top_are_told() {
    let rig = Rig::new();
    let top = |options: &str| {
        let mut command = program();
        command.args(["top", "--control-path"]).arg(rig.path("ctl"));
        common::finish(command.args(options.split_whitespace()))
    };
    let line = common::one_line(&top(""), 1);
    assert!(line.contains("is no terminal; use --once"), "{line}");
    for wrong in ["--once --interval 0", "--once --interval x", "--once --sort x"] {
        common::one_line(&top(wrong), 2);
    }
    let told = top("--json");
    let told: serde_json::Value = serde_json::from_slice(&told.stderr).unwrap();
    assert!(told["why"].as_str().unwrap().contains("--once") && told["exit_code"] == 2, "{told}");
    let mut command = program();
    let line = common::one_line(
        &common::finish(command.args(["top", "--once", "--control-path", "x"])),
        3,
    );
    assert!(line.contains("ask the daemon at x"), "{line}");
}
