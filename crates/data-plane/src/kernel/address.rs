// SPDX-License-Identifier: Apache-2.0
//! Translates addresses for the kernel to addresses of this process, and checks that they lie in
//! the right mapping. The kernel only checks that an address belongs to user space. A front-end
//! chooses the addresses of rings and of their log freely: they must not name other memory of this
//! process.

use crate::error::KernelError;
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_kern::vhost_binding::{VHOST_VRING_F_LOG, vhost_vring_addr};
use virtio_spec::split;
use virtqueue::dirty_log::PAGE_BYTES;
use virtqueue::{DirtyLog, GuestMemory, RingSetup};

fn unsuited<T>(why: impl Into<String>) -> Result<T, KernelError> {
    Err(KernelError::Unsuited(why.into()))
}

/// The memory table with addresses of this process.
pub(super) fn memory_table(memory: &GuestMemory) -> Vec<VhostUserMemoryRegionInfo> {
    let regions = memory.regions().iter();
    regions
        .map(|region| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.guest_addr(),
            memory_size: region.len(),
            userspace_addr: region.host() as u64,
            ..VhostUserMemoryRegionInfo::default()
        })
        .collect()
}

/// The three areas of a split queue, and the log address of its used ring.
pub(super) fn vring(index: u16, setup: &RingSetup) -> Result<vhost_vring_addr, KernelError> {
    let place = |name: &str, addr: u64, len: usize| {
        let found = setup.memory.locate_user(addr, len as u64);
        found.ok_or_else(|| {
            KernelError::Unsuited(format!("the {name} at {addr:#x} is outside guest memory"))
        })
    };
    let size = setup.size;
    let (desc, desc_at) =
        place("descriptor table", setup.desc_addr, split::desc_table_bytes(size))?;
    let (avail, avail_at) = place("avail ring", setup.avail_addr, split::avail_ring_bytes(size))?;
    let bytes = split::used_ring_bytes(size);
    let (used, used_at) = place("used ring", setup.used_addr, bytes)?;
    let mut addr = vhost_vring_addr {
        index: index.into(),
        flags: 0,
        desc_user_addr: desc.host() as u64 + desc_at,
        used_user_addr: used.host() as u64 + used_at,
        avail_user_addr: avail.host() as u64 + avail_at,
        log_guest_addr: 0,
    };
    if let Some(log) = &setup.log {
        let logged_at = setup.used_log_addr.unwrap_or(used.guest_addr() + used_at);
        check_logged(log.len() as u64, logged_at, bytes as u64)?;
        addr.flags = 1 << VHOST_VRING_F_LOG;
        addr.log_guest_addr = logged_at;
    }
    Ok(addr)
}

/// Checks that the dirty log has a bit for every page of guest memory: the kernel would set missing
/// bits beyond the end of the log.
pub(super) fn check_log(log: &DirtyLog, memory: &GuestMemory) -> Result<(), KernelError> {
    memory
        .regions()
        .iter()
        .try_for_each(|region| check_logged(log.len() as u64, region.guest_addr(), region.len()))
}

fn check_logged(log_bytes: u64, guest_addr: u64, len: u64) -> Result<(), KernelError> {
    match guest_addr.checked_add(len) {
        Some(end) if end.div_ceil(PAGE_BYTES).div_ceil(8) <= log_bytes => Ok(()),
        _ => unsuited(format!(
            "the dirty log of {log_bytes} bytes ends before {len} bytes at {guest_addr:#x}"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::fs::File;
    use std::sync::Arc;
    use virtqueue::{Layout, Region};

    const GUEST: u64 = 0x10_0000;
    const USER: u64 = 0x7000_0000;
    const LEN: u64 = 0x10000;

    fn memory_file(len: u64) -> File {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(len).unwrap();
        file
    }

    fn setup() -> RingSetup {
        let region = Region::map(GUEST, USER, LEN, memory_file(LEN + 4096), 4096).unwrap();
        RingSetup {
            memory: Arc::new(GuestMemory::new(vec![region]).unwrap()),
            layout: Layout::Split,
            size: 256,
            desc_addr: USER,
            avail_addr: USER + 0x1000,
            used_addr: USER + 0x2000,
            base: 0,
            indirect: true,
            event_idx: true,
            keep_descriptors: false,
            log: None,
            used_log_addr: None,
        }
    }

    #[test]
    fn the_front_ends_addresses_become_those_of_this_process() {
        let setup = setup();
        let host = setup.memory.regions()[0].host() as u64;
        let addr = vring(3, &setup).unwrap();
        assert_eq!((addr.index, addr.flags), (3, 0));
        assert_eq!(addr.desc_user_addr, host);
        assert_eq!(addr.avail_user_addr, host + 0x1000);
        assert_eq!(addr.used_user_addr, host + 0x2000);
        let table = memory_table(&setup.memory);
        let region = &table[0];
        let told = (region.guest_phys_addr, region.memory_size, region.userspace_addr);
        assert_eq!(told, (GUEST, LEN, host));
    }

    #[test]
    fn a_ring_that_leaves_its_region_is_refused() {
        let mut setup = setup();
        setup.used_addr = USER + LEN - split::used_ring_bytes(256) as u64 + 4;
        let why = vring(0, &setup).unwrap_err().to_string();
        assert!(why.contains("used ring"), "{why}");
    }

    #[test]
    fn a_logged_ring_is_logged_at_its_guest_address_or_where_the_front_end_says() {
        let mut setup = setup();
        let log = DirtyLog::map(memory_file(4096), 0, 4096).unwrap();
        setup.log = Some(Arc::new(log));
        let addr = vring(0, &setup).unwrap();
        assert_eq!((addr.flags, addr.log_guest_addr), (1, GUEST + 0x2000));
        setup.used_log_addr = Some(0x3000);
        assert_eq!(vring(0, &setup).unwrap().log_guest_addr, 0x3000);
    }

    #[test]
    fn a_log_address_behind_the_logs_end_is_refused_before_the_kernel_sees_it() {
        let mut setup = setup();
        setup.log = Some(Arc::new(DirtyLog::map(memory_file(4096), 0, 4096).unwrap()));
        // 4096 bytes are the bits of 128 MiB.
        let last = (128 << 20) - split::used_ring_bytes(256) as u64;
        setup.used_log_addr = Some(last);
        assert!(vring(0, &setup).is_ok());
        for beyond in [last + 1, 1 << 40, u64::MAX - 8] {
            setup.used_log_addr = Some(beyond);
            let why = vring(0, &setup).unwrap_err().to_string();
            assert!(why.contains("dirty log of 4096 bytes ends before"), "{why}");
        }
    }

    #[test]
    fn a_log_that_is_shorter_than_guest_memory_is_refused() {
        let setup = setup();
        let pages = (GUEST + LEN) / PAGE_BYTES; // 272 pages: 34 bytes
        let enough = DirtyLog::map(memory_file(4096), 0, pages / 8).unwrap();
        assert!(check_log(&enough, &setup.memory).is_ok());
        let short = DirtyLog::map(memory_file(4096), 0, pages / 8 - 1).unwrap();
        assert!(check_log(&short, &setup.memory).is_err());
    }
}
