// SPDX-License-Identifier: Apache-2.0
//! A daemon with a directory for images, sockets and configuration files.

use crate::common::{self, Daemon, Place, program, run};
use driver::{Device, Options, Request};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

pub(crate) struct Rig {
    pub(crate) daemon: Daemon,
    pub(crate) place: Place,
}

impl Rig {
    pub(crate) fn new() -> Rig {
        Rig::with(&[])
    }

    /// A daemon with further options.
    pub(crate) fn with(options: &[&str]) -> Rig {
        let place = place_of(&[]);
        Rig { daemon: start(&place, options), place }
    }

    /// A daemon whose log lines go to `log`.
    pub(crate) fn with_log(log: Stdio) -> Rig {
        let place = place_of(&[]);
        let daemon = Daemon::start_with_log(&mut command(&place, &[]), &place.path("ctl"), log);
        Rig { daemon, place }
    }

    /// A daemon whose directory has these files.
    pub(crate) fn of_directory(files: &[(&str, &str)]) -> Rig {
        let place = place_of(files);
        let conf = place.path("conf");
        Rig { daemon: start(&place, &["--config-dir", conf.to_str().unwrap()]), place }
    }

    /// Starts the daemon again, which has ended, with further options.
    pub(crate) fn restart(&mut self, options: &[&str]) {
        self.daemon = start(&self.place, options);
    }

    /// Writes a file of the directory; `@` stands for the place.
    pub(crate) fn write_file(&self, name: &str, text: &str) {
        write_file(&self.place, name, text);
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.place.path(name)
    }

    /// Runs `vhost-blk ctl` in the directory of the rig.
    pub(crate) fn ctl(&self, words: &str) -> Output {
        common::finish(&mut self.command(words))
    }

    /// `vhost-blk ctl` in the directory of the rig.
    pub(crate) fn command(&self, words: &str) -> Command {
        let mut command = program();
        command.current_dir(self.place.dir.path()).args(["ctl", "--control-path", "ctl"]);
        command.args(words.split_whitespace());
        command
    }

    /// The output of a command that succeeds.
    #[track_caller]
    pub(crate) fn ok(&self, words: &str) -> String {
        let output = self.ctl(words);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}: {stderr}");
        common::stdout(&output)
    }

    /// The reason of a command that fails.
    #[track_caller]
    pub(crate) fn refused(&self, words: &str, code: i32) -> String {
        common::one_line(&self.ctl(words), code)
    }

    #[track_caller]
    pub(crate) fn json(&self, words: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("--json {words}"))).unwrap()
    }

    /// Adds a disk `name` with an image and a socket of that name.
    #[track_caller]
    pub(crate) fn add(&self, name: &str, options: &str) {
        self.add_at(name, &self.path(&format!("{name}.img")), options);
    }

    /// Adds a disk `name` with an image at this path and a socket of that name.
    #[track_caller]
    pub(crate) fn add_at(&self, name: &str, image: &Path, options: &str) {
        std::fs::File::create(image).unwrap().set_len(1 << 20).unwrap();
        let image = image.display();
        self.ok(&format!(
            "add {name} --blk-file {image} --socket-path {name}.sock --data-plane uring \
             --num-queues 1 {options}"
        ));
    }

    /// A guest of the disk `name`.
    #[track_caller]
    pub(crate) fn guest(&self, name: &str) -> Device {
        let options = Options { limit: Duration::from_secs(60), ..Options::default() };
        Device::connect(self.path(&format!("{name}.sock")), &options).unwrap()
    }

    /// Submits the only request of a guest of the disk `name`, whose storage works on it then.
    #[track_caller]
    pub(crate) fn submit(&self, name: &str, guest: &mut Device, request: &Request) {
        let layout = guest.layout();
        guest.queue(0).submit(request, &layout).unwrap();
        self.place.wait_until("the request is taken", || {
            self.json(&format!("status {name}"))["queues"][0]["inflight"] == 1
        });
    }

    /// The row of a disk in the list; `Null`: there is none.
    pub(crate) fn row(&self, name: &str) -> Value {
        let disks = self.json("list");
        let row = disks.as_array().unwrap().iter().find(|row| row["name"] == name);
        row.cloned().unwrap_or_default()
    }

    /// Waits until a disk has this state.
    #[track_caller]
    pub(crate) fn wait_for(&self, name: &str, state: &str) {
        self.place.wait_until(&format!("{name}: {state}"), || self.row(name)["state"] == state);
    }

    /// Names of the disks.
    pub(crate) fn names(&self) -> Vec<String> {
        let disks = self.json("list");
        let names = disks.as_array().unwrap().iter();
        names.map(|disk| disk["name"].as_str().unwrap().to_owned()).collect()
    }

    /// A raw connection.
    pub(crate) fn connect(&self) -> Raw {
        Raw::connect(&self.path("ctl"))
    }

    /// A connection that receives the events from now on.
    #[track_caller]
    pub(crate) fn events(&self) -> Raw {
        self.connect().subscribed()
    }
}

