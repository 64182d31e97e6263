// SPDX-License-Identifier: Apache-2.0
//! Memory is plugged into a running guest in stock QEMU, under load: the daemon gets a new memory
//! table, and requests go to the new memory.

mod common;

use anyhow::Result;
use common::{LAB, build_daemon, disk_args, with_guests};
use kit::qmp::Qmp;
use lab::disk;
use lab::guest::{Guest, GuestDisk, GuestSpec};
use lab::job::Job;
use lab::run::GUEST_PATIENCE;
use lab::server::{Server, ServerCommand};
use serde_json::json;

/// Pages of the page cache come from memory that is onlined as movable first, so that reads fill
/// it; the zone says how much of it is free. Its count is exact after a refresh only.
const JOB: &str = r#"
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

#[test]
fn memory_that_is_plugged_in_under_load_is_served_like_the_rest() {
    with_guests(plug_in_memory);
}

fn plug_in_memory() -> Result<()> {
    let directory = tempfile::tempdir_in(LAB.cache.dir())?;
    let path = directory.path().join("disk");
    disk::create(&path, disk::DISK_BYTES)?;
    let mut server = Server::start(&ServerCommand::daemon(&build_daemon()), &path, 2)?;
    let monitor = directory.path().join("monitor");
    let mut args = disk_args(&server.socket(), "");
    args.extend(["-m".into(), "512M,slots=2,maxmem=2G".into(), "-qmp".into()]);
    args.push(format!("unix:{},server=on,wait=off", monitor.display()));
    let spec = GuestSpec {
        accel: LAB.choice.accel,
        vcpus: 2,
        disks: vec![GuestDisk::Arguments(args)],
        job: Job::on_disk(JOB),
    };
    let mut guest = Guest::boot(&LAB.base, &spec)?;
    guest.wait_for("ready", GUEST_PATIENCE)?;
    let plug = || {
        let mut qmp = Qmp::connect(&monitor)?;
        let memory = json!({
            "qom-type": "memory-backend-memfd", "id": "more", "size": 256 << 20, "share": true
        });
        qmp.execute("object-add", memory)?;
        let module = json!({ "driver": "pc-dimm", "id": "module", "memdev": "more" });
        qmp.execute("device_add", module)
    };
    plug().map_err(|error| guest.blame(error))?;
    guest.finish(GUEST_PATIENCE).map_err(|error| server.with_log(error))?;
    server.stop()?;
    disk::check_ext4(&path)
}
