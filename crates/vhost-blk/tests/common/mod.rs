// SPDX-License-Identifier: Apache-2.0
//! Runs the built program.
#![allow(dead_code, reason = "each test program uses its part")]

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The longest that anything here may take; far above what it takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for `condition`.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reasons for which the daemon refuses an upgrade of a loaded disk, or a snapshot of it, while its storage is slow:
/// a write to a new cluster waits for several syncs.
pub(crate) const BUSY: [&str; 7] = [
    "did not complete in 2 s",
    "it does not answer; check its storage",
    "cannot take over (no end in 10 s)",
    "waits for the storage of the disk",
    "a storage of the snapshot to it does not answer",
    "did not complete in 10 s",
    "the tables of the image are not durable",
];

/// The answer of `ctl --json`, which runs again as long as the daemon refuses the command because of slow storage.
#[track_caller]
pub(crate) fn done(mut ctl: impl FnMut() -> Output) -> Value {
    let deadline = Instant::now() + 5 * PATIENCE;
    loop {
        let output = ctl();
        let why = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            return serde_json::from_slice(&output.stdout).unwrap();
        }
        let is_busy = BUSY.iter().any(|reason| why.contains(reason));
        assert!(is_busy && Instant::now() < deadline, "{why}");
    }
}

/// An upgrade to the same program by `ctl --json`. Returns the pause.
#[track_caller]
pub(crate) fn upgraded(ctl: impl FnMut() -> Output) -> Duration {
    let answer = done(ctl);
    assert_eq!(answer["version"], env!("CARGO_PKG_VERSION"));
    Duration::from_micros(answer["pause_us"].as_u64().expect("a pause"))
}

/// Data for the load (`vhost-user/tests/common/load.rs`); differs from seed to seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    word.to_le_bytes().into_iter().cycle().take(len).collect()
}

/// A program that makes itself useless for the kernel when it is run, and answers the check of an upgrade.
pub(crate) const USELESS: &str = r#"echo 'vhost-blk: can take over'
printf useless >"$0".new; chmod 755 "$0".new; mv "$0".new "$0""#;

