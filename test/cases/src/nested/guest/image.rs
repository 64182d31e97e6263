// SPDX-License-Identifier: Apache-2.0
//! Boot files of inner guests: the payload's kernel, a small initramfs made here, and the payload's
//! root image, which all guests only read.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use kit::agent;
use kit::outcome::skip;

use super::cpio::Archive;
use kit::process::run_to_end;

const INIT: &str = include_str!("init.sh");
/// Driver of the root disk, which the guest needs before it mounts its root.
const ROOT_DRIVER: &str = "virtio_blk";
/// Folder of the initramfs, kept for further guests of the same VM.
const INITRAMFS_FOLDER: &str = "/run/nested";
/// Folder of the project's own modules, built for the kernel of the outer VM.
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
    fn initramfs(self) -> PathBuf {
        Path::new(INITRAMFS_FOLDER).join(match self {
            Self::InTree => "initramfs".to_owned(),
            Self::Own(driver) => format!("initramfs-{}", driver.parameters().replace(' ', "-")),
        })
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
    /// Takes the payload's guest folder; makes the initramfs if this VM has none yet.
    ///
    /// # Errors
    ///
    /// [`kit::outcome::Skip`] if the project's driver is requested and was built for another kernel
    /// than the guest's.
    pub(crate) fn prepare(folder: &Path, driver: Driver) -> Result<Self> {
        let (kernel, root) = (folder.join("vmlinuz"), folder.join("root.img"));
        for file in [&kernel, &root] {
            if !file.exists() {
                bail!("{} is missing: the lab puts it there", file.display());
            }
        }
        let initramfs = driver.initramfs();
        if !initramfs.exists() {
            let mount = Mount::read_only(&root)?;
            let bytes = initramfs_from(mount.place(), driver)?;
            fs::create_dir_all(initramfs.parent().expect("it has a folder"))?;
            fs::write(&initramfs, bytes).context("cannot write the inner guest's initramfs")?;
        }
        Ok(Self { kernel, initramfs, root, driver })
    }
}

fn initramfs_from(root: &Path, driver: Driver) -> Result<Vec<u8>> {
    let busybox = fs::read(root.join("bin/busybox"))
        .context("the guest's root image has no busybox: add busybox-static to it")?;
    let mut archive = Archive::default();
    for folder in ["bin", "modules", "parameters"] {
        archive.folder(folder)?;
    }
    archive.program("bin/busybox", &busybox)?;
    archive.program("init", INIT.as_bytes())?;
    archive.program("agent", agent::SCRIPT.as_bytes())?;
    let (release, mut modules) = early_modules(root)?;
    if let Driver::Own(driver) = driver {
        let parameters = driver.parameters();
        // The project's driver depends on the same modules as the kernel's own driver.
        modules.pop();
        modules.push(own_driver(&release)?);
        archive.program(&format!("parameters/{:02}", modules.len() - 1), parameters.as_bytes())?;
    }
    for (i, module) in modules.iter().enumerate() {
        archive.program(&format!("modules/{i:02}"), &plain_module(module)?)?;
    }
    Ok(archive.finish()?)
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

/// The guest's kernel release, and the root disk's driver after the modules that it depends on,
/// without built-in ones.
fn early_modules(root: &Path) -> Result<(String, Vec<PathBuf>)> {
    let all = root.join("lib/modules");
    let wrong = || format!("the guest's root image has no modules in {}", all.display());
    let release = fs::read_dir(&all).with_context(wrong)?.next().with_context(wrong)??.path();
    let dependencies = fs::read_to_string(release.join("modules.dep")).with_context(wrong)?;
    let names = in_load_order(&dependencies, ROOT_DRIVER);
    let modules = names.iter().map(|name| release.join(name)).collect();
    let name = release.file_name().with_context(wrong)?;
    Ok((name.to_string_lossy().into_owned(), modules))
}

/// Paths from `modules.dep`, dependencies first.
fn in_load_order(dependencies: &str, module: &str) -> Vec<String> {
    let is_it = |path: &str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        file.split('.').next().is_some_and(|name| name.replace('-', "_") == module)
    };
    let line = dependencies.lines().filter_map(|line| line.split_once(':'));
    let Some((path, needs)) = line.into_iter().find(|(path, _)| is_it(path)) else {
        return Vec::new();
    };
    let mut paths: Vec<_> = needs.split_whitespace().rev().map(str::to_owned).collect();
    paths.push(path.to_owned());
    paths
}

/// The content of the module, decompressed.
fn plain_module(path: &Path) -> Result<Vec<u8>> {
    let tool = match path.extension().and_then(|e| e.to_str()) {
        Some("ko") => return Ok(fs::read(path)?),
        Some("xz") => "xzcat",
        Some("gz") => "zcat",
        _ => bail!("{}: no known compression", path.display()),
    };
    let output = Command::new("busybox").arg(tool).arg(path).output().context("no busybox")?;
    if !output.status.success() || output.stdout.is_empty() {
        bail!("busybox {tool} cannot unpack {}", path.display());
    }
    Ok(output.stdout)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need_and_built_in_ones_not_at_all() {
        let text = "kernel/a/virtio-blk.ko.xz: kernel/b.ko.xz kernel/c.ko.xz\nkernel/b.ko.xz:\n";
        let order = in_load_order(text, "virtio_blk");
        assert_eq!(order, ["kernel/c.ko.xz", "kernel/b.ko.xz", "kernel/a/virtio-blk.ko.xz"]);
        assert!(in_load_order(text, "virtio_pci").is_empty());
    }
}
