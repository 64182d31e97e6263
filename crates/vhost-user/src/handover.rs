// SPDX-License-Identifier: Apache-2.0
//! Hands a device over to a later program: exports its state, and takes over an exported one.

use crate::control::Peer;
use crate::descriptor::take_socket_pair;
use crate::image_lock::FollowedLock;
use crate::mem_table::MemTable;
use crate::queue_setup::{QueueSlot, VringAddr};
use crate::region_use::UsedRegion;
use crate::session::Session;
use crate::state::{
    AddrState, ConnectionState, DescriptorIndex, DeviceState, HealthState, InflightState,
    KickState, PartState, RegionState, SlotState, StateError,
};
use crate::{Device, DeviceOptions};
use backend::Info;
use data_plane::{AtStop, InflightRegion, LimitChange, LimitError, Limits};
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use virtio_blk::DeviceConfig;
use virtio_spec::features::F_RING_PACKED;
use virtqueue::{DirtyLog, Region};

/// The state of a device, with the descriptors that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The state.
    pub state: DeviceState,
    /// The descriptors, which stay the device's own.
    pub descriptors: Vec<RawFd>,
    /// An error of the storage has halted the disk. The requests that it keeps are not in the state:
    /// no other program may take the device over.
    pub halted: bool,
}

/// A device whose queues are stopped, and which handles no message and no command until this is
/// dropped. Its state does not change in between.
#[derive(Debug)]
pub struct Frozen {
    /// The state.
    pub exported: Exported,
    /// Time of the monotonic clock, in nanoseconds, at which the queues began to stop.
    pub stopped_at_ns: u64,
    /// The device waits for its end.
    _thaw: Sender<()>,
}

/// The connection of a device that is taken over.
pub(crate) struct Inherited {
    pub(crate) state: ConnectionState,
    pub(crate) descriptors: Descriptors,
}

/// The table of descriptors; each can be taken once.
pub(crate) struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    fn take(&mut self, at: DescriptorIndex) -> Result<OwnedFd, StateError> {
        self.0.get_mut(at).and_then(Option::take).ok_or(StateError::Descriptor(at))
    }

    fn file(&mut self, at: DescriptorIndex) -> Result<File, StateError> {
        self.take(at).map(File::from)
    }

    fn file_of(&mut self, at: Option<DescriptorIndex>) -> Result<Option<File>, StateError> {
        at.map(|at| self.file(at)).transpose()
    }
}

/// Collects descriptors for a state.
#[derive(Default)]
struct Table(Vec<RawFd>);

impl Table {
    fn add(&mut self, fd: &impl AsRawFd) -> DescriptorIndex {
        self.0.push(fd.as_raw_fd());
        self.0.len() - 1
    }

    fn part(&mut self, file: &File, offset: u64, len: u64) -> PartState {
        PartState { file: self.add(file), offset, len }
    }
}

/// All features that a device with this disk and these options offers or accepts.
pub(crate) fn served_features(info: &Info, options: &DeviceOptions) -> u64 {
    let config = DeviceConfig {
        info: info.clone(),
        num_queues: options.num_queues,
        seg_max: crate::seg_max(options.queue_size_max),
        packed: options.packed,
    };
    config.features() | crate::session::OWN_FEATURES | u64::from(options.packed) << F_RING_PACKED
}

