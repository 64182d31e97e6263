// SPDX-License-Identifier: Apache-2.0
//! The host VM's root image: Debian with QEMU and the tools of the cases, and the image and kernel
//! that guests inside it boot.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::cache::{Cache, key_of};
use crate::debian::{self, Variant};
use crate::guest::GuestBase;
use kit::process::run_to_end;

const SUITE: &str = "trixie";
const PACKAGES: &str = "qemu-system-x86,qemu-system-common,qemu-utils,fio,e2fsprogs,xfsprogs,\
                        dmsetup,kmod,util-linux,mount,fdisk,mdadm,busybox-static,nvme-cli,nbdkit,nbd-client,procps,\
                        strace,open-iscsi,drbd-utils";
const SIZE: &str = "5G";

const SECTOR: u64 = 512;

/// Byte offset of the partition on the disk.
const PARTITION_START: u64 = 1 << 20;

/// The signature by which the kernel finds the partition.
const DISK_SIGNATURE: u32 = 0x7662_6c6b;

/// The VM's first process: it only finds the payload, which has the rest.
const INIT: &str = include_str!("first.sh");

/// Path of that process.
pub(crate) const INIT_PATH: &str = "/sbin/lab-init";

/// Directory of the inner guest's kernel and root image; the payload has a link to it.
pub(crate) const GUEST_DIR: &str = "/opt/guest";

/// The root image, with some more packages; made in the cache if it does not exist.
pub(crate) fn cached(cache: &Cache, inner: &GuestBase, more: &[&str]) -> Result<PathBuf> {
    let inner_image = inner.image.path().to_string_lossy();
    let packages = [&[PACKAGES], more].concat().join(",");
    let key =
        key_of(&[SUITE, &packages, SIZE, INIT, "partition", &inner_image, inner.kernel.release()]);
    let entry = cache.entry(&format!("vm-root-{key}"), |staging| {
        eprintln!("lab: making the host VM's root image (about a minute)");
        build(staging, inner, &packages)
    })?;
    Ok(entry.join("root.img"))
}

fn build(staging: &Path, inner: &GuestBase, packages: &str) -> Result<()> {
    let root = staging.join("root");
    debian::bootstrap(Variant::Minbase, SUITE, packages, &root)?;
    debian::install_program(&root.join(INIT_PATH.trim_start_matches('/')), INIT)?;
    for directory in ["lab", "usr/lib/modules", GUEST_DIR.trim_start_matches('/')] {
        fs::create_dir_all(root.join(directory))?;
    }
    let guest = root.join(GUEST_DIR.trim_start_matches('/'));
    let files = [(inner.kernel.vmlinuz(), "vmlinuz"), (inner.image.path().to_owned(), "root.img")];
    for (from, to) in files {
        let (from, to) = (from.to_string_lossy(), guest.join(to).to_string_lossy().into_owned());
        run_to_end(&["cp", "--sparse=always", &from, &to])?;
    }
    disk_of(&root, staging, SIZE)
}

/// Makes `root.img` in `staging` of the tree `root`, which is removed; `size` is that of its file
/// system.
pub(crate) fn disk_of(root: &Path, staging: &Path, size: &str) -> Result<()> {
    let file_system = staging.join("file-system");
    debian::ext4_from(root, &file_system, "lab-root", size)?;
    fs::remove_dir_all(root)?;
    partitioned(&file_system, &staging.join("root.img"))?;
    fs::remove_file(&file_system)?;
    Ok(())
}

/// Makes `disk` a disk with one partition that holds `file_system`.
fn partitioned(file_system: &Path, disk: &Path) -> Result<()> {
    let sectors = fs::metadata(file_system)?.len() / SECTOR;
    let first = fs::File::create(disk)?;
    first.write_all_at(&partition_table(sectors.try_into()?), 0)?;
    let seek = format!("seek={}", PARTITION_START >> 20);
    let (from, to) = (format!("if={}", file_system.display()), format!("of={}", disk.display()));
    run_to_end(&["dd", "bs=1M", "conv=sparse,notrunc", "status=none", &seek, &from, &to])?;
    first.set_len(PARTITION_START + sectors * SECTOR)?;
    Ok(())
}

/// A DOS partition table with one Linux partition.
fn partition_table(sectors: u32) -> [u8; SECTOR as usize] {
    let mut table = [0; SECTOR as usize];
    table[440..444].copy_from_slice(&DISK_SIGNATURE.to_le_bytes());
    let start = (PARTITION_START / SECTOR) as u32;
    // Status, then the first sector in an address format that no kernel reads; the type: Linux.
    table[450] = 0x83;
    table[454..458].copy_from_slice(&start.to_le_bytes());
    table[458..462].copy_from_slice(&sectors.to_le_bytes());
    table[510..512].copy_from_slice(&[0x55, 0xaa]);
    table
}

/// The kernel argument that names its root. It uses no name of a namespace, because names depend on
/// the order of detection, which differs from boot to boot.
pub(crate) fn root_argument() -> String {
    format!("PARTUUID={DISK_SIGNATURE:08x}-01")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_partition_is_where_the_table_says() {
        let dir = tempfile::tempdir().unwrap();
        let (content, disk) = (dir.path().join("content"), dir.path().join("disk"));
        fs::write(&content, vec![7; 3 << 20]).unwrap();
        partitioned(&content, &disk).unwrap();
        let listed = run_to_end(&["blkid", "-p", "-o", "export", &disk.to_string_lossy()]).unwrap();
        assert!(listed.contains("PTTYPE=dos"), "{listed}");
        let bytes = fs::read(&disk).unwrap();
        assert_eq!(bytes.len(), 4 << 20);
        assert_eq!(bytes[450], 0x83);
        assert_eq!(u32::from_le_bytes(bytes[454..458].try_into().unwrap()), 2048);
        assert_eq!(u32::from_le_bytes(bytes[458..462].try_into().unwrap()), 3 << 11);
        assert!(bytes[1 << 20..].iter().all(|byte| *byte == 7));
    }
}
