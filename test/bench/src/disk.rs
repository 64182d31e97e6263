// SPDX-License-Identifier: Apache-2.0
//! The disk file that all servers share: fully written, and removed at the end.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kit::process::run_to_end;
use rustix::fs::{Mode, OFlags};
use tempfile::{NamedTempFile, TempPath};

const CHUNK_BYTES: usize = 1 << 20;
/// `linux/magic.h`.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Makes a file of `size_bytes` (rounded down to whole MiB), written with data that does not
/// compress to nothing.
pub fn create(folder: &Path, size_bytes: u64) -> Result<NamedTempFile> {
    let wrong = || format!("cannot write a disk of {size_bytes} bytes in {}", folder.display());
    let mut file =
        tempfile::Builder::new().prefix("bench-disk-").tempfile_in(folder).with_context(wrong)?;
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

/// The reason why files of a folder are not on a disk that O_DIRECT reaches, if there is one.
pub fn is_no_real_disk(folder: &Path) -> Result<Option<String>> {
    let of = || folder.display().to_string();
    if rustix::fs::statfs(folder).with_context(of)?.f_type == TMPFS_MAGIC {
        return Ok(Some("is on a tmpfs".to_owned()));
    }
    let probe = NamedTempFile::new_in(folder).with_context(of)?;
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

    #[test]
    fn a_disk_has_its_size_and_no_holes() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let disk = create(folder.path(), 3 << 20).unwrap();
        let metadata = disk.as_file().metadata().unwrap();
        assert_eq!(metadata.len(), 3 << 20);
        assert!(metadata.blocks() * 512 >= 3 << 20, "the file has holes");
    }
}
