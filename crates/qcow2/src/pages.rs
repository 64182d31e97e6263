// SPDX-License-Identifier: Apache-2.0
//! The places of single clusters, a word for each.
//!
//! A page has the words of [`CLUSTERS`] clusters of the disk in a row. A word is the place of its cluster, a multiple
//! of 512 bytes, whose low 9 bits have the file's number, plus one. 0 is an unknown cluster, and 511 one of zeroes. A
//! set that is full replaces a page that was not used of late.

use crate::extents::{Extent, ZEROES};
use crate::places::ENTRY_BYTES;
use std::collections::HashMap;
use std::ops::Range;

/// Clusters of a page.
pub(crate) const CLUSTERS: u64 = 512;
/// Maximum pages of a lane (32 MiB): those of 256 GiB in clusters of 64 KiB, as many as QEMU keeps by default.
const PAGES_MAX: usize = 8192;
/// The bits of a word that have the file.
const FILE: u64 = (1 << 9) - 1;

const _: () = assert!((crate::chain::FILES_MAX as u64) + 1 < FILE);
// The clusters of a page have one L2 table, also with the smallest clusters.
const _: () = assert!(CLUSTERS * ENTRY_BYTES <= 4096);

/// The word of a cluster in the file with this number, at a place in bytes.
fn word_of(file: u32, host: u64) -> u64 {
    match file {
        ZEROES => FILE,
        file => host | (u64::from(file) + 1),
    }
}

/// The file of the word of a known cluster.
fn file_of(word: u64) -> u32 {
    match word & FILE {
        FILE => ZEROES,
        file => file as u32 - 1,
    }
}

/// The places of some clusters in a row.
#[derive(Debug)]
struct Page {
    number: u64,
    words: Box<[u64; CLUSTERS as usize]>,
    /// It was used since the set has last looked for a page to replace.
    is_used: bool,
    /// It may have words of other files than the image itself, or of zeroes.
    has_others: bool,
    /// The clusters around which places were asked for since the last cut.
    asked: Range<u64>,
}

/// The places of many clusters.
#[derive(Debug)]
pub(crate) struct Pages {
    cluster_bits: u32,
    pages: Vec<Page>,
    /// The index of each page, by its number.
    index: HashMap<u64, usize>,
    /// The page to be looked at next by a full set.
    hand: usize,
}

impl Pages {
    pub(crate) fn new(cluster_bytes: u64) -> Pages {
        let cluster_bits = cluster_bytes.trailing_zeros();
        Pages { cluster_bits, pages: Vec::new(), index: HashMap::new(), hand: 0 }
    }

    /// Bytes of the disk that a page has.
    pub(crate) fn page_bytes(&self) -> u64 {
        CLUSTERS << self.cluster_bits
    }

    /// Returns whether the extent is one for this set: whole clusters, less than a page.
    pub(crate) fn suits(&self, extent: &Extent) -> bool {
        let cluster = 1_u64 << self.cluster_bits;
        let is_whole = (extent.start | extent.end).is_multiple_of(cluster);
        is_whole
            && extent.end - extent.start < self.page_bytes()
            && (extent.file == ZEROES || extent.host & FILE == 0)
    }

    /// The extent with the byte at `at`, from the start of its cluster on. It is no longer than needed for `len` bytes.
    pub(crate) fn find(&mut self, at: u64, len: u64) -> Option<Extent> {
        let (number, first) = self.place(at);
        let page = &mut self.pages[*self.index.get(&number)?];
        page.is_used = true;
        let word = page.words[first];
        let step = match word {
            0 => return None,
            FILE => 0,
            _ => 1 << self.cluster_bits,
        };
        let wanted = (at & ((1 << self.cluster_bits) - 1)).saturating_add(len);
        let most = wanted.div_ceil(1 << self.cluster_bits).max(1);
        let run = page.words[first..].iter().scan(word, |next, word| {
            let expected = std::mem::replace(next, next.wrapping_add(step));
            (expected == *word).then_some(())
        });
        let clusters = run.take(most as usize).count() as u64;
        let start = at >> self.cluster_bits << self.cluster_bits;
        let end = start + (clusters << self.cluster_bits);
        Some(match word {
            FILE => Extent::zeroes(start..end),
            _ => Extent { start, end, file: file_of(word), host: word & !FILE },
        })
    }

    /// Known clusters of the page with the byte at `at`.
    pub(crate) fn known(&self, at: u64) -> usize {
        let page = self.index.get(&self.place(at).0).map(|index| &self.pages[*index]);
        page.map_or(0, |page| page.words.iter().filter(|word| **word != 0).count())
    }

