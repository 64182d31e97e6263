// SPDX-License-Identifier: Apache-2.0
//! The fixed newstyle handshake: chooses an export with NBD_OPT_GO.

use super::NbdError;
use super::wire::{Limit, Wire};

const MAGIC: &[u8; 8] = b"NBDMAGIC";
const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// NBD_FLAG_FIXED_NEWSTYLE, of both sides.
const FIXED_NEWSTYLE: u16 = 1;
const OPT_GO: u32 = 7;

const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const REP_ERR: u32 = 1 << 31;
const REP_ERR_UNSUP: u32 = REP_ERR + 1;
const REP_ERR_TLS_REQD: u32 = REP_ERR + 5;
const REP_ERR_UNKNOWN: u32 = REP_ERR + 6;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// Maximum replies to NBD_OPT_GO.
const REPLIES_MAX: usize = 64;
/// Maximum bytes of one of them.
const REPLY_BYTES_MAX: u32 = 8 << 10;
/// Most bytes of a request, if the server says nothing: the protocol has this value.
const REQUEST_BYTES: u32 = 32 << 20;

/// NBD_FLAG_READ_ONLY.
const READ_ONLY: u16 = 1 << 1;
/// NBD_FLAG_SEND_FLUSH.
const SEND_FLUSH: u16 = 1 << 2;
/// NBD_FLAG_SEND_WRITE_ZEROES.
const SEND_WRITE_ZEROES: u16 = 1 << 6;

/// The facts of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) size_bytes: u64,
    flags: u16,
    /// Requests have whole blocks of this size.
    pub(super) block_bytes: u32,
    /// Most bytes of a request with data.
    pub(super) request_bytes: u32,
}

impl Facts {
    pub(super) fn is_read_only(self) -> bool {
        self.flags & READ_ONLY != 0
    }

    pub(super) fn flushes(self) -> bool {
        self.flags & SEND_FLUSH != 0
    }

    pub(super) fn writes_zeroes(self) -> bool {
        self.flags & SEND_WRITE_ZEROES != 0
    }
}

/// Chooses the export. Afterwards the connection takes requests.
pub(super) fn go(wire: &mut Wire, export: &str, limit: Limit) -> Result<Facts, NbdError> {
    if wire.take::<8>(limit)? != *MAGIC {
        return Err(NbdError::Broken("it does not begin with NBDMAGIC"));
    }
    if wire.take::<8>(limit)? != *OPTION_MAGIC {
        return Err(NbdError::Broken("it speaks the oldstyle protocol"));
    }
    if u16::from_be_bytes(wire.take(limit)?) & FIXED_NEWSTYLE == 0 {
        return Err(NbdError::Broken("it does not speak the fixed newstyle protocol"));
    }
    let mut message = u32::from(FIXED_NEWSTYLE).to_be_bytes().to_vec();
    message.extend(OPTION_MAGIC);
    message.extend(OPT_GO.to_be_bytes());
    // The name is bounded, and one information is wanted.
    let name_bytes = export.len() as u32;
    message.extend((4 + name_bytes + 4).to_be_bytes());
    message.extend(name_bytes.to_be_bytes());
    message.extend(export.as_bytes());
    message.extend(1_u16.to_be_bytes());
    message.extend(INFO_BLOCK_SIZE.to_be_bytes());
    wire.send(&message, limit)?;
    replies(wire, export, limit)
}

fn replies(wire: &mut Wire, export: &str, limit: Limit) -> Result<Facts, NbdError> {
    let mut found = None;
    let (mut block_bytes, mut request_bytes) = (1, REQUEST_BYTES);
    for _ in 0..REPLIES_MAX {
        let (kind, data) = reply(wire, limit)?;
        match kind {
            REP_ACK => {
                let (size_bytes, flags) =
                    found.ok_or(NbdError::Broken("its export has no size"))?;
                return Ok(Facts { size_bytes, flags, block_bytes, request_bytes });
            }
            REP_INFO => match information(&data) {
                Some(Information::Export(size, flags)) => found = Some((size, flags)),
                Some(Information::Blocks(least, most)) => {
                    (block_bytes, request_bytes) = (least.max(1), most.max(least));
                }
                None => {}
            },
            kind if kind & REP_ERR != 0 => return Err(refusal(kind, &data, export)),
            _ => return Err(NbdError::Broken("its reply to NBD_OPT_GO is of an unknown kind")),
        }
    }
    Err(NbdError::Broken("its replies to NBD_OPT_GO do not end"))
}

fn reply(wire: &mut Wire, limit: Limit) -> Result<(u32, Vec<u8>), NbdError> {
    let magic = u64::from_be_bytes(wire.take(limit)?);
    let option = u32::from_be_bytes(wire.take(limit)?);
    let kind = u32::from_be_bytes(wire.take(limit)?);
    let len = u32::from_be_bytes(wire.take(limit)?);
    if magic != REPLY_MAGIC || option != OPT_GO {
        return Err(NbdError::Broken("it does not reply to NBD_OPT_GO"));
    }
    if len > REPLY_BYTES_MAX {
        return Err(NbdError::Broken("its reply to NBD_OPT_GO is too long"));
    }
    let mut data = vec![0; len as usize];
    wire.receive(&mut data, limit)?;
    Ok((kind, data))
}

enum Information {
    /// Size in bytes, and flags.
    Export(u64, u16),
    /// Least and most bytes of a request.
    Blocks(u32, u32),
}

