// SPDX-License-Identifier: Apache-2.0
//! The open device while queues run on it.

use super::device::{Signal, VhostBlk};
use super::failures::FailureWatch;
use super::stalls::StallThread;
use super::traces::TraceWatch;
use super::workers::Workers;
use super::{KernelOptions, abi, address, compat, counters, halt, memlock, shared};
use crate::error::{self, KernelError};
use crate::eventfd_watch::signal;
use crate::health::Health;
use crate::limits::{KernelUser, Limits, Share};
use crate::plane::{Choices, Coalesce, IoPoll, QueueSetup, QueueState};
use crate::region::InflightRegion;
use backend::Disk;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::num::NonZeroU64;
use std::sync::Arc;
use vhost::VhostBackend;
use virtio_blk::DiskView;
use virtqueue::{DirtyLog, GuestMemory, InflightChain};

/// The open device while queues run on it. Fields are dropped in this order.
pub(super) struct Run {
    /// They have descriptors of the device, and end before the device is closed.
    failures: FailureWatch,
    _traces: TraceWatch,
    _stalls: Option<StallThread>,
    // Closing the device drains it; the mappings below must outlive it.
    device: VhostBlk,
    /// The module uses these limits until it has others, or until the close.
    shared: Option<KernelUser>,
    /// Opened once, so that no lack of descriptors hides the counters.
    fdinfo: File,
    workers: Workers,
    disk: DiskView,
    options: abi::Options,
    health: Arc<Health>,
    /// Settings of all queues.
    common: Common,
    queues: BTreeMap<u16, Held>,
}

/// Settings that all queues of a run share; keeps memory and log mapped.
struct Common {
    features: u64,
    memory: Arc<GuestMemory>,
    log: Option<Arc<DirtyLog>>,
}

impl Common {
    fn of(setup: &QueueSetup) -> Self {
        let memory = Arc::clone(&setup.ring.memory);
        Common { features: setup.features, memory, log: setup.ring.log.clone() }
    }

    fn is_that_of(&self, setup: &QueueSetup) -> bool {
        let same_log = match (&self.log, &setup.ring.log) {
            (Some(ours), Some(its)) => Arc::ptr_eq(ours, its),
            (ours, its) => ours.is_none() && its.is_none(),
        };
        self.features == setup.features && Arc::ptr_eq(&self.memory, &setup.ring.memory) && same_log
    }
}

/// Resources that a running queue needs.
struct Held {
    call: Option<File>,
    region: Option<Arc<InflightRegion>>,
}

impl Run {
    /// Opens the device and sets up everything except the queues. The first request waits for
    /// `debt_ms` milliseconds if there is a limit.
    pub(super) fn begin(
        disk: &Arc<dyn Disk>,
        options: &KernelOptions,
        setup: &QueueSetup,
        debt_ms: u32,
    ) -> Result<Run, KernelError> {
        let core = error::of_core;
        let storage = disk.kernel_file().map_err(|why| KernelError::Unsuited(why.into()))?;
        let device = VhostBlk::open(&options.path)?;
        device.set_num_queues(options.num_queues.into())?;
        let own = || device.set_owner().map_err(core("VHOST_SET_OWNER"));
        let workers = Workers::start(options.workers, &options.cpus, own)?;
        let known = device.get_features().map_err(core("VHOST_GET_FEATURES"))?;
        let common = Common::of(setup);
        if let Some(log) = &common.log {
            address::check_log(log, &common.memory)?;
            device.set_log_base(log.host() as u64, None).map_err(core("VHOST_SET_LOG_BASE"))?;
        }
        let features = compat::features(setup.features, known, common.log.is_some())?;
        device.set_features(features).map_err(core("VHOST_SET_FEATURES"))?;
        let table = address::memory_table(&common.memory);
        device.set_mem_table(&table).map_err(core("VHOST_SET_MEM_TABLE"))?;
        device.attach(storage)?;
        let info = device.info()?;
        compat::disk(&info, &disk.info(), options.seg_max)?;
        device.set_serial(setup.disk.id())?;
        halt::check(&info, setup.health.policies())?;
        let flags = wanted_flags(&**disk, options, &info) | halt::flags(&setup.health);
        let limits = disk.info();
        let sectors = |range: Option<backend::RangeLimits>| range.map_or(0, |it| it.sectors_max);
        let batch = options.batch_size.filter(|_| flags & abi::OPT_BATCH != 0);
        let set = abi::Options {
            flags,
            max_discard_sectors: sectors(limits.discard),
            max_write_zeroes_sectors: sectors(limits.write_zeroes),
            max_secure_erase_sectors: sectors(limits.secure_erase),
            batch: batch.map_or(0, |size| size as u32), // at most 64
            limit_debt_ms: debt_ms,
            ..limit_options(&options.limits)
        };
        let mut run = Run {
            failures: FailureWatch::start(&device, Arc::clone(disk), Arc::clone(&setup.health))?,
            _traces: TraceWatch::start(&device, Arc::clone(&setup.health))?,
            _stalls: StallThread::start(&device, options.num_queues, Arc::clone(&setup.health))?,
            fdinfo: device.fdinfo()?,
            device,
            shared: None,
            workers,
            disk: setup.disk.clone(),
            options: set,
            health: Arc::clone(&setup.health),
            common,
            queues: BTreeMap::new(),
        };
        run.set_options()?;
        Ok(run)
    }

