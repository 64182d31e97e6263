// SPDX-License-Identifier: Apache-2.0
//! The Debian packages on a machine with systemd, which the lab has made of this checkout.
//!
//! * [`libvirt`]: the daemon's package below a guest of libvirt.
//! * [`modules`]: the packages of the kernel modules.
//! * [`system`]: the Debian system of the machine.

mod libvirt;
mod modules;
mod system;

use crate::case::cases;
use crate::host::env::Env;
use crate::host::load::{Handles, Spec, allow_lost_calls, memory_for, under_load};
use crate::host::target::{LIMIT, options};
use anyhow::{Context, Result, ensure};
use driver::{Device, Options};
use kit::set::Set::{Debian12, Debian13};
use kit::system::run;
use kit::wait::{wait_until, wait_until_so};
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use system::Version::{New, Old};
use system::{apt, expect_access, expect_same_files, expect_state, files, install, main_pid};
use system::{property, runs_installed_program, sh};

cases! { Host;
    "packages-debian12", Debian12,
        "the daemon's package on Debian 12: units, sockets, the watchdog, an upgrade and a crash under load, removal without a trace",
        life_of_the_daemon;
    "packages-debian13", Debian13,
        "the same on Debian 13",
        life_of_the_daemon;
}

/// Requests on each queue between two steps.
const STEP: u64 = 20;
/// Bytes of the largest request.
const REQUEST_MAX: usize = 256 << 10;
/// Sectors of each queue's part of the disk: 8 MiB.
const PART: u64 = 16 << 10;

/// systemd's DefaultStartLimitBurst.
const STARTS_DEFAULT: u32 = 5;
/// With a dash, as in the names for Proxmox VE. `systemd-escape --unescape` reads it as a slash; %i of the unit keeps it.
const DATA: &str = "vhost-blk@100-data.service";
const DATA_SOCKET: &str = "/run/vhost-blk-100-data/disk.sock";
/// A disk whose running daemon refuses an upgrade.
const MEMORY: &str = "vhost-blk@memory.service";
const MANY: &str = "vhost-blk.service";
const IMAGES: &str = "/var/lib/images";
const CONFIGURATION: &str = "/etc/vhost-blk";

/// Installs, uses, upgrades, removes and purges the package of the daemon.
fn life_of_the_daemon(env: &Env) -> Result<()> {
    let before = files()?;
    install(&["vhost-blk"], Old)?;
    check_fresh_installation()?;
    serve_late_storage()?;
    serve_disks()?;
    watch()?;
    show_sandbox()?;
    wait_for_a_front_end_by_a_socket_unit()?;
    load_and_upgrade(env)?;
    reload_many()?;
    refuse_images_in_tmp()?;
    remove()?;
    apt("purge vhost-blk")?;
    ensure!(Path::new(IMAGES).join("data.img").exists(), "the purge took an image");
    fs::remove_dir_all(IMAGES)?;
    expect_same_files(&before)
}

/// The daemon for many disks runs at once, and has no disk.
fn check_fresh_installation() -> Result<()> {
    expect_state(MANY, "active")?;
    ensure!(property(MANY, "Type")? == "notify", "{MANY} does not report its readiness");
    ensure!(property(MANY, "UnitFileState")? == "enabled", "{MANY} is not enabled");
    expect_access("/run/vhost-blk/control", 0o600, "root")?;
    run("getent", &["group", "vhost-blk"]).context("no group of /dev/vhost-blk")?;
    for file in [
        "/usr/share/man/man1/vhost-blk-serve.1.gz",
        "/usr/share/qemu/vhost-user/50-vhost-blk.json",
        "/usr/share/bash-completion/completions/vhost-blk",
    ] {
        ensure!(Path::new(file).exists(), "the package has no {file}");
    }
    Ok(())
}

