// SPDX-License-Identifier: Apache-2.0
//! A guest of libvirt on a disk of the package's daemon, as the documents tell an operator.

mod guest;
mod page;

use crate::case::cases;
use crate::host::env::Env;
use crate::host::packages::system::Version::{New, Old};
use crate::host::packages::system::{expect_access, expect_state, install, main_pid, property, sh};
use crate::host::packages::{IMAGES, MANY};
use crate::host::target::LIMIT;
use anyhow::{Context, Result, ensure};
use guest::Guest;
use kit::agent::Shell;
use kit::set::Set::Libvirt;
use kit::system::run;
use kit::wait::wait_until_so;
use page::Commands;
use serde_json::Value;
use std::path::Path;

cases! { Host;
    "libvirt-debian12", Libvirt,
        "libvirt starts a guest on a disk of the package's daemon by the documented commands; the disk grows, is limited and watched, and outlives an upgrade of the package, its daemon and its guest",
        guest_of_libvirt;
}

/// Bytes of the documented image, and after its growth.
const SIZES: [u64; 2] = [1 << 30, 2 << 30];
const SOCKET: &str = "/run/vhost-blk/data.sock";
const METRICS: &str = "/run/vhost-blk/metrics";
/// A limit that a guest under any emulation exceeds.
const LOW_LIMIT: &str = "5";

/// Follows the documents from the package to the end of the guest.
fn guest_of_libvirt(_: &Env) -> Result<()> {
    let commands = Commands::read()?;
    install(&["vhost-blk"], Old)?;
    expect_state(MANY, "active")?;
    Guest::prepare(Path::new("guest.xml"))?;
    follow(&commands.serve)?;
    expect_access(SOCKET, 0o660, "kvm")?;
    let mut guest = start(&commands)?;
    let sum = write(&mut guest)?;
    grow(&commands, &mut guest)?;
    limit(&commands, &mut guest)?;
    watch(&commands)?;
    upgrade(&mut guest, &sum)?;
    restart(&mut guest, &sum)?;
    end(&commands)
}

/// Runs documented commands as an operator does, without the lab's programs.
fn follow(commands: &str) -> Result<String> {
    println!("{commands}");
    let said = sh(&format!("export PATH=/usr/sbin:/usr/bin:/sbin:/bin\nset -e\n{commands}"))?;
    println!("{said}");
    Ok(said)
}

/// Starts the guest, which is confined and may still use the socket.
fn start(commands: &Commands) -> Result<Guest> {
    follow(&commands.start)?;
    let pid = sh("cat /run/libvirt/qemu/guest.pid")?;
    let user = sh(&format!("stat -c %U /proc/{pid}"))?;
    ensure!(user == "libvirt-qemu", "QEMU runs as {user}");
    let profile = sh(&format!("cat /proc/{pid}/attr/current"))?;
    let is_confined = profile.starts_with("libvirt-") && profile.ends_with("(enforce)");
    ensure!(is_confined, "AppArmor does not confine QEMU: {profile}");
    // libvirt leaves owner and mode of the socket alone.
    expect_access(SOCKET, 0o660, "kvm")?;
    Guest::wait()
}

/// The guest makes a file system and a file, and reads it from the disk; returns its sum.
fn write(guest: &mut Guest) -> Result<String> {
    ensure!(size(guest)? == SIZES[0], "the guest sees {} bytes", size(guest)?);
    guest.ok("/usr/sbin/mke2fs -q -t ext4 /dev/vda && mount -t ext4 /dev/vda /mnt")?;
    guest.ok("dd if=/dev/urandom of=/mnt/file bs=64k count=64 2>/dev/null && sync")?;
    let written = guest.ok("md5sum /mnt/file")?;
    expect_content(guest, &written)?;
    Ok(written)
}

/// Fails if the file on the disk, not the one in the guest's memory, has another sum.
fn expect_content(guest: &mut Guest, written: &str) -> Result<()> {
    let read = guest.ok("sync; echo 3 >/proc/sys/vm/drop_caches; md5sum /mnt/file")?;
    ensure!(read == *written, "the guest wrote {written} and reads {read}");
    Ok(())
}

/// The size of the disk in the guest.
fn size(guest: &mut Guest) -> Result<u64> {
    let bytes = guest.ok("blockdev --getsize64 /dev/vda")?;
    bytes.trim().parse().with_context(|| format!("the guest's size: {bytes}"))
}

