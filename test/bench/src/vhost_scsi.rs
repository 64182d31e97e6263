// SPDX-License-Identifier: Apache-2.0
//! `/dev/vhost-scsi`, programmed as QEMU does it: the kernel's own vhost storage, as a peer.

use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use driver::kernel::abi::VringAddr;
use driver::kernel::{KernelDevice, regions_of};
use driver::{GuestMemory, Queue};
use virtio_spec::features::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, bit};

use crate::load::{Chains, Load};
use crate::wire::{Wire, memory_bytes};

/// Control and event queue come before those for commands.
const COMMAND_QUEUES_FROM: u16 = 2;
/// `struct vhost_scsi_target`: version (4), name (224), portal group (2), reserved (2).
const TARGET_BYTES: usize = 232;
const NAME_BYTES: usize = 224;
const PORTAL_GROUP: u16 = 1;
const ABI_VERSION: u32 = 1;
/// `VHOST_SCSI_SET_ENDPOINT`: `_IOW(0xaf, 0x40, struct vhost_scsi_target)`.
const SET_ENDPOINT: u32 = 1 << 30 | (TARGET_BYTES as u32) << 16 | 0xaf << 8 | 0x40;

/// A running vhost-scsi device; it stops when dropped.
#[derive(Debug)]
pub struct ScsiSession {
    _device: KernelDevice,
    /// The kernel looks at them as long as the device is open.
    _unused_queues: Vec<Queue>,
    features: u64,
}

impl ScsiSession {
    /// Sets a device up for a target, with a worker for each queue; gives the command queues.
    pub fn open(wwpn: &str, load: &Load) -> Result<(Self, Vec<Queue>)> {
        let device = KernelDevice::open_at("/dev/vhost-scsi").context("/dev/vhost-scsi")?;
        device.set_owner()?;
        let mut wanted = bit(F_VERSION_1) | bit(F_EVENT_IDX);
        if load.chains == Chains::Auto {
            wanted |= bit(F_INDIRECT_DESC);
        }
        let features = device.features()? & wanted;
        device.set_features(features)?;
        let all = load.queues + COMMAND_QUEUES_FROM;
        let memory = GuestMemory::new(&[(0, memory_bytes(load, all, Wire::Scsi))])?;
        device.set_mem_table(&regions_of(&memory))?;
        let event_idx = features & bit(F_EVENT_IDX) != 0;
        let mut queues = Vec::new();
        for index in 0..all {
            let queue = Queue::new(&memory, load.queue_size, false, event_idx)?;
            set_up(&device, index.into(), &queue)?;
            if index > COMMAND_QUEUES_FROM {
                let worker = device.new_worker()?;
                device.attach_worker(index.into(), worker)?;
            }
            queues.push(queue);
        }
        set_endpoint(&device, wwpn)?;
        let commands = queues.split_off(COMMAND_QUEUES_FROM.into());
        Ok((Self { _device: device, _unused_queues: queues, features }, commands))
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }
}

fn set_up(device: &KernelDevice, index: u32, queue: &Queue) -> Result<()> {
    let [desc, avail, used] = queue.addresses().map(|gpa| queue.memory().user_address(gpa));
    device.set_vring_num(index, queue.size().into())?;
    device.set_vring_base(index, 0)?;
    device.set_vring_addr(VringAddr { index, flags: 0, desc, used, avail, log: 0 })?;
    device.set_call(index, Some(queue.call_fd().as_raw_fd()))?;
    device.set_kick(index, Some(queue.kick_fd().as_raw_fd()))?;
    Ok(())
}

fn set_endpoint(device: &KernelDevice, wwpn: &str) -> Result<()> {
    let mut target = [0_u8; TARGET_BYTES];
    target[..4].copy_from_slice(&ABI_VERSION.to_ne_bytes());
    target[4..4 + wwpn.len()].copy_from_slice(wwpn.as_bytes());
    let group = 4 + NAME_BYTES;
    target[group..group + 2].copy_from_slice(&PORTAL_GROUP.to_ne_bytes());
    device.raw(SET_ENDPOINT, &mut target).context("VHOST_SCSI_SET_ENDPOINT")?;
    Ok(())
}
