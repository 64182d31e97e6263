// SPDX-License-Identifier: Apache-2.0
//! Memory and disks are plugged into a running guest in stock QEMU. With new memory the daemon gets a new memory table,
//! and requests go to the new memory.

mod common;

use std::os::unix::net::UnixStream;
use std::path::Path;

use common::{LAB, build_daemon, disk_args};
use kit::qmp::Qmp;
use kit::wait::{wait_until, wait_until_so};
use lab::disk;
use lab::guest::{Guest, GuestDisk, GuestSpec};
use lab::job::Job;
use lab::run::GUEST_PATIENCE;
use lab::server::{Server, ServerCommand};
use serde_json::json;
use tempfile::TempDir;

/// Pages of the page cache come from memory that is onlined as movable first, so that reads fill
/// it; the zone says how much of it is free. Its count is exact after a refresh only.
const MEMORY_JOB: &str = r#"
free_of_movable() {
    echo 1 >/proc/sys/vm/stat_refresh
    awk '/^Node/ { movable = /Movable/ } movable && /nr_free_pages/ { n += $2 }
        END { print n + 0 }' /proc/zoneinfo
}
load() {
    fio --name=verify --filename=/mnt/verify.dat --size=64m --direct="$1" --ioengine=io_uring \
        --iodepth=16 --rw=randwrite --bsrange=4k-128k --randrepeat=0 --verify=crc32c \
        --verify_fatal=1 --do_verify=1 --output=/run/verify.txt ||
        { cat /run/verify.txt; fail "fio found data that is not what it wrote"; }
}
stage make the file system
mkfs.ext4 -q -F "$disk"
mount "$disk" /mnt
stage load while memory is plugged
echo online_movable >/sys/devices/system/memory/auto_online_blocks
say "ready"
load 1
stage wait for the memory
# A block that came online later would hide the use of another one: wait until no more come.
tries=0
previous=0
until now=$(free_of_movable); [ "$now" -gt 20000 ] && [ "$now" -lt $((previous + 1000)) ]; do
    tries=$((tries + 1))
    [ "$tries" -lt 30 ] || fail "no memory was plugged in: $now free pages"
    previous=$now
    sleep 1
done
stage load with the new memory
load 0
direct=$(dd if=/mnt/verify.dat bs=1M iflag=direct status=none | sha256sum)
echo 3 >/proc/sys/vm/drop_caches
before=$(free_of_movable)
cached=$(sha256sum </mnt/verify.dat)
after=$(free_of_movable)
[ "$direct" = "$cached" ] || fail "a read into the new memory brings other bytes"
[ "$after" -lt $((before - 8000)) ] || fail "the new memory was not used: $before free pages, now $after"
stage check the file system
umount /mnt
e2fsck -fn "$disk" || fail "e2fsck found errors"
"#;

/// Uses the disk, lets it go and waits until it is back, several times. Its files are there each time.
const DISK_JOB: &str = r#"
until_disk() {
    tries=0
    until [ "$(test -b "$disk" && echo there || echo gone)" = "$1" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 1200 ] || fail "the disk is not $1"
        sleep 0.1
    done
}
sums() { (cd /mnt && cat verify-*.dat | sha256sum); }
stage make the file system
mkfs.ext4 -q -F "$disk"
mount "$disk" /mnt
for round in 1 2; do
    stage "write, round $round"
    fio --name=verify --filename="/mnt/verify-$round.dat" --size=8m --direct=1 --ioengine=io_uring \
        --iodepth=16 --rw=randwrite --bsrange=4k-128k --randrepeat=0 --verify=crc32c \
        --verify_fatal=1 --do_verify=1 --end_fsync=1 --output=/run/verify.txt ||
        { cat /run/verify.txt; fail "fio found data that is not what it wrote"; }
    before=$(sums)
    umount /mnt
    say "unmounted-$round"
    stage "wait until the disk has gone, round $round"
    until_disk gone
    say "gone-$round"
    stage "wait until the disk is back, round $round"
    until_disk there
    mount "$disk" /mnt
    [ "$(sums)" = "$before" ] || fail "the files have other content"
done
stage check the file system
umount /mnt
e2fsck -fn "$disk" || fail "e2fsck found errors"
"#;