/// Starts a daemon, and waits until it has read its directory, and no disk of that is being opened.
fn start(place: &Place, options: &[&str]) -> Daemon {
    // Its clients may come before it reads the directory.
    let files = if options.contains(&"--config-dir") { files_of(place) } else { 0 };
    let daemon = Daemon::start(&mut command(place, options), &place.path("ctl"));
    place.wait_until("the disks of the directory", || {
        let mut list = program();
        list.args(["ctl", "--json", "--control-path"]).arg(place.path("ctl")).arg("list");
        let listed = common::finish(&mut list);
        // A daemon that was killed has left its socket: the next one does not answer at once.
        if !listed.status.success() {
            return false;
        }
        let disks: Vec<Value> = serde_json::from_slice(&listed.stdout).unwrap();
        disks.len() >= files && disks.iter().all(|disk| disk["state"] != "starting")
    });
    daemon
}

/// Number of files in the directory.
fn files_of(place: &Place) -> usize {
    std::fs::read_dir(place.path("conf")).unwrap().count()
}

/// A daemon with these options.
pub(crate) fn command(place: &Place, options: &[&str]) -> Command {
    let mut command = program();
    command.arg("daemon").arg("--control-path").arg(place.path("ctl")).args(options);
    command
}

/// A place with a directory of these files.
pub(crate) fn place_of(files: &[(&str, &str)]) -> Place {
    let place = Place::new();
    std::fs::create_dir(place.path("conf")).unwrap();
    for (name, text) in files {
        write_file(&place, name, text);
    }
    place
}

fn write_file(place: &Place, name: &str, text: &str) {
    let directory = place.dir.path().to_str().unwrap();
    let path = place.path("conf").join(format!("{name}.toml"));
    std::fs::write(path, text.replace('@', directory)).unwrap();
}

/// A connection that speaks the protocol byte by byte.
pub(crate) struct Raw {
    pub(crate) stream: UnixStream,
    pub(crate) reader: BufReader<UnixStream>,
}

impl Raw {
    pub(crate) fn connect(control: &Path) -> Raw {
        let stream = UnixStream::connect(control).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Raw { reader: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    /// This connection, which receives the events from now on.
    #[track_caller]
    pub(crate) fn subscribed(mut self) -> Raw {
        let first = self.call(r#"{"method":"io.vhostblk.Events","more":true}"#);
        assert_eq!(first, json!({"parameters": {}, "continues": true}));
        self
    }

    pub(crate) fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
        self.stream.write_all(&[0]).unwrap();
    }

    #[track_caller]
    pub(crate) fn receive(&mut self) -> Value {
        let mut bytes = Vec::new();
        self.reader.read_until(0, &mut bytes).unwrap();
        assert_eq!(bytes.pop(), Some(0), "the daemon hung up");
        serde_json::from_slice(&bytes).unwrap()
    }

    pub(crate) fn call(&mut self, text: &str) -> Value {
        self.send(text);
        self.receive()
    }

    #[track_caller]
    pub(crate) fn next_event(&mut self) -> Value {
        let mut reply = self.receive();
        assert_eq!(reply["continues"], true, "{reply}");
        let event = reply["parameters"]["event"].take();
        let time = event["time"].as_str().unwrap();
        assert!(time > "2026-11-01T00:00:00.000Z" && time.len() == 24, "{event}");
        event
    }
}

/// Runs the program with the words of a line.
pub(crate) fn run_line(line: &str) -> Output {
    run(line.split_whitespace())
}

/// The page of metrics.
pub(crate) fn scrape(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}
