// SPDX-License-Identifier: Apache-2.0
//! Guest memory of the `chain` and `request` targets: one memfd, two regions without a gap in
//! guest-physical addresses but with their parts of the file exchanged, and one behind a gap.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use virtqueue::{Chain, DirtyLog, GuestMemory, Region};

/// Guest-physical address, length, file offset.
const REGIONS: [(u64, u64, u64); 3] =
    [(0, 0x4000, 0x8000), (0x4000, 0x4000, 0), (0x1_0000, 0x1000, 0x4000)];
const FILE_BYTES: u64 = 0xc000;
/// Offset of the front-end's addresses from guest-physical ones.
pub(crate) const USER_BASE: u64 = 0x10_0000_0000;

/// Guest memory with its file.
pub(crate) struct Guest {
    file: File,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) log: Arc<DirtyLog>,
}

/// An anonymous file of `len` bytes.
pub(crate) fn memfd(len: u64) -> File {
    let fd = rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    let file = File::from(fd);
    file.set_len(len).expect("memory for a memfd");
    file
}

impl Guest {
    /// New memory with `contents` from address 0 on; what does not fit is cut.
    pub(crate) fn new(contents: &[u8]) -> Self {
        let file = memfd(FILE_BYTES);
        let map = |(gpa, len, offset)| {
            let file = file.try_clone().expect("a descriptor");
            Region::map(gpa, gpa + USER_BASE, len, file, offset).expect("a region")
        };
        let memory = Arc::new(GuestMemory::new(REGIONS.map(map).to_vec()).expect("a table"));
        let log = Arc::new(DirtyLog::map(memfd(2), 0, 2).expect("a log"));
        let guest = Guest { file, memory, log };
        let mut left = contents;
        for (_, len, offset) in REGIONS {
            let (here, rest) = left.split_at(left.len().min(len as usize));
            guest.file.write_all_at(here, offset).expect("guest memory");
            left = rest;
        }
        guest
    }

    /// Every byte of guest memory.
    pub(crate) fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; FILE_BYTES as usize];
        self.file.read_exact_at(&mut bytes, 0).expect("guest memory");
        bytes
    }

    /// Every segment of the chain lies in guest memory, and the sums are right.
    pub(crate) fn check(&self, chain: &mut Chain) {
        let readable = self.sum(chain.readable());
        let writable = self.sum(chain.writable());
        assert_eq!((readable, writable), (chain.readable_bytes(), chain.writable_bytes()));
    }

    fn sum(&self, iovs: &[libc::iovec]) -> u64 {
        iovs.iter().map(|iov| self.inside(iov.iov_base as u64, iov.iov_len as u64)).sum()
    }

    fn inside(&self, mut host: u64, len: u64) -> u64 {
        let mut left = len;
        while left > 0 {
            let offset_in = |region: &Region| host.wrapping_sub(region.host() as u64);
            let mut regions = self.memory.regions().iter();
            let region = regions.find(|region| offset_in(region) < region.len());
            let region = region.expect("a segment leaves guest memory");
            let here = left.min(region.len() - offset_in(region));
            host += here;
            left -= here;
        }
        len
    }
}