/// The disk and the guest's file system grow while the guest uses them.
fn grow(commands: &Commands, guest: &mut Guest) -> Result<()> {
    follow(&commands.grow)?;
    wait_until_so(LIMIT, "the new size in the guest", || Ok(size(guest)? == SIZES[1]))?;
    guest.ok("/usr/sbin/resize2fs /dev/vda")?;
    let blocks = guest.ok("echo $(($(stat -f -c '%b * %S' /mnt)))")?;
    let bytes: u64 = blocks.trim().parse().with_context(|| format!("the file system: {blocks}"))?;
    ensure!(bytes > SIZES[0], "the guest's file system has {bytes} bytes");
    Ok(())
}

/// A limit makes requests of the guest wait.
fn limit(commands: &Commands, guest: &mut Guest) -> Result<()> {
    follow(&commands.limit)?;
    let limits = status()?["limits"].clone();
    ensure!(limits["iops"] == 5000 && limits["bandwidth"] == 200 << 20, "the limits: {limits}");
    let before = total("throttled")?;
    ctl(&["limit", "data", "--iops", LOW_LIMIT])?;
    guest.ok("for i in 1 2 3 4 5; do echo $i >/mnt/other; sync; done")?;
    ensure!(total("throttled")? > before, "no request has waited for a limit");
    ctl(&["limit", "data", "--none"]).map(drop)
}

/// The counters of the disk are those of the guest.
fn watch(commands: &Commands) -> Result<()> {
    expect_access(METRICS, 0o600, "root")?;
    let page = follow(&commands.watch)?;
    for line in [
        "vhost_blk_disk_up{disk=\"data\"} 1".to_owned(),
        "vhost_blk_front_end_connected{disk=\"data\"} 1".to_owned(),
        format!("vhost_blk_capacity_bytes{{disk=\"data\"}} {}", SIZES[1]),
    ] {
        ensure!(page.lines().any(|found| found == line), "the metrics have no line {line}");
    }
    ensure!(total("write_bytes")? > 4 << 20, "less was written than the guest's file");
    ensure!(total("failed")? == 0, "requests failed");
    Ok(())
}

/// The package's new version replaces the program under the guest, which stays connected.
fn upgrade(guest: &mut Guest, sum: &str) -> Result<()> {
    let before = (main_pid(MANY)?, status()?["front_ends"].clone());
    let said = install(&["vhost-blk"], New)?;
    ensure!(said.contains(&format!("{MANY} changed to the new program")), "not upgraded: {MANY}");
    let after = (main_pid(MANY)?, status()?["front_ends"].clone());
    ensure!(after == before, "the daemon or the connection is another one: {before:?}, {after:?}");
    guest.ok("echo upgraded >/mnt/upgraded && sync")?;
    expect_content(guest, sum)
}

/// The guest goes on after a restart of the service, which serves the saved disk again.
fn restart(guest: &mut Guest, sum: &str) -> Result<()> {
    let before = main_pid(MANY)?;
    run("systemctl", &["restart", MANY])?;
    ensure!(main_pid(MANY)? != before, "{MANY} was not restarted");
    expect_content(guest, sum)?;
    let errors = guest.ok("dmesg | grep -ci 'i/o error' || true")?;
    ensure!(errors.trim() == "0", "the guest saw {errors} errors");
    Ok(())
}

/// The end of the guest leaves the daemon and the image sound.
fn end(commands: &Commands) -> Result<()> {
    let daemon = main_pid(MANY)?;
    follow(&commands.end)?;
    ensure!(main_pid(MANY)? == daemon, "the daemon has ended with the guest");
    expect_state(MANY, "active")?;
    ensure!(property(MANY, "NRestarts")? == "0", "systemd has started the daemon again");
    ensure!(!Path::new(SOCKET).exists(), "the removal left the socket");
    // The guest was not shut down: its journal is replayed first.
    sh(&format!("e2fsck -p {IMAGES}/data.img || [ $? -eq 1 ]; e2fsck -fn {IMAGES}/data.img"))?;
    let metadata = std::fs::metadata(format!("{IMAGES}/data.img"))?;
    ensure!(metadata.len() == SIZES[1], "the image has {} bytes", metadata.len());
    Ok(())
}

/// The answer to a command, from the installed program.
fn ctl(words: &[&str]) -> Result<Value> {
    let path = ["ctl", "--control-path", "/run/vhost-blk/control", "--json"];
    let said = run("/usr/bin/vhost-blk", &[&path[..], words].concat())?;
    serde_json::from_str(&said).with_context(|| format!("{words:?}: {said}"))
}

fn status() -> Result<Value> {
    ctl(&["status", "data"])
}

/// A counter of the disk, over all its queues.
fn total(counter: &str) -> Result<u64> {
    let stats = ctl(&["stats", "data"])?;
    let queues = stats["queues"].as_array().context("no queues")?;
    Ok(queues.iter().filter_map(|queue| queue[counter].as_u64()).sum())
}