impl Session<'_> {
    /// Stops the queues, sends the state, and waits until the receiver drops it. Then the queues
    /// start again.
    pub(crate) fn freeze(&mut self, peer: Option<&Peer<'_>>, reply: &Sender<Frozen>) {
        let time = clock_gettime(ClockId::Monotonic);
        let stopped_at_ns = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
        let stopped = self.stop_running(AtStop::Resubmit);
        let (thaw, thawed) = channel();
        let frozen = Frozen { exported: self.export(peer), stopped_at_ns, _thaw: thaw };
        let _ = reply.send(frozen); // an error drops it at once
        let _ = thawed.recv(); // no message is ever sent
        let queues = stopped.len();
        if let Err(error) = self.restart(stopped) {
            tracing::error!(%error, queues, "the upgrade failed");
        }
    }

    /// The state as it is now. Positions and counters are valid only while no queue runs.
    pub(crate) fn export(&self, peer: Option<&Peer<'_>>) -> Exported {
        let mut table = Table::default();
        let device = &*self.device;
        let followed = device.image_lock.as_ref();
        let state = DeviceState {
            capacity_sectors: self.capacity_sectors(),
            logical_block_bytes: device.config.info.logical_block_bytes,
            read_only: device.config.info.read_only,
            num_queues: device.options.num_queues,
            plane: device.planes.selected().into(),
            paused: device.paused,
            writeback: self.writeback.load(Ordering::Relaxed),
            cache_set: device.cache_set,
            limits: device.planes.limits().into(),
            limit_group: device.planes.limit_group().map(|group| group.to_string()),
            errors: device.errors_set.then(|| device.health.rules().into()),
            image_lock_held: followed.filter(|it| !it.lock.is_off()).map(|it| it.held),
            guest_is_away: followed.is_some_and(|it| it.lock.is_off() && !it.held),
            front_ends: device.front_ends,
            counters: device.earlier_stats.iter().map(|&stats| stats.into()).collect(),
            health: HealthState::of(device.health.totals()),
            connection: peer.map(|peer| self.export_connection(peer, &mut table)),
            waiting: device.waiting.descriptors().iter().map(|fd| table.add(fd)).collect(),
        };
        Exported { state, descriptors: table.0, halted: device.health.is_halted() }
    }

    fn export_connection(&self, peer: &Peer<'_>, table: &mut Table) -> ConnectionState {
        let region = |region: &Region, table: &mut Table| {
            let (file, offset) = region.file();
            let file = table.part(file, offset, region.len());
            RegionState { guest_addr: region.guest_addr(), user_addr: region.user_addr(), file }
        };
        let log = self.log.as_ref().map(|log| {
            let (file, offset) = log.file();
            table.part(file, offset, log.len() as u64)
        });
        let inflight = self.inflight_region.as_ref().map(|UsedRegion { region, .. }| {
            let (file, offset, len) = region.file();
            InflightState { file: table.part(file, offset, len), num_queues: region.num_queues() }
        });
        ConnectionState {
            stream: table.add(peer.stream),
            silent: peer.silent,
            asked_features: self.asked_features,
            features: self.features,
            protocol_features: self.protocol_features,
            status: self.status(),
            memory: self.table.regions().iter().map(|one| region(one, table)).collect(),
            log,
            inflight,
            channel: self.backend_channel.socket().map(|socket| table.add(socket)),
            known_sectors: self.backend_channel.known_sectors(),
            queues: self.queues.iter().map(|slot| export_slot(slot, table)).collect(),
        }
    }

    /// Takes over the connection's state. The features are set already ([`crate::replay`]).
    pub(crate) fn restore(
        &mut self,
        state: ConnectionState,
        fds: &mut Descriptors,
    ) -> Result<(), StateError> {
        let mut regions = Vec::new();
        for RegionState { guest_addr, user_addr, file } in state.memory {
            let region =
                Region::map(guest_addr, user_addr, file.len, fds.file(file.file)?, file.offset);
            regions.push(region.map_err(io::Error::other)?);
        }
        if let Some(PartState { file, offset, len }) = state.log {
            let log = DirtyLog::map(fds.file(file)?, offset, len).map_err(io::Error::other)?;
            self.log = Some(Arc::new(log));
        }
        if let Some(InflightState { file, num_queues }) = state.inflight {
            let PartState { file, offset, len } = file;
            // The first program checked the length against the wanted size of the queues.
            let region = InflightRegion::map(fds.file(file)?, offset, len, num_queues, 1)?;
            self.inflight_region = Some(UsedRegion::begin(region, None)?);
        }
        for (slot, state) in self.queues.iter_mut().zip(state.queues) {
            *slot = restore_slot(state, fds)?;
        }
        if let Some(channel) = fds.file_of(state.channel)? {
            take_socket_pair(&channel)?;
            self.backend_channel.replace(channel);
        }
        state
            .known_sectors
            .into_iter()
            .for_each(|sectors| self.backend_channel.set_known_sectors(sectors));
        self.set_raw_status(state.status);
        self.set_table(MemTable::of(regions))?; // starts the queues
        Ok(())
    }
}

