// SPDX-License-Identifier: Apache-2.0
//! The packages of the two kernel modules, which DKMS builds on the machine.

use super::system::Version::{self, New, Old};
use super::system::{apt, expect_access, expect_same_files, expect_state, files, install, sh};
use super::{CONFIGURATION, IMAGES, STEP, verified_load};
use crate::case::cases;
use crate::guest::mode;
use crate::host::env::Env;
use crate::host::target::LIMIT;
use anyhow::{Context, Result, ensure};
use kit::set::Set::{Debian12, Debian13};
use kit::system::run;
use kit::wait::wait_until_so;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

cases! { Host;
    "packages-dkms-debian12", Debian12,
        "DKMS builds both modules on Debian 12; the host's serves a verified load while its package is upgraded; removal without a trace",
        life_of_the_modules;
    "packages-dkms-debian13", Debian13,
        "the same on Debian 13",
        life_of_the_modules;
}

const NAMES: &str = "vhost-blk vhost-blk-dkms vhost-blk-guest-dkms";
const UNIT: &str = "vhost-blk@kernel.service";
const SOCKET: &str = "/run/vhost-blk-kernel/disk.sock";
/// Headers that the builds need, in place of a download; a purge removes them.
const HEADERS: &str = "/var/cache/vhost-blk";
/// Only this project's driver has the parameter.
const OWN_PARAMETER: &str = "/sys/module/virtio_blk/parameters/use_bio";

/// Installs, uses, upgrades and purges the packages of the modules.
fn life_of_the_modules(env: &Env) -> Result<()> {
    // depmod of Debian 13 writes an index that the kernel's package has not.
    run("depmod", &[])?;
    let before = without_headers(files()?);
    build(&["vhost-blk", "vhost-blk-dkms"], Old)?;
    load("vhost_blk")?;
    wait_until_so(LIMIT, "the group of the device", || {
        Ok(expect_access("/dev/vhost-blk", 0o660, "vhost-blk").is_ok())
    })?;
    serve()?;
    verified_load(env, SOCKET, |handles, _| {
        build(&["vhost-blk-dkms"], New)?;
        handles.wait_for_progress(STEP).context("after the upgrade of the module's package")
    })?;
    run_upgraded(env)?;
    use_guest_driver()?;
    purge()?;
    expect_same_files(&before)
}

/// Installs packages whose modules DKMS builds; an error has DKMS's log.
fn build(names: &[&str], version: Version) -> Result<()> {
    let Err(error) = install(names, version) else { return Ok(()) };
    let log = sh("tail -n 40 /var/lib/dkms/*/*/build/make.log")?;
    Err(error.context(log))
}

fn without_headers(mut files: BTreeSet<PathBuf>) -> BTreeSet<PathBuf> {
    files.retain(|file| !file.starts_with(HEADERS));
    files
}

/// Loads a module that DKMS has built.
fn load(module: &str) -> Result<()> {
    expect_dkms(module)?;
    run("modprobe", &[module]).map(drop)
}

/// Fails if modprobe would load another module than that of DKMS.
fn expect_dkms(module: &str) -> Result<()> {
    let file = run("modinfo", &["-n", module])?;
    ensure!(file.contains("/updates/"), "modprobe would load {file}");
    Ok(())
}

/// Serves a disk on the kernel plane.
fn serve() -> Result<()> {
    fs::create_dir_all(IMAGES)?;
    run("/usr/bin/vhost-blk", &["create", &format!("{IMAGES}/kernel.img"), "64M"])?;
    fs::write(
        format!("{CONFIGURATION}/kernel.toml"),
        format!(
            "blk-file = \"{IMAGES}/kernel.img\"\nsocket-path = \"{SOCKET}\"\nnum-queues = 2\n\
             control-path = \"/run/vhost-blk-kernel/control.sock\"\ndata-plane = \"kernel\"\n"
        ),
    )?;
    run("systemctl", &["start", UNIT])?;
    expect_state(UNIT, "active")
}

/// The unit loads the upgraded module.
fn run_upgraded(env: &Env) -> Result<()> {
    run("systemctl", &["stop", UNIT])?;
    run("rmmod", &["vhost_blk"])?;
    expect_dkms("vhost_blk")?;
    run("systemctl", &["start", UNIT])?;
    verified_load(env, SOCKET, |_, _| Ok(()))?;
    run("systemctl", &["stop", UNIT])?;
    run("rmmod", &["vhost_blk"]).map(drop)
}

/// The guest's driver takes the place of the kernel's, and drives the machine's virtio disk.
fn use_guest_driver() -> Result<()> {
    mode::unload()?;
    build(&["vhost-blk-guest-dkms"], Old)?;
    load("virtio_blk")?;
    ensure!(Path::new(OWN_PARAMETER).exists(), "the kernel's own driver was loaded");
    wait_until_so(LIMIT, "the virtio disk", || Ok(Path::new("/dev/vda").exists()))?;
    sh("head -c 4M /dev/urandom >/root/data && dd if=/root/data of=/dev/vda conv=fsync bs=64k &&
        echo 3 >/proc/sys/vm/drop_caches && cmp -n 4194304 /root/data /dev/vda && rm /root/data")?;
    mode::unload()
}

/// The purge takes the modules, and the kernel's own driver is back.
fn purge() -> Result<()> {
    apt(&format!("purge {NAMES}"))?;
    ensure!(run("modinfo", &["-n", "vhost_blk"]).is_err(), "vhost_blk is still there");
    let file = run("modinfo", &["-n", "virtio_blk"])?;
    ensure!(file.contains("/kernel/"), "modprobe would load {file}");
    run("modprobe", &["virtio_blk"])?;
    ensure!(!Path::new(OWN_PARAMETER).exists(), "this project's driver was loaded");
    ensure!(!Path::new(HEADERS).exists(), "the purge left {HEADERS}");
    Ok(fs::remove_dir_all(IMAGES)?)
}
