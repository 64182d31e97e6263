// SPDX-License-Identifier: Apache-2.0
//! Images on a file system without room for their tables.

mod common;

use backend::conformance::{Request, Rig};
use backend::{Disk, IoError, IoKind, ResizeError};
use common::{MIB, PATIENCE, check, content, end, options, qemu_ok, rig};
use kit::mount;
use mount::{Mount, may_not_mount};
use qcow2::{AllowBacking, Qcow2Disk};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CLUSTER: u64 = 64 << 10;
const DISK: u64 = 8 * MIB;
const BASE: u8 = 0x5a;
const NO_ROOM: Result<(), IoError> = Err(IoError::Errno(libc::ENOSPC));

/// A file system in memory with an image of 8 MiB, whose first cluster is full of ones.
struct Place {
    mount: Mount,
    path: PathBuf,
    disk: Arc<Qcow2Disk>,
    /// The content of the rest of the disk.
    below: u8,
}

/// The image at `path`, which no other program may change.
fn open(path: &Path) -> Arc<Qcow2Disk> {
    let mut options = options(AllowBacking::SameDir, true);
    options.file.lock = Some(PATIENCE);
    Arc::new(Qcow2Disk::open(path, &options).expect("it opens"))
}

impl Place {
    fn new(has_backing: bool) -> Place {
        let mount = Mount::tmpfs(32);
        let directory = mount.place.path();
        let create = ["create", "-qf", "qcow2"];
        if has_backing {
            fs::write(mount.path("base.raw"), vec![BASE; DISK as usize]).expect("a base");
            let more = ["-b", "base.raw", "-F", "raw", "a.qcow2", "8M"];
            qemu_ok("qemu-img", directory, &[&create[..], &more].concat());
        } else {
            qemu_ok("qemu-img", directory, &[&create[..], &["a.qcow2", "8M"]].concat());
        }
        let path = mount.path("a.qcow2");
        let disk = open(&path);
        rig(&disk).write(0, &vec![1; CLUSTER as usize]);
        Place { mount, path, disk, below: if has_backing { BASE } else { 0 } }
    }

    /// Leaves room for the data of a small write, and not for the rest of its cluster.
    fn fill(&self) {
        self.fill_but(8);
    }

    /// Leaves room for so many pages.
    fn fill_but(&self, pages: u64) {
        let told = rustix::fs::statvfs(self.mount.place.path()).expect("the room");
        let filler = vec![1; ((told.f_bavail - pages) * told.f_frsize) as usize];
        fs::write(self.mount.path("filler"), filler).expect("a filler");
    }

    fn make_room(&self) {
        fs::remove_file(self.mount.path("filler")).expect("the filler goes");
    }
}

fn write(rig: &mut Rig, at: u64, byte: u8) -> Result<(), IoError> {
    rig.run(&mut Request::write(at, &[byte; 4096], &[4096], 0))
}

#[track_caller]
fn reads_as(rig: &mut Rig, at: u64, byte: u8) {
    assert_eq!(rig.read(at, 4096), [byte; 4096], "at {at:#x}");
}

/// A commit that finds no room changes nothing for the guest but its failed write; it is repeated.
#[test]
fn a_commit_without_room_is_repeated_and_no_read_sees_its_part() {
    if may_not_mount() {
        return;
    }
    let place = Place::new(true);
    let (disk, below) = (&place.disk, place.below);
    let (mut one, mut other) = (rig(disk), rig(disk));
    reads_as(&mut one, MIB, below);
    place.fill();
    assert_eq!(write(&mut other, MIB + 8192, 2), NO_ROOM);
    // Beside the failed write, in both lanes, and by a reader.
    for rig in [&mut one, &mut other] {
        reads_as(rig, MIB, below);
        reads_as(rig, MIB + 4096, below);
        reads_as(rig, MIB + 12288, below);
    }
    let mut reader = disk.reader().expect("a reader");
    let read = reader.read(MIB..MIB + 8192).expect("the content").to_vec();
    assert_eq!(read, [below; 8192]);
    // No later write gets into the cluster that no table names, nor into a new one.
    assert_eq!(write(&mut one, MIB, 3), NO_ROOM);
    assert_eq!(write(&mut other, 2 * MIB, 3), NO_ROOM);
    reads_as(&mut one, 2 * MIB, below);
    // A cluster that was there before is as good as ever.
    assert_eq!(write(&mut one, 4096, 4), Ok(()));
    reads_as(&mut other, 4096, 4);
    assert_eq!(one.run(&mut Request::command(IoKind::Flush, 0, 0)), Ok(()));
    assert!(!disk.top().has_failed_sync());
    let why = disk.settle(PATIENCE).expect_err("the tables are not durable");
    assert_eq!(why.raw_os_error(), Some(libc::ENOSPC));
    let why = disk.resize(Some(2 * DISK)).expect_err("it does not grow");
    assert!(why.to_string().contains("No space"), "{why}");
    place.make_room();
    assert_eq!(write(&mut other, MIB + 8192, 2), Ok(()));
    assert_eq!(write(&mut one, 2 * MIB, 3), Ok(()));
    for (at, byte) in [(0, 1), (4096, 4), (MIB, below), (MIB + 8192, 2), (MIB + 12288, below)] {
        reads_as(&mut one, at, byte);
        reads_as(&mut other, at, byte);
    }
    disk.settle(PATIENCE).expect("the tables are durable");
    let Place { mount, path, disk, .. } = place;
    drop((one, other, reader));
    end(disk);
    let file = fs::File::open(&path).expect("it opens");
    assert_eq!(
        backend::mark::in_use(&file).expect("a mark or none"),
        None,
        "it was closed properly"
    );
    assert_eq!(check(&path), Ok(()));
    let mut expected = vec![below; DISK as usize];
    expected[..CLUSTER as usize].fill(1);
    let written = [(4096, 4), (MIB as usize + 8192, 2), (2 * MIB as usize, 3)];
    written.into_iter().for_each(|(at, byte)| expected[at..at + 4096].fill(byte));
    assert!(content(&path) == expected);
    drop(mount);
}

