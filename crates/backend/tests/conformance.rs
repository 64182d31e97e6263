// SPDX-License-Identifier: Apache-2.0
//! Every disk of this crate passes the suite.

mod common;

use backend::conformance::{Quirks, SyncEngine, Target};
use backend::{Disk, File, FileOptions, Mem, Null, conformance, conformance_without_data};
use common::{BLOCKS_OF_4K, DISK, Mounted, TMPFS, file_target, loop_device};

const SIZE: u64 = 16 << 20;

fn direct() -> FileOptions {
    FileOptions::default()
}

fn cached() -> FileOptions {
    FileOptions { direct: false, ..FileOptions::default() }
}

fn blocks_of(bytes: u32) -> FileOptions {
    FileOptions { logical_block_bytes: Some(bytes), ..FileOptions::default() }
}

fn loop_target(options: &[&str]) -> Result<Target, String> {
    let device = loop_device(SIZE, options)?;
    let file = File::open(&device.path, direct()).expect("the device opens");
    Ok(Target::new(file).keeping(device))
}

fn quirky(quirks: Quirks, options: FileOptions) -> Result<Target, String> {
    let target = file_target(DISK, SIZE, options)?;
    Ok(target.run_by(move || Box::new(SyncEngine::with_quirks(quirks))))
}

fn short() -> Quirks {
    Quirks { transfer_bytes_max: Some(9 * 512), ..Quirks::default() }
}

fn nervous() -> Quirks {
    Quirks { interrupts: true, newest_first: true, ..Quirks::default() }
}

/// An image of `size` bytes where O_DIRECT wants blocks of 4096 bytes.
fn coarse_target(mkfs: &str, size: u64) -> Result<Target, String> {
    let mounted = Mounted::with_4k_sectors(mkfs)?;
    let file = File::open(mounted.image(size), direct()).expect("the image opens");
    assert_eq!(file.info().logical_block_bytes, 512);
    Ok(Target::new(file).keeping(mounted))
}

fn coarse_and_nervous() -> Result<Target, String> {
    let target = coarse_target("mkfs.ext4", SIZE + 512 * 3)?;
    Ok(target.run_by(|| Box::new(SyncEngine::with_quirks(nervous()))))
}

conformance_without_data!(null, Ok(Target::new(Null::new(SIZE))));
conformance!(mem, Ok(Target::new(Mem::new(SIZE).unwrap())));

conformance!(direct_file_on_tmpfs, file_target(TMPFS, SIZE, direct()));
conformance!(direct_file_on_disk, file_target(DISK, SIZE, direct()));
conformance!(cached_file_on_tmpfs, file_target(TMPFS, SIZE, cached()));
conformance!(cached_file_on_disk, file_target(DISK, SIZE, cached()));
conformance!(direct_file_with_4k_blocks, file_target(DISK, SIZE, blocks_of(4096)));

conformance!(direct_loop_device_with_4k_blocks, loop_target(&BLOCKS_OF_4K));
conformance!(direct_loop_device_with_512_byte_blocks, loop_target(&[]));

conformance!(direct_file_with_short_transfers, quirky(short(), direct()));
conformance!(cached_file_with_short_transfers, quirky(short(), cached()));
conformance!(direct_file_with_interrupts_out_of_order, quirky(nervous(), direct()));

conformance!(small_blocks_on_4k_direct_io, coarse_target("mkfs.ext4", SIZE));
conformance!(small_blocks_on_4k_direct_io_of_xfs, coarse_target("mkfs.xfs", SIZE));
conformance!(small_blocks_on_4k_direct_io_with_a_tail_out_of_order, coarse_and_nervous());
