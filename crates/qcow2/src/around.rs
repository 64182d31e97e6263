// SPDX-License-Identifier: Apache-2.0
//! The places around a question, for which a lane will ask next.
//!
//! `imago` returns one run of clusters for a call, and loads the whole L2 table for it. So the L2 entries of a guarded
//! image are read from the file, but for clusters with a change since the last commit. `imago` maps these, and the
//! backing files.

use crate::entry::{COMPRESSED, EXCLUSIVE, Entry, RESERVED, ZERO};
use crate::extents::{Extent, ZEROES};
use crate::fields::entries;
use crate::image::{Answer, Found, Image, Question};
use crate::places::ENTRY_BYTES;
use crate::storage::Store;
use std::io;
use std::ops::Range;

/// Maximum questions to `imago` about a window: a backing file may have smaller clusters.
const TOLD_MAX: usize = 512;

/// The place of a cluster, as far as it is known.
enum Place {
    /// A lane may use it without a commit.
    Known(Extent),
    /// `imago` can tell it.
    Told,
    /// It needs a question of its own.
    Asked,
}

impl Store {
    /// The L2 entries of clusters of the disk that have the same table. `None`: nothing guards the image, or not all of
    /// its tables were looked at.
    ///
    /// # Errors
    /// The error of the read.
    fn entries(&self, clusters: &Range<u64>) -> io::Result<Option<Vec<u64>>> {
        let Some(guard) = self.guard().filter(|guard| guard.is_sound()) else { return Ok(None) };
        let count = (clusters.end - clusters.start) as usize;
        let Some((table, first)) = guard.places().l2_entry(clusters.start) else {
            return Ok(Some(vec![0; count]));
        };
        let found = self.read(count * ENTRY_BYTES as usize, table + first * ENTRY_BYTES)?;
        Ok(Some(entries(&found).collect()))
    }
}

impl Image {
    /// The answer to a question whose place is one of these extents, unless it ends with the window: `imago` may know a
    /// longer one then.
    pub(crate) fn answer_by(
        &self,
        known: &[Extent],
        question: &Question,
        window: &Range<u64>,
    ) -> Option<Answer> {
        let (at, len) = question.range();
        let number = known.partition_point(|extent| extent.end <= at);
        let extent = *known.get(number).filter(|extent| extent.start <= at)?;
        let version = self.versions().now();
        match (extent.file, question.changes()) {
            _ if extent.end == window.end => None,
            (0, _) => Some(Answer::Extent(extent, version)),
            (_, true) => None,
            (ZEROES, false) => Some(Answer::Zero(len.min(extent.end - at), extent, version)),
            (_, false) => Some(Answer::Extent(extent, version)),
        }
    }

    /// The extents of the window of a question that need no commit, in ascending order. If the question changes
    /// something, none unless the image itself has its cluster, which gets no other place then. The window is a part of
    /// the disk with one L2 table, and has the position of the question. An error ends them: the question about the
    /// place gets it.
    pub(crate) fn around(&self, question: &Question, window: &Range<u64>) -> Vec<Extent> {
        let mut known = Vec::new();
        if self.check_committed().is_ok() && window.contains(&question.range().0) {
            let _ = self.add_around(&mut known, question, window); // a question will get the error
        }
        known
    }

