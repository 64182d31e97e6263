// SPDX-License-Identifier: Apache-2.0
//! Disks that grow while they are served.

mod common;

use backend::conformance::{Request, Rig, Target};
use backend::wrap::{Rates, from_spec};
use backend::{Disk, File, FileOptions, IoError, Mem, Null, ResizeError};
use common::{DISK, Image, TMPFS};
use kit::loop_device::LoopDevice;
use std::fs;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

fn image(place: &str, size: u64) -> Image {
    Image::new(place, size).expect("an image can be made")
}

fn open(image: &Image, options: FileOptions) -> File {
    File::open(&image.path, options).expect("the image opens")
}

fn capacity(disk: &impl Disk) -> u64 {
    disk.info().capacity_sectors * 512
}

/// The error's text, checked to be one line with a remedy.
fn refusal(outcome: Result<(), ResizeError>) -> String {
    let why = outcome.expect_err("it is to be refused").to_string();
    assert!(!why.contains('\n') && why.contains("; "), "{why}");
    why
}

#[test]
fn a_lane_opened_after_the_growth_reaches_the_new_end_and_an_old_one_does_not() {
    for place in [DISK, TMPFS] {
        for direct in [true, false] {
            let image = image(place, MIB);
            let target =
                Target::new(open(&image, FileOptions { direct, ..FileOptions::default() }));
            let mut old = Rig::new(&target);
            old.write(0, &[1; 4096]);
            target.disk.resize(Some(3 * MIB)).expect("it grows");
            assert_eq!(fs::metadata(&image.path).unwrap().len(), 3 * MIB);
            let mut new = Rig::new(&target);
            assert_eq!(new.info.capacity_sectors, 3 * MIB / 512);
            new.write(3 * MIB - 4096, &[7; 4096]);
            assert_eq!(new.read(3 * MIB - 4096, 4096), [7; 4096]);
            assert_eq!(new.read(0, 4096), [1; 4096]);
            assert_eq!(new.read(MIB, 4096), [0; 4096]);
            let outside = old.run(&mut Request::read(MIB, &[4096], 0));
            assert_eq!(outside, Err(IoError::EndOfStorage));
        }
    }
}

#[test]
fn an_end_inside_a_block_of_direct_io_moves_with_the_size() {
    let image = image(DISK, MIB + 512);
    let target = Target::new(open(&image, FileOptions::default()));
    let mut bytes = MIB + 512;
    for size in [MIB + 1024, 2 * MIB, 2 * MIB + 3584] {
        Rig::new(&target).write(bytes - 512, &[5; 512]);
        target.disk.resize(Some(size)).expect("it grows");
        let mut rig = Rig::new(&target);
        assert_eq!(rig.read(bytes - 512, 1024), [[5; 512], [0; 512]].concat());
        rig.write(size - 512, &[9; 512]);
        assert_eq!(rig.read(size - 512, 512), [9; 512]);
        rig.write(size - 512, &[0; 512]);
        bytes = size;
    }
}

#[test]
fn growth_by_other_means_is_taken_up_and_a_loss_is_told() {
    let image = image(DISK, MIB);
    let file = open(&image, FileOptions::default());
    let other = fs::OpenOptions::new().write(true).open(&image.path).unwrap();
    file.resize(None).expect("nothing changed");
    assert_eq!(capacity(&file), MIB);
    other.set_len(2 * MIB + 100).unwrap();
    assert_eq!(capacity(&file), MIB);
    file.resize(None).expect("it has grown");
    assert_eq!(capacity(&file), 2 * MIB);
    other.set_len(MIB).unwrap();
    let why = refusal(file.resize(None));
    assert!(why.contains(&format!("has {MIB} bytes")), "{why}");
    assert!(refusal(file.resize(Some(4 * MIB))).contains("enlarge the storage again"));
    assert_eq!(capacity(&file), 2 * MIB);
}