/// A daemon without its storage is not active, and the journal has the reason. It serves storage that comes after more
/// starts than systemd allows by default. It has a user of its own, by the documented drop-in.
fn serve_late_storage() -> Result<()> {
    let (unit, image, socket) = ("vhost-blk@late.service", "/late.img", "/run/vhost-blk-late/s");
    let drop_in = format!("/run/systemd/system/{unit}.d");
    fs::create_dir_all(&drop_in)?;
    let groups = "SupplementaryGroups=kvm vhost-blk";
    fs::write(format!("{drop_in}/user.conf"), format!("[Service]\nUser=daemon\n{groups}\n"))?;
    run("systemctl", &["daemon-reload"])?;
    let file = Path::new(CONFIGURATION).join("late.toml");
    let text =
        format!("blk-file = \"{image}\"\nsocket-path = \"{socket}\"\nsocket-group = \"kvm\"\n");
    fs::write(&file, text)?;
    ensure!(run("systemctl", &["start", unit]).is_err(), "{unit} starts without its image");
    let said = run("journalctl", &["--no-pager", "--output", "cat", "--unit", unit])?;
    ensure!(said.contains(image), "the journal of {unit} has no reason:\n{said}");
    wait_until_so(LIMIT, "more starts than the default limit", || {
        Ok(property(unit, "NRestarts")?.parse::<u32>()? > STARTS_DEFAULT)
    })?;
    run("/usr/bin/vhost-blk", &["create", "/new.img", "16M"])?;
    run("chown", &["daemon", "/new.img"])?;
    fs::rename("/new.img", image)?;
    wait_until_so(LIMIT, "the late disk", || Ok(property(unit, "ActiveState")? == "active"))?;
    expect_access(socket, 0o660, "kvm")?;
    let user = run("ps", &["-o", "user=", "-p", &main_pid(unit)?.to_string()])?;
    ensure!(user.trim() == "daemon", "{unit} runs as {user}");
    run("systemctl", &["stop", unit])?;
    fs::remove_dir_all(drop_in)?;
    run("systemctl", &["daemon-reload"])?;
    fs::remove_file(image)?;
    Ok(fs::remove_file(file)?)
}

/// Starts a daemon for an image, and one whose disk is in memory.
fn serve_disks() -> Result<()> {
    fs::create_dir_all(IMAGES)?;
    for name in ["data", "more"] {
        run("/usr/bin/vhost-blk", &["create", &format!("{IMAGES}/{name}.img"), "64M"])?;
    }
    let disk = |name: &str, text: &str| fs::write(format!("{CONFIGURATION}/{name}.toml"), text);
    disk(
        "100-data",
        "blk-file = \"/var/lib/images/data.img\"\nsocket-path = \"/run/vhost-blk-100-data/disk.sock\"\n\
         control-path = \"/run/vhost-blk-100-data/control.sock\"\nsocket-group = \"kvm\"\n\
         num-queues = 2\ndata-plane = \"uring\"\n",
    )?;
    disk(
        "memory",
        "backend = \"mem\"\nsize = \"16M\"\nsocket-path = \"/run/vhost-blk-memory/disk.sock\"\n\
         control-path = \"/run/vhost-blk-memory/control.sock\"\n",
    )?;
    for unit in [DATA, MEMORY] {
        run("systemctl", &["enable", "--now", unit])?;
        expect_state(unit, "active")?;
    }
    // Readiness: the socket is there as soon as the unit is active.
    expect_access(DATA_SOCKET, 0o660, "kvm")?;
    expect_access("/run/vhost-blk-memory/disk.sock", 0o600, "root")?;
    Ok(())
}

/// systemd watches the daemons, gets their pings, and starts one again that has stopped.
fn watch() -> Result<()> {
    for unit in [MANY, DATA] {
        ensure!(property(unit, "WatchdogUSec")? == "30s", "{unit} is not watched for 30 s");
    }
    let directory = format!("/run/systemd/system/{MEMORY}.d");
    fs::create_dir_all(&directory)?;
    fs::write(format!("{directory}/soon.conf"), "[Service]\nWatchdogSec=3\n")?;
    run("systemctl", &["daemon-reload"])?;
    run("systemctl", &["restart", MEMORY])?;
    let first = property(MEMORY, "WatchdogTimestampMonotonic")?;
    wait_until_so(
        LIMIT,
        "a ping",
        || Ok(property(MEMORY, "WatchdogTimestampMonotonic")? != first),
    )?;
    let stopped = main_pid(MEMORY)?;
    run("kill", &["-STOP", &stopped.to_string()])?;
    wait_until_so(LIMIT, "the daemon that systemd starts again", || {
        Ok(![0, stopped].contains(&main_pid(MEMORY)?))
    })?;
    let said = run("journalctl", &["--no-pager", "--output", "cat", "--unit", MEMORY])?;
    ensure!(said.contains("Watchdog timeout"), "systemd restarted it for another reason:\n{said}");
    fs::remove_dir_all(&directory)?;
    run("systemctl", &["daemon-reload"])?;
    run("systemctl", &["restart", MEMORY])?;
    expect_state(MEMORY, "active")
}

