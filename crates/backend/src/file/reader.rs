// SPDX-License-Identifier: Apache-2.0
//! Reads a served file beside its lanes, by system calls that wait.

use super::File;
use super::lane::Shared;
use super::piece::widened;
use super::sync;
use crate::holes::Holes;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Reads a file with a descriptor of its own, with O_DIRECT as its disk does.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    file: fs::File,
    /// Alignment in bytes of memory, positions and lengths.
    align: u32,
    buffer: Vec<u8>,
    /// The place in the buffer of the last read.
    content: Range<usize>,
    /// Number of times that the lock had been given up.
    handovers: u32,
    /// A disk may have written to the file.
    writable: bool,
    /// The holes, once they were asked for.
    holes: Option<Holes>,
    /// The last data that was found.
    data: Range<u64>,
}

impl File {
    /// Opens the file once more, to read it.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn reader(&self) -> io::Result<Reader> {
        let shared = Arc::clone(&self.shared);
        let (flags, align) = match self.limits.direct {
            None => (0, 1),
            Some(align) => (libc::O_DIRECT, align.memory.max(align.read)),
        };
        let file = sync::open_again(&shared.file, true, flags)?;
        let handovers = self.handovers();
        Ok(Reader {
            shared,
            file,
            align,
            buffer: Vec::new(),
            content: 0..0,
            handovers,
            writable: !self.info.read_only,
            holes: None,
            data: 0..0,
        })
    }

    /// Number of times that the lock of the image was given up: another program may have written then.
    pub fn handovers(&self) -> u32 {
        self.shared.handovers.load(Ordering::Acquire)
    }
}

impl Reader {
    /// Reads a range of bytes.
    ///
    /// # Errors
    /// The error of the system call, or `UnexpectedEof` if the file is shorter.
    pub fn read(&mut self, range: Range<u64>) -> io::Result<&[u8]> {
        let wide = widened(&range, self.align);
        let (skip, len) = ((range.start - wide.start) as usize, (range.end - range.start) as usize);
        let wide_len = (wide.end - wide.start) as usize;
        self.buffer.resize(wide_len + self.align as usize, 0);
        let first = self.buffer.as_ptr().align_offset(self.align as usize);
        let buffer = &mut self.buffer[first..first + wide_len];
        let mut filled = 0;
        while filled < skip + len {
            match self.file.read_at(&mut buffer[filled..], wide.start + filled as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
        self.content = first + skip..first + skip + len;
        Ok(self.content())
    }

    /// The bytes of the last read.
    pub fn content(&self) -> &[u8] {
        &self.buffer[self.content.clone()]
    }

    /// The first position in a range that is in no hole; its end if all of it is a hole. The first call syncs the
    /// file if data may lie in its holes ([`Holes::synced`]): from then on no I/O writes to the ranges that are asked
    /// for, or the writes are noted.
    ///
    /// # Errors
    /// The error of the system call, or of a sync that failed, now or earlier.
    pub fn skip_hole(&mut self, range: Range<u64>) -> io::Result<u64> {
        let holes = self.holes()?;
        if !self.data.contains(&range.start) {
            self.data = holes.first_data(&self.file, range.clone())?;
        }
        Ok(range.start.max(self.data.start).min(range.end))
    }

    fn holes(&mut self) -> io::Result<Holes> {
        let sync = || match self.writable {
            // The disk remembers a failure: completed writes may be lost.
            true => self.shared.sync(),
            false => self.file.sync_data(),
        };
        let holes = self.holes.map_or_else(|| Holes::synced(&self.file, sync), Ok)?;
        self.holes = Some(holes);
        Ok(holes)
    }

    /// Returns whether the lock of the image was given up since the reader was opened: another program
    /// may have written.
    pub fn was_handed_over(&self) -> bool {
        self.shared.handovers.load(Ordering::Acquire) != self.handovers
    }
}
