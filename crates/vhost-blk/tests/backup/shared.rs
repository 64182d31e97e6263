// SPDX-License-Identifier: Apache-2.0
//! Backups that share the space of the image, on file systems that can.

use crate::common::{Daemon, wait_until};
use crate::moments::Moments;
use crate::mount::{Mount, Sharing, may_not_mount, run, sharing_of};
use crate::rig::Rig;
use crate::{MIB, assert_same, parts, parts_of};
use driver::Device;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const BYTES: u64 = 16 * MIB;
/// Sectors that the guest writes again and again.
const SECTORS: u64 = 1000;

/// A daemon, and a file system whose files share space.
struct Shared {
    rig: Rig,
    mount: Mount,
}

impl Shared {
    fn on(mount: fn(u64) -> Mount) -> Shared {
        let rig = Rig::new();
        let mount = mount(512);
        Shared { rig, mount }
    }

    /// Adds the disk `a` with a new image of `bytes` bytes in this format.
    fn add(&self, format: &str, bytes: u64, options: &str) -> PathBuf {
        self.create(&["-f", format], bytes);
        self.serve(&format!("--format {format} {options}"))
    }

    fn create(&self, options: &[&str], bytes: u64) {
        let (image, bytes) = (self.mount.path("image"), bytes.to_string());
        let end = [image.to_str().unwrap(), &bytes];
        run(&[&["qemu-img", "create", "-q"], options, &end].concat());
    }

    fn serve(&self, options: &str) -> PathBuf {
        let image = self.mount.path("image");
        let disk = format!("a --blk-file {} --socket-path a.sock --num-queues 1", image.display());
        self.rig.ok(&format!("add {disk} {options}"));
        image
    }

    fn backup(&self, to: &Path, options: &str) -> Value {
        self.rig.json(&format!("backup a --to {} {options}", to.display()))
    }

    #[track_caller]
    fn refused(&self, to: &Path, options: &str) -> String {
        let told = self.rig.refused(&format!("backup a --to {} {options}", to.display()), 1);
        assert!(!to.exists());
        assert_no_parts(to.parent().unwrap());
        told
    }
}

#[track_caller]
fn assert_no_parts(directory: &Path) {
    assert_eq!(parts_of(directory), [""; 0]);
}

fn stamp(n: u64) -> [u8; 512] {
    let mut data = [0; 512];
    data.chunks_mut(8).for_each(|word| word.copy_from_slice(&n.to_le_bytes()));
    data
}

/// The disk after so many writes of [`while_written`].
fn after(writes: u64) -> Vec<u8> {
    let mut disk = vec![0; BYTES as usize];
    for n in writes.saturating_sub(SECTORS) + 1..=writes {
        let at = place(n) as usize * 512;
        disk[at..at + 512].copy_from_slice(&stamp(n));
    }
    disk
}

/// Sectors far from each other, so that blocks of the file system have sectors of several rounds.
fn place(n: u64) -> u64 {
    n % SECTORS * 31
}

/// Writes one sector after another while `act` runs, which gets the number of complete writes. Returns
/// that number at the end.
fn while_written(guest: &mut Device, done: &AtomicU64, act: impl FnOnce() + Send) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            let before = done.load(Ordering::Acquire);
            wait_until("writes", || done.load(Ordering::Acquire) > before + 50);
            act();
            stop.store(true, Ordering::Release);
        });
        while !stop.load(Ordering::Acquire) && !acting.is_finished() {
            let n = done.load(Ordering::Acquire) + 1;
            guest.write(place(n), &stamp(n)).unwrap();
            done.store(n, Ordering::Release);
        }
        acting.join().unwrap();
    });
}

/// The content of an image that no disk has open.
fn content_of(image: &Path, format: &str) -> Vec<u8> {
    if format == "raw" {
        return fs::read(image).unwrap();
    }
    let (image, raw) = (image.to_str().unwrap(), format!("{}.raw", image.display()));
    run(&["qemu-img", "check", "-qf", format, image]);
    run(&["qemu-img", "convert", "-f", format, "-O", "raw", image, &raw]);
    fs::read(raw).unwrap()
}

/// The number of writes that a copy has, which is checked to be one moment.
#[track_caller]
fn moment_of(copy: &[u8]) -> u64 {
    let stamp_at = |n| {
        let at = place(n) as usize * 512;
        u64::from_le_bytes(copy[at..at + 8].try_into().unwrap())
    };
    let newest = (0..SECTORS).map(stamp_at).max().unwrap();
    assert_same(copy, &after(newest));
    newest
}

