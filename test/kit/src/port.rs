// SPDX-License-Identifier: Apache-2.0
//! A virtio serial port of the machine: reads and writes end with an error after a time limit.
//!
//! A port whose other end is silent otherwise blocks its user for ever, and the case ends without a
//! word about the reason.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

/// Time that the other end may take to answer, or to make room.
const LIMIT: Duration = Duration::from_secs(60);

/// An open port.
#[derive(Debug)]
pub struct Port {
    file: File,
    limit: Duration,
}

impl Port {
    /// Opens the port at `path`, which only one process can open at a time.
    ///
    /// # Errors
    /// Fails as `open(2)` does.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
        Ok(Self { file: options.open(path)?, limit: LIMIT })
    }

    /// Repeats `operate`, waiting for `events`, until it no longer would block.
    fn bounded<T>(
        &mut self,
        events: PollFlags,
        mut operate: impl FnMut(&mut File) -> io::Result<T>,
    ) -> io::Result<T> {
        let limit = Timespec::try_from(self.limit).map_err(io::Error::other)?;
        loop {
            match operate(&mut self.file) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
            if poll(&mut [PollFd::new(&self.file, events)], Some(&limit))? == 0 {
                let seconds = self.limit.as_secs();
                let why = format!("the port's other end was silent for {seconds} s");
                return Err(io::Error::new(ErrorKind::TimedOut, why));
            }
        }
    }
}

impl Read for Port {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.bounded(PollFlags::IN, |file| file.read(buffer))
    }
}

impl Write for Port {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bounded(PollFlags::OUT, |file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fifo(limit: Duration) -> (tempfile::TempDir, Port) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("port");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let port = Port::open(&path).unwrap();
        (dir, Port { limit, ..port })
    }

    #[test]
    fn a_silent_end_is_an_error_with_the_time_it_was_silent() {
        let (_dir, mut port) = fifo(Duration::from_millis(20));
        let error = port.read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.to_string().contains("silent for"), "{error}");
        let error = loop {
            if let Err(error) = port.write(&[0; 65536]) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn data_that_comes_is_read() {
        let (dir, mut port) = fifo(LIMIT);
        let mut other = Port::open(&dir.path().join("port")).unwrap();
        let writer = std::thread::spawn(move || other.write_all(b"said").unwrap());
        let mut said = [0; 4];
        port.read_exact(&mut said).unwrap();
        writer.join().unwrap();
        assert_eq!(&said, b"said");
    }
}