/// systemd makes the socket of a disk, which outlives the daemon for many disks beside it, and starts
/// the disk's own daemon with the first front-end.
fn wait_for_a_front_end_by_a_socket_unit() -> Result<()> {
    let (socket, service) = ("vhost-blk@later.socket", "vhost-blk@later.service");
    let file = "/run/vhost-blk/later.sock";
    fs::write(format!("{CONFIGURATION}/later.toml"), "backend = \"null\"\nsize = \"16M\"\n")?;
    run("systemctl", &["enable", "--now", socket])?;
    run("systemctl", &["restart", MANY])?;
    expect_access(file, 0o660, "kvm")?;
    expect_state(service, "inactive")?;
    let mut device = Device::from_stream(UnixStream::connect(file)?, &options())?;
    device.flush()?;
    expect_state(service, "active")
}

/// Prints the rating of the units, and fails if one has lost restrictions (10.0 is the worst).
fn show_sandbox() -> Result<()> {
    for unit in [MANY, DATA] {
        let rating = run("systemd-analyze", &["security", "--no-pager", "--threshold=25", unit])
            .with_context(|| format!("{unit} has fewer restrictions than before"))?;
        println!("{}", rating.lines().last().unwrap_or_default());
    }
    Ok(())
}

/// Upgrades the package, and then kills the daemon, while two queues write and verify.
fn load_and_upgrade(env: &Env) -> Result<()> {
    verified_load(env, DATA_SOCKET, |handles, specs| {
        upgrade(handles)?;
        allow_lost_calls(specs, true);
        crash(handles)
    })
}

/// Runs `body` while two queues of the disk write and verify; each has made progress before.
fn verified_load(
    env: &Env,
    socket: &str,
    body: impl FnOnce(&mut Handles, &[Spec]) -> Result<()>,
) -> Result<()> {
    let specs: Vec<Spec> = (0..2)
        .map(|queue| {
            let sectors = queue * PART..(queue + 1) * PART;
            Spec::new(sectors, 1, REQUEST_MAX, env.seed() + queue)
        })
        .collect();
    let options = Options {
        num_queues: 2,
        queue_size: 256,
        regions: memory_for(&specs),
        scratch_bytes: 4096,
        inflight: true,
        ..options()
    };
    let device = Device::from_stream(UnixStream::connect(socket)?, &options)?;
    let done = under_load(device, specs.clone(), |handles| {
        handles.wait_for_progress(STEP)?;
        body(handles, &specs)
    })?;
    for (queue, done) in done.iter().enumerate() {
        println!("queue {queue}: {} requests, {} bytes verified", done.requests, done.verified);
        ensure!(done.errors == 0, "queue {queue}: {} errors", done.errors);
    }
    Ok(())
}

