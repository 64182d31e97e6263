// SPDX-License-Identifier: Apache-2.0
//! A daemon that can be upgraded.
#![allow(dead_code, reason = "each test program uses its part")]

use crate::common::{Daemon, Place, program, run, upgraded};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

/// A directory, a daemon with a control socket in it, and the path of that socket.
pub(crate) struct Served {
    pub(crate) place: Place,
    pub(crate) daemon: Daemon,
    pub(crate) control: PathBuf,
}

/// Returns whether the kernel's data plane runs the queues.
pub(crate) fn on_kernel() -> bool {
    std::env::var("VHOST_BLK_TEST_PLANE").is_ok_and(|plane| plane == "kernel")
}

/// `VHOST_BLK_TEST_DISK`: a device, or a directory for an image.
fn disk_of_environment() -> PathBuf {
    let disk = std::env::var_os("VHOST_BLK_TEST_DISK").expect("VHOST_BLK_TEST_DISK is set");
    let disk = PathBuf::from(disk);
    if !disk.is_dir() {
        return disk;
    }
    let image = disk.join("upgrade.img");
    std::fs::File::create(&image).unwrap();
    image
}

/// Starts a daemon of 2 queues and 8 MiB, with more options.
pub(crate) fn served(options: &[&str]) -> Served {
    let place = Place::new();
    let control = place.path("control.sock");
    let (image, plane) = match on_kernel() {
        true => (disk_of_environment(), "kernel"),
        false => (place.image.clone(), "uring"),
    };
    if image.is_file() {
        std::fs::File::options().write(true).open(&image).unwrap().set_len(8 << 20).unwrap();
    }
    let mut command = program();
    command.args(["serve", "--data-plane", plane, "--socket-path"]).arg(&place.socket);
    command.arg("--blk-file").arg(image);
    command.args(["--num-queues", "2", "--threads", "2", "--control-path"]).arg(&control);
    command.args(options);
    let daemon = Daemon::start(&mut command, &control);
    Served { place, daemon, control }
}

impl Served {
    pub(crate) fn ctl(&self, words: &[&str]) -> Output {
        ctl(&self.control, words)
    }

    /// Upgrades to the same program. Returns the pause.
    #[track_caller]
    pub(crate) fn upgrade(&self) -> Duration {
        upgraded(|| self.ctl(&["--json", "upgrade"]))
    }

    pub(crate) fn status(&self) -> Value {
        let output = self.ctl(&["--json", "status"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

pub(crate) fn ctl(control: &Path, words: &[&str]) -> Output {
    let mut arguments = vec!["ctl".into(), "--control-path".into(), control.to_path_buf()];
    arguments.extend(words.iter().map(PathBuf::from));
    run(arguments)
}
