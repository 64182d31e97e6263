// SPDX-License-Identifier: Apache-2.0
//! `make demo-storage`: the life of a disk, told in numbered steps. A guest fills a qcow2 overlay,
//! which is snapshotted, backed up, grown and merged meanwhile; the running disk moves to an NVMe/TCP
//! namespace; from there the guest moves to another host, and paths are lost.
//!
//! * [`account`]: the numbered steps.
//! * [`files`]: the images, and the files with their checksums.

mod account;
mod files;

use anyhow::{Result, ensure};
use kit::system::sha256;
use kit::wait::wait_until_so;
use std::path::Path;
use std::time::Duration;

use super::daemon::{Daemon, Plane};
use super::disk::check_ext4;
use super::guest::{Guest, Migration};
use super::migrate_nvme::{Host, Hosts, SERIAL, spec};
use super::{Needs, Setup, load};
use crate::case::cases;
use account::Account;
use files::{Files, check_qcow2, compare, install, text, written_mb};

cases! { Nested;
    "demo-storage", Needs::MODULE,
        "make demo-storage: a guest's qcow2 overlay is snapshotted, backed up, grown, merged and moved to NVMe/TCP while it writes; there the guest moves to another host, and paths are lost",
        run;
}

/// Options of a disk with images, whose blocks are those of the namespace.
const CHAIN: [&str; 4] =
    ["--num-queues=2", "--format=qcow2", "--allow-backing=same-dir", "--logical-block-size=4096"];
/// Longest time for the guest to see a size; emulation needs only a part of it.
const SIZE_LIMIT: Duration = Duration::from_secs(60);
/// Longest time for the disk to return to the kernel plane.
const PLANE_LIMIT: Duration = Duration::from_secs(60);
/// Name of the bitmap of the backups.
const BITMAP: &str = "nightly";

const SET_UP: &str = "\
Stand-ins of this demonstration:
  two hosts    two daemons and two QEMUs in one Linux kernel, each host with its own host NQN, NVMe
               controllers and block device. They share the target, and no lock of an image.
  the target   nvmet of the same kernel, over TCP on the loopback interface; one image, two paths to
               each host. Each host sees it in a subsystem of its own, because Linux would make one
               block device of the paths of both hosts.
  a lost path  the target ends the connections of a port and refuses new ones.
  the guest    Linux in stock QEMU with KVM. It boots once; from then to the end fio writes to its
               disk, reads back and compares without a pause.
  not shown    a real network, and two machines.";

/// Runs the case.
fn run(setup: &Setup) -> Result<()> {
    println!("{SET_UP}");
    let account = &mut Account::default();
    account.step("An NVMe/TCP target with two paths to each of two hosts");
    let hosts = Hosts::connect()?;
    let (source, destination) = (hosts.node(Host::Source), hosts.node(Host::Destination));
    account.done(format_args!(
        "{} MiB; {} on the first host, {} on the second one",
        hosts.bytes() >> 20,
        source.display(),
        destination.display()
    ));
    let served = on_images(setup, account, &hosts)?;
    on_nvme(setup, account, &hosts, served)?;
    account.end();
    Ok(())
}

/// A running guest and the daemon that serves its disk.
struct Served {
    guest: Guest,
    daemon: Daemon,
}

/// The guest's time on the images of the first host. In the end its disk is the namespace.
fn on_images(setup: &Setup, account: &mut Account, hosts: &Hosts) -> Result<Served> {
    account
        .step("A guest on a qcow2 overlay of a base image, on the file system of the first host");
    let files = Files::create()?;
    let base = sha256(&files.base())?;
    let daemon = Daemon::automatic(&setup.program, &files.overlay(), SERIAL, &CHAIN)?;
    let mut guest = Guest::boot(&setup.image, &spec(&daemon, false))?;
    let node = guest.virtio_disk(SERIAL)?;
    guest.ok(&format!("mount {node} /run/disk"))?;
    install(&mut guest)?;
    load::start(&mut guest)?;
    load::wait_for_another_round(&mut guest)?;
    account.done("booted; copied the programs of its system to the disk; fio writes from now on");
    same_files(account, &mut guest)?;
    snapshot(account, &files, &daemon, &mut guest)?;
    back_up(account, &files, &daemon, &mut guest)?;
    grow(account, &daemon, &mut guest, hosts.bytes())?;
    back_up_changes(account, &files, &daemon, &mut guest)?;
    merge(account, &daemon, &mut guest)?;
    to_block_device(account, &daemon, &mut guest, hosts.node(Host::Source))?;
    check_qcow2(&files.overlay())?;
    account.checked("qemu-img check: the overlay, which the disk has left, has no error");
    ensure!(sha256(&files.base())? == base, "the base image has changed");
    account.checked("SHA-256: the base image has no changed byte");
    Ok(Served { guest, daemon })
}

fn snapshot(
    account: &mut Account,
    files: &Files,
    daemon: &Daemon,
    guest: &mut Guest,
) -> Result<()> {
    account.step("A snapshot while the guest writes");
    daemon.control(&["snapshot", "--to", &text(&files.path("disk-1.qcow2"))])?;
    account.done("ctl snapshot: the guest goes on in a new overlay, the old one stays as it was");
    goes_on(account, guest)?;
    let (disk, chain) = (files.overlay(), daemon.control(&["snapshots"])?);
    ensure!(chain.contains(&text(&disk)), "the chain lacks {}: {chain}", disk.display());
    account.checked("ctl snapshots: the chain has the old overlay");
    Ok(())
}