fn one_moment(mount: fn(u64) -> Mount, format: &str, options: &str) {
    let shared = Shared::on(mount);
    shared.add(format, BYTES, options);
    let mut guest = shared.rig.guest("a");
    let done = AtomicU64::new(0);
    for round in 0..3 {
        let copy = shared.mount.path(&format!("copy-{round}"));
        let range = std::sync::Mutex::new(0..0);
        while_written(&mut guest, &done, || {
            let start = done.load(Ordering::Acquire);
            let told = shared.backup(&copy, &format!("--format {format} --reflink always"));
            *range.lock().unwrap() = start..done.load(Ordering::Acquire) + 1;
            assert_eq!(told, json!({"copied_bytes": BYTES, "total_bytes": BYTES, "shared": true}));
        });
        assert_ne!(sharing_of(&copy), Sharing::None);
        let moment = moment_of(&content_of(&copy, format));
        let range = range.into_inner().unwrap();
        assert!(range.start <= moment && moment <= range.end, "{moment} in {range:?}");
        assert_no_parts(shared.mount.place.path());
    }
    let mut content = vec![0; BYTES as usize];
    for (part, bytes) in (0..).zip(content.chunks_mut(256 << 10)) {
        guest.read(part * 512, bytes).unwrap();
    }
    assert_same(&content, &after(done.into_inner()));
}

#[test]
fn a_raw_clone_is_the_disk_at_one_moment_while_the_guest_writes() {
    if may_not_mount() {
        return;
    }
    one_moment(Mount::xfs, "raw", "--direct on");
    one_moment(Mount::xfs, "raw", "--direct off");
    one_moment(Mount::btrfs, "raw", "--direct off");
}

#[test]
fn a_qcow2_clone_is_the_disk_at_one_moment_while_the_guest_writes() {
    if may_not_mount() {
        return;
    }
    one_moment(Mount::xfs, "qcow2", "--direct on");
    one_moment(Mount::btrfs, "qcow2", "--direct off");
}

/// Discarded clusters leave the image in the background, a tenth of a second later.
#[test]
fn a_qcow2_clone_is_sound_while_discarded_clusters_leave() {
    if may_not_mount() {
        return;
    }
    let shared = Shared::on(Mount::xfs);
    shared.create(&["-f", "qcow2", "-o", "cluster_size=4k"], BYTES);
    shared.serve("--format qcow2");
    let mut guest = shared.rig.guest("a");
    for round in 0..24u64 {
        for part in 0..32 {
            guest.write(part * 1024, &vec![round as u8 + 1; 256 << 10]).unwrap();
        }
        for part in 0..32 {
            guest.discard(part * 1024, 512).unwrap();
        }
        std::thread::sleep(Duration::from_millis(20 + round * 3));
        let copy = shared.mount.path("copy");
        shared.backup(&copy, "--format qcow2 --reflink always");
        assert!(content_of(&copy, "qcow2").iter().all(|byte| *byte == 0), "round {round}");
        fs::remove_file(&copy).unwrap();
    }
}

/// The file system has no room for a copy.
#[test]
fn a_clone_needs_no_space() {
    if may_not_mount() {
        return;
    }
    let shared = Shared::on(Mount::xfs);
    let image = shared.add("raw", 300 * MIB, "");
    let mut guest = shared.rig.guest("a");
    for part in 0..300 {
        guest.write(part * 2048, &vec![part as u8 | 1; MIB as usize]).unwrap();
    }
    let copy = shared.mount.path("copy");
    let told = shared.refused(&copy, "--reflink never");
    assert!(told.contains("space"), "{told}");
    let told = shared.rig.ok(&format!("backup a --reflink always --to {}", copy.display()));
    assert!(told.contains("(300M), and shares its space with the image"), "{told}");
    assert_eq!((sharing_of(&copy), sharing_of(&image)), (Sharing::All, Sharing::All));
    let meta = fs::metadata(&copy).unwrap();
    assert_eq!((meta.mode() & 0o777, meta.len()), (0o600, 300 * MIB));
    run(&["cmp", image.to_str().unwrap(), copy.to_str().unwrap()]);
    // Each stays as it is when the other one is written.
    guest.write(0, &[0xaa; 4096]).unwrap();
    guest.flush().unwrap();
    assert_eq!(fs::read(&copy).unwrap()[..4096], [1; 4096]);
    assert_no_parts(shared.mount.place.path());
}

#[test]
fn a_backup_that_cannot_share_is_a_copy_and_always_is_refused() {
    if may_not_mount() {
        return;
    }
    let shared = Shared::on(Mount::btrfs);
    shared.add("raw", BYTES, "");
    let mut guest = shared.rig.guest("a");
    guest.write(0, &stamp(7)).unwrap();
    let (near, far) = (shared.mount.path("copy"), shared.rig.path("copy"));
    shared.backup(&shared.mount.path("0"), "--format qcow2 --bitmap b");
    for (to, options, why) in [
        (&far, "", "different file systems"),
        (&near, "--format qcow2", "the formats differ"),
        (&near, "--verify", "--verify compares two copies"),
        (&near, "--incremental b", "has changes only"),
    ] {
        let told = shared.refused(to, &format!("{options} --reflink always"));
        assert!(told.contains("cannot share the space") && told.contains(why), "{told}");
        assert!(told.contains("; give --reflink auto"), "{told}");
        assert_eq!(shared.backup(to, &format!("{options} --reflink auto"))["shared"], false);
        assert_eq!(sharing_of(to), Sharing::None);
        fs::remove_file(to).unwrap();
    }
    assert_eq!(shared.backup(&near, "")["shared"], false, "never is the default");
    assert_eq!(sharing_of(&near), Sharing::None);
    assert!(parts(&shared.rig.place).is_empty());
}