#[test]
fn sizes_that_a_disk_cannot_have_are_refused_and_change_nothing() {
    let image = image(DISK, MIB);
    let options = FileOptions { logical_block_bytes: Some(4096), ..FileOptions::default() };
    let file = open(&image, options);
    for (size, words) in [
        (MIB / 2, "would cut its end off"),
        (0, "would cut its end off"),
        (MIB + 512, "give 1048576 or 1052672"),
        (u64::MAX - 4095, "LimitFSIZE="),
    ] {
        let why = refusal(file.resize(Some(size)));
        assert!(why.contains(words), "{why}");
    }
    file.resize(Some(MIB)).expect("it has this size");
    assert_eq!((capacity(&file), fs::metadata(&image.path).unwrap().len()), (MIB, MIB));
}

#[test]
fn a_read_only_disk_takes_growth_up_and_does_not_cause_it() {
    let image = image(DISK, MIB);
    let file = open(&image, FileOptions { read_only: true, ..FileOptions::default() });
    assert!(refusal(file.resize(Some(2 * MIB))).contains("read-only"));
    fs::OpenOptions::new().write(true).open(&image.path).unwrap().set_len(2 * MIB).unwrap();
    file.resize(Some(2 * MIB)).expect("it has this size");
    assert_eq!(capacity(&file), 2 * MIB);
}

#[test]
fn disks_without_a_file_say_that_they_have_a_fixed_size() {
    for disk in [Arc::new(Null::new(MIB)) as Arc<dyn Disk>, Arc::new(Mem::new(MIB).unwrap())] {
        assert!(refusal(disk.resize(Some(2 * MIB))).contains("--size"));
        assert!(refusal(disk.resize(None)).contains("--size"));
    }
}

#[test]
fn wrappers_pass_the_size_on() {
    let image = image(DISK, MIB);
    let record = format!("record:path={}.log", image.path.display());
    let specs = ["delay:us=1", "fault:ops=flush,errno=EIO", "limit:iops=1000000", &record, "lie"];
    let mut disk: Arc<dyn Disk> = Arc::new(open(&image, FileOptions::default()));
    for spec in specs {
        disk = from_spec(spec, disk).expect(spec);
    }
    disk.resize(Some(2 * MIB)).expect("it grows");
    assert_eq!(disk.info().capacity_sectors * 512, 2 * MIB);
    fs::remove_file(format!("{}.log", image.path.display())).unwrap();
}

#[test]
fn a_rate_of_bytes_holds_for_the_new_part_of_a_disk() {
    let image = image(TMPFS, MIB);
    let file = Arc::new(open(&image, FileOptions::default()));
    let bytes = std::num::NonZeroU64::new(16 << 20);
    let rates = Rates { ios: None, bytes, burst: std::time::Duration::ZERO };
    let target = Target::new(backend::wrap::Limit::new(file, rates));
    target.disk.resize(Some(4 * MIB)).expect("it grows");
    let before = std::time::Instant::now();
    Rig::new(&target).write(MIB, &vec![1; 2 << 20]);
    Rig::new(&target).write(3 * MIB, &vec![1; 4096]);
    // 2 MiB at 16 MiB a second, before the second write starts.
    assert!(before.elapsed().as_millis() >= 125, "{:?}", before.elapsed());
}

#[test]
fn a_block_device_has_the_size_of_the_device() {
    let image = Image::new(DISK, 4 * MIB).expect("an image can be made");
    let device = match LoopDevice::attach(&image.path, &["--direct-io=on"]) {
        Ok(device) => device,
        Err(why) => return println!("SKIP: no loop device: {why:#}"),
    };
    let file = File::open(&device.path, FileOptions::default()).expect("the device opens");
    let why = refusal(file.resize(Some(8 * MIB)));
    assert!(why.contains("enlarge the device itself"), "{why}");
    fs::OpenOptions::new().write(true).open(&image.path).unwrap().set_len(8 * MIB).unwrap();
    device.update_size().expect("the device grows");
    file.resize(None).expect("it has grown");
    assert_eq!(capacity(&file), 8 * MIB);
}
