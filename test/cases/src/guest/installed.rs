// SPDX-License-Identifier: Apache-2.0
//! The module in the directory where DKMS installs it, loaded by name with parameters from the
//! kernel's command line.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use kit::outcome::skip;
use kit::system::{run, run_quietly};
use tempfile::TempDir;

use super::parameters::shows_mode;
use crate::case::cases;
use crate::guest::machine::disk::{Disk, Plug};
use crate::guest::mode::{self, Driver, MODULE, Mode};
use crate::guest::{Context, Modes};

cases! { Guest;
    "guest-installed", Modes::of(Mode::OURS).at_every_change(&[Mode::BioPoll]),
        "modprobe takes the module below updates, not the kernel's own, and its parameters from the command line",
        by_name;
}

const COMMAND_LINE: &str = "/proc/cmdline";

fn by_name(context: &Context) -> Result<()> {
    mode::unload()?;
    let (root, release) = both_modules()?;
    let root = root.path().to_string_lossy().into_owned();
    let taken = run("modinfo", &["-b", &root, "-k", &release, "-n", MODULE])?;
    ensure!(taken.contains("/updates/"), "modprobe would take {taken}");

    let _line = CommandLine::with(&context.mode.parameters())?;
    run("modprobe", &["-d", &root, MODULE])?;
    let _driver = Driver;
    let disk = Disk::plug(&context.machine, &Plug::file(16))?;
    // The kernel's own driver has no such attributes.
    shows_mode(&disk, context.mode)
}

/// A root directory for modprobe with only the kernel's own module and this project's, and the
/// kernel's release.
fn both_modules() -> Result<(TempDir, String)> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned();
    let own = run("modinfo", &["-n", MODULE])?;
    let own = Path::new(&own);
    if !own.is_file() {
        return Err(skip(format!("the kernel has {MODULE} built in")));
    }
    let root = tempfile::tempdir()?;
    let modules = root.path().join("lib/modules").join(&release);
    // The destination in dkms.conf.
    let updates = modules.join("updates/dkms");
    let kernel = modules.join("kernel/drivers/block");
    fs::create_dir_all(&updates)?;
    fs::create_dir_all(&kernel)?;
    // Some versions of kmod look for their directory below usr.
    fs::create_dir(root.path().join("usr"))?;
    std::os::unix::fs::symlink("../lib", root.path().join("usr/lib"))?;
    fs::copy(own, kernel.join(own.file_name().context("the module's file has no name")?))?;
    let ours = mode::ours()?;
    fs::copy(&ours, updates.join(format!("{MODULE}.ko")))
        .with_context(|| ours.display().to_string())?;
    run("depmod", &["-b", &root.path().to_string_lossy(), &release])?;
    Ok((root, release))
}

/// Replaces the kernel's command line for modprobe until dropped.
struct CommandLine {
    _text: tempfile::NamedTempFile,
}

impl CommandLine {
    /// The real command line, followed by parameters of the module.
    fn with(parameters: &[String]) -> Result<Self> {
        let mut line = fs::read_to_string(COMMAND_LINE)?.trim().to_owned();
        for parameter in parameters {
            line += &format!(" {MODULE}.{parameter}");
        }
        let text = tempfile::NamedTempFile::new()?;
        fs::write(text.path(), line + "\n")?;
        run("mount", &["--bind", &text.path().to_string_lossy(), COMMAND_LINE])?;
        Ok(Self { _text: text })
    }
}

impl Drop for CommandLine {
    fn drop(&mut self) {
        run_quietly("umount", &[COMMAND_LINE]);
    }
}