#[test]
fn an_overlay_has_to_be_copied() {
    if may_not_mount() {
        return;
    }
    let shared = Shared::on(Mount::btrfs);
    shared.add("raw", BYTES, "");
    let mut guest = shared.rig.guest("a");
    guest.write(3, &stamp(1)).unwrap();
    shared.rig.ok(&format!("snapshot a --to {}", shared.mount.path("overlay").display()));
    guest.write(5, &stamp(2)).unwrap();
    let copy = shared.mount.path("copy");
    let told = shared.refused(&copy, "--format qcow2 --reflink always");
    assert!(told.contains("the image has a backing file"), "{told}");
    assert_eq!(shared.backup(&copy, "--format qcow2 --reflink auto")["shared"], false);
    let content = content_of(&copy, "qcow2");
    assert_eq!((content[3 * 512], content[5 * 512]), (1, 2));
}

/// The notes begin with the moment of the clone.
#[test]
fn incremental_backups_follow_a_clone() {
    if may_not_mount() {
        return;
    }
    for (format, mount) in [("raw", Mount::xfs as fn(u64) -> Mount), ("qcow2", Mount::btrfs)] {
        let shared = Shared::on(mount);
        shared.add(format, BYTES, "");
        let mut guest = shared.rig.guest("a");
        let done = AtomicU64::new(0);
        let full = shared.mount.path("full");
        while_written(&mut guest, &done, || {
            let options = format!("--format {format} --bitmap b --reflink always");
            assert_eq!(shared.backup(&full, &options)["shared"], true);
        });
        let first = moment_of(&content_of(&full, format));
        for number in 0..3 {
            let next = shared.mount.path(&format!("{number}"));
            while_written(&mut guest, &done, || {
                assert_eq!(shared.backup(&next, "--incremental b")["shared"], false);
            });
            let content = crate::content::content_by_qemu(&next);
            let moment = moment_of(&content);
            assert!(moment > first, "{moment} after {first}");
        }
    }
}

/// The last bytes of the file are no whole sector.
#[test]
fn the_clone_has_the_size_of_the_disk() {
    if may_not_mount() {
        return;
    }
    let shared = Shared::on(Mount::btrfs);
    let image = shared.mount.path("odd");
    let content: Vec<u8> = (0..MIB + 700).map(|n| (n / 512) as u8).collect();
    fs::write(&image, &content).unwrap();
    shared.rig.ok(&format!("add a --blk-file {} --socket-path a.sock", image.display()));
    let copy = shared.mount.path("copy");
    assert_eq!(shared.backup(&copy, "--reflink always")["shared"], true);
    assert_same(&fs::read(&copy).unwrap(), &content[..MIB as usize + 512]);
    assert_eq!(fs::metadata(&image).unwrap().len(), MIB + 700);
}

/// A client that goes cancels its backup, at the latest when the clone is made.
#[test]
fn a_client_that_is_killed_at_any_moment_leaves_a_whole_clone_or_nothing() {
    if may_not_mount() {
        return;
    }
    let shared = Shared::on(Mount::btrfs);
    shared.add("raw", BYTES, "");
    let mut guest = shared.rig.guest("a");
    let done = AtomicU64::new(0);
    let first = shared.mount.path("first");
    let words = format!("backup a --reflink always --to {}", first.display());
    let mut moments = Moments::of(|| drop(shared.rig.ok(&words)));
    for _ in 0..25 {
        let copy = shared.mount.path("copy");
        while_written(&mut guest, &done, || {
            let words = format!("backup a --reflink always --to {}", copy.display());
            let mut client = Daemon::spawn(&mut shared.rig.command(&words));
            moments.wait();
            client.signal(libc::SIGKILL);
            client.wait();
            let is_over = || {
                parts_of(shared.mount.place.path()).is_empty() && {
                    // The daemon may not have begun, or have ended the backup.
                    let next = shared.mount.path("next");
                    let told = shared
                        .rig
                        .ctl(&format!("backup a --reflink always --to {}", next.display()));
                    let _ = fs::remove_file(next);
                    told.status.success()
                }
            };
            wait_until("the backup ends", is_over);
        });
        let is_whole = copy.exists();
        if is_whole {
            moment_of(&fs::read(&copy).unwrap());
            fs::remove_file(&copy).unwrap();
        }
        moments.learn(is_whole);
    }
    moments.assert_both();
}
