// SPDX-License-Identifier: Apache-2.0
//! Opening files and devices, and what their ranges commands do to them.

mod common;

use backend::conformance::{Request, Rig, Target};
use backend::{Disk, File, FileError, FileOptions, IoError, IoKind};
use common::{BLOCKS_OF_4K, DISK, Image, TMPFS, allocated_bytes, loop_device};
use std::fs;
use std::io::Write;
use std::path::Path;

const MIB: u64 = 1 << 20;

fn image(place: &str, size: u64) -> Image {
    Image::new(place, size).expect("an image can be made")
}

fn open(path: &Path) -> File {
    File::open(path, FileOptions::default()).expect("the image opens")
}

fn read_only() -> FileOptions {
    FileOptions { read_only: true, ..FileOptions::default() }
}

fn skip(reason: &str) {
    println!("SKIP: {reason}");
}

/// The error's text, checked to be one line.
fn refusal(path: &Path, options: FileOptions) -> String {
    let why = File::open(path, options).expect_err("it is to be refused").to_string();
    assert!(!why.contains('\n'), "{why}");
    why
}

#[test]
fn a_file_is_described_as_it_is() {
    let image = image(DISK, 3 * MIB);
    let file = open(&image.path);
    let info = file.info();
    assert_eq!(info.capacity_sectors, 3 * MIB / 512);
    assert_eq!(info.description, format!("file {} (direct)", image.path.display()));
    assert!(info.volatile_cache && !info.read_only && info.secure_erase.is_none());
    assert!(info.discard.is_some() && info.write_zeroes.is_some());
    assert!(file.notices().is_empty() && !file.fell_back_from_direct());
}

/// The program that writes an image may run beside one that opens it: an upgrade looks at the image of the
/// running daemon.
#[test]
fn an_opening_loses_no_byte_of_a_file_that_grows() {
    const PAGE: [u8; 4096] = [7; 4096];
    let image = image(DISK, MIB);
    let mut writer = fs::File::options().append(true).open(&image.path).expect("the image");
    let open = || File::open(&image.path, FileOptions::default()).expect("the image opens").info();
    std::thread::scope(|scope| {
        let grows = scope.spawn(|| (0..4096).try_for_each(|_| writer.write_all(&PAGE)));
        while !grows.is_finished() {
            assert!(open().discard.is_some());
        }
        grows.join().expect("no panic").expect("the file grows");
    });
    let content = fs::read(&image.path).expect("the image");
    let lost = content[MIB as usize..].chunks(4096).filter(|page| *page != PAGE).count();
    assert_eq!((content.len() as u64, lost), (17 * MIB, 0), "bytes, and lost pages");
}

#[test]
fn discard_can_be_switched_off() {
    let image = image(DISK, MIB);
    let options = FileOptions { discard: false, ..FileOptions::default() };
    let file = File::open(&image.path, options).expect("the image opens");
    assert_eq!(file.info().discard, None);
    let mut rig = Rig::new(&Target::new(file));
    let discard = rig.run(&mut Request::command(IoKind::Discard, 0, 4096));
    assert_eq!(discard, Err(IoError::Unsupported));
}

#[test]
fn without_discard_a_thick_image_stays_thick() {
    let image = image(DISK, MIB);
    let options = FileOptions { discard: false, ..FileOptions::default() };
    let file = File::open(&image.path, options).expect("the image opens");
    assert!(!file.info().write_zeroes_unmaps);
    let mut rig = Rig::new(&Target::new(file));
    rig.write(0, &vec![0xaa; MIB as usize]);
    let zeroes = IoKind::WriteZeroes { unmap: true };
    assert_eq!(rig.run(&mut Request::command(zeroes, 0, MIB)), Ok(()));
    assert!(rig.read(0, MIB as usize) == vec![0; MIB as usize]);
    assert!(allocated_bytes(&image.path) >= MIB, "space was freed");
}

