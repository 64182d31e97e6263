// SPDX-License-Identifier: Apache-2.0
//! The disk file that all servers share: fully written, and removed at the end.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kit::process::run_to_end;
use rustix::fs::{Mode, OFlags};
use tempfile::{NamedTempFile, TempPath};

const CHUNK_BYTES: usize = 1 << 20;
/// `linux/magic.h`.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// A directory on a real disk: the given one, or the project's in the cache directory.
pub(crate) fn directory(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(directory) = given {
        return Ok(directory.to_owned());
    }
    kit::system::cache_directory().context("no directory for the disk; give --dir")
}

/// Makes a file of `size_bytes` (rounded down to whole MiB), written with data that does not
/// compress to nothing.
pub fn create(directory: &Path, size_bytes: u64) -> Result<NamedTempFile> {
    let wrong = || {
        let (mib, directory) = (size_bytes >> 20, directory.display());
        format!("cannot write a disk of {mib} MiB in {directory}; --help has the options of both")
    };
    let mut file = tempfile::Builder::new()
        .prefix("bench-disk-")
        .tempfile_in(directory)
        .with_context(wrong)?;
    let mut state = 1_u64;
    for _ in 0..size_bytes / CHUNK_BYTES as u64 {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        while chunk.len() < CHUNK_BYTES {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            chunk.extend(state.to_le_bytes());
        }
        file.write_all(&chunk).with_context(wrong)?;
    }
    file.as_file().sync_all().with_context(wrong)?;
    Ok(file)
}

/// Path of the qcow2 image with the content of a disk file.
pub fn image_beside(file: &Path) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(".qcow2");
    path.into()
}

/// Makes the image of [`image_beside`] with our program; all its clusters are allocated, because
/// the file has no zeroes.
pub fn create_image(program: &Path, file: &Path) -> Result<TempPath> {
    let image = image_beside(file);
    let [program, file, target] = [program, file, &image].map(|path| path.display().to_string());
    let words = [&program, "convert", "--format=raw", "--output-format=qcow2", &file, &target];
    run_to_end(&words).context("cannot make the qcow2 image")?;
    Ok(TempPath::try_from_path(image)?)
}

/// Path of the image of [`fragment`].
pub fn fragmented_beside(file: &Path) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(".fragmented.qcow2");
    path.into()
}

/// Makes a copy of the image of [`create_image`] whose clusters lie in random order, as an image has them that grew
/// by random writes. No two neighbours of the disk are neighbours in the file, but for a few.
pub fn fragment(file: &Path) -> Result<TempPath> {
    let (from, to) = (image_beside(file), fragmented_beside(file));
    std::fs::copy(&from, &to).context("cannot copy the qcow2 image")?;
    let path = TempPath::try_from_path(to)?;
    let wrong = || format!("cannot fragment {}", path.display());
    let (from, to) = (File::open(&from)?, File::options().read(true).write(true).open(&path)?);
    shuffle(&from, &to).with_context(wrong)?;
    to.sync_all().with_context(wrong)?;
    Ok(path)
}

/// Exchanges the places of the clusters of `to`, which is a copy of `from`, with their data.
fn shuffle(from: &File, to: &File) -> std::io::Result<()> {
    const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
    let words = |at: u64, count: u64| -> std::io::Result<Vec<u64>> {
        let mut bytes = vec![0; count as usize * 8];
        from.read_exact_at(&mut bytes, at)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect())
    };
    // The bits of a cluster, the entries of the L1 table, and its place.
    let cluster = 1 << (words(16, 1)?[0] & 0xffff_ffff);
    let (l1_entries, l1_at) = (words(32, 1)?[0] & 0xffff_ffff, words(40, 1)?[0]);
    let mut entries = Vec::new();
    for l2_table in words(l1_at, l1_entries)?.iter().map(|entry| entry & PLACE) {
        let table = if l2_table == 0 { Vec::new() } else { words(l2_table, cluster / 8)? };
        let named = (0..).zip(table).filter(|(_, entry)| entry & PLACE != 0);
        entries.extend(named.map(|(number, entry)| (l2_table + 8 * number, entry)));
    }
    let mut order: Vec<usize> = (0..entries.len()).collect();
    let mut state = 1_u64;
    for last in (1..order.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        order.swap(last, ((state >> 33) % (last as u64 + 1)) as usize);
    }
    let mut data = vec![0; cluster as usize];
    for (&(at, old), other) in entries.iter().zip(order) {
        let new = entries[other].1;
        from.read_exact_at(&mut data, old & PLACE)?;
        to.write_all_at(&data, new & PLACE)?;
        to.write_all_at(&new.to_be_bytes(), at)?;
    }
    Ok(())
}