fn back_up(account: &mut Account, files: &Files, daemon: &Daemon, guest: &mut Guest) -> Result<()> {
    account.step("A backup while the guest writes");
    let copy = files.path("backup.qcow2");
    let to = text(&copy);
    daemon
        .control(&["backup", "--to", &to, "--format", "qcow2", "--bitmap", BITMAP, "--verify"])?;
    account.done(format_args!(
        "ctl backup --bitmap {BITMAP} --verify: one file of {} MB without a backing file",
        copy.metadata()?.len() / 1_000_000
    ));
    goes_on(account, guest)?;
    check_copy(account, files, &copy)
}

fn back_up_changes(
    account: &mut Account,
    files: &Files,
    daemon: &Daemon,
    guest: &mut Guest,
) -> Result<()> {
    account.step("A backup of the changes since the last one, while the guest writes");
    let copy = files.path("changes.qcow2");
    daemon.control(&["backup", "--to", &text(&copy), "--incremental", BITMAP])?;
    account.done(format_args!(
        "ctl backup --incremental {BITMAP}: a file of {} MB on top of the first backup",
        copy.metadata()?.len() / 1_000_000
    ));
    goes_on(account, guest)?;
    check_copy(account, files, &copy)
}

/// Checks a copy of the disk of a guest that writes.
fn check_copy(account: &mut Account, files: &Files, copy: &Path) -> Result<()> {
    let count = files.check_copy(copy)?;
    account.checked("qemu-img check: the copy has no error and no leak");
    account.checked("e2fsck: its file system is sound after the replay of the journal");
    account.checked(format_args!("SHA-256: the copy has all {count} files, each right"));
    Ok(())
}

fn grow(account: &mut Account, daemon: &Daemon, guest: &mut Guest, bytes: u64) -> Result<()> {
    account.step("The disk grows while the guest writes");
    daemon.control(&["resize", &bytes.to_string()])?;
    let node = guest.virtio_disk(SERIAL)?;
    wait_until_so(SIZE_LIMIT, "the new size in the guest", || {
        Ok(guest.ok(&format!("blockdev --getsize64 {node}"))?.trim() == bytes.to_string())
    })?;
    guest.ok(&format!("resize2fs {node}"))?;
    account.done("ctl resize; in the guest resize2fs, mounted");
    account.checked(format_args!("the guest sees {} MiB", bytes >> 20));
    goes_on(account, guest)
}

fn merge(account: &mut Account, daemon: &Daemon, guest: &mut Guest) -> Result<()> {
    account.step("The snapshot is given up while the guest writes");
    daemon.control(&["commit"])?;
    account
        .done("ctl commit: the new overlay was merged into the old one, where the guest goes on");
    goes_on(account, guest)
}

/// Moves the running disk to the namespace, which has its size.
fn to_block_device(
    account: &mut Account,
    daemon: &Daemon,
    guest: &mut Guest,
    node: &Path,
) -> Result<()> {
    account.step("The disk moves to the NVMe/TCP namespace while the guest writes");
    let said = daemon.control(&["mirror", "--to", &text(node), "--overwrite", "--complete"])?;
    account.done("ctl mirror --complete: copied, followed the writes, and took over");
    account.figure(said.trim());
    goes_on(account, guest)?;
    same_files(account, guest)?;
    wait_until_so(PLANE_LIMIT, "the disk on the kernel plane", || {
        Ok(daemon.control(&["status"])?.contains(Plane::Kernel.name()))
    })?;
    account.checked("ctl status: the kernel plane serves the raw device");
    Ok(())
}

/// The guest's time on the namespace, on both hosts.
fn on_nvme(setup: &Setup, account: &mut Account, hosts: &Hosts, served: Served) -> Result<()> {
    account.step("The guest moves to the second host while it writes");
    let Served { guest, daemon: old } = served;
    let new = hosts.serve(setup, Host::Destination, Plane::Kernel)?;
    let (mut guest, migration) = hosts.migrate(setup, guest, &new)?;
    let node = guest.virtio_disk(SERIAL)?;
    let Migration { rounds, downtime_ms } = migration;
    account.done("live migration to the daemon and the QEMU of the second host");
    account.checked("the first host lost a path during it: a round of fio was verified without it");
    goes_on(account, &mut guest)?;
    account.figure(format_args!("{downtime_ms} ms of pause; dirty log read {rounds} times"));

    account.step("The second host loses one of its two paths");
    hosts.lose_path(Host::Destination, 0)?;
    account.done("the target has cut it; one path is left");
    goes_on(account, &mut guest)?;

    account.step("The end");
    load::finish(&mut guest)?;
    load::verify_once(&mut guest)?;
    account.checked("fio has ended without an error or a wrong byte");
    same_files(account, &mut guest)?;
    account.figure(format_args!("{} MB written since its boot", written_mb(&mut guest, &node)?));
    guest.ok("umount /run/disk")?;
    guest.cut_power();
    [old, new].into_iter().try_for_each(Daemon::stop)?;
    account.checked("both daemons ended in order");
    check_ext4(hosts.node(Host::Destination))?;
    account.checked("e2fsck on the second host: the file system is sound");
    Ok(())
}

/// Checks that the load goes on without an error.
fn goes_on(account: &mut Account, guest: &mut Guest) -> Result<()> {
    load::wait_for_another_round(guest)?;
    account.checked("fio in the guest has written and verified another round");
    Ok(())
}

/// Checks all files in the guest.
fn same_files(account: &mut Account, guest: &mut Guest) -> Result<()> {
    let count = compare(guest)?;
    account.checked(format_args!("SHA-256 in the guest: all {count} files are right"));
    Ok(())
}
