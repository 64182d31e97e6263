// SPDX-License-Identifier: Apache-2.0
//! A block device as LUN 0 of a vhost-scsi target of the kernel (LIO, iblock).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kit::null_blk::configfs;
use kit::system::modprobe;

/// A vhost-scsi target; removed on drop.
#[derive(Debug)]
pub struct ScsiTarget {
    wwpn: String,
    /// Directories (and one link) in the order in which they were made.
    made: Vec<PathBuf>,
}

impl ScsiTarget {
    /// Makes a target for a device. `number` (below 256) tells targets apart.
    pub fn create(number: u8, device: &Path) -> Result<Self> {
        for module in ["target_core_mod", "target_core_iblock", "vhost_scsi"] {
            modprobe(module, &[])?;
        }
        let target = configfs()?.join("target");
        let wwpn = format!("naa.50014050000000{number:02x}");
        let mut this = Self { wwpn: wwpn.clone(), made: Vec::new() };
        let adapter = this.directory(target.join(format!("core/iblock_{number}")))?;
        let disk = this.directory(adapter.join("disk"))?;
        set(&disk, "control", &format!("udev_path={}", device.display()))?;
        set(&disk, "enable", "1")?;
        // Each command would look persistent reservations up.
        set(&disk.join("attrib"), "emulate_pr", "0")?;
        let vhost = target.join("vhost");
        if !vhost.exists() {
            // Stays: the module's own directory, without which it has no targets.
            make_directory(&vhost)?;
        }
        let port = this.directory(vhost.join(&wwpn))?;
        let group = this.directory(port.join("tpgt_1"))?;
        set(&group, "nexus", &format!("naa.50014051000000{number:02x}"))?;
        let lun = this.directory(group.join("lun/lun_0"))?;
        let link = lun.join("disk");
        std::os::unix::fs::symlink(&disk, &link)
            .with_context(|| format!("cannot make {}", link.display()))?;
        this.made.push(link);
        Ok(this)
    }

    fn directory(&mut self, path: PathBuf) -> Result<PathBuf> {
        make_directory(&path)?;
        self.made.push(path.clone());
        Ok(path)
    }

    /// The name by which vhost-scsi finds it.
    pub fn wwpn(&self) -> &str {
        &self.wwpn
    }
}

impl Drop for ScsiTarget {
    fn drop(&mut self) {
        for path in self.made.iter().rev() {
            if path.file_name().is_some_and(|name| name == "tpgt_1") {
                // Fails if the nexus was never created.
                let _ = set(path, "nexus", "NULL");
            }
            let removed =
                if path.is_symlink() { fs::remove_file(path) } else { fs::remove_dir(path) };
            if let Err(error) = removed {
                eprintln!("cannot remove {}: {error}", path.display());
            }
        }
    }
}

fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir(path).with_context(|| format!("cannot make {}", path.display()))
}

fn set(directory: &Path, name: &str, value: &str) -> Result<()> {
    let path = directory.join(name);
    fs::write(&path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
}