fn export_slot(slot: &QueueSlot, table: &mut Table) -> SlotState {
    let kick = match &slot.kick {
        None => KickState::None,
        Some(None) => KickState::Polled,
        Some(Some(file)) => KickState::Eventfd(table.add(file)),
    };
    let addr = slot.addr.map(|VringAddr { desc, avail, used, used_log }| AddrState {
        desc,
        avail,
        used,
        used_log,
    });
    let call = slot.call.as_ref().map(|file| table.add(file));
    let err = slot.err.as_ref().map(|file| table.add(file));
    let QueueSlot { size, base, enabled, .. } = *slot;
    SlotState { size, addr, base, enabled, kick, call, err }
}

fn restore_slot(state: SlotState, fds: &mut Descriptors) -> Result<QueueSlot, StateError> {
    let SlotState { size, base, enabled, .. } = state;
    Ok(QueueSlot {
        size,
        addr: state.addr.map(|AddrState { desc, avail, used, used_log }| VringAddr {
            desc,
            avail,
            used,
            used_log,
        }),
        base,
        enabled,
        kick: match state.kick {
            KickState::None => None,
            KickState::Polled => Some(None),
            KickState::Eventfd(at) => Some(Some(fds.file(at)?)),
        },
        call: signalled(fds.file_of(state.call)?)?,
        err: signalled(fds.file_of(state.err)?)?,
        ..QueueSlot::default()
    })
}

/// Leaves a descriptor of an earlier program for writing only, if it is a socket.
fn signalled(file: Option<File>) -> io::Result<Option<File>> {
    file.as_ref().map(take_socket_pair).transpose()?;
    Ok(file)
}

impl Device {
    /// Takes over the state of a device of an earlier program, before anything else. Returns the
    /// connection of its front-end, for [`Device::serve`]. `descriptors` are those of the state.
    ///
    /// # Errors
    /// [`StateError`]; the device is not usable then.
    pub fn take_over(
        &mut self,
        state: DeviceState,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Option<UnixStream>, StateError> {
        state.check(&self.config.info, &self.options)?;
        self.planes.restore(state.plane.into());
        self.config.packed = self.options.packed && self.planes.packed();
        self.take_over_limits(state.limits.into(), state.limit_group.as_deref())?;
        state.errors.map_or(Ok(()), |errors| self.set_error_rules(errors.into()))?;
        self.paused = state.paused;
        // The lock is that of the open image, whatever the options say.
        self.image_lock =
            self.image_lock.take().map(|FollowedLock { lock, .. }| match state.image_lock_held {
                Some(held) => FollowedLock { lock, held },
                None => FollowedLock { lock: lock.without_lock(), held: !state.guest_is_away },
            });
        self.writeback.store(state.writeback, Ordering::Relaxed);
        self.cache_set = state.cache_set;
        self.front_ends = state.front_ends;
        for (own, earlier) in self.earlier_stats.iter_mut().zip(&state.counters) {
            *own = earlier.into();
        }
        if let Some(earlier) = &state.health {
            self.health.add_totals(&earlier.into());
        }
        let mut descriptors = Descriptors(descriptors.into_iter().map(Some).collect());
        for at in state.waiting {
            self.waiting.add(UnixStream::from(descriptors.take(at)?));
        }
        let Some(state) = state.connection else { return Ok(None) };
        let stream = UnixStream::from(descriptors.take(state.stream)?);
        self.inherited = Some(Inherited { state, descriptors });
        Ok(Some(stream))
    }

    /// Takes over the limits and the group; the device has none yet. Disks of a group that are taken
    /// over at the same time bring the same limits.
    fn take_over_limits(&mut self, limits: Limits, group: Option<&str>) -> Result<(), LimitError> {
        match group {
            Some(group) => {
                self.planes.join_limit_group(group, LimitChange::of_member(limits)).map(drop)
            }
            None => Ok(self.set_limits(limits)?),
        }
    }
}