/// The rest of a new cluster, and its count, need no room.
#[test]
fn a_cluster_of_an_empty_disk_needs_room_for_its_data_alone() {
    if may_not_mount() {
        return;
    }
    let place = Place::new(false);
    let mut rig = rig(&place.disk);
    place.fill_but(1);
    assert_eq!(write(&mut rig, MIB + 8192, 2), Ok(()));
    assert_eq!(write(&mut rig, MIB + 12288, 3), NO_ROOM);
    assert_eq!(write(&mut rig, 2 * MIB, 3), NO_ROOM);
    for (at, byte) in [(MIB, 0), (MIB + 8192, 2), (MIB + 12288, 0), (2 * MIB, 0)] {
        reads_as(&mut rig, at, byte);
    }
    place.disk.settle(PATIENCE).expect("the tables have room");
    place.make_room();
    assert_eq!(write(&mut rig, 2 * MIB, 3), Ok(()));
    let Place { mount, path, disk, .. } = place;
    drop(rig);
    end(disk);
    assert_eq!(check(&path), Ok(()));
    let mut expected = vec![0; DISK as usize];
    expected[..CLUSTER as usize].fill(1);
    let written = [(MIB as usize + 8192, 2), (2 * MIB as usize, 3)];
    written.into_iter().for_each(|(at, byte)| expected[at..at + 4096].fill(byte));
    assert!(content(&path) == expected);
    drop(mount);
}

/// The rest of the cluster, which was copied for the write, is not in the way of the tables.
#[test]
fn data_without_room_fails_its_write_and_no_commit() {
    if may_not_mount() {
        return;
    }
    let place = Place::new(true);
    place.fill_but(0);
    let mut rig = rig(&place.disk);
    assert_eq!(write(&mut rig, MIB + 8192, 2), NO_ROOM);
    place.disk.settle(PATIENCE).expect("no table names the cluster");
    place.make_room();
    assert_eq!(write(&mut rig, MIB + 8192, 2), Ok(()));
    reads_as(&mut rig, MIB, BASE);
}

/// The end of the disk, or of the program, comes before there is room.
#[test]
fn an_image_that_ends_without_room_has_the_content_of_before() {
    if may_not_mount() {
        return;
    }
    let place = Place::new(true);
    place.fill();
    assert_eq!(write(&mut rig(&place.disk), MIB + 8192, 2), NO_ROOM);
    let Place { mount, path, disk, below } = place;
    end(disk);
    let file = fs::File::open(&path).expect("it opens");
    assert!(backend::mark::in_use(&file).expect("a mark").is_some(), "leaked clusters may be left");
    fs::remove_file(mount.path("filler")).expect("the filler goes");
    assert_eq!(check(&path), Ok(()));
    let mut expected = vec![below; DISK as usize];
    expected[..CLUSTER as usize].fill(1);
    assert!(content(&path) == expected);
    let disk = open(&path);
    assert_eq!(write(&mut rig(&disk), MIB + 8192, 2), Ok(()));
    reads_as(&mut rig(&disk), MIB, below);
    end(disk);
    assert_eq!(check(&path), Ok(()));
}

/// DISCARD and WRITE_ZEROES are not done before their tables are durable.
#[test]
fn zeroes_without_room_are_done_when_their_tables_are() {
    if may_not_mount() {
        return;
    }
    for kind in [IoKind::Discard, IoKind::WriteZeroes { unmap: false }] {
        let place = Place::new(true);
        let mut rig = rig(&place.disk);
        place.fill();
        let zero = |rig: &mut Rig| rig.run(&mut Request::command(kind, 4 * MIB, CLUSTER));
        assert_eq!(write(&mut rig, MIB + 8192, 2), NO_ROOM);
        assert_eq!(zero(&mut rig), NO_ROOM, "{kind:?}");
        assert_eq!(zero(&mut rig), NO_ROOM, "{kind:?}");
        place.make_room();
        assert_eq!(zero(&mut rig), Ok(()), "{kind:?}");
        reads_as(&mut rig, 4 * MIB, 0);
    }
}

/// A growth over a larger backing file takes several steps, each with 8 MiB of tables.
#[test]
fn a_growth_that_ends_without_room_tells_the_size_of_the_image_and_is_repeated() {
    if may_not_mount() {
        return;
    }
    const STEP: u64 = 4 << 30;
    let mount = Mount::tmpfs(12);
    let base = fs::File::create(mount.path("base.raw")).expect("a base");
    base.set_len(2 * STEP).expect("it is sparse");
    let create = "create -qf qcow2 -o cluster_size=4096 -b base.raw -F raw a.qcow2 1M";
    qemu_ok("qemu-img", mount.place.path(), &create.split(' ').collect::<Vec<_>>());
    let path = mount.path("a.qcow2");
    let disk = open(&path);
    let why = disk.resize(Some(2 * STEP)).expect_err("it does not grow");
    let ResizeError::GrownInPart { present, capacity, .. } = why else { panic!("{why}") };
    assert!(capacity == MIB && present > MIB, "{present} and {capacity}");
    assert!(why.to_string().contains("The disk keeps its 1048576"), "{why}");
    assert_eq!(disk.info().capacity_sectors * 512, MIB);
    mount.resize(40);
    disk.resize(Some(2 * STEP)).expect("it grows");
    reads_as(&mut rig(&disk), 2 * STEP - 4096, 0);
    end(disk);
    check(&path).expect("the image has no error");
}
