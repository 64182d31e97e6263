// SPDX-License-Identifier: Apache-2.0
//! A single random step.

use super::Devices;
use super::material::Material;
use anyhow::Result;
use driver::kernel::abi::{
    self, BlkInflight, BlkInfo, BlkOptions, BlkShare, IotlbMsg, VringAddr, VringFile,
};
use driver::kernel::{BadAddress, KernelDevice};
use kit::rng::Rng;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Codes that take a `vhost_vring_state`.
const STATE_CODES: [u32; 10] = [
    abi::SET_VRING_NUM,
    abi::SET_VRING_BASE,
    abi::GET_VRING_BASE,
    abi::SET_VRING_BUSYLOOP_TIMEOUT,
    abi::GET_VRING_BUSYLOOP_TIMEOUT,
    abi::ATTACH_VRING_WORKER,
    abi::GET_VRING_WORKER,
    abi::BLK_SET_QUEUE,
    abi::BLK_SET_QUEUE,
    abi::SET_VRING_NUM,
];
/// Codes that take a `vhost_vring_file`.
const FILE_CODES: [u32; 3] = [abi::SET_VRING_KICK, abi::SET_VRING_CALL, abi::SET_VRING_ERR];
/// All known codes.
const ALL_CODES: [u32; 30] = [
    abi::GET_FEATURES,
    abi::SET_FEATURES,
    abi::SET_OWNER,
    abi::RESET_OWNER,
    abi::SET_MEM_TABLE,
    abi::SET_LOG_BASE,
    abi::SET_LOG_FD,
    abi::NEW_WORKER,
    abi::FREE_WORKER,
    abi::SET_VRING_NUM,
    abi::SET_VRING_ADDR,
    abi::SET_VRING_BASE,
    abi::GET_VRING_BASE,
    abi::SET_VRING_KICK,
    abi::SET_VRING_CALL,
    abi::BLK_SET_BACKEND,
    abi::BLK_SET_SERIAL,
    abi::BLK_GET_INFO,
    abi::BLK_SET_QUEUE,
    abi::BLK_SET_OPTIONS,
    abi::BLK_SET_INFLIGHT,
    abi::BLK_SET_NUM_QUEUES,
    abi::BLK_SET_FAILURE_EVENT,
    abi::BLK_GET_FAILURE,
    abi::BLK_SET_TRACE,
    abi::BLK_GET_TRACED,
    abi::BLK_GET_OLDEST,
    abi::BLK_GET_KEPT,
    abi::BLK_SHARE_LIMITS,
    abi::SET_BACKEND_FEATURES,
];

/// Runs one step on one of the devices; returns whether the kernel accepted it.
pub(super) fn step(devices: &Devices, material: &Material, rng: &mut Rng) -> Result<bool> {
    let which = rng.below(super::DEVICES as u64) as usize;
    let device = devices.lock().expect("no thread panics with it").get(which).cloned();
    let device = device.expect("there are that many");
    if rng.one_in(150) {
        let fresh = Arc::new(super::open(1 + rng.below(8) as u32)?);
        // The old device is closed when the other thread drops its clone.
        devices.lock().expect("no thread panics with it")[which] = fresh;
        return Ok(true);
    }
    if rng.one_in(25) {
        return Ok(bring_up(&device, material, rng).is_ok());
    }
    Ok(one(&device, material, rng).is_ok())
}

fn index(rng: &mut Rng) -> u32 {
    match rng.below(20) {
        0 => rng.number() as u32,
        1 => *rng.pick(&[63, 64, 65, u32::MAX, 1 << 31]),
        _ => rng.below(3) as u32,
    }
}

fn number(rng: &mut Rng) -> u32 {
    match rng.below(4) {
        0 => rng.number() as u32,
        1 => 1 << rng.below(17),
        _ => rng.below(2) as u32,
    }
}

