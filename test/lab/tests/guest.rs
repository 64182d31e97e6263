// SPDX-License-Identifier: Apache-2.0
//! Real guests in stock QEMU on a disk served by the daemon.
//!
//! Needs QEMU and root (`scripts/setup.sh test`); the first run makes the guest kernel and the root
//! image. `LAB_SERVER_CMD` puts another server in the daemon's place: a command line with
//! `{socket}`, `{disk}` and `{queues}`.

mod common;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use anyhow::{Error, Result};
use common::{LAB, build_daemon, with_guests};
use kit::outcome::BOOTED_AGAIN;
use lab::disk;
use lab::emulator::{EmulatorFault, again_if_lost};
use lab::guest::{Guest, GuestBase, GuestDisk, GuestSpec};
use lab::job::Job;
use lab::qemu::Qemu;
use lab::run::GUEST_PATIENCE;
use lab::server::{Server, ServerCommand};

static SERVER: LazyLock<ServerCommand> = LazyLock::new(|| match std::env::var("LAB_SERVER_CMD") {
    Ok(text) => ServerCommand::template(&text).unwrap(),
    Err(_) => ServerCommand::daemon(&build_daemon()),
});

struct Rig {
    _dir: tempfile::TempDir,
    disk: PathBuf,
    server: Server,
}

impl Rig {
    fn new(queues: u32) -> Result<Self> {
        let dir = tempfile::tempdir_in(LAB.cache.dir())?;
        let disk = dir.path().join("disk");
        disk::create(&disk, disk::DISK_BYTES)?;
        let server = Server::start(&SERVER, &disk, queues)?;
        Ok(Self { _dir: dir, disk, server })
    }

    fn boot(&self, vcpus: u32, job: Job) -> Result<Guest> {
        let disks = vec![GuestDisk::VhostUser { socket: self.server.socket() }];
        Guest::boot(&LAB.base, &GuestSpec { accel: LAB.choice.accel, vcpus, disks, job })
    }

    fn run(&mut self, vcpus: u32, job: Job) -> Result<()> {
        let ended = self.boot(vcpus, job)?.finish(GUEST_PATIENCE);
        ended.map(drop).map_err(|error| self.server.with_log(error))
    }

    /// Stops the server and looks at the disk without it.
    fn finish(self) -> Result<()> {
        self.server.stop()?;
        disk::check_ext4(&self.disk)
    }
}

#[test]
fn a_real_guest_formats_writes_verifies_and_unmounts_a_disk_served_by_the_daemon() {
    with_guests(|| {
        let mut rig = Rig::new(2)?;
        rig.run(2, Job::format_and_verify())?;
        rig.finish()
    });
}

#[test]
fn after_a_guest_is_killed_under_load_the_next_one_on_the_same_daemon_finds_what_was_synced() {
    with_guests(|| {
        let mut rig = Rig::new(2)?;
        let mut writer = rig.boot(2, Job::write_until_killed())?;
        writer.wait_for("writing", GUEST_PATIENCE)?;
        writer.cut_power()?;
        rig.run(1, Job::check_after_power_cut())?;
        rig.finish()
    });
}

const WRITE: &str = "stage write
echo kept-over-a-restart | dd of=$disk bs=512 seek=9 conv=sync,fsync oflag=direct
";
const READ: &str = "stage read
dd if=$disk bs=512 skip=9 count=1 iflag=direct | grep -q kept-over-a-restart
";

#[test]
fn a_guest_reads_through_one_daemon_what_another_daemon_wrote_before() {
    with_guests(|| {
        let mut first = Rig::new(1)?;
        first.run(1, Job::on_disk(WRITE))?;
        let Rig { _dir, disk, server } = first;
        server.stop()?;
        let server = Server::start(&SERVER, &disk, 1)?;
        let mut second = Rig { _dir, disk, server };
        second.run(1, Job::on_disk(READ))?;
        second.server.stop()
    });
}

/// fio writes, waits for the mark behind its data, and compares.
const COMPARE: &str = r#"
compare() {
    fio --name=compare --filename="$disk" --size=4m --direct=1 --rw=write --bs=64k \
        --verify=crc32c --verify_fatal=1 --output=/run/compare.txt "$@"
}
stage write
compare --do_verify=0
say "written"
until dd if="$disk" bs=512 skip=16384 count=1 iflag=direct status=none | grep -q marked; do
    sleep 0.1
done
stage compare
compare --verify_only || fail "fio found data that is not what it wrote"
"#;

/// Runs [`COMPARE`]; `change` is done to the image after the guest has written.
fn compare_after(change: impl Fn(&File) -> io::Result<()>) -> Result<()> {
    again_if_lost("compare", || {
        let rig = Rig::new(1)?;
        let mut guest = rig.boot(1, Job::on_disk(COMPARE))?;
        guest.wait_for("written", GUEST_PATIENCE)?;
        let image = File::options().write(true).open(&rig.disk)?;
        change(&image)?;
        image.write_all_at(b"marked", 8 << 20)?;
        image.sync_all()?;
        guest.finish(GUEST_PATIENCE).map(drop)
    })
}

