// SPDX-License-Identifier: Apache-2.0
//! Real guests in stock QEMU on a disk served by the daemon.
//!
//! Needs QEMU and root (`scripts/setup.sh test`); the first run makes the guest kernel and the root
//! image. `LAB_SERVER_CMD` puts another server in the daemon's place: a command line with
//! `{socket}`, `{disk}` and `{queues}`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use lab::disk;
use lab::guest::{Guest, GuestDisk, GuestSpec};
use lab::job::Job;
use lab::run::{GUEST_PATIENCE, Lab};
use lab::server::{Server, ServerCommand};

static LAB: LazyLock<Lab> = LazyLock::new(|| {
    let lab = Lab::open().unwrap_or_else(|error| panic!("the lab cannot be set up: {error:#}"));
    eprintln!("accelerator: {}: {}", lab.choice.accel, lab.choice.reason);
    lab
});

static SERVER: LazyLock<ServerCommand> = LazyLock::new(|| match std::env::var("LAB_SERVER_CMD") {
    Ok(text) => ServerCommand::template(&text).unwrap(),
    Err(_) => ServerCommand::daemon(&build_daemon()),
});

/// The daemon as it stands in the sources, from the folder where this test was built.
fn build_daemon() -> PathBuf {
    let folder = Path::new(env!("CARGO_BIN_EXE_lab")).parent().unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "-p", "vhost-blk", "--bin", "vhost-blk"]);
    if folder.ends_with("release") {
        build.arg("--release");
    }
    build.arg("--target-dir").arg(folder.parent().unwrap());
    assert!(build.status().unwrap().success(), "the daemon does not build");
    folder.join("vhost-blk")
}

struct Rig {
    _dir: tempfile::TempDir,
    disk: PathBuf,
    server: Server,
}

impl Rig {
    fn new(queues: u32) -> Self {
        let dir = tempfile::tempdir_in(LAB.cache.dir()).unwrap();
        let disk = dir.path().join("disk");
        disk::create(&disk, disk::DISK_BYTES).unwrap();
        let server = Server::start(&SERVER, &disk, queues).unwrap_or_else(|e| panic!("{e:#}"));
        Self { _dir: dir, disk, server }
    }

    fn boot(&self, vcpus: u32, job: Job) -> Guest {
        let disk = Some(GuestDisk::VhostUser { socket: self.server.socket() });
        let spec = GuestSpec { accel: LAB.choice.accel, vcpus, disk, job };
        Guest::boot(&LAB.base, &spec).unwrap_or_else(|error| panic!("{error:#}"))
    }

    fn run(&self, vcpus: u32, job: Job) {
        if let Err(error) = self.boot(vcpus, job).finish(GUEST_PATIENCE) {
            panic!("{error:#}\nthe server's log:\n{}", self.server.log());
        }
    }

    /// Stops the server and looks at the disk without it.
    fn finish(self) {
        self.server.stop().unwrap_or_else(|error| panic!("{error:#}"));
        disk::check_ext4(&self.disk).unwrap_or_else(|error| panic!("{error:#}"));
    }
}

#[test]
fn a_real_guest_formats_writes_verifies_and_unmounts_a_disk_served_by_the_daemon() {
    let rig = Rig::new(2);
    rig.run(2, Job::format_and_verify());
    rig.finish();
}

#[test]
fn after_a_power_cut_under_load_the_next_guest_on_the_same_daemon_finds_what_was_synced() {
    let rig = Rig::new(2);
    let mut writer = rig.boot(2, Job::write_until_killed());
    writer.wait_for("writing", GUEST_PATIENCE).unwrap_or_else(|error| panic!("{error:#}"));
    writer.cut_power().unwrap();
    rig.run(1, Job::check_after_power_cut());
    rig.finish();
}

#[test]
fn a_guest_reads_through_one_daemon_what_another_daemon_wrote_before() {
    let Rig { _dir, disk, server } = Rig::new(1);
    let first = Rig { _dir, disk, server };
    first.run(
        1,
        Job::on_disk("stage write\necho kept-over-a-restart | dd of=$disk bs=512 seek=9 conv=sync,fsync oflag=direct\n"),
    );
    let Rig { _dir, disk, server } = first;
    server.stop().unwrap_or_else(|error| panic!("{error:#}"));
    let server = Server::start(&SERVER, &disk, 1).unwrap_or_else(|error| panic!("{error:#}"));
    let second = Rig { _dir, disk, server };
    second.run(
        1,
        Job::on_disk(
            "stage read\ndd if=$disk bs=512 skip=9 count=1 iflag=direct | grep -q kept-over-a-restart\n",
        ),
    );
    second.server.stop().unwrap_or_else(|error| panic!("{error:#}"));
}

#[test]
fn a_guest_whose_data_is_wrong_fails_the_run() {
    let rig = Rig::new(1);
    let job = Job::on_disk("stage compare\nfail the data is wrong\n");
    let error = rig.boot(1, job).finish(Duration::from_secs(120)).unwrap_err().to_string();
    assert!(error.contains("stage 'compare'") && error.contains("the data is wrong"), "{error}");
}
