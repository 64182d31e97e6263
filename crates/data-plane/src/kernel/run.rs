// SPDX-License-Identifier: Apache-2.0
//! The open device while queues run on it.

use super::device::{Signal, VhostBlk};
use super::error::{self, KernelError};
use super::workers::Workers;
use super::{KernelOptions, abi, address, counters, suits};
use crate::IoPoll;
use crate::planes::QueueSpec;
use crate::{InflightRegion, QueueStopped};
use backend::Disk;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use vhost::VhostBackend;
use virtio_blk::DiskView;
use virtqueue::{DirtyLog, GuestMemory};

/// See the module's head.
pub(super) struct Run {
    // The first field: closing the device drains it, and only then may mappings go.
    device: VhostBlk,
    workers: Workers,
    disk: DiskView,
    options: abi::Options,
    /// What was set for all queues.
    common: Common,
    queues: BTreeMap<u16, Held>,
}

/// What all queues of a run have in common, kept mapped.
struct Common {
    features: u64,
    memory: Arc<GuestMemory>,
    log: Option<Arc<DirtyLog>>,
}

impl Common {
    fn of(spec: &QueueSpec) -> Self {
        let setup = &spec.setup;
        let memory = Arc::clone(&setup.memory);
        Common { features: spec.features, memory, log: setup.log.clone() }
    }

    fn is_that_of(&self, spec: &QueueSpec) -> bool {
        let same_log = match (&self.log, &spec.setup.log) {
            (Some(ours), Some(its)) => Arc::ptr_eq(ours, its),
            (ours, its) => ours.is_none() && its.is_none(),
        };
        self.features == spec.features && Arc::ptr_eq(&self.memory, &spec.setup.memory) && same_log
    }
}

/// What a running queue needs to be there.
struct Held {
    call: Option<File>,
    _region: Option<Arc<InflightRegion>>,
}

impl Run {
    /// Opens the device and makes everything but the queues ready.
    pub(super) fn begin(
        disk: &dyn Disk,
        options: &KernelOptions,
        spec: &QueueSpec,
    ) -> Result<Run, KernelError> {
        let core = error::of_core;
        let storage = disk.kernel_file().map_err(|why| KernelError::Unsuited(why.into()))?;
        let device = VhostBlk::open(&options.path)?;
        let mut workers = Workers::before_owner(options.workers, &options.cpus);
        device.set_owner().map_err(core("VHOST_SET_OWNER"))?;
        workers.owned();
        let known = device.get_features().map_err(core("VHOST_GET_FEATURES"))?;
        let common = Common::of(spec);
        if let Some(log) = &common.log {
            address::check_log(log, &common.memory)?;
            device.set_log_base(log.host() as u64, None).map_err(core("VHOST_SET_LOG_BASE"))?;
        }
        let features = suits::features(spec.features, known, common.log.is_some())?;
        device.set_features(features).map_err(core("VHOST_SET_FEATURES"))?;
        let table = address::memory_table(&common.memory);
        device.set_mem_table(&table).map_err(core("VHOST_SET_MEM_TABLE"))?;
        device.attach(storage)?;
        let info = device.info()?;
        suits::disk(&info, &disk.info(), options.seg_max)?;
        device.set_serial(spec.disk.id())?;
        let flags = wanted_flags(disk, options, &info);
        let limits = disk.info();
        let sectors = |range: Option<backend::RangeLimits>| range.map_or(0, |it| it.sectors_max);
        let set = abi::Options {
            size: size_of::<abi::Options>() as u32,
            flags,
            max_discard_sectors: sectors(limits.discard),
            max_write_zeroes_sectors: sectors(limits.write_zeroes),
            max_secure_erase_sectors: sectors(limits.secure_erase),
            reserved: 0,
        };
        let queues = BTreeMap::new();
        let mut run =
            Run { device, workers, disk: spec.disk.clone(), options: set, common, queues };
        run.set_options()?;
        Ok(run)
    }

