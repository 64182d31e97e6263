// SPDX-License-Identifier: Apache-2.0
//! Leaked clusters of an image that was not closed properly are freed when it is opened again.

mod common;

use backend::Disk;
use backend::mark::{self, InUse};
use common::{PATIENCE, check, code, content, directory, end, image, leak, options, qemu_ok};
use qcow2::{AllowBacking, Qcow2Disk, Qcow2Options};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn locked() -> Qcow2Options {
    let mut options = options(AllowBacking::SameDir, true);
    // The thread of an earlier disk may still end.
    options.file.lock = Some(PATIENCE);
    options
}

fn open(path: &Path) -> Qcow2Disk {
    Qcow2Disk::open(path, &locked()).expect("it opens")
}

fn file(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("it opens")
}

fn marked(path: &Path) -> Option<InUse> {
    mark::in_use(&file(path)).expect("the attribute is read")
}

fn leaks(path: &Path) -> u64 {
    qcow2::check::check(path, &file(path)).expect("it is checked").leaks
}

/// An image with data and three leaked clusters, with the mark of a disk that died.
fn died(directory: &TempDir) -> PathBuf {
    let path = image(directory, 6, "cluster_size=4k");
    let write = ["-f", "qcow2", "-c", "write -P 7 1M 300k", "a.qcow2"];
    qemu_ok("qemu-io", directory.path(), &write);
    leak(&path);
    let file = file(&path);
    let end = file.metadata().expect("a size").len();
    file.write_all_at(&[0xaa; 3 * 4096], end - 3 * 4096).expect("it is written");
    mark::set_in_use(&file, InUse::Sound).expect("it is marked");
    path
}

#[test]
fn an_image_is_marked_while_it_may_be_written() {
    let directory = directory();
    let path = image(&directory, 6, "cluster_size=4k");
    let disk = open(&path);
    assert_eq!((marked(&path), disk.notices()), (Some(InUse::Sound), vec![]));
    end(disk);
    assert_eq!(marked(&path), None);
    let mut read_only = locked();
    read_only.file.read_only = true;
    let _disk = Qcow2Disk::open(&path, &read_only).expect("it opens");
    assert_eq!(marked(&path), None);
}

#[test]
fn leaked_clusters_of_an_image_that_was_not_closed_are_freed_when_it_is_opened() {
    let directory = directory();
    let path = died(&directory);
    let before = content(&path);
    let leaked = SeekFrom::Data(file(&path).metadata().expect("a size").len() - 3 * 4096);
    assert!(seek(file(&path), leaked).is_ok());
    assert_eq!(leaks(&path), 3);
    let disk = open(&path);
    let [notice] = &disk.notices()[..] else { panic!("{:?}", disk.notices()) };
    assert!(notice.contains("3 leaked clusters (12288 bytes) were freed"), "{notice}");
    assert_eq!((leaks(&path), marked(&path)), (0, Some(InUse::Sound)));
    assert_eq!(seek(file(&path), leaked), Err(Errno::NXIO), "the clusters are no hole");
    end(disk);
    assert_eq!((check(&path), marked(&path)), (Ok(()), None));
    assert_eq!(content(&path), before);
}

#[test]
fn leaked_clusters_stay_where_the_image_was_closed_or_is_shared_or_only_read() {
    let directory = directory();
    let path = died(&directory);
    let mut read_only = locked();
    read_only.file.read_only = true;
    let shared = options(AllowBacking::Off, true);
    for options in [read_only, shared] {
        let disk = Qcow2Disk::open(&path, &options).expect("it opens");
        assert_eq!(disk.notices(), [""; 0]);
        drop(disk);
        assert_eq!((leaks(&path), marked(&path)), (3, Some(InUse::Sound)));
    }
    mark::unset_in_use(&file(&path)).expect("it is unmarked");
    end(open(&path));
    assert_eq!((leaks(&path), marked(&path)), (3, None));
}

#[test]
fn a_damaged_image_that_was_not_closed_is_told_and_stays_marked() {
    let directory = directory();
    let path = died(&directory);
    let image = file(&path);
    let mut l1 = [0; 8];
    image.read_exact_at(&mut l1, 40).expect("the place of the L1 table");
    // A reserved bit, with which imago opens the image.
    let at = u64::from_be_bytes(l1);
    let mut entry = [0; 8];
    image.read_exact_at(&mut entry, at).expect("an entry");
    let mut l2 = u64::from_be_bytes(entry) & 0x00ff_ffff_ffff_fe00;
    l2 += 256 * 8; // the entry of 1 MiB
    image.read_exact_at(&mut entry, l2).expect("an entry");
    image.write_all_at(&(u64::from_be_bytes(entry) | 4).to_be_bytes(), l2).expect("it is damaged");
    let disk = open(&path);
    let notices = disk.notices().join(" ");
    assert!(notices.contains("its tables have errors (`vhost-blk check`)"), "{notices}");
    end(disk);
    let report = qcow2::check::check(&path, &file(&path)).expect("it is checked");
    assert_eq!((code(&report), report.leaks, marked(&path)), (2, 3, Some(InUse::Leaks)));
}

#[test]
fn the_mark_stays_after_a_failed_commit_and_goes_with_a_repair() {
    let directory = directory();
    let path = image(&directory, 6, "cluster_size=4k");
    let disk = open(&path);
    disk.sync_failed(libc::EIO);
    end(disk);
    assert_eq!(marked(&path), Some(InUse::Sound));
    let report = qcow2::repair(&path, &file(&path)).expect("it is checked");
    assert_eq!((code(&report), marked(&path)), (0, None));
}

#[test]
fn a_program_that_takes_the_image_over_removes_the_mark_at_its_end() {
    for (mark, after) in [(InUse::Sound, None), (InUse::Leaks, Some(InUse::Leaks))] {
        let directory = directory();
        let path = image(&directory, 6, "cluster_size=4k");
        let opened = open(&path);
        mark::set_in_use(&file(&path), mark).expect("it is marked");
        let files = vec![opened.top().share().expect("a descriptor")];
        let taken = Qcow2Disk::adopt(&path, files, true, &options(AllowBacking::Off, true));
        let taken = taken.expect("it is taken over");
        std::mem::forget(opened); // as by exec
        assert_eq!(marked(&path), Some(mark));
        end(taken);
        assert_eq!(marked(&path), after);
    }
}
