// SPDX-License-Identifier: Apache-2.0
//! Pages of guest memory that its file system does not have.
// UNSAFETY: reads and writes the mapping, as a queue does.
#![expect(unsafe_code)]

use kit::mount;
use mount::{Mount, may_not_mount};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use virtqueue::SharedMapping;

const PAGE: usize = 4096;

fn read(mapping: &SharedMapping, at: usize) -> u8 {
    // SAFETY: the tests read inside their mappings.
    unsafe { mapping.as_ptr().add(at).read_volatile() }
}

fn write(mapping: &SharedMapping, at: usize, byte: u8) {
    // SAFETY: as above.
    unsafe { mapping.as_ptr().add(at).write_volatile(byte) };
}

/// A file of so many pages on a file system, and its mapping.
fn mapped(mount: &Mount, pages: usize) -> (File, SharedMapping) {
    let file = File::create_new(mount.path("memory")).unwrap();
    file.set_len((pages * PAGE) as u64).unwrap();
    drop(file);
    let file = File::options().read(true).write(true).open(mount.path("memory")).unwrap();
    let mapping = SharedMapping::map(file.try_clone().unwrap(), 0, (pages * PAGE) as u64);
    (file, mapping.unwrap())
}

#[test]
fn a_truncation_loses_whole_pages_on_a_file_system_with_smaller_blocks() {
    if may_not_mount() {
        return;
    }
    let mount = Mount::ext4_with_blocks(16, 1024);
    let (file, mapping) = mapped(&mount, 4);
    (0..4).for_each(|page| write(&mapping, page * PAGE, 7));
    file.set_len(0).unwrap();
    // Within the page, but in its third block.
    assert_eq!(read(&mapping, 2 * PAGE + 2050), 0);
    assert!(mapping.is_lost());
    assert_eq!([2, 3].map(|page| read(&mapping, page * PAGE)), [0, 0]);
}

/// As a VMM whose memory in /dev/shm finds no room. Requests in flight still use the pages that have content.
#[test]
fn a_hole_that_finds_no_room_loses_one_page_and_no_other() {
    if may_not_mount() {
        return;
    }
    let mount = Mount::tmpfs(1);
    let (file, mapping) = mapped(&mount, 8);
    for page in [0, 2, 7] {
        file.write_all_at(&[7; PAGE], (page * PAGE) as u64).unwrap();
    }
    let mut rest = File::create(mount.path("rest")).unwrap();
    while rest.write_all(&[1; PAGE]).is_ok() {}
    assert_eq!([1, 3].map(|page| read(&mapping, page * PAGE)), [0, 0]);
    assert!(mapping.is_lost());
    assert_eq!([0, 2, 7].map(|page| read(&mapping, page * PAGE)), [7, 7, 7]);
    // The other pages are still those of the file.
    file.write_all_at(&[9], 7 * PAGE as u64).unwrap();
    assert_eq!(read(&mapping, 7 * PAGE), 9);
}

/// A hostile VMM could have more of them than a process may have mappings.
#[test]
fn many_holes_that_find_no_room_do_not_use_up_the_mappings_of_the_process() {
    if may_not_mount() {
        return;
    }
    const PAGES: usize = 160_000;
    let mount = Mount::tmpfs(1);
    let (file, mapping) = mapped(&mount, PAGES);
    file.write_all_at(&[7; PAGE], 0).unwrap();
    let mut rest = File::create(mount.path("rest")).unwrap();
    while rest.write_all(&[1; PAGE]).is_ok() {}
    for page in (1..PAGES).step_by(2).chain((1..PAGES).rev().step_by(2)) {
        assert_eq!(read(&mapping, page * PAGE), 0);
    }
    assert_eq!(read(&mapping, 0), 7);
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    assert!(mappings < 1000, "{mappings} mappings");
    // The pages of a mapping that has gone do not count.
    drop((mapping, file));
    std::fs::remove_file(mount.path("memory")).unwrap();
    let (file, mapping) = mapped(&mount, 8);
    while rest.write_all(&[1; PAGE]).is_ok() {}
    drop(rest);
    file.write_all_at(&[7; 1], 7 * PAGE as u64).unwrap_err();
    assert_eq!(read(&mapping, PAGE), 0);
    assert!(mapping.is_lost());
}