    /// Notes that the places of a window, which lies in one page, are asked for. Returns whether they were not before.
    pub(crate) fn asks(&mut self, window: &Range<u64>) -> bool {
        let bits = self.cluster_bits;
        let clusters = window.start >> bits..window.end.div_ceil(1 << bits);
        let number = clusters.start / CLUSTERS;
        let Some(index) = self.index.get(&number) else { return true };
        let asked = &mut self.pages[*index].asked;
        let is_new = clusters.start < asked.start || clusters.end > asked.end;
        if is_new {
            *asked = clusters;
        }
        is_new
    }

    /// Adds an extent that suits the set.
    pub(crate) fn add(&mut self, extent: Extent) {
        let Extent { mut start, end, file, mut host } = extent;
        while start < end {
            let (number, first) = self.place(start);
            let bits = self.cluster_bits;
            let page = self.page(number);
            page.has_others |= file != 0;
            let clusters = ((end - start) >> bits).min(CLUSTERS - first as u64);
            for word in &mut page.words[first..first + clusters as usize] {
                *word = word_of(file, host);
                host = host.wrapping_add(1 << bits);
            }
            start += clusters << bits;
        }
    }

    /// Forgets the clusters of a range whose file satisfies `ends`.
    pub(crate) fn cut(&mut self, range: Range<u64>, ends: impl Fn(u32) -> bool) {
        if self.pages.is_empty() || range.start >= range.end {
            return;
        }
        let ((first, from), (last, to)) = (self.place(range.start), self.place(range.end - 1));
        let cut = |page: &mut Page| {
            let from = if page.number == first { from } else { 0 };
            let to = if page.number == last { to } else { CLUSTERS as usize - 1 };
            page.forget(from..to + 1, &ends);
        };
        match last - first < self.pages.len() as u64 {
            true => {
                for number in first..=last {
                    if let Some(index) = self.index.get(&number) {
                        cut(&mut self.pages[*index]);
                    }
                }
            }
            false => {
                let within = |page: &&mut Page| (first..=last).contains(&page.number);
                self.pages.iter_mut().filter(within).for_each(cut);
            }
        }
    }

    /// Forgets all clusters but those of the image itself.
    pub(crate) fn cut_others(&mut self) {
        for page in self.pages.iter_mut().filter(|page| page.has_others) {
            page.forget(0..CLUSTERS as usize, |file| file != 0);
            page.has_others = false;
        }
    }

    /// Forgets all clusters.
    pub(crate) fn clear(&mut self) {
        *self = Pages::new(1 << self.cluster_bits);
    }

    /// The page of a position, and the cluster in it.
    fn place(&self, at: u64) -> (u64, usize) {
        let cluster = at >> self.cluster_bits;
        (cluster / CLUSTERS, (cluster % CLUSTERS) as usize)
    }

    /// The page with a number, which is made if it does not exist.
    fn page(&mut self, number: u64) -> &mut Page {
        let index = match self.index.get(&number) {
            Some(index) => *index,
            None => self.make(number),
        };
        &mut self.pages[index]
    }

    fn make(&mut self, number: u64) -> usize {
        let words = Box::new([0; _]);
        let page = Page { number, words, is_used: true, has_others: false, asked: 0..0 };
        let index = if self.pages.len() < PAGES_MAX {
            self.pages.push(page);
            self.pages.len() - 1
        } else {
            while std::mem::take(&mut self.pages[self.hand].is_used) {
                self.hand = (self.hand + 1) % PAGES_MAX;
            }
            let before = std::mem::replace(&mut self.pages[self.hand], page);
            self.index.remove(&before.number);
            self.hand
        };
        self.index.insert(number, index);
        index
    }
}

