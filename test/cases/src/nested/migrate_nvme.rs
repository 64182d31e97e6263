// SPDX-License-Identifier: Apache-2.0
//! A guest migrates live between two hosts that share a namespace of an NVMe/TCP target, over two
//! paths each. Both hosts are in one kernel, see [`crate::host::fixture::NvmeTcp`]: each has its own
//! daemon, QEMU, host NQN and block device. As between machines, no lock is common to both devices.

use std::path::Path;

use anyhow::{Context, Result};

use super::daemon::{Daemon, Plane};
use super::disk::check_ext4;
use super::guest::{Guest, GuestSpec, Migration};
use super::migrate::UNDER_LOAD;
use super::{Needs, Setup, load};
use crate::case::cases;
use crate::host::fixture::{Disk, NvmeTcp};

cases! { Nested;
    "migration-nvme-tcp", Needs::MODULE,
        "a guest that writes migrates between two hosts on NVMe/TCP on the kernel plane, and paths are lost during and after it, without an I/O error",
        |setup| run(setup, Plane::Kernel);
    "migration-nvme-tcp-uring", Needs::NOTHING,
        "the same on the io_uring plane",
        |setup| run(setup, Plane::Uring);
}

/// Serial number of the disk.
pub(super) const SERIAL: &str = "moved";
/// Queues of the disk.
const QUEUES: u16 = 2;
/// Seconds without a connection after which a host gives a controller up: more than a case takes.
const LOSS_NEVER: u32 = 3600;

/// Bytes a second of a migration that does not end before a round of the load.
const SLOWLY: u64 = 128 << 10;

/// A host, of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Host {
    /// The guest starts here.
    Source,
    /// The guest moves here.
    Destination,
}

/// Both hosts, with their block devices and paths.
pub(super) struct Hosts([(Disk, NvmeTcp); 2]);

impl Hosts {
    /// Makes the target, and connects both hosts over both paths.
    pub(super) fn connect() -> Result<Self> {
        NvmeTcp::expect_lost_paths();
        NvmeTcp::connect_two_hosts(LOSS_NEVER).map(Self)
    }

    /// Block device of a host.
    pub(super) fn node(&self, host: Host) -> &Path {
        &self.0[host as usize].0.path
    }

    /// Size of the namespace in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.0[0].0.bytes
    }

    /// Cuts one of the two paths of a host, and waits until the host has noticed.
    pub(super) fn lose_path(&self, host: Host, path: usize) -> Result<()> {
        let target = &self.0[host as usize].1;
        target.cut(path)?;
        target.wait_for_paths(1)
    }

    /// Mends the cut path of a host, and waits until it is in use again.
    pub(super) fn mend_path(&self, host: Host, path: usize) -> Result<()> {
        let target = &self.0[host as usize].1;
        target.mend(path)?;
        target.wait_for_paths(2)
    }

    /// Starts the daemon of a host; that of the destination waits for the guest.
    pub(super) fn serve(&self, setup: &Setup, host: Host, plane: Plane) -> Result<Daemon> {
        let queues = format!("--num-queues={QUEUES}");
        let incoming = format!("--incoming={}", ["off", "on"][host as usize]);
        Daemon::start(&setup.program, self.node(host), SERIAL, plane, &[&queues, &incoming])
    }

    /// Moves the guest to the destination, where `daemon` waits. The source loses a path while
    /// memory is copied, and the load goes on over the other one before the copy ends.
    pub(super) fn migrate(
        &self,
        setup: &Setup,
        mut source: Guest,
        daemon: &Daemon,
    ) -> Result<(Guest, Migration)> {
        let mut target = Guest::start(&setup.image, &spec(daemon, true))?;
        source.limit_migration(SLOWLY)?;
        let migration = source.migrate_during(&mut target, |source| {
            self.lose_path(Host::Source, 0)?;
            load::wait_for_another_round(source).context("the source has lost a path")?;
            source.limit_migration(UNDER_LOAD)
        })?;
        source.cut_power();
        Ok((target, migration))
    }
}

/// A guest whose disk the daemon serves.
pub(super) fn spec(daemon: &Daemon, incoming: bool) -> GuestSpec {
    GuestSpec { disks: daemon.qemu_args(QUEUES), incoming, ..GuestSpec::default() }
}

/// Runs the case.
fn run(setup: &Setup, plane: Plane) -> Result<()> {
    let hosts = Hosts::connect()?;
    let daemons =
        [hosts.serve(setup, Host::Source, plane)?, hosts.serve(setup, Host::Destination, plane)?];
    let mut source = Guest::boot(&setup.image, &spec(&daemons[0], false))?;
    let node = source.virtio_disk(SERIAL)?;
    load::format(&mut source, &node)?;
    load::write_kept(&mut source)?;
    load::start(&mut source)?;
    let (mut target, migration) = hosts.migrate(setup, source, &daemons[1])?;
    load::wait_for_another_round(&mut target).context("with both paths")?;
    for path in [0, 1] {
        hosts.lose_path(Host::Destination, path)?;
        load::wait_for_another_round(&mut target)
            .with_context(|| format!("without path {path}"))?;
        hosts.mend_path(Host::Destination, path)?;
    }
    load::finish(&mut target)?;
    load::check_kept(&mut target)?;
    load::verify_once(&mut target)?;
    target.ok("umount /run/disk")?;
    target.cut_power();
    daemons.into_iter().try_for_each(Daemon::stop)?;
    check_ext4(hosts.node(Host::Destination))?;
    let Migration { rounds, downtime_ms } = migration;
    println!(
        "moved under load: dirty log read {rounds} times, {downtime_ms} ms of standstill; three \
         paths were lost, all data verified"
    );
    Ok(())
}