/// Makes all calls that a running queue needs, well-formed.
fn bring_up(device: &KernelDevice, material: &Material, rng: &mut Rng) -> io::Result<()> {
    // The device can have an owner already.
    let _owned = device.set_owner();
    device.set_features(device.features()? & !(1 << 33) & (rng.number() | 1 << 32))?;
    let whole = material.whole();
    device.set_mem_table(&[whole])?;
    for index in 0..2 {
        let base = whole.user + u64::from(index) * (1 << 20);
        let log = u64::from(index) * (1 << 20) + 0x2_0000;
        device.set_vring_num(index, 64)?;
        device.set_vring_base(index, 0)?;
        let (desc, avail, used) = (base, base + 0x1_0000, base + 0x2_0000);
        device.set_vring_addr(VringAddr { index, flags: 0, desc, used, avail, log })?;
        device.set_kick(index, Some(material.event_fd(rng)))?;
        device.set_call(index, Some(material.event_fd(rng)))?;
    }
    device.set_backend(0, Some(material.storage_fd(rng)))
}

/// Addresses that are aligned, and often both in the arena or both 0.
fn share(material: &Material, rng: &mut Rng) -> BlkShare {
    if rng.one_in(3) {
        return BlkShare::default();
    }
    let (limits_addr, debt_addr) = (material.address(rng) & !127, material.address(rng) & !15);
    BlkShare { limits_addr, debt_addr }
}

fn one(device: &KernelDevice, material: &Material, rng: &mut Rng) -> io::Result<()> {
    match rng.below(30) {
        0 => device.set_owner(),
        29 => device.share_limits(share(material, rng)),
        1 if rng.one_in(4) => device.reset_owner(),
        1 | 2 => {
            device.set_features(if rng.one_in(2) { rng.number() } else { device.features()? })
        }
        3 => device.set_mem_table(&material.regions(rng)),
        4 => device.set_log_base(material.address(rng)),
        5 => device.set_log_fd(Some(material.event_fd(rng))),
        6 if rng.one_in(3) => device.new_worker().map(drop),
        6 => device.free_worker(rng.below(4) as u32),
        7..10 => state(device, rng),
        10 => device.set_vring_addr(vring_addr(material, rng)),
        11 | 12 => file(device, material, rng),
        13 | 14 => {
            let fd = material.storage_fd(rng);
            device.set_backend(if rng.one_in(3) { index(rng) } else { 0 }, Some(fd))
        }
        15 => options(device, rng),
        16 => inflight(device, material, rng),
        17 => info(device, rng),
        18 => odd(device, rng),
        19 => iotlb(device, material, rng),
        20 => device.set_serial(rng.number().to_le_bytes().repeat(3)[..20].try_into().expect("20")),
        21 => device.next_miss(Duration::ZERO).map(drop),
        22 => {
            material.kick(rng);
            Ok(())
        }
        23 => device.set_failure_event(Some(material.event_fd(rng))),
        24 => device.failure().map(drop),
        25 => device.set_trace(rng.below(3), Some(material.event_fd(rng))),
        26 => device.traced().map(drop),
        27 => device.oldest(index(rng)).map(drop),
        28 => device.kept(index(rng)).map(drop),
        _ => {
            (0..8).for_each(|_| material.scribble(rng));
            Ok(())
        }
    }
}

fn state(device: &KernelDevice, rng: &mut Rng) -> io::Result<()> {
    let (index, num) = (index(rng), number(rng));
    device.raw(*rng.pick(&STATE_CODES), &mut abi::VringState { index, num }).map(drop)
}

fn file(device: &KernelDevice, material: &Material, rng: &mut Rng) -> io::Result<()> {
    let (index, fd) = (index(rng), material.event_fd(rng));
    device.raw(*rng.pick(&FILE_CODES), &mut VringFile { index, fd }).map(drop)
}

fn vring_addr(material: &Material, rng: &mut Rng) -> VringAddr {
    VringAddr {
        index: index(rng),
        flags: if rng.one_in(10) { rng.number() as u32 } else { rng.below(2) as u32 },
        desc: material.address(rng),
        used: material.address(rng),
        avail: material.address(rng),
        log: rng.below(1 << 30) & !3,
    }
}