/// The program (another build of it with `VHOST_BLK_TEST_PROGRAM`) with nothing of the caller's
/// environment that it looks at.
pub(crate) fn program() -> Command {
    let built = || env!("CARGO_BIN_EXE_vhost-blk").into();
    let mut command =
        Command::new(std::env::var_os("VHOST_BLK_TEST_PROGRAM").unwrap_or_else(built));
    let names = ["LISTEN_FDS", "LISTEN_PID", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];
    for name in names.into_iter().chain(["JOURNAL_STREAM"]) {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// The program that the daemons run.
pub(crate) fn own_path() -> PathBuf {
    program().get_program().into()
}

/// Runs the program to its end.
#[track_caller]
pub(crate) fn run<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Output {
    finish(program().args(arguments))
}

/// Runs `command` to its end; a daemon that serves instead of failing is killed.
#[track_caller]
pub(crate) fn finish(command: &mut Command) -> Output {
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let stdout = std::thread::spawn(move || read_all(&mut stdout));
    let stderr = std::thread::spawn(move || read_all(&mut stderr));
    let mut daemon = Daemon { child, stderr: None };
    let status = daemon.wait();
    Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
}

fn read_all(from: &mut impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    bytes
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The one line of a failed start.
#[track_caller]
pub(crate) fn one_line(output: &Output, code: i32) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("vhost-blk: cannot "), "{text}");
    assert!(text.contains("; "), "no remedy: {text}");
    text
}

/// A directory with an image and a place for a socket.
pub(crate) struct Place {
    pub(crate) dir: TempDir,
    pub(crate) image: PathBuf,
    pub(crate) socket: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img");
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let socket = dir.path().join("disk.sock");
        Place { dir, image, socket }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `serve` on this place's image and socket.
    pub(crate) fn serve(&self) -> Command {
        let mut command = program();
        command.arg("serve").arg("--blk-file").arg(&self.image);
        command.arg("--socket-path").arg(&self.socket);
        command
    }

    /// Waits for `condition`.
    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, condition: impl FnMut() -> bool) {
        wait_until(what, condition);
    }

    /// An executable script in the directory.
    pub(crate) fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Names of what lies in the directory.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// A running daemon; killed at the latest when dropped.
pub(crate) struct Daemon {
    child: Child,
    stderr: Option<BufReader<ChildStderr>>,
}

/// The socket of metrics in a command's options.
fn metrics_of(command: &Command) -> Option<PathBuf> {
    let directory = command.get_current_dir().unwrap_or(Path::new(""));
    let paths = command.get_args().filter_map(|argument| argument.to_str()?.strip_prefix("unix:"));
    paths.last().map(|path| directory.join(path))
}

impl Daemon {
    /// Starts `command` and waits until its sockets answer: `socket`, and that of metrics.
    #[track_caller]
    pub(crate) fn start(command: &mut Command, socket: &Path) -> Daemon {
        Daemon::start_with_log(command, socket, Stdio::piped())
    }

    /// The same, where log lines go to `log`.
    #[track_caller]
    pub(crate) fn start_with_log(command: &mut Command, socket: &Path, log: Stdio) -> Daemon {
        let mut daemon = Daemon::spawn_with_log(command, log);
        // The daemon makes this one last.
        let metrics = metrics_of(command);
        let sockets = std::iter::once(socket).chain(metrics.as_deref());
        let deadline = Instant::now() + PATIENCE;
        for socket in sockets {
            while UnixStream::connect(socket).is_err() {
                if let Some(status) = daemon.child.try_wait().unwrap() {
                    panic!("ended ({status}): {}", daemon.rest_of_stderr());
                }
                assert!(Instant::now() < deadline, "no socket");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        daemon
    }

    pub(crate) fn spawn(command: &mut Command) -> Daemon {
        Daemon::spawn_with_log(command, Stdio::piped())
    }

    fn spawn_with_log(command: &mut Command, log: Stdio) -> Daemon {
        let mut child = command.stderr(log).spawn().unwrap();
        let stderr = child.stderr.take().map(BufReader::new);
        Daemon { child, stderr }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: i32) {
        let id = i32::try_from(self.child.id()).unwrap();
        // UNSAFETY: the standard library sends no signal but SIGKILL.
        #[expect(unsafe_code)]
        // SAFETY: the child has not been waited for, so that the number is still its own.
        let result = unsafe { libc::kill(id, signal) };
        assert_eq!(result, 0);
    }

    /// Waits for the end.
    #[track_caller]
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the daemon does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// As [`Daemon::wait`], without a pause between the end and the return.
    pub(crate) fn wait_at_once(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// The next log line with `words` in it.
    #[track_caller]
    pub(crate) fn log_line(&mut self, words: &str) -> String {
        let [line] = self.log_lines([words]);
        line
    }

    /// The next log lines with these words, which threads may write in any order.
    #[track_caller]
    pub(crate) fn log_lines<const N: usize>(&mut self, words: [&str; N]) -> [String; N] {
        let mut lines = [const { String::new() }; N];
        while let Some(missing) = lines.iter().position(String::is_empty) {
            let line = self.next_line(words[missing]);
            let mut expected = lines.iter_mut().zip(words);
            let place = expected.find(|(kept, words)| kept.is_empty() && line.contains(words));
            if let Some((kept, _)) = place {
                *kept = line;
            }
        }
        lines
    }

    /// The next log line, while one with `words` is expected.
    #[track_caller]
    fn next_line(&mut self, words: &str) -> String {
        let stderr = self.stderr.as_mut().unwrap();
        let limit = Timespec::try_from(PATIENCE).unwrap();
        if stderr.buffer().is_empty() {
            let mut log = [PollFd::new(stderr.get_ref(), PollFlags::IN)];
            let ready = poll(&mut log, Some(&limit)).unwrap();
            assert_ne!(ready, 0, "waited in vain for a line with `{words}`");
        }
        let mut line = String::new();
        assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "no line with `{words}`");
        line
    }

    /// Checks that the daemon has exactly these descriptors.
    #[track_caller]
    pub(crate) fn assert_descriptors(&self, expected: &[String]) {
        assert_eq!(self.settled_descriptors(), expected);
    }

    /// Descriptors of the daemon, by their names, after the end of all threads that have some for a while
    /// only.
    #[track_caller]
    pub(crate) fn settled_descriptors(&self) -> Vec<String> {
        let passing = ["apart", "control-client", "opening", "openings", "reload", "taker"];
        wait_until("these threads end", || {
            !self.threads().iter().any(|(name, _)| passing.contains(&name.as_str()))
        });
        self.descriptors()
    }

    /// Waits until the daemon has read a signal that it blocks.
    pub(crate) fn wait_for_signal(&self, signal: i32) {
        wait_until("the signal is read", || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap();
            let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
            let pending = u64::from_str_radix(pending.trim(), 16).unwrap();
            pending & 1 << (signal - 1) == 0
        });
    }

    /// Name and state (`S`, `D` ...) of each thread of the daemon, also of the kernel's for its io_uring.
    pub(crate) fn threads(&self) -> Vec<(String, String)> {
        let entries = std::fs::read_dir(format!("/proc/{}/task", self.id())).unwrap();
        let thread = |entry: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(entry.ok()?.path().join("stat")).ok()?;
            let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
            Some((name.to_owned(), rest.split(' ').next()?.to_owned()))
        };
        entries.filter_map(thread).collect()
    }

    /// Number of the daemon's threads with this name.
    pub(crate) fn threads_named(&self, wanted: &str) -> usize {
        self.threads().iter().filter(|(name, _)| name == wanted).count()
    }

    /// Descriptors of the daemon, by their names.
    pub(crate) fn descriptors(&self) -> Vec<String> {
        let entries = std::fs::read_dir(format!("/proc/{}/fd", self.id())).unwrap();
        let name = |entry: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_link(entry.ok()?.path()).ok()?.into_os_string().into_string().ok()
        };
        let mut names: Vec<String> = entries.filter_map(name).collect();
        // The number of a socket changes; its presence does not.
        names.iter_mut().for_each(|name| name.truncate(name.find(":[").unwrap_or(name.len())));
        names.sort();
        names
    }

    /// Closes this end of the daemon's stderr.
    pub(crate) fn close_stderr(&mut self) {
        self.stderr = None;
    }

    pub(crate) fn rest_of_stderr(&mut self) -> String {
        let stderr = self.stderr.take().unwrap();
        stderr.lines().map_while(Result::ok).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends bytes and a descriptor with them.
pub(crate) fn send_with_descriptor(stream: &UnixStream, bytes: &[u8], descriptor: i32) {
    use vmm_sys_util::sock_ctrl_msg::ScmSocket;
    stream.send_with_fd(bytes, descriptor).unwrap();
}
