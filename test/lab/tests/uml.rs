// SPDX-License-Identifier: Apache-2.0
//! Guests in User Mode Linux on a disk served by the daemon: the stock driver of a real kernel,
//! with a vhost-user front-end that is neither QEMU's nor this project's.
//!
//! Needs root (`scripts/setup.sh test`); the first run fetches the kernel and makes the root image.

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use kit::loop_device::LoopDevice;
use kit::process::run_to_end;
use lab::cache::Cache;
use lab::disk;
use lab::guest::{Guest, GuestReport};
use lab::image::RootImage;
use lab::job::Job;
use lab::kernel::GuestKernel;
use lab::run::GUEST_PATIENCE;
use lab::server::{Server, ServerCommand};
use lab::uml::UmlKernel;

const DISK_BYTES: u64 = 256 << 20;
/// Byte offset of the guest's one partition.
const PARTITION_BYTES: u64 = 1 << 20;

/// Partition, file system, verified random writes, a file with a reported checksum, discard.
const WHOLE_LIFE: &str = r#"
stage partition
echo 'start=1MiB' | sfdisk -q --label gpt "$disk"
stage make the file system
mkfs.ext4 -q -F "${disk}1"
mount "${disk}1" /mnt
stage write and verify with fio
fio --name=verify --filename=/mnt/verify.dat --size=64m --direct=1 --ioengine=io_uring \
    --iodepth=16 --rw=randwrite --bssplit=4k/40:12k/20:64k/30:256k/10 --verify=crc32c \
    --verify_fatal=1 --do_verify=1 --end_fsync=1 --output=/run/verify.txt ||
    { cat /run/verify.txt; fail "fio found data that is not what it wrote"; }
stage keep a file
dd if=/dev/urandom of=/mnt/kept bs=1M count=4 status=none
say "kept $(sha256sum /mnt/kept | cut -d ' ' -f 1)"
stage discard
rm /mnt/verify.dat
sync
fstrim /mnt
stage unmount
umount /mnt
"#;

/// Releases the disk, waits for the host, and takes it again.
const DETACH_AND_ATTACH: &str = r#"
driver=/sys/bus/platform/drivers/virtio-uml
dd if=/dev/urandom of=/run/kept bs=1M count=4 status=none
dd if=/run/kept of="$disk" bs=1M oflag=direct status=none
echo virtio-uml.0 >$driver/unbind
say detached
until [ -e /run/lab/attach ]; do sleep 0.1; done
stage attach
echo virtio-uml.0 >$driver/bind
[ -b "$disk" ] || fail "no disk after it was attached again"
cmp -n 4194304 /run/kept "$disk" || fail "the data is not what was written"
"#;

struct Lab {
    cache: Cache,
    image: RootImage,
    kernel: UmlKernel,
    daemon: ServerCommand,
}

/// `None` if apt has no User Mode Linux.
static LAB: LazyLock<Option<Lab>> = LazyLock::new(|| {
    let open = || -> anyhow::Result<Option<Lab>> {
        let cache = Cache::open()?;
        let Some(kernel) = UmlKernel::cached(&cache)? else { return Ok(None) };
        let image = RootImage::cached(&cache, &GuestKernel::cached(&cache)?)?;
        let daemon = ServerCommand::daemon(&common::build_daemon());
        Ok(Some(Lab { cache, image, kernel, daemon }))
    };
    open().unwrap_or_else(|error| panic!("the lab cannot be set up: {error:#}"))
});

/// Returns whether the CPU has AMX. The host's ptrace then takes a floating-point state of 11008
/// bytes only (`PTRACE_SETREGSET`, NT_X86_XSTATE). Debian 12's kernel, 6.1, has room for less, and
/// panics when it starts its first process.
fn has_amx() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" amx_tile"))
}

fn lab_or_skip() -> Option<&'static Lab> {
    if has_amx() {
        println!("SKIP: this User Mode Linux has no room for the registers of a CPU with AMX");
        return None;
    }
    let lab = LAB.as_ref();
    if lab.is_none() {
        println!("SKIP: apt knows no package user-mode-linux");
    }
    lab
}

impl Lab {
    fn serve(&self, disk: &Path) -> Server {
        Server::start(&self.daemon, disk, 1).unwrap_or_else(|error| panic!("{error:#}"))
    }