#[test]
fn a_read_only_disk_offers_nothing_that_writes_and_takes_no_write() {
    let image = image(DISK, MIB);
    let file = File::open(&image.path, read_only()).expect("the image opens");
    let info = file.info();
    assert!(info.read_only && !info.write_zeroes_unmaps);
    assert_eq!((info.discard, info.write_zeroes, info.secure_erase), (None, None, None));
    let mut rig = Rig::new(&Target::new(file));
    let write = rig.run(&mut Request::write(0, &[1; 512], &[512], 0));
    assert_eq!(write, Err(IoError::Errno(libc::EBADF)));
    assert_eq!(rig.read(0, 512), [0; 512]);
}

#[test]
fn a_part_of_a_block_at_the_end_is_not_served_and_said_so() {
    let image = image(DISK, MIB + 700);
    let file = open(&image.path);
    assert_eq!(file.info().capacity_sectors, MIB / 512 + 1);
    let [notice] = file.notices() else { panic!("{:?}", file.notices()) };
    assert!(notice.contains("the last 188 bytes"), "{notice}");
}

#[test]
fn a_file_that_shrank_ends_reads_with_end_of_storage() {
    for direct in [true, false] {
        let image = image(DISK, MIB);
        let options = FileOptions { direct, ..FileOptions::default() };
        let file = File::open(&image.path, options).expect("the image opens");
        let mut rig = Rig::new(&Target::new(file));
        let shrunk = fs::OpenOptions::new().write(true).open(&image.path).unwrap();
        shrunk.set_len(MIB / 2 + 100).unwrap();
        for (offset, len) in [(MIB / 2 - 512, 4096), (MIB / 2 + 4096, 512)] {
            for misalign in [0, 1] {
                let mut read = Request::read(offset, &[len], misalign);
                assert_eq!(rig.run(&mut read), Err(IoError::EndOfStorage), "{len} at {offset}");
            }
        }
    }
}

#[test]
fn discard_and_unmapping_zeroes_free_space_and_plain_zeroes_keep_it() {
    let image = image(DISK, 4 * MIB);
    let mut rig = Rig::new(&Target::new(open(&image.path)));
    let all = 4 * MIB;
    let mut after = |kind| {
        rig.write(0, &vec![0xaa; all as usize]);
        assert!(allocated_bytes(&image.path) >= all, "a written file takes its space");
        assert_eq!(rig.run(&mut Request::command(kind, 0, all).durable()), Ok(()));
        assert_eq!(fs::metadata(&image.path).unwrap().len(), all, "{kind:?} changed the size");
        allocated_bytes(&image.path)
    };
    assert!(after(IoKind::Discard) < MIB);
    assert!(after(IoKind::WriteZeroes { unmap: true }) < MIB);
    assert!(after(IoKind::WriteZeroes { unmap: false }) >= all);
}

#[test]
fn plain_zeroes_keep_space_also_where_the_file_system_cannot_zero() {
    // tmpfs knows no FALLOC_FL_ZERO_RANGE, so that zeroes are written.
    let image = image(TMPFS, 8 * MIB);
    let mut rig = Rig::new(&Target::new(open(&image.path)));
    let kind = IoKind::WriteZeroes { unmap: false };
    for len in [512, 64 << 10, (64 << 10) + 512, 5 * MIB + 1536] {
        rig.write(0, &vec![0xaa; 8 * MIB as usize]);
        assert_eq!(rig.run(&mut Request::command(kind, 512, len)), Ok(()), "{len}");
        let after = rig.read(0, 8 * MIB as usize);
        let end = 512 + len as usize;
        assert!(after[512..end].iter().all(|byte| *byte == 0), "{len}");
        assert!(after[..512].iter().chain(&after[end..]).all(|byte| *byte == 0xaa), "{len}");
        assert!(allocated_bytes(&image.path) >= 8 * MIB, "{len}");
    }
}