/// `None`: information of another kind.
fn information(data: &[u8]) -> Option<Information> {
    let (kind, data) = data.split_first_chunk()?;
    match u16::from_be_bytes(*kind) {
        INFO_EXPORT => {
            let (size, data) = data.split_first_chunk()?;
            let (flags, _) = data.split_first_chunk()?;
            Some(Information::Export(u64::from_be_bytes(*size), u16::from_be_bytes(*flags)))
        }
        INFO_BLOCK_SIZE => {
            let (least, data) = data.split_first_chunk()?;
            let (_, data) = data.split_first_chunk::<4>()?;
            let (most, _) = data.split_first_chunk()?;
            Some(Information::Blocks(u32::from_be_bytes(*least), u32::from_be_bytes(*most)))
        }
        _ => None,
    }
}

fn refusal(kind: u32, data: &[u8], export: &str) -> NbdError {
    let said = String::from_utf8_lossy(data).into_owned();
    match kind {
        REP_ERR_UNSUP => NbdError::Broken("it does not know NBD_OPT_GO"),
        REP_ERR_TLS_REQD => NbdError::Tls,
        _ => {
            let why = match (said.is_empty(), kind) {
                (false, _) => said,
                (true, REP_ERR_UNKNOWN) => "there is none of this name".into(),
                (true, kind) => format!("error {}", kind - REP_ERR),
            };
            NbdError::Refused { export: export.to_owned(), why }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x01";

    /// A reply to NBD_OPT_GO.
    fn reply(kind: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = REPLY_MAGIC.to_be_bytes().to_vec();
        [OPT_GO, kind, data.len() as u32].iter().for_each(|word| bytes.extend(word.to_be_bytes()));
        bytes.extend(data);
        bytes
    }

    /// The result of a handshake with a server that says these bytes and closes.
    fn shake(bytes: &[u8]) -> Result<Facts, NbdError> {
        let (ours, mut server) = UnixStream::pair().unwrap();
        server.write_all(bytes).unwrap();
        server.shutdown(std::net::Shutdown::Write).unwrap();
        go(&mut Wire::of(ours), "x", Limit::of(Some(Duration::from_secs(60))))
    }

    #[test]
    fn an_export_has_the_size_the_flags_and_the_blocks_that_the_server_tells() {
        let export = [&[0; 2][..], &4096_u64.to_be_bytes(), &0b110_u16.to_be_bytes()].concat();
        let blocks = [512_u32, 4096, 1 << 20].map(u32::to_be_bytes).concat();
        let blocks = [&3_u16.to_be_bytes()[..], &blocks].concat();
        let unknown = reply(REP_INFO, &[0, 9, 1]);
        let ack = reply(REP_ACK, &[]);
        let plain = [GREETING, &unknown, &reply(REP_INFO, &export), &ack].concat();
        let facts = shake(&plain).unwrap();
        assert_eq!((facts.size_bytes, facts.block_bytes), (4096, 1));
        assert_eq!(facts.request_bytes, REQUEST_BYTES);
        assert!(facts.is_read_only() && facts.flushes() && !facts.writes_zeroes());
        let all = [GREETING, &reply(REP_INFO, &export), &reply(REP_INFO, &blocks), &ack].concat();
        let facts = shake(&all).unwrap();
        assert_eq!((facts.block_bytes, facts.request_bytes), (512, 1 << 20));
    }

    #[test]
    fn a_server_that_breaks_the_handshake_is_refused_with_the_reason() {
        let with = |bytes: &[u8]| [GREETING, bytes].concat();
        let endless = reply(REP_INFO, &[0, 9]).repeat(REPLIES_MAX);
        let mut other = reply(REP_ACK, &[]);
        other[0] ^= 1;
        let mut long = reply(REP_ACK, &[]);
        long[16..20].copy_from_slice(&(REPLY_BYTES_MAX + 1).to_be_bytes());
        for (bytes, why) in [
            (b"HTTP/1.1 400".to_vec(), "does not begin with NBDMAGIC"),
            (b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53".to_vec(), "oldstyle"),
            (b"NBDMAGICIHAVEOPT\0\0".to_vec(), "fixed newstyle"),
            (GREETING.to_vec(), "has ended the connection"),
            (with(&other), "does not reply to NBD_OPT_GO"),
            (with(&long), "too long"),
            (with(&endless), "do not end"),
            (with(&reply(REP_ACK, &[])), "no size"),
            (with(&reply(2, &[])), "unknown kind"),
            (with(&reply(REP_ERR_UNSUP, &[])), "does not know NBD_OPT_GO"),
            (with(&reply(REP_ERR_TLS_REQD, &[])), "wants TLS"),
            (with(&reply(REP_ERR_UNKNOWN, &[])), "\"x\": there is none of this name"),
            (with(&reply(REP_ERR + 7, b"good night")), "\"x\": good night"),
            (with(&reply(REP_ERR + 7, &[])), "\"x\": error 7"),
        ] {
            let told = shake(&bytes).unwrap_err().to_string();
            assert!(told.contains(why) && told.contains("; "), "{told}");
        }
    }

    #[test]
    fn a_server_that_says_nothing_is_left_at_the_time_limit() {
        let (ours, _server) = UnixStream::pair().unwrap();
        let limit = Limit::of(Some(Duration::from_millis(1)));
        let told = go(&mut Wire::of(ours), "", limit).unwrap_err().to_string();
        assert!(told.contains("has not answered") && told.contains("; check"), "{told}");
    }
}