/// Path of the image of [`create_empty`].
pub fn empty_beside(file: &Path) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(".empty.qcow2");
    path.into()
}

/// Makes an empty image of `size_bytes` beside a disk file.
pub fn create_empty(program: &Path, file: &Path, size_bytes: u64) -> Result<TempPath> {
    create_by(program, empty_beside(file), size_bytes, &["--format=qcow2"])
}

/// Makes an image with our program and these options of `create`.
pub fn create_by(
    program: &Path,
    image: PathBuf,
    size_bytes: u64,
    options: &[&str],
) -> Result<TempPath> {
    let [program, path] = [program, &image].map(|path| path.display().to_string());
    let size = size_bytes.to_string();
    let words = [&[&program, "create", &path, &size], options].concat();
    run_to_end(&words).with_context(|| format!("cannot make {path}"))?;
    Ok(TempPath::try_from_path(image)?)
}

/// The reason why files of a directory are not on a disk that O_DIRECT reaches, if there is one.
pub fn is_no_real_disk(directory: &Path) -> Result<Option<String>> {
    let of = || directory.display().to_string();
    if rustix::fs::statfs(directory).with_context(of)?.f_type == TMPFS_MAGIC {
        return Ok(Some("is on a tmpfs".to_owned()));
    }
    let probe = NamedTempFile::new_in(directory).with_context(of)?;
    let flags = OFlags::RDWR | OFlags::DIRECT;
    let direct = rustix::fs::open(probe.path(), flags, Mode::empty());
    Ok(direct.err().map(|error| format!("refuses O_DIRECT ({error})")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tmpfs_is_no_real_disk() {
        let why = is_no_real_disk(Path::new("/dev/shm")).unwrap();
        assert_eq!(why.as_deref(), Some("is on a tmpfs"));
    }

    /// A header, an L1 table, an L2 table with 64 entries, and 64 clusters of 512 bytes with their number.
    #[test]
    fn a_shuffled_image_has_the_same_content_in_another_order() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let entry = |number: u64| (1 << 63) | ((3 + number) << 9);
        for file in [&from, &to] {
            let word = |at: u64, value: u64| file.write_all_at(&value.to_be_bytes(), at).unwrap();
            for (at, value) in [(16, 9), (32, 1), (40, 512), (512, 1024)] {
                word(at, value);
            }
            for number in 0..64 {
                word(1024 + 8 * number, entry(number));
                file.write_all_at(&[number as u8; 512], (3 + number) << 9).unwrap();
            }
        }
        shuffle(&from, &to).unwrap();
        let mut neighbours = 0;
        let place = |number: u64| {
            let mut word = [0; 8];
            to.read_exact_at(&mut word, 1024 + 8 * number).unwrap();
            u64::from_be_bytes(word) & !(1 << 63)
        };
        for number in 0..64 {
            let mut data = [0; 512];
            to.read_exact_at(&mut data, place(number)).unwrap();
            assert_eq!(data, [number as u8; 512], "{number}");
            neighbours += u32::from(number > 0 && place(number) == place(number - 1) + 512);
        }
        assert!(neighbours < 8, "{neighbours} clusters follow their neighbour");
    }

    #[test]
    fn a_disk_has_its_size_and_no_holes() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let disk = create(directory.path(), 3 << 20).unwrap();
        let metadata = disk.as_file().metadata().unwrap();
        assert_eq!(metadata.len(), 3 << 20);
        assert!(metadata.blocks() * 512 >= 3 << 20, "the file has holes");
    }
}
