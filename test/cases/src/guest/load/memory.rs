// SPDX-License-Identifier: Apache-2.0
//! Memory for direct I/O.

/// Alignment that is sufficient for every disk here.
const ALIGN: usize = 4096;

/// Page-aligned bytes.
#[derive(Debug)]
pub(crate) struct Aligned {
    space: Vec<u8>,
    len: usize,
}

impl Aligned {
    /// Allocates `len` zero bytes.
    pub(crate) fn new(len: usize) -> Self {
        Self { space: vec![0; len + ALIGN], len }
    }

    /// The content.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        let skip = self.space.as_ptr().align_offset(ALIGN);
        &mut self.space[skip..skip + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_begin_at_a_page() {
        let mut memory = Aligned::new(100);
        assert_eq!((memory.bytes().len(), memory.bytes().as_ptr() as usize % ALIGN), (100, 0));
    }
}