/// Unplugs the served disk, and closes its connection, as libvirt does.
fn unplug_disk(qmp: &mut Qmp<UnixStream>) {
    qmp.execute("device_del", json!({ "id": "served" })).unwrap();
    // QEMU refuses this while the guest has the device.
    let is_closed = || Ok(qmp.try_execute("chardev-remove", json!({ "id": "disk" }))?.is_ok());
    wait_until_so(GUEST_PATIENCE, "the guest to release the disk", is_closed).unwrap();
}

fn plug_disk(qmp: &mut Qmp<UnixStream>, socket: &Path) {
    let address = json!({ "type": "unix", "data": { "path": socket } });
    let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
    qmp.execute("chardev-add", json!({ "id": "disk", "backend": backend })).unwrap();
    let device = json!({
        "driver": "vhost-user-blk-pci", "id": "served", "chardev": "disk", "num-queues": 2, "bus": "root-port"
    });
    qmp.execute("device_add", device).unwrap();
}

/// A guest with two virtual CPUs and a served disk.
struct Rig {
    guest: Guest,
    qmp: Qmp<UnixStream>,
    server: Server,
    directory: TempDir,
}

impl Rig {
    /// `device` is added to QEMU's option for the disk, `args` to QEMU's options.
    fn boot(device: &str, args: &[&str], job: &str) -> Rig {
        let directory = tempfile::tempdir_in(LAB.cache.dir()).unwrap();
        let path = directory.path().join("disk");
        disk::create(&path, disk::DISK_BYTES).unwrap();
        let server = Server::start(&ServerCommand::daemon(&build_daemon()), &path, 2).unwrap();
        let monitor = directory.path().join("monitor");
        let mut all: Vec<String> = args.iter().copied().map(str::to_owned).collect();
        all.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", monitor.display())]);
        all.extend(disk_args(&server.socket(), ""));
        all.last_mut().unwrap().push_str(device);
        let spec = GuestSpec {
            accel: LAB.choice.accel,
            vcpus: 2,
            disks: vec![GuestDisk::Arguments(all)],
            job: Job::on_disk(job),
        };
        let guest = Guest::boot(&LAB.base, &spec).unwrap();
        let connect = || Ok(Qmp::connect(&monitor).ok());
        let qmp = wait_until(GUEST_PATIENCE, "QEMU's monitor", connect)
            .unwrap_or_else(|error| panic!("{error:#}\n{}", guest.log()));
        Rig { guest, qmp, server, directory }
    }

    fn wait_for(&mut self, word: &str) {
        self.guest.wait_for(word, GUEST_PATIENCE).unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// Waits for the end of the guest, and checks the file system of its disk.
    fn finish(self) {
        if let Err(error) = self.guest.finish(GUEST_PATIENCE) {
            panic!("{error:#}\nthe daemon's log:\n{}", self.server.log());
        }
        self.server.stop().unwrap();
        disk::check_ext4(&self.directory.path().join("disk")).unwrap();
    }
}

#[test]
fn memory_that_is_plugged_in_under_load_is_served_like_the_rest() {
    let mut rig = Rig::boot("", &["-m", "512M,slots=2,maxmem=2G"], MEMORY_JOB);
    rig.wait_for("ready");
    let memory = json!({
        "qom-type": "memory-backend-memfd", "id": "more", "size": 256 << 20, "share": true
    });
    rig.qmp.execute("object-add", memory).unwrap();
    let module = json!({ "driver": "pc-dimm", "id": "module", "memdev": "more" });
    rig.qmp.execute("device_add", module).unwrap();
    rig.finish();
}

#[test]
fn a_disk_that_is_unplugged_and_plugged_in_again_has_its_files() {
    let mut rig = Rig::boot(
        ",id=served,bus=root-port",
        &["-device", "pcie-root-port,id=root-port"],
        DISK_JOB,
    );
    for round in 1..=2 {
        rig.wait_for(&format!("unmounted-{round}"));
        unplug_disk(&mut rig.qmp);
        rig.wait_for(&format!("gone-{round}"));
        plug_disk(&mut rig.qmp, &rig.server.socket());
    }
    rig.finish();
}
