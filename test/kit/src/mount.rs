// SPDX-License-Identifier: Apache-2.0
//! Small file systems and loop devices for tests, which need root. A failure is a panic.

use crate::loop_device::LoopDevice;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Runs a program that has to succeed; returns what it printed.
#[track_caller]
pub fn run(words: &[&str]) -> String {
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {}", words.join(" "), said.trim());
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Says why a test cannot run, where the user may not mount.
pub fn may_not_mount() -> bool {
    let root = run(&["id", "-u"]) == "0";
    if !root {
        println!("SKIP: only root can mount");
    }
    !root
}

const EXT4: [&str; 3] = ["mkfs.ext4", "-q", "-F"];

/// A mounted file system; unmounted when dropped.
#[derive(Debug)]
pub struct Mount {
    /// The directory on which it is mounted.
    pub place: TempDir,
}

impl Mount {
    /// A file system in memory with room for `mib` MiB.
    pub fn tmpfs(mib: u64) -> Mount {
        Mount::new(&["-t", "tmpfs", "-o", &format!("size={mib}M"), "none"])
    }

    /// A file system in memory without extended attributes.
    pub fn ramfs() -> Mount {
        Mount::new(&["-t", "ramfs", "none"])
    }

    /// ext4 of `mib` MiB on a loop device in memory: no sync of it waits for a disk.
    pub fn ext4(mib: u64) -> Mount {
        Mount::in_memory(&EXT4, mib)
    }

    /// ext4 in the same way, on an image in `directory`.
    pub fn ext4_in(directory: &Path, mib: u64) -> Mount {
        Mount::on_loop(&EXT4, directory, mib)
    }

    /// ext4 in memory, with blocks of so many bytes.
    pub fn ext4_with_blocks(mib: u64, bytes: u32) -> Mount {
        Mount::in_memory(&[&EXT4[..], &["-b", &bytes.to_string()]].concat(), mib)
    }

    /// XFS in memory; it needs 300 MiB.
    pub fn xfs(mib: u64) -> Mount {
        Mount::in_memory(&["mkfs.xfs", "-q"], mib)
    }

    /// btrfs in memory; it needs 110 MiB.
    pub fn btrfs(mib: u64) -> Mount {
        Mount::in_memory(&["mkfs.btrfs", "-q"], mib)
    }

    /// The image has no name any more: the loop device alone keeps it.
    fn in_memory(make: &[&str], mib: u64) -> Mount {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        Mount::on_loop(make, directory.path(), mib)
    }

    fn on_loop(make: &[&str], directory: &Path, mib: u64) -> Mount {
        let image = directory.join(make[0]);
        File::create(&image).unwrap().set_len(mib << 20).unwrap();
        let image = image.to_str().unwrap();
        run(&[make, &[image]].concat());
        Mount::new(&["-o", "loop", image])
    }

    /// Changes the room of a file system in memory to `mib` MiB.
    pub fn resize(&self, mib: u64) {
        let size = format!("remount,size={mib}M");
        run(&["mount", "-o", &size, self.place.path().to_str().unwrap()]);
    }

    /// The file system on a block device.
    pub fn of(device: &Path) -> Mount {
        Mount::new(&[device.to_str().unwrap()])
    }

    fn new(words: &[&str]) -> Mount {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().to_str().unwrap();
        run(&[&["mount"], words, &[path]].concat());
        Mount { place }
    }

    /// The path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A daemon's io_uring releases its files a moment after the process has ended.
        let unmounted = Command::new("umount").arg("--lazy").arg(self.place.path()).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("{} stays mounted", self.place.path().display());
        }
    }
}

/// The data of a file that it shares with another one.
#[derive(Debug, PartialEq, Eq)]
pub enum Sharing {
    /// All of it is its own.
    None,
    /// Some extents are shared.
    Part,
    /// All extents are shared.
    All,
}

/// The extents of a file with data, as the file system tells them.
pub fn sharing_of(path: &Path) -> Sharing {
    File::open(path).unwrap().sync_all().unwrap();
    let told = run(&["filefrag", "-v", path.to_str().unwrap()]);
    let is_extent =
        |line: &&str| line.trim_start().split(':').next().unwrap().parse::<u64>().is_ok();
    let extents: Vec<&str> = told.lines().filter(is_extent).collect();
    assert!(!extents.is_empty(), "{told}");
    match extents.iter().filter(|extent| extent.contains("shared")).count() {
        0 => Sharing::None,
        count if count == extents.len() => Sharing::All,
        _ => Sharing::Part,
    }
}

/// A frozen file system; thawed when dropped.
#[derive(Debug)]
pub struct Frozen<'a>(&'a Mount);

impl Frozen<'_> {
    /// Freezes a file system.
    pub fn of(mount: &Mount) -> Frozen<'_> {
        run(&["fsfreeze", "--freeze", mount.place.path().to_str().unwrap()]);
        Frozen(mount)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        run(&["fsfreeze", "--unfreeze", self.0.place.path().to_str().unwrap()]);
    }
}

/// A loop device over `file`.
pub fn loop_device(file: &Path) -> LoopDevice {
    LoopDevice::attach(file, &[]).unwrap_or_else(|why| panic!("{why:#}"))
}

/// A block device of 16 MiB whose page cache takes writes that it loses, but for its first MiB.
#[derive(Debug)]
pub struct LossyDevice {
    /// The device.
    pub device: LoopDevice,
    below: Mount,
}

impl LossyDevice {
    /// A device that loses nothing yet.
    #[expect(clippy::new_without_default, reason = "it makes a device of the system")]
    pub fn new() -> LossyDevice {
        let below = Mount::tmpfs(32);
        let file = below.path("disk");
        File::create(&file).unwrap().set_len(16 << 20).unwrap();
        LossyDevice { device: loop_device(&file), below }
    }

    /// Loses the writes from now on.
    pub fn lose(&self) {
        let file = self.below.path("disk");
        run(&["fallocate", "--punch-hole", "-o", "1M", "-l", "15M", file.to_str().unwrap()]);
        let mut rest = File::create(self.below.path("rest")).unwrap();
        while rest.write_all(&[1; 4096]).is_ok() {}
    }

    /// Has room for writes again.
    pub fn mend(&self) {
        std::fs::remove_file(self.below.path("rest")).unwrap();
    }
}