impl Page {
    fn forget(&mut self, clusters: Range<usize>, ends: impl Fn(u32) -> bool) {
        self.asked = 0..0;
        for word in &mut self.words[clusters] {
            if *word != 0 && ends(file_of(*word)) {
                *word = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: u64 = 64 << 10;

    fn extent(cluster: u64, clusters: u64, file: u32, place: u64) -> Extent {
        let start = cluster * CLUSTER;
        Extent { start, end: start + clusters * CLUSTER, file, host: place * CLUSTER }
    }

    #[test]
    fn clusters_in_a_row_are_one_extent_as_far_as_the_request_goes() {
        let mut pages = Pages::new(CLUSTER);
        pages.add(extent(510, 2, 0, 7));
        pages.add(extent(512, 3, 0, 9));
        pages.add(extent(515, 1, 1, 12));
        pages.add(extent(516, 1, 0, 13));
        for (at, len, found) in [
            (510 * CLUSTER + 512, 4096, Some(extent(510, 1, 0, 7))),
            (511 * CLUSTER - 512, 4096, Some(extent(510, 2, 0, 7))),
            // A page ends here.
            (510 * CLUSTER, 5 * CLUSTER, Some(extent(510, 2, 0, 7))),
            (512 * CLUSTER, 5 * CLUSTER, Some(extent(512, 3, 0, 9))),
            (512 * CLUSTER, 2 * CLUSTER, Some(extent(512, 2, 0, 9))),
            (515 * CLUSTER, 2 * CLUSTER, Some(extent(515, 1, 1, 12))),
            (516 * CLUSTER, u64::MAX, Some(extent(516, 1, 0, 13))),
            (517 * CLUSTER, 512, None),
            (509 * CLUSTER, 512, None),
            (5000 * CLUSTER, 512, None),
        ] {
            assert_eq!(pages.find(at, len), found, "{at} {len}");
        }
        assert_eq!((pages.known(0), pages.known(600 * CLUSTER), pages.known(1 << 40)), (2, 5, 0));
    }

    #[test]
    fn zeroes_in_a_row_are_one_extent() {
        let mut pages = Pages::new(CLUSTER);
        pages.add(Extent::zeroes(3 * CLUSTER..6 * CLUSTER));
        let zeroes = Extent::zeroes(4 * CLUSTER..6 * CLUSTER);
        assert_eq!(pages.find(4 * CLUSTER + 7 * 512, 9 * CLUSTER), Some(zeroes));
    }

    #[test]
    fn only_whole_clusters_of_less_than_a_page_suit() {
        let pages = Pages::new(CLUSTER);
        let good = extent(3, 511, 0, 7);
        assert!(pages.suits(&good) && pages.suits(&Extent::zeroes(0..CLUSTER)));
        let last = Extent { end: good.end - 512, ..good };
        let first = Extent { start: good.start + 512, ..good };
        let place = Extent { host: good.host + 7, ..good };
        for bad in [last, first, place, extent(3, 512, 0, 7)] {
            assert!(!pages.suits(&bad), "{bad:?}");
        }
    }

    #[test]
    fn a_window_is_asked_for_once_until_a_cut() {
        let mut pages = Pages::new(CLUSTER);
        let window = |clusters: Range<u64>| clusters.start * CLUSTER..clusters.end * CLUSTER;
        assert!(pages.asks(&window(0..64)) && pages.asks(&window(0..64)), "there is no page yet");
        pages.add(extent(3, 1, 0, 7));
        assert!(pages.asks(&window(0..64)));
        assert!(!pages.asks(&window(0..64)));
        assert!(pages.asks(&window(0..128)));
        assert!(!pages.asks(&window(64..128)));
        pages.cut(window(500..501), |_| true);
        assert!(pages.asks(&window(64..128)));
    }

    #[test]
    fn the_clusters_of_other_files_end_at_once() {
        let mut pages = Pages::new(CLUSTER);
        pages.add(extent(0, 3, 0, 7));
        pages.add(extent(1, 1, 2, 7));
        pages.add(Extent::zeroes(600 * CLUSTER..601 * CLUSTER));
        pages.cut_others();
        assert_eq!((pages.known(0), pages.known(600 * CLUSTER)), (2, 0));
        pages.clear();
        assert_eq!((pages.known(0), pages.page_bytes()), (0, CLUSTERS * CLUSTER));
    }

    #[test]
    fn a_full_set_replaces_a_page_that_was_not_used() {
        let mut pages = Pages::new(CLUSTER);
        let at = |page: usize| page as u64 * CLUSTERS;
        (0..PAGES_MAX).for_each(|page| pages.add(extent(at(page), 1, 0, 7)));
        // The first new page finds all others used; the next ones do not.
        pages.add(extent(at(PAGES_MAX), 1, 0, 7));
        let used = |page: usize| page % 5 == 3;
        for page in (0..PAGES_MAX).filter(|page| used(*page)) {
            assert!(pages.find(at(page) * CLUSTER, 512).is_some());
        }
        (1..PAGES_MAX / 2).for_each(|page| pages.add(extent(at(PAGES_MAX + page), 1, 0, 7)));
        assert_eq!((pages.pages.len(), pages.index.len()), (PAGES_MAX, PAGES_MAX));
        for page in (0..PAGES_MAX).filter(|page| used(*page)) {
            assert!(pages.find(at(page) * CLUSTER, 512).is_some(), "{page}");
        }
        assert_eq!(pages.find(CLUSTER * at(1), 512), None);
        assert_eq!(
            pages.known(at(PAGES_MAX + 1) * CLUSTER),
            1,
            "nothing is left of the other page"
        );
    }
}
