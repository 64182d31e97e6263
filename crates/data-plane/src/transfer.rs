// SPDX-License-Identifier: Apache-2.0
//! The submission entry of a read or write.

use backend::Op;
use io_uring::opcode;
use io_uring::squeue::Entry;
use io_uring::types::Fixed;

/// Maximum bytes of one transfer in the kernel (MAX_RW_COUNT); a longer one is a short transfer.
const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// The entry of `op`, a read or a write. `files` is the place of the lane's first file in the table
/// of registered files, `fixed` the index of the registered buffer that contains the memory.
#[inline]
pub(crate) fn transfer(op: &Op, files: u32, fixed: Option<u16>) -> Entry {
    let (write, file, bufs, at, flags) = match *op {
        Op::Read { file, bufs, offset } => (false, file, bufs, offset, 0),
        Op::Write { file, bufs, offset, dsync } => {
            (true, file, bufs, offset, if dsync { libc::RWF_DSYNC } else { 0 })
        }
        _ => unreachable!("only reads and writes are transfers"),
    };
    let (file, iovs) = (Fixed(files + file.0), bufs.iovs());
    if let [iov] = iovs {
        let len = iov.iov_len.min(TRANSFER_BYTES_MAX) as u32;
        let base = iov.iov_base.cast::<u8>();
        return match (write, fixed) {
            (false, None) => opcode::Read::new(file, base, len).offset(at).build(),
            (true, None) => opcode::Write::new(file, base, len).offset(at).rw_flags(flags).build(),
            (false, Some(i)) => opcode::ReadFixed::new(file, base, len, i).offset(at).build(),
            (true, Some(i)) => {
                opcode::WriteFixed::new(file, base, len, i).offset(at).rw_flags(flags).build()
            }
        };
    }
    let (ptr, count) = (iovs.as_ptr(), iovs.len() as u32);
    match (write, fixed) {
        (false, None) => opcode::Readv::new(file, ptr, count).offset(at).build(),
        (true, None) => opcode::Writev::new(file, ptr, count).offset(at).rw_flags(flags).build(),
        (false, Some(i)) => opcode::ReadvFixed::new(file, ptr, count, i).offset(at).build(),
        (true, Some(i)) => {
            opcode::WritevFixed::new(file, ptr, count, i).offset(at).rw_flags(flags).build()
        }
    }
}
