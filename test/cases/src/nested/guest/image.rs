// SPDX-License-Identifier: Apache-2.0
//! Boot files of inner guests: the payload's kernel, a small initramfs made here, and the payload's
//! root image, which all guests only read.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use kit::outcome::skip;
use kit::process::run_to_end;

use crate::initramfs::{Initramfs, modules_of};
use crate::nested::Lab;

const INIT: &str = include_str!("init.sh");
/// Driver of the root disk, which the guest needs before it mounts its root.
const ROOT_DRIVER: &str = "virtio_blk";
/// Directory of the project's own modules, built for the kernel of the outer VM.
const OWN_MODULES: &str = "/lab/modules";

/// Driver of the guest's virtio disks, the root disk included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Driver {
    /// The kernel's own module.
    InTree,
    /// The project's module.
    Own(OwnDriver),
}

/// The mode of the project's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnDriver {
    /// Uses the bio path instead of the request path.
    pub(crate) bio: bool,
    /// Number of polled queues.
    pub(crate) poll_queues: u32,
}

impl OwnDriver {
    fn parameters(self) -> String {
        format!("use_bio={} poll_queues={}", u8::from(self.bio), self.poll_queues)
    }
}

impl Driver {
    /// Name of the initramfs with this driver.
    fn initramfs(self) -> String {
        match self {
            Self::InTree => "initramfs".to_owned(),
            Self::Own(driver) => format!("initramfs-{}", driver.parameters().replace(' ', "-")),
        }
    }
}

/// Files that an inner guest boots from.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    /// The kernel.
    pub(crate) kernel: PathBuf,
    /// The initramfs.
    pub(crate) initramfs: PathBuf,
    /// The root image.
    pub(crate) root: PathBuf,
    /// The driver in the initramfs.
    pub(crate) driver: Driver,
}

impl Image {
    /// Takes the files of the guest directory; makes the initramfs if the work directory has none yet.
    ///
    /// # Errors
    ///
    /// [`kit::outcome::Skip`] if the project's driver is requested and was built for another kernel
    /// than the guest's.
    pub(crate) fn prepare(lab: &Lab, driver: Driver) -> Result<Self> {
        let (kernel, root) = (lab.guest.join("vmlinuz"), lab.guest.join("root.img"));
        for file in [&kernel, &root] {
            if !file.exists() {
                bail!("{} is missing: the lab puts it there", file.display());
            }
        }
        let initramfs = lab.work.join(driver.initramfs());
        if !initramfs.exists() {
            let mount = Mount::read_only(&root)?;
            let bytes = initramfs_from(mount.place(), driver)?;
            fs::create_dir_all(&lab.work)?;
            fs::write(&initramfs, bytes).context("cannot write the inner guest's initramfs")?;
        }
        Ok(Self { kernel, initramfs, root, driver })
    }
}

fn initramfs_from(root: &Path, driver: Driver) -> Result<Vec<u8>> {
    let mut initramfs = Initramfs::new(root, INIT)?;
    let (release, mut modules) = modules_of(root, ROOT_DRIVER)?;
    let mut parameters = String::new();
    if let Driver::Own(driver) = driver {
        parameters = driver.parameters();
        // The project's driver depends on the same modules as the kernel's own driver.
        modules.pop();
        modules.push(own_driver(&release)?);
    }
    for (i, module) in modules.iter().enumerate() {
        let is_driver = i + 1 == modules.len();
        initramfs.module(module, if is_driver { &parameters } else { "" })?;
    }
    initramfs.finish()
}

/// The project's module, if it was built for this kernel.
fn own_driver(release: &str) -> Result<PathBuf> {
    let module = Path::new(OWN_MODULES).join(format!("{ROOT_DRIVER}.ko"));
    let magic = run_to_end(&["modinfo", "-F", "vermagic", &module.display().to_string()])?;
    let built_for = magic.split_whitespace().next().unwrap_or_default();
    if built_for != release {
        return Err(skip(format!("the driver is built for {built_for}, the guest has {release}")));
    }
    Ok(module)
}

/// A loop mount, unmounted on drop.
#[derive(Debug)]
pub(crate) struct Mount {
    place: tempfile::TempDir,
}

impl Mount {
    /// Mounts a file system image without writing to it; the journal is not replayed.
    pub(crate) fn read_only(image: &Path) -> Result<Self> {
        Self::new(image, "ro,noload")
    }

    /// Mounts an image or a block device for writing; the journal is replayed.
    pub(crate) fn writable(image: &Path) -> Result<Self> {
        Self::new(image, "rw")
    }

    fn new(what: &Path, options: &str) -> Result<Self> {
        let options = if what.is_file() { format!("loop,{options}") } else { options.to_owned() };
        if what.is_file() {
            kit::system::modprobe("loop", &[])?;
        }
        let place = tempfile::Builder::new().prefix("nested-mount-").tempdir()?;
        let at = place.path().display().to_string();
        run_to_end(&["mount", "-t", "ext4", "-o", &options, &what.display().to_string(), &at])?;
        Ok(Self { place })
    }

    /// Mount point.
    pub(crate) fn place(&self) -> &Path {
        self.place.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(error) = run_to_end(&["umount", &self.place.path().display().to_string()]) {
            eprintln!("nested: {error:#}");
        }
    }
}