#[test]
fn a_file_system_without_direct_io_falls_back_with_a_notice() {
    let path = Path::new("/sys/kernel/btf/vmlinux");
    if !path.exists() {
        return skip("this kernel has no file that is known to refuse O_DIRECT");
    }
    let file = File::open(path, read_only()).expect("it opens without O_DIRECT");
    assert!(file.fell_back_from_direct());
    assert!(file.notices()[0].contains("refuses O_DIRECT"), "{:?}", file.notices());
    assert!(file.info().description.ends_with("(cached)"));
    assert_eq!(file.info().memory_align_bytes, 1);
    let mut rig = Rig::new(&Target::new(file));
    let wanted = fs::read(path).unwrap();
    assert!(rig.read(0, 8192) == wanted[..8192]);
}

#[test]
fn what_cannot_be_served_is_refused_with_a_remedy() {
    let directory = tempfile::TempDir::new_in(DISK).expect("a directory can be made");
    let missing = directory.path().join("none.raw");
    assert!(refusal(&missing, FileOptions::default()).contains("vhost-blk create"));
    assert!(refusal(directory.path(), FileOptions::default()).contains("neither a regular file"));
    assert!(refusal(Path::new("/dev/null"), FileOptions::default()).contains("nor a block device"));
    for size in [0, 511] {
        let empty = image(DISK, size);
        assert!(refusal(&empty.path, FileOptions::default()).contains("smaller than one block"));
    }
}

#[test]
fn bad_block_sizes_are_refused_with_a_remedy() {
    let image = image(DISK, MIB);
    for wanted in [0, 1, 256, 513, 1000, 131_072] {
        let options = FileOptions { logical_block_bytes: Some(wanted), ..FileOptions::default() };
        assert!(refusal(&image.path, options).contains("use 512 or 4096"), "{wanted}");
    }
}

#[test]
fn a_device_is_described_as_it_is_and_refuses_smaller_blocks() {
    let device = match loop_device(MIB, &BLOCKS_OF_4K) {
        Ok(device) => device,
        Err(reason) => return skip(&reason),
    };
    let info = open(&device.path).info();
    assert_eq!((info.capacity_sectors, info.logical_block_bytes), (MIB / 512, 4096));
    assert!(info.physical_block_bytes >= 4096 && info.description.starts_with("block device"));
    let options = FileOptions { logical_block_bytes: Some(512), ..FileOptions::default() };
    assert!(refusal(&device.path, options).contains("use --logical-block-size 4096"));
}

#[test]
fn a_read_only_device_needs_the_option() {
    let device = match loop_device(MIB, &["--read-only"]) {
        Ok(device) => device,
        Err(reason) => return skip(&reason),
    };
    let why = refusal(&device.path, FileOptions::default());
    assert!(why.contains("use --read-only"), "{why}");
    let file = File::open(&device.path, read_only()).expect("it opens for reading");
    assert!(file.info().read_only);
}

#[test]
fn a_file_in_memory_is_direct_and_needs_no_alignment() {
    let image = image(TMPFS, MIB);
    let file = open(&image.path);
    if file.fell_back_from_direct() {
        return skip("this tmpfs refuses O_DIRECT");
    }
    assert!(file.info().description.ends_with("(direct)"));
    assert_eq!(file.info().memory_align_bytes, 1);
}

#[test]
fn a_file_that_may_not_be_written_says_so() {
    // A sysfs attribute cannot be opened for writing, even by root.
    let path = Path::new("/sys/kernel/btf/vmlinux");
    if !path.exists() {
        return skip("this kernel has no file that root may not write");
    }
    match File::open(path, FileOptions { direct: false, ..FileOptions::default() }) {
        Err(FileError::NotWritable { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_that_cannot_be_opened_gets_a_remedy() {
    let name = "x".repeat(300);
    let error = File::open(&name, FileOptions::default()).expect_err("too long a name");
    assert!(matches!(error, FileError::Open { .. }), "{error}");
    assert!(error.to_string().contains("; check the path"), "{error}");
}