    fn add_around(
        &self,
        known: &mut Vec<Extent>,
        question: &Question,
        window: &Range<u64>,
    ) -> io::Result<()> {
        let (store, cluster) = (self.store()?, self.cluster_bytes());
        let clusters = window.start / cluster..window.end.div_ceil(cluster);
        let entries = store.entries(&clusters)?;
        let bound = self.end_of(store)?;
        let place = |number: u64| {
            let part = number * cluster..((number + 1) * cluster).min(window.end);
            let entry = entries.as_ref().map(|all| all[(number - clusters.start) as usize]);
            (part.clone(), self.place_of(entry, part, bound))
        };
        let is_own = |place| matches!(place, Place::Known(extent) if extent.file == 0);
        let (at, _) = question.range();
        if question.changes() && !is_own(place(at / cluster).1) {
            return Ok(());
        }
        let places: Vec<_> = clusters.clone().map(place).collect();
        let are_told = |(_, place): &(_, Place)| matches!(place, Place::Told);
        let mut left = TOLD_MAX;
        for run in places.chunk_by(|one, next| are_told(one) && are_told(next)) {
            match run {
                [(_, Place::Known(extent))] => add(known, *extent),
                [(first, Place::Told), ..] if !question.changes() => {
                    let end = run.last().map_or(first.end, |(last, _)| last.end);
                    self.add_told(known, first.start..end, &mut left)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The place of the cluster of `part`, by its L2 entry if that can be read. Data lies before `bound` in the file.
    fn place_of(&self, entry: Option<u64>, part: Range<u64>, bound: u64) -> Place {
        let cluster = self.cluster_bytes();
        if self.tables.has_changed(&part) || self.discarded.frees(&part) {
            return Place::Asked;
        }
        let Some(entry) = entry else { return Place::Told };
        let host = match Entry::of(entry, cluster.trailing_zeros()) {
            _ if entry & COMPRESSED == 0 && entry & RESERVED != 0 => return Place::Asked,
            _ if entry & (COMPRESSED | ZERO) == ZERO => {
                return Place::Known(Extent::zeroes(part));
            }
            Entry::None if self.has_backing() => return Place::Told,
            Entry::None => return Place::Known(Extent::zeroes(part)),
            Entry::Cluster(host) if entry & EXCLUSIVE != 0 => host,
            Entry::Cluster(_) | Entry::Compressed(..) => return Place::Asked,
        };
        let is_good = host >= cluster && host.is_multiple_of(cluster) && host + cluster <= bound;
        match is_good {
            true => Place::Known(Extent { start: part.start, end: part.end, file: 0, host }),
            false => Place::Asked,
        }
    }

    /// Adds the extents of a range as `imago` tells them, while questions to it are `left`.
    fn add_told(
        &self,
        known: &mut Vec<Extent>,
        range: Range<u64>,
        left: &mut usize,
    ) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end && *left > 0 {
            *left -= 1;
            at = match self.find_within(at, range.end - at, range.end - at)? {
                Found::Extent { extent, .. } | Found::Zero(_, extent) => {
                    add(known, extent);
                    extent.end
                }
                Found::Copy(len) => at + len,
            };
        }
        Ok(())
    }
}

/// Adds an extent, to the one before if it continues that.
fn add(known: &mut Vec<Extent>, extent: Extent) {
    let continues = |last: &Extent| {
        last.end == extent.start
            && last.file == extent.file
            && (extent.file == ZEROES || last.host + (last.end - last.start) == extent.host)
    };
    match known.last_mut().filter(|last| continues(last)) {
        Some(last) => last.end = extent.end,
        None => known.push(extent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::tables::tests::overlay;
    use crate::versions::User;
    use std::fs::File;
    use std::sync::mpsc::channel;

    const CLUSTER: u64 = 64 << 10;
    const MIB: u64 = 1 << 20;

    /// The extents of the first five clusters, in clusters, each with its file.
    fn first(image: &Image) -> Vec<(u64, u64, u32)> {
        around(image, &Question::Read(0, 512), 5)
    }

    /// The same of a question and a window of so many clusters.
    fn around(image: &Image, question: &Question, clusters: u64) -> Vec<(u64, u64, u32)> {
        let extents = image.around(question, &(0..clusters * CLUSTER)).into_iter();
        extents.map(|e| (e.start / CLUSTER, e.end / CLUSTER, e.file)).collect()
    }

    /// An overlay of 8 MiB over data, whose clusters of these numbers were written in this order.
    fn written(clusters: &[u64]) -> (tempfile::TempDir, File, Image) {
        let (directory, file, mut image) = overlay();
        for cluster in clusters {
            let write = Question::Write(cluster * CLUSTER, vec![1; 4096]);
            assert_eq!(image.answer(write), Answer::Done(4096));
        }
        assert_eq!(image.commit(), Ok(()));
        (directory, file, image)
    }

    #[test]
    fn known_places_wait_for_no_commit_and_are_not_about_to_be_freed() {
        let (_directory, _file, mut image) = written(&[0, 1, 4]);
        let write = Question::Write(3 * CLUSTER, vec![1; 4096]);
        assert_eq!(image.answer(write), Answer::Done(4096));
        assert_eq!(first(&image), [(0, 2, 0), (2, 3, 1), (4, 5, 0)]);
        let (own, other) = (Question::Place(CLUSTER, 512), Question::Place(2 * CLUSTER, 512));
        assert_eq!(around(&image, &own, 5), [(0, 2, 0), (4, 5, 0)]);
        assert_eq!(around(&image, &other, 5), [], "it gets a place");
        assert_eq!(image.commit(), Ok(()));
        let all = [(0, 2, 0), (2, 3, 1), (3, 4, 0), (4, 5, 0)];
        assert_eq!(first(&image), all);
        image.note_discarded(CLUSTER, CLUSTER);
        assert_eq!(first(&image), all);
        let user = User::new(image.versions(), channel().0).enter();
        assert!(image.unmap_discarded(true, &mut Job::in_place).is_ok(), "{user}");
        assert_eq!(first(&image), [(0, 1, 0), (2, 3, 1), (3, 4, 0), (4, 5, 0)]);
    }

    #[test]
    fn known_places_are_those_that_imago_tells() {
        let (_directory, _file, mut image) = written(&[7, 3, 4, 90, 5, 100]);
        let zero = [Question::Zero(3 * CLUSTER, CLUSTER), Question::Zero(4 * CLUSTER, CLUSTER)];
        assert!(matches!(zero.map(|zero| image.answer(zero)), [Answer::Extent(..), _]));
        image.free(4 * CLUSTER..5 * CLUSTER).expect("a zero cluster");
        assert_eq!(image.commit(), Ok(()));
        let known = image.around(&Question::Read(0, 512), &(0..8 * MIB));
        for at in (0..8 * MIB).step_by(CLUSTER as usize) {
            let known = known.iter().find(|known| (known.start..known.end).contains(&at));
            let known = known.map(|known| (known.file, known.part(at..known.end).host));
            let told = match image.find(at, CLUSTER).expect("a good image") {
                Found::Extent { extent, .. } => (extent.file, extent.host),
                Found::Zero(..) => (ZEROES, 0),
                Found::Copy(len) => panic!("{len} bytes at {at}"),
            };
            assert_eq!(known, Some(told), "{at}");
        }
    }

    #[test]
    fn a_question_is_answered_by_a_place_that_ends_within_the_window() {
        let (_directory, _file, image) = written(&[0, 2, 3, 1]);
        let window = 0..4 * CLUSTER;
        let known = image.around(&Question::Read(0, 512), &window);
        let by = |question| image.answer_by(&known, &question, &window);
        let host = |cluster: u64| match by(Question::Read(cluster * CLUSTER, 512)) {
            Some(Answer::Extent(extent, _)) => (extent.start / CLUSTER, extent.host / CLUSTER),
            other => panic!("{other:?}"),
        };
        assert_eq!((host(0), host(1)), ((0, host(0).1), (1, host(0).1 + 3)));
        let write = Question::Write(CLUSTER + 512, vec![1; 512]);
        assert!(matches!(by(write), Some(Answer::Extent(extent, _)) if extent.end == 2 * CLUSTER));
        assert_eq!(by(Question::Read(2 * CLUSTER, 512)), None, "it may be longer");
        assert_eq!(by(Question::Read(4 * CLUSTER, 512)), None, "it is not in the window");
    }

    #[test]
    fn questions_to_imago_are_bounded_and_an_error_ends_the_places() {
        let (directory, _file, image) = written(&[2, 1]);
        let mut known = Vec::new();
        image.add_told(&mut known, 0..MIB, &mut 2).expect("a good image");
        assert_eq!(known.iter().map(|known| known.end).collect::<Vec<_>>(), [CLUSTER, 2 * CLUSTER]);
        let unreadable = File::create(directory.path().join("unreadable")).expect("a file");
        image.store().expect("the image").exchange(&unreadable);
        assert_eq!(first(&image), []);
    }

    /// A write to zeroes, or to a place in a backing file, needs a place of its own.
    #[test]
    fn only_a_read_is_answered_by_zeroes_or_a_backing_file() {
        let (_directory, _file, image) = written(&[2]);
        let (below, zeroes) = (0..2 * CLUSTER, 3 * CLUSTER..4 * CLUSTER);
        let below = Extent { start: below.start, end: below.end, file: 1, host: 0 };
        let known = [below, Extent::zeroes(zeroes)];
        for (at, len) in [(0, 2 * CLUSTER), (3 * CLUSTER, CLUSTER)] {
            let by = |question| image.answer_by(&known, &question, &(0..8 * CLUSTER));
            assert!(by(Question::Read(at, len)).is_some());
            let data = vec![1; len as usize];
            for change in [Question::Place(at, len), Question::Write(at, data)] {
                assert_eq!(by(change), None);
            }
            assert_eq!(by(Question::Discard(at, len)), None);
            assert_eq!(by(Question::Zero(at, len)), None);
        }
    }

    #[test]
    fn an_entry_that_names_a_wrong_place_is_no_place() {
        let (_directory, _file, image) = written(&[0]);
        let bound = image.end_of(image.store().expect("a file")).expect("a length");
        let place = |entry| image.place_of(Some(entry), 0..CLUSTER, bound);
        let is_known = |entry| matches!(place(entry), Place::Known(_));
        assert!(is_known(EXCLUSIVE | 3 << 16) && is_known(ZERO) && is_known(EXCLUSIVE | ZERO));
        let wrong = [
            3 << 16,                   // not exclusive
            EXCLUSIVE,                 // the header
            EXCLUSIVE | bound,         // behind the end
            EXCLUSIVE | 3 << 16 | 512, // within a cluster
            EXCLUSIVE | 3 << 16 | 2,   // a reserved bit
            ZERO | 1 << 60,
            COMPRESSED | 3 << 16,
            COMPRESSED | 3 << 16 | ZERO,
        ];
        for entry in wrong {
            assert!(!is_known(entry), "{entry:x}");
        }
        assert!(matches!(place(0), Place::Told));
    }
}