    /// Sets the options with the current cache mode. If memory cannot be pinned, continues without
    /// pinning.
    fn set_options(&mut self) -> Result<(), KernelError> {
        let through = if self.disk.write_through() { abi::OPT_WRITE_THROUGH } else { 0 };
        self.options.flags = self.options.flags & !abi::OPT_WRITE_THROUGH | through;
        match self.device.set_options(&self.options) {
            Err(error) if self.options.flags & abi::OPT_PIN_MEMORY != 0 => {
                let bytes = self.common.memory.regions().iter().map(|region| region.len()).sum();
                let remedy = pin_remedy(&error, bytes, memlock::room());
                crate::log_once_per_second!(warn, %error, "guest memory cannot be pinned; {remedy}, or set --pin-memory off; continuing without");
                self.options.flags &= !abi::OPT_PIN_MEMORY;
                self.device.set_options(&self.options)
            }
            outcome => outcome.map_err(of_old_module),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queues.is_empty()
    }

    /// Returns whether exactly `count` queues run.
    pub(super) fn is_all(&self, count: usize) -> bool {
        self.queues.len() == count
    }

    pub(super) fn start_queue(
        &mut self,
        options: &KernelOptions,
        setup: &QueueSetup,
        call: bool,
    ) -> Result<(), KernelError> {
        if !self.common.is_that_of(setup) {
            let why = "guest memory, features or dirty log changed while other queues run";
            return Err(KernelError::Unsuited(why.into()));
        }
        if setup.kick.is_none() {
            let why = "the queue has no kick eventfd, and the kernel does not poll forever";
            return Err(KernelError::Unsuited(why.into()));
        }
        let started = self.set_up(options, setup);
        if let Err(error) = started {
            self.unset(setup.index);
            return Err(error);
        }
        // If no descriptor is left for the copy, the guest may miss one call; the kernel has its
        // own.
        let copy = setup.call.as_ref().and_then(|call| call.try_clone().ok());
        let mut held = Held { call: copy, region: setup.region.clone() };
        if call {
            held.call();
        }
        self.queues.insert(setup.index, held);
        Ok(())
    }

    fn set_up(&mut self, options: &KernelOptions, setup: &QueueSetup) -> Result<(), KernelError> {
        let core = error::of_core;
        let QueueSetup { index, ring, .. } = setup;
        let at = usize::from(*index);
        let device = &self.device;
        if u32::from(ring.size) > abi::QUEUE_SIZE_MAX {
            return Err(KernelError::Unsuited(format!(
                "a queue of {} descriptors, and the kernel takes {}; lower the VMM's queue-size",
                ring.size,
                abi::QUEUE_SIZE_MAX
            )));
        }
        let base = ring.base as u16; // `VirtQueue::start` checked the base of a split queue
        device.set_vring_num(at, ring.size).map_err(core("VHOST_SET_VRING_NUM"))?;
        device.set_vring_addr(&address::vring(*index, ring)?)?;
        device.set_vring_base(at, base).map_err(core("VHOST_SET_VRING_BASE"))?;
        device.set_vring_signal(*index, Signal::Call, setup.call.as_ref())?;
        device.set_vring_signal(*index, Signal::Err, setup.err.as_ref())?;
        // Before the kick is set: with a kick, the core waits for a grace period and the old
        // worker.
        self.workers.serve(device, *index);
        device.set_vring_signal(*index, Signal::Kick, setup.kick.as_ref())?;
        let part = setup.region.as_ref().and_then(|region| region.split_part(*index, ring.size));
        device.set_inflight(&abi::Inflight {
            index: (*index).into(),
            desc_num: part.map_or(0, |_| ring.size.into()),
            user_addr: part.unwrap_or(0),
        })?;
        let micros = u32::try_from(options.poll_max.as_micros()).unwrap_or(u32::MAX);
        device.set_busy_loop(*index, micros)?;
        device.set_queue(*index, true)
    }

    /// Detaches the eventfds of a queue.
    fn unset(&self, index: u16) {
        for signal in [Signal::Kick, Signal::Call, Signal::Err] {
            if let Err(error) = self.device.set_vring_signal(index, signal, None) {
                tracing::debug!(queue = index, ?signal, %error, "an eventfd stays set");
            }
        }
    }

    /// Stops and drains all queues by one ioctl: the kernel stops each of them before it drains
    /// any. The caller still has to stop them one by one. This detaches the storage and ends the
    /// run.
    pub(super) fn stop_all(&self) {
        if let Err(error) = self.device.detach() {
            tracing::error!(%error, "the kernel did not stop all queues at once");
        }
    }

    /// Halts the queues: they take no further chain in this run.
    pub(super) fn halt(&mut self) {
        if self.options.flags & abi::OPT_HALT != 0 {
            return;
        }
        self.options.flags |= abi::OPT_HALT;
        if let Err(error) = self.set_options() {
            tracing::error!(%error, "the kernel did not halt the queues");
        }
    }

    /// Stops queues; returns their states in the same order.
    pub(super) fn stop_queues(&mut self, indices: &[u16]) -> Vec<QueueState> {
        let stopped: Vec<Stopped> = indices.iter().map(|index| self.stop_queue(*index)).collect();
        if self.health.can_halt() {
            // A halt must be known before the kept requests go elsewhere.
            self.failures.report_now();
        }
        // A stopped queue keeps its counters until its next start.
        let lines = self.counters().unwrap_or_else(|error| {
            tracing::warn!(queues = ?indices, %error, "the totals lack the counters of this run");
            Vec::new()
        });
        let state = |(index, stopped): (&u16, Stopped)| QueueState {
            base: stopped.base,
            stats: counters::of_queue(&lines, *index).stats,
            inflight: 0,
            choices: Choices::default(),
            faulted: stopped.faulted,
            kept: stopped.kept.len() as u64,
            left: match stopped.region {
                // It records the chains.
                true => Vec::new(),
                false => stopped.kept.iter().map(|&head| InflightChain::Split { head }).collect(),
            },
        };
        indices.iter().zip(stopped).map(state).collect()
    }

    fn stop_queue(&mut self, index: u16) -> Stopped {
        let drained = self.device.set_queue(index, false);
        if let Err(error) = &drained {
            tracing::error!(queue = index, %error, "the kernel did not stop the queue");
        }
        let base = self.device.get_vring_base(usize::from(index));
        let base = base.expect("VHOST_GET_VRING_BASE of a valid index does not fail");
        let kept = if self.health.can_halt() { self.device.kept(index) } else { Ok(Vec::new()) };
        let kept = kept.unwrap_or_else(|error| {
            tracing::error!(queue = index, %error, "requests that failed are lost");
            Vec::new()
        });
        self.unset(index);
        let held = self.queues.remove(&index);
        let region = held.is_some_and(|held| held.region.is_some());
        Stopped { base, faulted: drained.is_err(), kept, region }
    }

    pub(super) fn set_call(&mut self, index: u16, call: Option<File>) -> Result<(), KernelError> {
        self.device.set_vring_signal(index, Signal::Call, call.as_ref())?;
        if let Some(held) = self.queues.get_mut(&index) {
            held.call = call;
            held.call(); // the old eventfd may have missed a call
        }
        Ok(())
    }

    pub(super) fn cache_mode_changed(&mut self) -> Result<(), KernelError> {
        self.set_options()
    }

    /// Replaces the limits of the disk.
    pub(super) fn set_limits(&mut self, limits: &Limits) -> Result<(), KernelError> {
        let before = self.options;
        let wanted = limit_options(limits);
        self.options.limit_iops = wanted.limit_iops;
        self.options.limit_bytes = wanted.limit_bytes;
        self.options.limit_burst_ms = wanted.limit_burst_ms;
        self.options.limit_debt_ms = 0;
        self.set_options().inspect_err(|_| self.options = before)
    }

    /// Makes the device share the limits of a group, or use its own ones.
    pub(super) fn share_limits(&mut self, share: Option<&Arc<Share>>) -> Result<(), KernelError> {
        self.shared = shared::share(&self.device, share)?;
        Ok(())
    }

    /// Time in milliseconds until a request may be taken.
    pub(super) fn limit_debt_ms(&self) -> u32 {
        let lines = self.counters().unwrap_or_default();
        let line = lines.iter().find(|(name, _)| name == "limit_debt_ms");
        line.and_then(|(_, text)| text.parse::<u64>().ok())
            .map_or(0, |debt| u32::try_from(debt).unwrap_or(u32::MAX))
    }

    pub(super) fn counters(&self) -> io::Result<Vec<(String, String)>> {
        let (mut fdinfo, mut text) = (&self.fdinfo, String::new());
        fdinfo.rewind()?;
        fdinfo.read_to_string(&mut text)?;
        Ok(counters::of_fdinfo(&text))
    }
}

/// Checks that the module can limit the rate.
pub(super) fn check_limits(device: &VhostBlk, limits: &Limits) -> Result<(), KernelError> {
    device.set_options(&limit_options(limits)).map_err(of_old_module)
}

/// Names the cause if a module refuses options that it does not know.
fn of_old_module(error: KernelError) -> KernelError {
    match error.errno() {
        Some(libc::E2BIG) => KernelError::Unsuited(
            "the kernel module is too old to limit the rate; load the one that belongs to this \
             program, or use --data-plane uring"
                .into(),
        ),
        _ => error,
    }
}

/// Options with these limits, and nothing else.
pub(super) fn limit_options(limits: &Limits) -> abi::Options {
    let set = limits.is_set();
    let burst_ms = u32::try_from(limits.burst.as_millis()).unwrap_or(u32::MAX);
    abi::Options {
        size: size_of::<abi::Options>() as u32,
        limit_iops: limits.iops.map_or(0, NonZeroU64::get),
        limit_bytes: limits.bytes.map_or(0, NonZeroU64::get),
        // All zeroes for a module that does not know the fields.
        limit_burst_ms: if set { burst_ms } else { 0 },
        ..abi::Options::default()
    }
}

/// The end of a queue.
struct Stopped {
    base: u32,
    /// It cannot be drained.
    faulted: bool,
    /// Heads of the chains that it keeps.
    kept: Vec<u16>,
    /// It has an in-flight region.
    region: bool,
}

impl Held {
    fn call(&mut self) {
        if let Some(call) = &mut self.call {
            let _ = signal(call);
        }
    }
}

/// The remedy if `bytes` bytes of guest memory cannot be pinned. The kernel returns ENOMEM both for
/// the limit, which leaves `room` bytes, and for a lack of memory.
fn pin_remedy(error: &KernelError, bytes: u64, room: Option<u64>) -> String {
    match (error.errno(), room) {
        (Some(libc::ENOMEM), Some(room)) if room < bytes => format!(
            "{} MiB are wanted and RLIMIT_MEMLOCK leaves {} MiB: raise it (LimitMEMLOCK=)",
            bytes >> 20,
            room >> 20
        ),
        (Some(libc::ENOMEM), _) => "the kernel has no memory for it: free some".into(),
        _ => "use guest memory that is no file on a disk".into(),
    }
}

/// The option flags, except the one of the cache mode.
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
        (abi::OPT_NO_UNMAP, compat::keeps_space(&disk.info())),
        (abi::OPT_COALESCE, options.coalesce == Coalesce::On),
        (abi::OPT_COALESCE_AUTO, options.coalesce == Coalesce::Auto),
        (abi::OPT_BATCH, options.batch_size.is_some()),
    ];
    let flags = wanted.iter().filter(|(_, on)| *on).fold(0, |flags, (flag, _)| flags | flag);
    // An older module calls at once, which is right, too.
    let unknown = flags & !info.option_flags & !abi::OPT_COALESCE_AUTO;
    if unknown != 0 {
        crate::log_once_per_second!(
            warn,
            options = format_args!("{unknown:#x}"),
            "this kernel module does not support some options: they have no effect"
        );
    }
    flags & info.option_flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_blamed_only_where_it_is_too_low() {
        let failed = |errno| {
            KernelError::call("VHOST_BLK_SET_OPTIONS", std::io::Error::from_raw_os_error(errno))
        };
        let text = pin_remedy(&failed(libc::ENOMEM), 8 << 30, Some(64 << 20));
        assert_eq!(
            text,
            "8192 MiB are wanted and RLIMIT_MEMLOCK leaves 64 MiB: raise it (LimitMEMLOCK=)"
        );
        for room in [None, Some(8 << 30)] {
            let text = pin_remedy(&failed(libc::ENOMEM), 8 << 30, room);
            assert!(text.contains("the kernel has no memory"), "{text}");
        }
        let text = pin_remedy(&failed(libc::EFAULT), 8 << 30, Some(0));
        assert!(text.contains("no file on a disk"), "{text}");
    }
}