fn options(device: &KernelDevice, rng: &mut Rng) -> io::Result<()> {
    let mut options = BlkOptions::with_flags(rng.below(u64::from(abi::OPT_HALT)) as u32);
    match rng.below(10) {
        0 => options.size = rng.number() as u32,
        1 => options.flags = rng.number() as u32,
        2 => options.batch = rng.number() as u32,
        5 => {
            options.flags |= abi::OPT_BATCH;
            options.batch = 1 + rng.below(u64::from(abi::BATCH_SIZE_MAX)) as u32;
        }
        3 => options.max_discard_sectors = rng.number() as u32,
        4 => {
            options.limit_iops = 1000 + rng.below(1_000_000);
            options.limit_bytes = rng.number();
            options.limit_burst_ms = rng.number() as u32;
            options.limit_debt_ms = rng.below(100) as u32;
        }
        _ => {}
    }
    device.raw(abi::BLK_SET_OPTIONS, &mut Padded { options, ..Padded::default() }).map(drop)
}

/// Options followed by padding, because `size` can claim more bytes.
#[repr(C)]
#[derive(zerocopy::FromBytes, IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)]
struct Padded {
    options: BlkOptions,
    room: [u64; 64],
}

impl Default for Padded {
    fn default() -> Self {
        Self { options: BlkOptions::default(), room: [0; 64] }
    }
}

fn inflight(device: &KernelDevice, material: &Material, rng: &mut Rng) -> io::Result<()> {
    let user_addr = if rng.one_in(4) { 0 } else { material.address(rng) };
    let desc_num = if rng.one_in(4) { rng.number() as u32 } else { rng.below(2048) as u32 };
    let region = BlkInflight { index: index(rng), desc_num, user_addr };
    device.set_inflight(region)
}

fn info(device: &KernelDevice, rng: &mut Rng) -> io::Result<()> {
    let known = size_of::<BlkInfo>() as u32;
    let size = if rng.one_in(2) { rng.below(u64::from(known) + 1) as u32 } else { known };
    device.raw(abi::BLK_GET_INFO, &mut BlkInfo { size, ..BlkInfo::default() }).map(drop)
}

/// Unknown codes, and malformed arguments.
fn odd(device: &KernelDevice, rng: &mut Rng) -> io::Result<()> {
    if rng.one_in(2) {
        let mut bytes = [0_u64; 512];
        let size = rng.below(256) as u32;
        let code = (rng.below(4) as u32) << 30 | size << 16 | 0xaf00 | rng.below(256) as u32;
        return device.raw(code, &mut bytes).map(drop);
    }
    let at = *rng.pick(&[BadAddress::Null, BadAddress::Kernel, BadAddress::NonCanonical]);
    device.raw_at(*rng.pick(&ALL_CODES), at).map(drop)
}

fn iotlb(device: &KernelDevice, material: &Material, rng: &mut Rng) -> io::Result<()> {
    if rng.one_in(4) {
        let bytes = rng.bytes(72);
        // A random address could be this process's memory, so the message gets an invalid type,
        // with which the kernel ignores it.
        let mut bytes: [u8; 72] = bytes.try_into().expect("72 bytes");
        bytes[33] = 7 + rng.below(200) as u8;
        let len = rng.below(73) as usize;
        return device.write_bytes(&bytes[..len]).map(drop);
    }
    let message = IotlbMsg {
        kind: if rng.one_in(10) { rng.below(4) as u32 } else { abi::IOTLB_MSG },
        iova: rng.below(1 << 24) & !0xfff,
        size: if rng.one_in(10) { rng.number() } else { 4096 * (1 + rng.below(512)) },
        uaddr: material.address(rng),
        perm: rng.below(5) as u8,
        what: rng.below(7) as u8,
        ..IotlbMsg::default()
    };
    // Only memory in the arena may be mapped.
    let message = IotlbMsg { size: message.size.min(8 << 20), ..message };
    device.send_iotlb(message)
}
