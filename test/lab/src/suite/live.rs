// SPDX-License-Identifier: Apache-2.0
//! The output of the cases while they run, for people who watch them (`lab run --show`).

use std::fs::File;
use std::io::{Read, Write};

use anyhow::Result;
use kit::outcome::EXPECT_LOG;

use crate::suite::script::MARK;

/// Copies whole lines from the output of a boot's cases, without the lines that are for the lab.
#[derive(Debug)]
pub(crate) struct Live {
    from: File,
    /// Bytes after the last whole line.
    partial: Vec<u8>,
}

impl Live {
    pub(crate) fn new(from: File) -> Self {
        Self { from, partial: Vec::new() }
    }

    /// Copies the lines that have been written since the last call.
    pub(crate) fn pass_on(&mut self, to: &mut impl Write) -> Result<()> {
        self.from.read_to_end(&mut self.partial)?;
        while let Some(at) = self.partial.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=at).collect();
            if !is_for_the_lab(&line) {
                to.write_all(&line)?;
            }
        }
        Ok(to.flush()?)
    }
}

fn is_for_the_lab(line: &[u8]) -> bool {
    [MARK, EXPECT_LOG].iter().any(|start| line.starts_with(start.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_are_shown_once_and_those_for_the_lab_are_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (mut writer, mut shown) = (file.reopen().unwrap(), Vec::new());
        let mut live = Live::new(file.reopen().unwrap());
        for part in ["lab: case a begins\nEXPECT-LOG: oops\nfirst\nsec", "ond\n", "no end"] {
            writer.write_all(part.as_bytes()).unwrap();
            live.pass_on(&mut shown).unwrap();
        }
        assert_eq!(String::from_utf8(shown).unwrap(), "first\nsecond\n");
    }
}