/// The package's scripts replace the program of the running daemons, or leave the old one running.
fn upgrade(handles: &mut Handles) -> Result<()> {
    let (data, memory) = (main_pid(DATA)?, main_pid(MEMORY)?);
    let said = install(&["vhost-blk"], New)?;
    ensure!(said.contains(&format!("{DATA} changed to the new program")), "not upgraded: {DATA}");
    ensure!(
        said.contains(&format!("{MEMORY} goes on with the old program")),
        "no word of {MEMORY}"
    );
    ensure!(said.contains(&format!("systemctl restart {MEMORY}")), "no remedy for {MEMORY}");
    ensure!(main_pid(DATA)? == data, "{DATA} has another process: its front-end lost it");
    ensure!(main_pid(MEMORY)? == memory, "{MEMORY} was restarted, and its content is lost");
    ensure!(runs_installed_program(DATA)?, "{DATA} runs the old program");
    ensure!(!runs_installed_program(MEMORY)?, "{MEMORY} claims to run the old program");
    // It has no disk yet.
    ensure!(runs_installed_program(MANY)?, "{MANY} runs the old program");
    handles.wait_for_progress(STEP).context("after the upgrade of the package")?;
    // A daemon that runs the new program needs no restart, whatever its upgrade answers.
    run("systemctl", &["restart", MEMORY])?;
    let said = sh("/usr/libexec/vhost-blk/after-upgrade 2>&1")?;
    ensure!(said.contains(&format!("{MEMORY} runs the new program, but:")), "it said:\n{said}");
    let is_false = said.contains(&format!("{MEMORY} goes on with the old program"));
    ensure!(!is_false, "a false report:\n{said}");
    handles.wait_for_progress(STEP).context("after a second run of after-upgrade")?;
    // The operator's way to do the same.
    run("systemctl", &["reload", DATA])?;
    ensure!(main_pid(DATA)? == data, "{DATA} has another process after the reload");
    handles.wait_for_progress(STEP).context("after the reload")
}

/// systemd starts a daemon again that was killed, and the front-end goes on with it.
fn crash(handles: &mut Handles) -> Result<()> {
    let killed = main_pid(DATA)?;
    run("kill", &["-KILL", &killed.to_string()])?;
    let stream = wait_until(LIMIT, "the daemon that systemd starts again", || {
        let is_new = main_pid(DATA)? != killed;
        Ok(if is_new { UnixStream::connect(DATA_SOCKET).ok() } else { None })
    })?;
    handles.reconnect(stream)?;
    handles.wait_for_progress(STEP).context("after the crash")
}

/// A reload adds a disk to the daemon for many, and fails if it cannot.
fn reload_many() -> Result<()> {
    fs::write(
        format!("{CONFIGURATION}/disks/more.toml"),
        "blk-file = \"/var/lib/images/more.img\"\nsocket-path = \"/run/vhost-blk/more.sock\"\n",
    )?;
    run("systemctl", &["reload", MANY])?;
    ensure!(Path::new("/run/vhost-blk/more.sock").exists(), "the reload did not wait for its disk");
    let bad = format!("{CONFIGURATION}/disks/bad.toml");
    fs::write(&bad, "blk-file = \"/none\"\nsocket-path = \"/run/vhost-blk/bad.sock\"\n")?;
    let told = sh(&format!("systemctl reload {MANY} && echo succeeded || true"))?;
    ensure!(!told.contains("succeeded"), "a reload with a wrong disk has succeeded");
    fs::remove_file(bad)?;
    run("systemctl", &["reload", MANY]).map(drop)
}

/// systemd empties the `/tmp` and `/var/tmp` of a unit at its end, so no copy may go there.
fn refuse_images_in_tmp() -> Result<()> {
    for directory in ["/tmp", "/var/tmp"] {
        let told = sh(&format!(
            "vhost-blk ctl --control-path /run/vhost-blk/control backup more --to {directory}/copy.img 2>&1 \
             && echo succeeded || true"
        ))?;
        ensure!(told.contains("Read-only file system"), "a backup to {directory} said: {told}");
    }
    Ok(())
}

/// The removal stops all daemons, and keeps the descriptions of the disks.
fn remove() -> Result<()> {
    apt("remove vhost-blk")?;
    let left = sh("pgrep --list-full --exact vhost-blk || true")?;
    ensure!(left.is_empty(), "the removal left daemons: {left}");
    let units = "systemctl list-units --plain --no-legend --state=active 'vhost-blk*'";
    let left = sh(units)?;
    ensure!(left.is_empty(), "the removal left units: {left}");
    for name in ["100-data", "memory", "disks/more"] {
        let file = Path::new(CONFIGURATION).join(format!("{name}.toml"));
        ensure!(file.exists(), "the removal took {}", file.display());
    }
    Ok(())
}
