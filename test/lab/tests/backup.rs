// SPDX-License-Identifier: Apache-2.0
//! A guest in stock QEMU writes and verifies while its disk is backed up, in full and incrementally:
//! each copy is as the disk after a power cut.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use common::{LAB, build_daemon, disk_args, with_guests};
use kit::process::run_to_end;
use lab::disk;
use lab::guest::{Guest, GuestDisk, GuestSpec};
use lab::job::Job;
use lab::run::GUEST_PATIENCE;
use lab::server::{Server, ServerCommand};

/// Places of two counters behind the file system in MiB. There is data between them, so that a copy
/// needs time from one to the other.
const FIRST: u64 = 400;
const SECOND: u64 = 440;

/// The second counter follows the first one: at any moment they differ by 1 at most.
const JOB: &str = r#"
stage make the file system
mkfs.ext4 -q -F "$disk" 300M
dd if=/dev/urandom of="$disk" bs=1M seek=400 count=41 oflag=direct status=none
write() { dd if=/run/counter of="$disk" bs=512 seek="$1" oflag=direct,sync conv=notrunc status=none; }
count() {
    n=0
    while [ ! -e /run/stop ]; do
        n=$((n + 1))
        printf '%0512d' "$n" >/run/counter
        write $((400 * 2048))
        write $((440 * 2048))
    done
    say "counted $n"
}
printf '%0512d' 0 >/run/counter
write $((400 * 2048))
write $((440 * 2048))
mount "$disk" /mnt
seq 1 100000 >/mnt/before
sync
stage load
count &
counter=$!
# At 2 or more both counters have been written.
{ until [ -s /mnt/verify.dat ] && grep -q '[2-9]' /run/counter; do sleep 0.1; done; say "loading"; } &
sectors() { cat "/sys/class/block/${disk##*/}/size"; }
before=$(sectors)
# The disk grows after the copies.
while [ "$(sectors)" = "$before" ]; do
    fio --name=verify --filename=/mnt/verify.dat --size=48m --direct=1 --ioengine=io_uring \
        --iodepth=16 --rw=randwrite --bsrange=4k-64k --randrepeat=0 --fsync=16 \
        --verify=crc32c --verify_fatal=1 --do_verify=1 --output=/run/verify.txt ||
        { cat /run/verify.txt; fail "fio found data that is not what it wrote"; }
done
touch /run/stop
wait $counter
stage check the file system
umount /mnt
e2fsck -fn "$disk" || fail "e2fsck found errors"
"#;

/// The copy has the file that the guest synced before, and its journal makes it sound. The guest counted before
/// the copy, and to `counted` after it.
fn check(copy: &Path, counted: u64) {
    let path = copy.to_str().unwrap();
    let replay = Command::new("e2fsck").args(["-E", "journal_only", "-p", path]).output().unwrap();
    // 1: it has changed something.
    assert!(matches!(replay.status.code(), Some(0 | 1)), "{replay:?}");
    disk::check_ext4(copy).unwrap();
    let image = File::open(copy).unwrap();
    let [first, second] = [FIRST, SECOND].map(|mib| {
        let mut digits = [0; 512];
        image.read_exact_at(&mut digits, mib << 20).unwrap();
        let digits = std::str::from_utf8(&digits).expect("a counter");
        digits.parse::<u64>().expect("a counter")
    });
    assert!(first == second || first == second + 1, "{first} and {second}");
    assert!(0 < second && first < counted, "{first} of {counted}: a copy of an idle disk");
    let file = Command::new("debugfs").args(["-R", "cat /before", path]).output().unwrap();
    let expected: String = (1..=100_000).map(|line| format!("{line}\n")).collect();
    assert!(file.stdout == expected.as_bytes(), "{} bytes of /before", file.stdout.len());
}

#[test]
fn a_backup_of_a_disk_that_a_guest_writes_is_a_sound_file_system() {
    with_guests(back_up_under_load);
}

fn back_up_under_load() -> Result<()> {
    let directory = tempfile::tempdir_in(LAB.cache.dir())?;
    let path = directory.path().join("disk");
    disk::create(&path, disk::DISK_BYTES)?;
    let binary = build_daemon();
    let control = directory.path().join("control");
    let (program, socket) = (binary.display(), control.display());
    let command = format!(
        "{program} serve --socket-path {{socket}} --blk-file {{disk}} --num-queues {{queues}} \
         --control-path {socket}"
    );
    let mut server = Server::start(&ServerCommand::template(&command)?, &path, 2)?;
    let spec = GuestSpec {
        accel: LAB.choice.accel,
        vcpus: 2,
        disks: vec![GuestDisk::Arguments(disk_args(&server.socket(), ""))],
        job: Job::on_disk(JOB),
    };
    let mut guest = Guest::boot(&LAB.base, &spec)?;
    guest.wait_for("loading", GUEST_PATIENCE)?;
    let mut ctl = |words: &[&str]| {
        let first = [&binary, Path::new("ctl"), Path::new("--control-path"), &control];
        let first = first.iter().map(|word| word.to_str().unwrap());
        let words: Vec<&str> = first.chain(words.iter().copied()).collect();
        run_to_end(&words).map(drop).map_err(|error| server.with_log(error))
    };
    let mut backup = |name: &str, options: &[&str]| {
        let copy = directory.path().join(name);
        ctl(&[&["backup", "--to", copy.to_str().unwrap()], options].concat()).map(|()| copy)
    };
    let first = backup("first", &["--bandwidth", "16M", "--bitmap", "b"])?;
    let second = backup("second", &["--bandwidth", "16M", "--incremental", "b"])?;
    ctl(&["resize", &(disk::DISK_BYTES + (1 << 20)).to_string()])?;
    let report = guest.finish(GUEST_PATIENCE).map_err(|error| server.with_log(error))?;
    let counted = report.value("counted").and_then(|count| count.parse().ok()).expect("a count");
    server.stop()?;
    disk::check_ext4(&path)?;
    // Before the check replays the journal of its backing file.
    let whole = directory.path().join("whole");
    let convert = ["convert", "-f", "qcow2", "--allow-backing", "same-dir"].map(Path::new);
    let words = [&[&*binary], &convert[..], &[&*second, &*whole]].concat();
    let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
    run_to_end(&words)?;
    [first, whole].iter().for_each(|copy| check(copy, counted));
    Ok(())
}
