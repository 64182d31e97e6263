// SPDX-License-Identifier: Apache-2.0
//! The requests to an export, one after another.

use super::handshake::{Facts, go};
use super::wire::{Hangup, Limit, Wire};
use super::{Address, NbdError};
use std::io;
use std::ops::Range;
use std::time::Duration;

/// Most bytes that one request zeroes.
pub(crate) const ZEROES_MAX: u64 = 32 << 20;
/// Most bytes of one request with data.
const DATA_MAX: u32 = 1 << 20;
/// Maximum wait for the handshake, of which an earlier end of the command takes no notice.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Maximum wait for the reply to a request that changes data. The others have no limit but the end of the
/// command. A guest waits less: `crates/vhost-blk/src/disks/converge`.
const NBD_REPLY_MAX: Duration = Duration::from_secs(60);

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
    WriteZeroes = 6,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Read => "READ",
            Kind::Write => "WRITE",
            Kind::Disconnect => "DISC",
            Kind::Flush => "FLUSH",
            Kind::WriteZeroes => "WRITE_ZEROES",
        }
    }

    fn limit(self) -> Limit {
        let changes = matches!(self, Kind::Write | Kind::WriteZeroes | Kind::Disconnect);
        Limit::of(changes.then_some(NBD_REPLY_MAX))
    }
}

/// An export that is written. After an error no request follows.
#[derive(Debug)]
pub(crate) struct Client {
    wire: Wire,
    facts: Facts,
    /// Number of the last request.
    cookie: u64,
}

impl Client {
    /// Connects to an export that can be written. `connected` gets the handle that ends the connection, before the
    /// server has to answer.
    ///
    /// # Errors
    /// [`NbdError`].
    pub(crate) fn connect(
        address: &Address,
        connected: impl FnOnce(Hangup),
    ) -> Result<Client, NbdError> {
        let wire = Wire::connect(&address.socket)?;
        connected(wire.hangup()?);
        Client::over(wire, &address.export)
    }

    fn over(mut wire: Wire, export: &str) -> Result<Client, NbdError> {
        let facts = go(&mut wire, export, Limit::of(Some(HANDSHAKE_MAX)))?;
        if facts.is_read_only() {
            return Err(NbdError::ReadOnly);
        }
        Ok(Client { wire, facts, cookie: 0 })
    }

    /// Checks that a disk fits into the export, in requests of whole `unit_bytes` but for its end.
    ///
    /// # Errors
    /// [`NbdError`].
    pub(crate) fn check(&self, disk_bytes: u64, unit_bytes: u64) -> Result<(), NbdError> {
        let Facts { size_bytes, block_bytes, .. } = self.facts;
        if size_bytes < disk_bytes {
            return Err(NbdError::Small { has: size_bytes, needs: disk_bytes });
        }
        let block = u64::from(block_bytes);
        if !unit_bytes.is_multiple_of(block) || !disk_bytes.is_multiple_of(block) {
            return Err(NbdError::Blocks(block_bytes));
        }
        Ok(())
    }

    /// Returns whether the server can make data durable.
    pub(crate) fn flushes(&self) -> bool {
        self.facts.flushes()
    }