    /// Sets the options with the cache mode of the moment; goes on unpinned where memory cannot be
    /// pinned.
    fn set_options(&mut self) -> Result<(), KernelError> {
        let through = if self.disk.write_through() { abi::OPT_WRITE_THROUGH } else { 0 };
        self.options.flags = self.options.flags & !abi::OPT_WRITE_THROUGH | through;
        match self.device.set_options(&self.options) {
            // The limit, or memory that cannot be pinned: a file of a disk's file system.
            Err(error) if self.options.flags & abi::OPT_PIN_MEMORY != 0 => {
                tracing::warn!(%error, "guest memory cannot be pinned; raise RLIMIT_MEMLOCK to its size and take memory that is no file on a disk, or set --pin-memory off; going on without");
                self.options.flags &= !abi::OPT_PIN_MEMORY;
                self.device.set_options(&self.options)
            }
            outcome => outcome,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queues.is_empty()
    }

    pub(super) fn start_queue(
        &mut self,
        options: &KernelOptions,
        spec: &QueueSpec,
    ) -> Result<(), KernelError> {
        if !self.common.is_that_of(spec) {
            let why = "guest memory, features or dirty log changed while other queues run";
            return Err(KernelError::Unsuited(why.into()));
        }
        if spec.kick.is_none() {
            let why = "the queue has no kick eventfd, and the kernel does not poll for ever";
            return Err(KernelError::Unsuited(why.into()));
        }
        let started = self.set_up(options, spec);
        if let Err(error) = started {
            self.unset(spec.index);
            return Err(error);
        }
        // Without a descriptor for a copy, one call may be missed: the kernel has its own.
        let call = spec.call.as_ref().and_then(|call| call.try_clone().ok());
        let mut held = Held { call, _region: spec.region.clone() };
        held.call(); // what an earlier run of the queue may have left uncalled
        self.queues.insert(spec.index, held);
        Ok(())
    }

    fn set_up(&mut self, options: &KernelOptions, spec: &QueueSpec) -> Result<(), KernelError> {
        let core = error::of_core;
        let QueueSpec { index, setup, .. } = spec;
        let at = usize::from(*index);
        let device = &self.device;
        if u32::from(setup.size) > abi::QUEUE_SIZE_MAX {
            return Err(KernelError::Unsuited(format!(
                "a queue of {} descriptors, and the kernel takes {}; lower the VMM's queue-size",
                setup.size,
                abi::QUEUE_SIZE_MAX
            )));
        }
        let base = setup.base as u16; // a split queue's, which was checked
        device.set_vring_num(at, setup.size).map_err(core("VHOST_SET_VRING_NUM"))?;
        device.set_vring_addr(&address::vring(*index, setup)?)?;
        device.set_vring_base(at, base).map_err(core("VHOST_SET_VRING_BASE"))?;
        device.set_vring_signal(*index, Signal::Call, spec.call.as_ref())?;
        device.set_vring_signal(*index, Signal::Err, spec.err.as_ref())?;
        // Before the kick: with one, the core waits for a grace period and for the old worker.
        self.workers.serve(device, *index);
        device.set_vring_signal(*index, Signal::Kick, spec.kick.as_ref())?;
        let part = spec.region.as_ref().and_then(|region| region.split_part(*index, setup.size));
        device.set_inflight(&abi::Inflight {
            index: (*index).into(),
            desc_num: part.map_or(0, |_| setup.size.into()),
            user_addr: part.unwrap_or(0),
        })?;
        let micros = u32::try_from(options.poll_max.as_micros()).unwrap_or(u32::MAX);
        device.set_busy_loop(*index, micros)?;
        device.set_queue(*index, true)
    }

    /// Lets go of the queue's eventfds.
    fn unset(&self, index: u16) {
        for signal in [Signal::Kick, Signal::Call, Signal::Err] {
            if let Err(error) = self.device.set_vring_signal(index, signal, None) {
                tracing::debug!(queue = index, ?signal, %error, "an eventfd stays set");
            }
        }
    }

    pub(super) fn stop_queue(&mut self, index: u16) -> QueueStopped {
        let drained = self.device.set_queue(index, false);
        if let Err(error) = &drained {
            tracing::error!(queue = index, %error, "the kernel did not stop the queue");
        }
        let base = self.device.get_vring_base(usize::from(index));
        let base = base.expect("a vring's base can always be had");
        self.unset(index);
        let stats = counters::stats(&counters::of_queue(&self.counters(), index));
        self.queues.remove(&index);
        QueueStopped { base, stats, faulted: drained.is_err() }
    }

    pub(super) fn set_call(&mut self, index: u16, call: Option<File>) -> Result<(), KernelError> {
        self.device.set_vring_signal(index, Signal::Call, call.as_ref())?;
        if let Some(held) = self.queues.get_mut(&index) {
            held.call = call;
            held.call(); // what the old eventfd may have missed
        }
        Ok(())
    }

    pub(super) fn cache_mode_changed(&mut self) -> Result<(), KernelError> {
        self.set_options()
    }

    pub(super) fn counters(&self) -> Vec<(String, String)> {
        self.device.fdinfo().map(|text| counters::of_fdinfo(&text)).unwrap_or_default()
    }
}

impl Held {
    fn call(&mut self) {
        if let Some(call) = &mut self.call {
            let _ = call.write(&1u64.to_ne_bytes());
        }
    }
}

/// The flags but that of the cache mode.
fn wanted_flags(disk: &dyn Disk, options: &KernelOptions, info: &abi::Info) -> u32 {
    let poll = match options.iopoll {
        IoPoll::Auto => info.flags & abi::INFO_POLL_QUEUES != 0,
        IoPoll::On => true,
        IoPoll::Off => false,
    };
    let wanted = [
        (abi::OPT_READ_ONLY, disk.info().read_only),
        (abi::OPT_IOPOLL, poll),
        (abi::OPT_PIN_MEMORY, options.pin_memory),
    ];
    let flags = wanted.iter().filter(|(_, on)| *on).fold(0, |flags, (flag, _)| flags | flag);
    let unknown = flags & !info.option_flags;
    if unknown != 0 {
        tracing::warn!(
            options = format_args!("{unknown:#x}"),
            "this kernel module does not know some options: they have no effect"
        );
    }
    flags & info.option_flags
}
