// SPDX-License-Identifier: Apache-2.0
//! The initramfs of a guest inside the VM: a shell, the agent, and the drivers that the guest needs
//! before it has a disk.

mod cpio;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use kit::agent;
use kit::process::run_to_end;

use cpio::Archive;

/// An incomplete initramfs.
#[derive(Debug)]
pub(crate) struct Initramfs {
    archive: Archive,
    modules: usize,
}

impl Initramfs {
    /// One with the busybox of the tree `root`, with `init` as the first process.
    pub(crate) fn new(root: &Path, init: &str) -> Result<Self> {
        let busybox = fs::read(root.join("bin/busybox")).with_context(|| {
            format!("{} has no busybox: add busybox-static to it", root.display())
        })?;
        let mut archive = Archive::default();
        for directory in ["bin", "modules", "parameters"] {
            archive.directory(directory)?;
        }
        archive.program("bin/busybox", &busybox)?;
        archive.program("init", init.as_bytes())?;
        archive.program("agent", agent::SCRIPT.as_bytes())?;
        Ok(Self { archive, modules: 0 })
    }

    /// Adds a module of the kernel, which `init` loads after the ones before it.
    pub(crate) fn module(&mut self, module: &Path, parameters: &str) -> Result<()> {
        let number = format!("{:02}", self.modules);
        self.modules += 1;
        self.archive.program(&format!("modules/{number}"), &plain_module(module)?)?;
        if !parameters.is_empty() {
            self.archive.program(&format!("parameters/{number}"), parameters.as_bytes())?;
        }
        Ok(())
    }

    /// Adds programs of this machine at their own paths, with their libraries.
    pub(crate) fn programs(&mut self, programs: &[&str]) -> Result<()> {
        let mut files: Vec<String> = programs.iter().map(|&program| program.to_owned()).collect();
        for program in programs {
            files.extend(libraries(&run_to_end(&["ldd", program])?));
        }
        files.sort();
        files.dedup();
        let mut directories = Vec::new();
        for file in &files {
            let above: Vec<&Path> = Path::new(file).ancestors().skip(1).collect();
            directories.extend(above.into_iter().rev().skip(1).map(Path::to_owned));
        }
        // A directory sorts before the directories in it.
        directories.sort();
        directories.dedup();
        let name = |path: &Path| path.to_string_lossy().trim_start_matches('/').to_owned();
        for directory in &directories {
            self.archive.directory(&name(directory))?;
        }
        for file in &files {
            self.archive.program(&name(Path::new(file)), &fs::read(file).context(file.clone())?)?;
        }
        Ok(())
    }

    /// The complete initramfs.
    pub(crate) fn finish(self) -> Result<Vec<u8>> {
        Ok(self.archive.finish()?)
    }
}

/// Paths in the output of `ldd`: libraries, and the loader.
fn libraries(output: &str) -> Vec<String> {
    let paths = output.lines().filter_map(|line| {
        line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned)
    });
    paths.collect()
}

/// The release of the only kernel in the tree `root`, and the module of that name after the modules
/// that it depends on, without built-in ones.
pub(crate) fn modules_of(root: &Path, name: &str) -> Result<(String, Vec<PathBuf>)> {
    let all = root.join("lib/modules");
    let wrong = || format!("no modules in {}", all.display());
    let entries = fs::read_dir(&all).with_context(wrong)?.flatten().map(|entry| entry.path());
    // The tree may be a file system of its own, which has a directory lost+found.
    let mut releases = entries.filter(|entry| entry.join("modules.dep").exists());
    let release = releases.next().with_context(wrong)?;
    let dependencies = fs::read_to_string(release.join("modules.dep")).with_context(wrong)?;
    let names = in_load_order(&dependencies, name);
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

    #[test]
    fn a_directory_without_a_list_of_modules_is_no_release() {
        let root = tempfile::tempdir().expect("a directory");
        let all = root.path().join("lib/modules");
        for name in ["lost+found", "6.12.0", "a", "z"] {
            fs::create_dir_all(all.join(name)).expect("a directory");
        }
        assert!(modules_of(root.path(), "b").is_err());
        fs::write(all.join("6.12.0/modules.dep"), "kernel/b.ko.xz:\n").expect("a list");
        let found = modules_of(root.path(), "b").expect("a release");
        assert_eq!(found, ("6.12.0".into(), vec![all.join("6.12.0/kernel/b.ko.xz")]));
    }

    #[test]
    fn ldd_names_libraries_and_the_loader() {
        let output = "\tlinux-vdso.so.1 (0x7ffd)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f00)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x7f01)\n";
        assert_eq!(libraries(output), ["/lib/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
    }
}
