// SPDX-License-Identifier: Apache-2.0
//! A set of clusters, a bit for each.

use std::collections::HashMap;

/// Clusters whose bits are kept together.
const PAGE: u64 = 512;

/// The bits of the clusters of a page.
pub(crate) type Bits = [u64; (PAGE / 64) as usize];

/// A set of clusters.
#[derive(Debug, Default)]
pub(crate) struct Clusters(HashMap<u64, Bits>);

impl Clusters {
    fn place(cluster: u64) -> (u64, usize, u64) {
        let bit = cluster % PAGE;
        (cluster / PAGE, (bit / 64) as usize, 1 << (bit % 64))
    }

    /// The pages of clusters in ascending order.
    pub(crate) fn pages(sorted: &[u64]) -> impl Iterator<Item = (u64, Bits)> + '_ {
        sorted.chunk_by(|one, next| one / PAGE == next / PAGE).map(|clusters| {
            let mut bits = Bits::default();
            for (_, word, bit) in clusters.iter().map(|cluster| Self::place(*cluster)) {
                bits[word] |= bit;
            }
            (clusters[0] / PAGE, bits)
        })
    }

    /// Number of pages that have a cluster of the set.
    pub(crate) fn page_count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn has(&self, cluster: u64) -> bool {
        let (page, word, bit) = Self::place(cluster);
        self.0.get(&page).is_some_and(|words| words[word] & bit != 0)
    }

    /// A cluster of a page that is in the set.
    pub(crate) fn first_of(&self, page: u64, bits: &Bits) -> Option<u64> {
        let own = self.0.get(&page)?;
        let both = own.iter().zip(bits).map(|(own, bits)| own & bits);
        let (word, both) = both.enumerate().find(|(_, both)| *both != 0)?;
        Some(page * PAGE + word as u64 * 64 + u64::from(both.trailing_zeros()))
    }

    pub(crate) fn add(&mut self, cluster: u64) {
        let (page, word, bit) = Self::place(cluster);
        self.0.entry(page).or_default()[word] |= bit;
    }

    pub(crate) fn add_page(&mut self, page: u64, bits: &Bits) {
        self.0.entry(page).or_default().iter_mut().zip(bits).for_each(|(own, bits)| *own |= bits);
    }

    pub(crate) fn remove(&mut self, cluster: u64) {
        let (page, word, bit) = Self::place(cluster);
        if let Some(words) = self.0.get_mut(&page) {
            words[word] &= !bit;
            if *words == [0; _] {
                self.0.remove(&page);
            }
        }
    }

    /// Appends the number of the pages, and the pages in ascending order, each with its number and its bits,
    /// little-endian.
    pub(crate) fn write(&self, bytes: &mut Vec<u8>) {
        let mut pages: Vec<_> = self.0.iter().collect();
        pages.sort_unstable();
        bytes.extend((pages.len() as u64).to_le_bytes());
        for (page, words) in pages {
            bytes.extend(page.to_le_bytes());
            words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        }
    }

    /// Reads two sets, which are all of the bytes.
    pub(crate) fn read_two(bytes: &[u8]) -> Option<(Clusters, Clusters)> {
        let (words, []) = bytes.as_chunks() else { return None };
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        let both = (Self::read(&mut words)?, Self::read(&mut words)?);
        words.next().is_none().then_some(both)
    }

    fn read(words: &mut impl Iterator<Item = u64>) -> Option<Clusters> {
        let pages = words.next()?;
        let page = |_| Some((words.next()?, page_of(words)?));
        (0..pages).map(page).collect::<Option<_>>().map(Clusters)
    }
}

/// The bits of a page.
fn page_of(words: &mut impl Iterator<Item = u64>) -> Option<Bits> {
    let mut bits = Bits::default();
    for word in &mut bits {
        *word = words.next()?;
    }
    Some(bits)
}
