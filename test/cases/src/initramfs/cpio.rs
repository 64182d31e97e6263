// SPDX-License-Identifier: Apache-2.0
//! Writes the archive format of initramfs images ("newc").

use std::io::{self, Write};

const MODE_DIRECTORY: u32 = 0o040_755;
const MODE_PROGRAM: u32 = 0o100_755;

/// An incomplete archive.
#[derive(Debug, Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds a directory.
    pub(super) fn directory(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, MODE_DIRECTORY, &[])
    }

    /// Adds an executable file.
    pub(super) fn program(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        self.entry(name, MODE_PROGRAM, content)
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let links = if mode == MODE_DIRECTORY { 2 } else { 1 };
        // inode, mode, uid, gid, links, time, size, device (4 numbers), length of name, checksum
        let size = content.len() as u32;
        let fields =
            [self.entries, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        self.bytes.write_all(b"070701")?;
        for field in fields {
            write!(self.bytes, "{field:08x}")?;
        }
        write!(self.bytes, "{name}\0")?;
        self.pad();
        self.bytes.write_all(content)?;
        self.pad();
        Ok(())
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Returns the complete archive.
    pub(super) fn finish(mut self) -> io::Result<Vec<u8>> {
        self.entry("TRAILER!!!", 0, &[])?;
        Ok(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_its_header_name_and_content_padded_to_four_bytes() {
        let mut archive = Archive::default();
        archive.program("init", b"12345").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[14..22], b"000081ed", "mode");
        assert_eq!(&bytes[54..62], b"00000005", "size");
        assert_eq!(&bytes[110..115], b"init\0");
        assert_eq!(&bytes[116..124], b"12345\0\0\0");
        assert_eq!(&bytes[124..130], b"070701", "the trailer follows");
        assert!(bytes.len().is_multiple_of(4));
    }
}