    /// Writes data.
    ///
    /// # Errors
    /// [`NbdError`].
    pub(crate) fn write(&mut self, at: u64, data: &[u8]) -> Result<(), NbdError> {
        let mut at = at;
        for part in data.chunks(self.data_max()) {
            self.request(Kind::Write, at, part.len() as u32, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Makes a range read as zeroes, which takes no space if the server has WRITE_ZEROES.
    ///
    /// # Errors
    /// [`NbdError`].
    pub(crate) fn zero(&mut self, range: Range<u64>) -> Result<(), NbdError> {
        let zeroes = if self.facts.writes_zeroes() { vec![] } else { vec![0; self.data_max()] };
        let max = if zeroes.is_empty() { ZEROES_MAX } else { zeroes.len() as u64 };
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(max);
            match zeroes.get(..len as usize) {
                Some(data) if !zeroes.is_empty() => {
                    self.request(Kind::Write, at, len as u32, data)?
                }
                _ => self.request(Kind::WriteZeroes, at, len as u32, &[])?,
            }
            at += len;
        }
        Ok(())
    }

    /// Fills the buffer from a position.
    ///
    /// # Errors
    /// [`NbdError`].
    pub(crate) fn read(&mut self, at: u64, buffer: &mut [u8]) -> Result<(), NbdError> {
        let (mut at, max) = (at, self.data_max());
        for part in buffer.chunks_mut(max) {
            self.request(Kind::Read, at, part.len() as u32, &[])?;
            self.wire.receive(part, Kind::Read.limit())?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Makes all that was written durable, if the server can do that.
    ///
    /// # Errors
    /// [`NbdError`].
    pub(crate) fn flush(&mut self) -> Result<(), NbdError> {
        if self.flushes() { self.request(Kind::Flush, 0, 0, &[]) } else { Ok(()) }
    }

    /// Takes leave of the server.
    pub(crate) fn disconnect(mut self) {
        self.cookie += 1;
        let message = header(Kind::Disconnect, self.cookie, 0, 0);
        let _ = self.wire.send(&message, Kind::Disconnect.limit()); // all is done
    }

    /// Most bytes of a request with data, in whole blocks.
    fn data_max(&self) -> usize {
        let Facts { block_bytes, request_bytes, .. } = self.facts;
        let max = request_bytes.min(DATA_MAX);
        (max - max % block_bytes).max(block_bytes) as usize
    }

    fn request(&mut self, kind: Kind, at: u64, len: u32, data: &[u8]) -> Result<(), NbdError> {
        let limit = kind.limit();
        self.cookie += 1;
        let message = header(kind, self.cookie, at, len);
        self.wire.send(&message, limit)?;
        self.wire.send(data, limit)?;
        let magic = u32::from_be_bytes(self.wire.take(limit)?);
        let error = u32::from_be_bytes(self.wire.take(limit)?);
        let cookie = u64::from_be_bytes(self.wire.take(limit)?);
        if magic != REPLY_MAGIC || cookie != self.cookie {
            return Err(NbdError::Broken("its reply is that of no request"));
        }
        match error {
            0 => Ok(()),
            // The errors of the protocol have the numbers of Linux.
            error => {
                let why = io::Error::from_raw_os_error(i32::try_from(error).unwrap_or(libc::EIO));
                Err(NbdError::Request { act: kind.name(), at, why })
            }
        }
    }
}

/// A request without flags.
fn header(kind: Kind, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    let mut message = REQUEST_MAGIC.to_be_bytes().to_vec();
    message.extend(0_u16.to_be_bytes());
    message.extend((kind as u16).to_be_bytes());
    message.extend(cookie.to_be_bytes());
    message.extend(at.to_be_bytes());
    message.extend(len.to_be_bytes());
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    const FLUSHES: u16 = 1 << 2;

    /// A client of an export of 4 MiB with these flags and blocks, and the server's end after the
    /// handshake.
    fn connected(flags: u16, blocks: [u32; 3]) -> (Client, UnixStream) {
        let (ours, mut server) = UnixStream::pair().unwrap();
        let export = [&[0; 2][..], &(4_u64 << 20).to_be_bytes(), &flags.to_be_bytes()].concat();
        let blocks = [&[0, 3][..], &blocks.map(u32::to_be_bytes).concat()].concat();
        let mut said = b"NBDMAGICIHAVEOPT\0\x01".to_vec();
        for (kind, data) in [(3, &export[..]), (3, &blocks), (1, &[])] {
            said.extend(0x0003_e889_0455_65a9_u64.to_be_bytes());
            said.extend([7, kind, data.len() as u32].map(u32::to_be_bytes).concat());
            said.extend(data);
        }
        server.write_all(&said).unwrap();
        let client = Client::over(Wire::of(ours), "").unwrap();
        server.read_exact(&mut [0; 4 + 16 + 8]).unwrap();
        (client, server)
    }

    /// Takes a request, checks its type, position and length, and replies with an error.
    fn answer(server: &mut UnixStream, expected: (Kind, u64, u32), error: u32) {
        let mut request = [0; 28];
        server.read_exact(&mut request).unwrap();
        let (kind, at, len) = expected;
        assert_eq!(request[6..8], (kind as u16).to_be_bytes());
        assert_eq!(request[16..24], at.to_be_bytes());
        assert_eq!(request[24..], len.to_be_bytes());
        if kind == Kind::Write {
            server.read_exact(&mut vec![0; len as usize]).unwrap();
        }
        let reply = [REPLY_MAGIC, error].map(u32::to_be_bytes).concat();
        server.write_all(&[&reply, &request[8..16]].concat()).unwrap();
        if kind == Kind::Read && error == 0 {
            server.write_all(&vec![7; len as usize]).unwrap();
        }
    }

    #[test]
    fn requests_are_cut_to_the_blocks_of_the_export_and_zeroes_are_data_without_write_zeroes() {
        let (mut client, mut server) = connected(FLUSHES, [512, 4096, 1536]);
        client.check(4 << 20, 65_536).unwrap();
        let served = std::thread::spawn(move || {
            answer(&mut server, (Kind::Write, 1024, 1536), 0);
            answer(&mut server, (Kind::Write, 2560, 512), 0);
            answer(&mut server, (Kind::Write, 4096, 512), 0);
            answer(&mut server, (Kind::Read, 0, 1536), 0);
            answer(&mut server, (Kind::Read, 1536, 512), 0);
            answer(&mut server, (Kind::Flush, 0, 0), 0);
        });
        client.write(1024, &[1; 2048]).unwrap();
        client.zero(4096..4608).unwrap();
        let mut data = [0; 2048];
        client.read(0, &mut data).unwrap();
        assert_eq!(data, [7; 2048]);
        client.flush().unwrap();
        served.join().unwrap();
    }

    #[test]
    fn a_disk_that_does_not_fit_into_the_export_or_its_blocks_is_refused() {
        let (client, _server) = connected(0, [4096, 4096, 4096]);
        let told = |bytes, unit| client.check(bytes, unit).unwrap_err().to_string();
        assert!(told((4 << 20) + 512, 65_536).contains("has 4194304 bytes, and the disk 4194816;"));
        assert!(told(4096 + 512, 65_536).contains("whole blocks of 4096 bytes"));
        assert!(told(8192, 512).contains("whole blocks of 4096 bytes"));
    }

    #[test]
    fn an_error_of_a_request_is_told_with_its_place_and_a_wrong_reply_is_not_taken() {
        let (mut client, mut server) = connected(FLUSHES, [1, 4096, 1 << 20]);
        let served = std::thread::spawn(move || {
            answer(&mut server, (Kind::Write, 4096, 512), libc::ENOSPC as u32);
            answer(&mut server, (Kind::Flush, 0, 0), u32::MAX);
            server.write_all(&[REPLY_MAGIC, 0, 0, 99].map(u32::to_be_bytes).concat()).unwrap();
            server
        });
        let told = client.write(4096, &[1; 512]).unwrap_err().to_string();
        assert!(told.contains("a WRITE at 4096 failed there: No space left"), "{told}");
        assert!(client.flush().unwrap_err().to_string().contains("Input/output error"));
        let _server = served.join().unwrap();
        let told = client.read(0, &mut [0; 512]).unwrap_err().to_string();
        assert!(told.contains("that of no request"), "{told}");
    }

    #[test]
    fn a_client_that_is_hung_up_ends_without_the_server() {
        let (mut client, server) = connected(0, [1, 4096, 1 << 20]);
        let hangup = client.wire.hangup().unwrap();
        let waiting = std::thread::spawn(move || client.read(0, &mut [0; 512]));
        hangup.hang_up();
        assert!(matches!(waiting.join().unwrap(), Err(NbdError::HungUp)));
        drop(server);
    }
}
