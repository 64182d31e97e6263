// SPDX-License-Identifier: Apache-2.0
//! Disks for guests: creation, protection against formatting by mistake, checks from outside.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Size of a disk that the lab makes.
pub const DISK_BYTES: u64 = 2 << 30;

/// Smallest disk that the verification and the measurement fit into.
pub const DISK_BYTES_MIN: u64 = 1 << 30;
/// Room for the data of a run: its files and the one that is measured take 400 MiB.
const ROOM_BYTES: u64 = 512 << 20;

/// Bytes at the start of a disk that must be zero for it to count as empty.
const HEAD_BYTES: u64 = 1 << 20;

/// True if `path` is a block device (and not a file).
pub fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Creates an empty sparse disk; replaces an existing file.
pub fn create(path: &Path, bytes: u64) -> Result<()> {
    let file =
        File::create(path).with_context(|| format!("cannot make the disk {}", path.display()))?;
    file.set_len(bytes)?;
    Ok(())
}

/// Makes sure that the file system of a new disk has room for the data of a run.
pub fn check_room(path: &Path) -> Result<()> {
    let room = rustix::fs::statvfs(path).with_context(|| path.display().to_string())?;
    refuse_little_room(path, room.f_bavail.saturating_mul(room.f_frsize))
}

fn refuse_little_room(path: &Path, bytes: u64) -> Result<()> {
    if bytes < ROOM_BYTES {
        bail!(
            "only {} MiB are free for {}, and a run writes up to {} MiB: make room on that file \
             system, or give a disk on another one (DISK=path)",
            bytes >> 20,
            path.display(),
            ROOM_BYTES >> 20
        );
    }
    Ok(())
}

/// Makes sure that `path` may be formatted: creates it if it does not exist, and refuses one with
/// content unless `format` is set.
pub fn claim(path: &Path, format: bool) -> Result<()> {
    if !path.exists() {
        return create(path, DISK_BYTES);
    }
    let bytes = size_bytes(path)?;
    if bytes < DISK_BYTES_MIN {
        bail!(
            "{} has {bytes} bytes, the run needs {DISK_BYTES_MIN}: give a larger disk",
            path.display()
        );
    }
    if format {
        return Ok(());
    }
    if let Some(content) = content_of(path)? {
        bail!(
            "{} is not empty ({content}) and the run would format it: give another disk, \
             or say FORMAT=1 (lab demo --format) to lose what is on it",
            path.display()
        );
    }
    Ok(())
}

/// Size of a file or block device; fails if the device is in use (mounted, for example).
fn size_bytes(path: &Path) -> Result<u64> {
    use std::io::{Seek, SeekFrom};
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    if is_block_device(path) {
        options.custom_flags(libc::O_EXCL);
    }
    let mut file = options.open(path).with_context(|| {
        format!("cannot open {} for writing: is it mounted or in use?", path.display())
    })?;
    Ok(file.seek(SeekFrom::End(0))?)
}

/// Description of a disk's content; `None` if it has none of value.
fn content_of(path: &Path) -> Result<Option<String>> {
    let probe = Command::new("blkid")
        .args(["--probe", "--output", "export"])
        .arg(path)
        .output()
        .context("cannot start blkid: run scripts/setup.sh")?;
    let found = String::from_utf8_lossy(&probe.stdout);
    let kind = found
        .lines()
        .find_map(|line| line.strip_prefix("TYPE=").or_else(|| line.strip_prefix("PTTYPE=")));
    match (probe.status.code(), kind) {
        (_, Some(kind)) => return Ok(Some(format!("blkid finds: {kind}"))),
        (Some(2), None) => {}
        _ => return Ok(Some("blkid finds contradicting signatures".to_owned())),
    }
    let mut head = Vec::new();
    File::open(path)?.take(HEAD_BYTES).read_to_end(&mut head)?;
    let empty = head.iter().all(|byte| *byte == 0);
    Ok((!empty).then(|| "its first MiB is not all zero".to_owned()))
}

/// Checks the ext4 file system on `path` without changing it; the error holds e2fsck's output.
pub fn check_ext4(path: &Path) -> Result<()> {
    let output = Command::new("e2fsck")
        .args(["-f", "-n"])
        .arg(path)
        .env("LC_ALL", "C")
        .output()
        .context("cannot start e2fsck: run scripts/setup.sh")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stdout);
        bail!("e2fsck -fn {} ({}):\n{text}", path.display(), output.status);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::process::run_to_end;
    use std::os::unix::fs::FileExt;

    fn disk() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        create(&path, DISK_BYTES).unwrap();
        (dir, path)
    }

    #[test]
    fn a_new_disk_needs_room_for_the_data_of_a_run() {
        let path = Path::new("/x/run.img");
        assert!(refuse_little_room(path, ROOM_BYTES).is_ok());
        let why = refuse_little_room(path, 191 << 20).unwrap_err().to_string();
        assert!(why.contains("only 191 MiB are free for /x/run.img"), "{why}");
        let (_dir, path) = disk();
        check_room(&path).unwrap();
    }

    #[test]
    fn a_missing_disk_is_made_and_an_empty_one_is_taken() {
        let (dir, path) = disk();
        claim(&path, false).unwrap();
        let other = dir.path().join("other");
        claim(&other, false).unwrap();
        assert_eq!(fs::metadata(other).unwrap().len(), DISK_BYTES);
    }

    #[test]
    fn a_disk_with_a_file_system_is_refused_until_format_is_said() {
        let (_dir, path) = disk();
        run_to_end(&["mke2fs", "-q", "-F", "-t", "ext4", &path.to_string_lossy()]).unwrap();
        let error = claim(&path, false).unwrap_err().to_string();
        assert!(error.contains("ext4") && error.contains("FORMAT=1"), "{error}");
        claim(&path, true).unwrap();
        check_ext4(&path).unwrap();
    }

    #[test]
    fn a_disk_with_unknown_bytes_is_refused_too() {
        let (_dir, path) = disk();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(b"mine", 70_000).unwrap();
        let error = claim(&path, false).unwrap_err().to_string();
        assert!(error.contains("not all zero"), "{error}");
    }

    #[test]
    fn a_disk_that_is_too_small_is_refused_before_anything_is_written() {
        let (_dir, path) = disk();
        create(&path, 4096).unwrap();
        let error = claim(&path, true).unwrap_err().to_string();
        assert!(error.contains("larger disk"), "{error}");
    }

    #[test]
    fn a_damaged_file_system_does_not_pass_the_check() {
        let (_dir, path) = disk();
        run_to_end(&["mke2fs", "-q", "-F", "-t", "ext4", &path.to_string_lossy()]).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[0xa5; 64 << 10], 8 << 10).unwrap();
        check_ext4(&path).unwrap_err();
    }
}