#[test]
fn a_guest_whose_data_changed_behind_its_back_fails_the_run() {
    compare_after(|_| Ok(())).expect("nothing was changed");
    let flip = |image: &File| image.write_all_at(&[0x5a], (1 << 20) + 100);
    let error = compare_after(flip).unwrap_err().to_string();
    assert!(error.contains("stage 'compare': fio found data"), "{error}");
}

/// Serves the disk the first time, and refuses to at each later one.
const SERVES_ONCE: &str = r#"#!/bin/sh
[ ! -e "$0.used" ] || { echo "the server has had enough" >&2; exit 1; }
: >"$0.used"
exec DAEMON serve --socket-path "$1" --blk-file "$2" --num-queues "$3"
"#;

fn program(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_measurement_that_fails_leaves_the_data_verified_and_has_its_own_exit_code() {
    with_guests(|| {
        let dir = tempfile::tempdir_in(LAB.cache.dir())?;
        let server = dir.path().join("server");
        program(&server, &SERVES_ONCE.replace("DAEMON", &build_daemon().display().to_string()));
        let disk = dir.path().join("disk").display().to_string();
        let command = format!("{} {{socket}} {{disk}} {{queues}}", server.display());
        let run = Command::new(env!("CARGO_BIN_EXE_lab"))
            .args(["demo", "--disk", &disk, "--server-cmd", &command, "--rounds", "1"])
            .output()?;
        let (said, errors) =
            (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        // It tried once more, which this server refuses.
        if let Some(why) = said.lines().find_map(|line| line.strip_prefix(BOOTED_AGAIN)) {
            return Err(EmulatorFault::new(why).into());
        }
        assert_eq!(run.status.code(), Some(3), "{said}{errors}");
        assert!(said.contains("verified in the guest:") && said.contains("FAILED"), "{said}");
        assert!(errors.contains("the data was verified"), "{errors}");
        assert!(errors.contains("the server has had enough"), "{errors}");
        Ok(())
    });
}

/// Boots in a QEMU that runs `before` with its arguments, says these words and dies.
fn boot_in_dying_qemu(before: &str, words: &str) -> Error {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qemu");
    program(
        &path,
        &format!(
            "#!/bin/sh\n[ \"$1\" != --version ] || {{ echo 'QEMU emulator version 10.0.0'; exit 0; }}\n\
             {before}\necho '{words}' >&2\nkill -ABRT $$\n"
        ),
    );
    let base = GuestBase { qemu: Qemu::at(&path).unwrap(), ..LAB.base.clone() };
    let (accel, job) = (LAB.choice.accel, Job::without_disk("true\n"));
    let guest = Guest::boot(&base, &GuestSpec { accel, vcpus: 1, disks: Vec::new(), job }).unwrap();
    guest.finish(GUEST_PATIENCE).unwrap_err()
}

#[test]
fn a_qemu_that_dies_at_once_is_quoted() {
    let error = boot_in_dying_qemu("", "error: failed to set MSR 0x10a to 0x0");
    assert!(!error.is::<EmulatorFault>(), "{error}");
    let error = error.to_string();
    let first = error.lines().next().unwrap();
    assert!(first.contains("MSR 0x10a") && first.contains("SIGABRT"), "{error}");
}

const ASSERTION: &str = "physmem.c:1: iotlb_to_section: Assertion `a < b\" failed.";

#[test]
fn an_assertion_of_the_emulation_is_its_fault_and_not_the_guests() {
    let error = boot_in_dying_qemu("", ASSERTION);
    assert!(error.is::<EmulatorFault>(), "{error:#}");
    assert!(error.to_string().contains("SIGABRT"), "{error:#}");
}

#[test]
fn a_failure_before_an_assertion_of_the_emulation_counts() {
    for (argument, line) in [
        ("file,id=results,path=*) file=${argument##*path=}", "fail wrong data"),
        ("file:*) file=${argument#file:}", "[ 47.5] Oops: int3: 0000 [#1]"),
    ] {
        let before = format!(
            "for argument; do case $argument in {argument}; echo '{line}' >>$file;; esac; done"
        );
        let error = boot_in_dying_qemu(&before, ASSERTION);
        assert!(!error.is::<EmulatorFault>(), "{error:#}");
        assert!(error.to_string().contains(line.trim_start_matches("fail ")), "{error:#}");
    }
}

#[test]
fn an_oops_of_the_guests_kernel_is_the_reason_and_is_shown() {
    let job =
        Job::without_disk("echo stage crash >\"$LAB_RESULTS\"\necho c >/proc/sysrq-trigger\n");
    let spec = GuestSpec { accel: LAB.choice.accel, vcpus: 1, disks: Vec::new(), job };
    let run = || Guest::boot(&LAB.base, &spec)?.finish(GUEST_PATIENCE);
    let error = again_if_lost("crash", run).unwrap_err().to_string();
    let first = error.lines().next().unwrap();
    assert!(first.contains("in stage 'crash': the guest's kernel failed"), "{error}");
    assert!(error.contains("console|") && error.contains("sysrq_handle_crash"), "{error}");
}