    fn boot(&self, server: &Server, job: Job) -> Guest {
        let guest = self.kernel.boot(&self.image, &server.socket(), &job);
        guest.unwrap_or_else(|error| panic!("{error:#}"))
    }

    fn run(&self, server: &Server, job: Job) -> GuestReport {
        finish(self.boot(server, job), server)
    }
}

fn finish(guest: Guest, server: &Server) -> GuestReport {
    let ended = guest.finish(GUEST_PATIENCE);
    ended.unwrap_or_else(|error| panic!("{error:#}\nthe server's log:\n{}", server.log()))
}

/// A sparse image in a directory of the cache, which is on a real file system.
fn image(lab: &Lab) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(lab.cache.dir()).unwrap();
    let path = dir.path().join("disk");
    disk::create(&path, DISK_BYTES).unwrap();
    (dir, path)
}

/// Runs the whole life of a disk at `served`, whose blocks lie in the file `image`.
fn live(lab: &Lab, served: &Path, image: &Path) {
    let server = lab.serve(served);
    let report = lab.run(&server, Job::on_disk(WHOLE_LIFE));
    server.stop().unwrap_or_else(|error| panic!("{error:#}"));
    let partition = PathBuf::from(format!("{}?offset={PARTITION_BYTES}", served.display()));
    disk::check_ext4(&partition).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(report.value("kept"), Some(sum_of_kept(&partition).as_str()));
    let allocated = std::fs::metadata(image).unwrap().blocks() * 512;
    assert!(allocated < 48 << 20, "64 MiB were discarded, and {allocated} bytes are there");
}

/// The checksum of the file `kept` on a file system, read by e2fsprogs.
fn sum_of_kept(file_system: &Path) -> String {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("kept");
    let request = format!("dump /kept {}", copy.display());
    run_to_end(&["debugfs", "-R", &request, &file_system.to_string_lossy()]).unwrap();
    let sum = run_to_end(&["sha256sum", &copy.to_string_lossy()]).unwrap();
    sum.split(' ').next().unwrap().to_owned()
}

#[test]
fn a_user_mode_guest_uses_a_file_from_its_partition_table_to_its_discard() {
    let Some(lab) = lab_or_skip() else { return };
    let (_dir, path) = image(lab);
    live(lab, &path, &path);
}

#[test]
fn a_user_mode_guest_uses_a_block_device_from_its_partition_table_to_its_discard() {
    let Some(lab) = lab_or_skip() else { return };
    if !Path::new("/dev/loop-control").exists() {
        println!("SKIP: this machine has no loop devices");
        return;
    }
    let (_dir, path) = image(lab);
    let device = LoopDevice::attach(&path, &[]).unwrap();
    live(lab, &device.path, &path);
}

/// The front-end of User Mode Linux does not reconnect: to the guest, the end of the daemon is the
/// surprise removal of a disk, in which the kernel's own driver hangs now and then. So the guest
/// loses its power, too. The next guest and the next daemon find all synced data.
#[test]
fn what_a_user_mode_guest_synced_survives_a_daemon_that_is_killed_under_load() {
    let Some(lab) = lab_or_skip() else { return };
    let (_dir, path) = image(lab);
    let server = lab.serve(&path);
    let mut guest = lab.boot(&server, Job::write_until_killed());
    guest.wait_for("writing", GUEST_PATIENCE).unwrap_or_else(|error| panic!("{error:#}"));
    server.kill().unwrap();
    guest.cut_power().unwrap();

    let server = lab.serve(&path);
    lab.run(&server, Job::check_after_power_cut());
    server.stop().unwrap_or_else(|error| panic!("{error:#}"));
    disk::check_ext4(&path).unwrap_or_else(|error| panic!("{error:#}"));
}

/// If a guest releases its disk first, the daemon can be exchanged.
#[test]
fn a_user_mode_guest_that_detaches_its_disk_goes_on_with_another_daemon() {
    let Some(lab) = lab_or_skip() else { return };
    let (_dir, path) = image(lab);
    let mut server = lab.serve(&path);
    let mut guest = lab.boot(&server, Job::on_disk(DETACH_AND_ATTACH));
    guest.wait_for("detached", GUEST_PATIENCE).unwrap_or_else(|error| panic!("{error:#}"));
    server.replace_killed().unwrap_or_else(|error| panic!("{error:#}"));
    guest.tell("attach").unwrap();
    finish(guest, &server);
    server.stop().unwrap_or_else(|error| panic!("{error:#}"));
}
