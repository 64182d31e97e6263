// SPDX-License-Identifier: Apache-2.0
//! The use of the guard ([`crate::guard`]) by an image that is written.

use crate::entry::{EXCLUSIVE, Entry};
use crate::fields::entries;
use crate::guard::{FileClusters, Guard};
use crate::image::Image;
use crate::mapped::Mapped;
use crate::places::{ENTRY_BYTES, HEADER_BYTES, Places};
use crate::storage::Store;
use imago::Mapping;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

impl Store {
    /// Guards the tables and the header from now on, as they are.
    ///
    /// # Errors
    /// The error of the system call, or a damaged header.
    pub(crate) fn protect(&self, cluster_bytes: u64) -> io::Result<()> {
        let places = Places::read(cluster_bytes, &|len, at| self.read(len, at))?;
        let header = self.read(HEADER_BYTES, 0)?;
        let file = FileClusters {
            all: self.size_bytes()?.div_ceil(cluster_bytes),
            allocated: self.allocated_bytes()?.div_ceil(cluster_bytes),
        };
        let _ = self.guard.set(Mutex::new(Guard::new(places, header, file))); // it has been guarded before
        Ok(())
    }

    /// The guard of an image that may be written.
    pub(crate) fn guard(&self) -> Option<MutexGuard<'_, Guard>> {
        let guard = self.guard.get()?;
        Some(guard.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// As [`Guard::known`].
    pub(crate) fn known(&self) -> Option<Vec<u8>> {
        self.guard()?.known()
    }

    /// Checks a write of imago, before it gets to the overlay.
    pub(crate) fn check_write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        let Some(mut guard) = self.guard() else { return Ok(()) };
        if offset >> guard.places().cluster_bits > 0 || data.is_empty() {
            return Ok(());
        }
        let (at, end) = (offset as usize, offset as usize + data.len());
        if end > HEADER_BYTES {
            return Err(guard.damage("a table would get the place of the header"));
        }
        let mut header = self.read(HEADER_BYTES, 0)?;
        header[at..end].copy_from_slice(data);
        guard.check_header(&header)
    }

    /// Refuses data in the place of the header or of a table.
    pub(crate) fn check_data(&self, offset: u64, len: u64) -> io::Result<()> {
        let Some(mut guard) = self.guard() else { return Ok(()) };
        let bits = guard.places().cluster_bits;
        let last = offset.saturating_add(len.saturating_sub(1)) >> bits;
        match (offset >> bits..=last).find(|cluster| guard.places().has(*cluster)) {
            None => Ok(()),
            Some(cluster) => {
                let what = format!("data would get the cluster {cluster}, which has a table");
                Err(guard.damage(what))
            }
        }
    }

    /// Returns whether L2 tables are left to look at.
    pub(crate) fn is_looking(&self) -> bool {
        self.guard().is_some_and(|guard| guard.is_looking())
    }

    /// Returns whether lanes may know places: each L2 table names places of its own only.
    pub(crate) fn is_sound(&self) -> bool {
        self.guard().is_none_or(|guard| guard.is_sound())
    }

    /// Looks at a few of the L2 tables that are left.
    ///
    /// # Errors
    /// The error of a read, which the next call repeats.
    pub(crate) fn look(&self) -> io::Result<()> {
        let Some(mut guard) = self.guard() else { return Ok(()) };
        let bits = guard.places().cluster_bits;
        let (begins, tables) = (guard.is_looking(), guard.next_tables());
        tables.iter().for_each(|table| self.read_ahead(table << bits, 1 << bits));
        for table in tables {
            if !guard.is_looking() {
                break;
            }
            let found = self.read(1 << bits, table << bits)?;
            guard.look(entries(&found));
        }
        if let (true, false, Err(why)) = (begins, guard.is_looking(), guard.check()) {
            tracing::error!(
                "qcow2: {self}: {why}; no write succeeds: stop the disk, and see `vhost-blk check`"
            );
        }
        Ok(())
    }

    /// Returns whether the L2 entry of a cluster of the disk names this cluster of the file, since the last commit:
    /// a zero cluster may have kept its place.
    fn names(&self, guard: &Guard, cluster: u64, place: u64) -> io::Result<bool> {
        let bits = guard.places().cluster_bits;
        let entries = self.l2_entries(guard, cluster..cluster + 1)?;
        Ok(entries.iter().any(|entry| Entry::of(*entry, bits) == Entry::Cluster(place << bits)))
    }

    /// The L2 entries of clusters of the disk since the last commit: those of the first one's table, if it has one.
    fn l2_entries(&self, guard: &Guard, clusters: Range<u64>) -> io::Result<Vec<u64>> {
        let Some((table, number)) = guard.places().l2_entry(clusters.start) else {
            return Ok(Vec::new());
        };
        let left = (1 << guard.places().cluster_bits) / ENTRY_BYTES - number;
        let count = (clusters.end - clusters.start).min(left);
        let found = self.read((count * ENTRY_BYTES) as usize, table + number * ENTRY_BYTES)?;
        Ok(entries(&found).collect())
    }

    /// The end of the clusters of the disk that imago may allocate at once, from the first one on, and whether that
    /// frees a cluster. A zero cluster may have kept its place. imago uses it for the first cluster, if it is
    /// exclusive. Otherwise it frees the place at once, which the file still names.
    ///
    /// # Errors
    /// The error of the system call.
    pub(crate) fn allocates_to(&self, clusters: Range<u64>) -> io::Result<(u64, bool)> {
        let Some(guard) = self.guard() else { return Ok((clusters.end, false)) };
        let bits = guard.places().cluster_bits;
        let has_place = |entry: u64| matches!(Entry::of(entry, bits), Entry::Cluster(_));
        // imago allocates within one table.
        let entries = self.l2_entries(&guard, clusters.clone())?;
        Ok(match clusters.clone().zip(entries).find(|(_, entry)| has_place(*entry)) {
            Some((first, entry)) if first == clusters.start => (first + 1, entry & EXCLUSIVE == 0),
            Some((other, _)) => (other, false),
            None => (clusters.end, false),
        })
    }
}

/// Clusters of the file that were claimed for data that is about to be written.
#[derive(Debug, Default)]
pub(crate) struct Claimed(Vec<u64>);

impl Image {
    /// Returns whether L2 tables are left to look at: a change would wait for that.
    pub(crate) fn is_looking(&self) -> bool {
        self.store().is_ok_and(Store::is_looking)
    }

    /// Looks at a few of the L2 tables that are left.
    ///
    /// # Errors
    /// As [`Store::look`].
    pub(crate) fn look(&self) -> io::Result<()> {
        self.store()?.look()
    }

    /// Makes the image ready for a change: looks at the L2 tables that are left.
    ///
    /// # Errors
    /// The error of a read; or the image must not change, because its tables are damaged.
    pub(crate) fn may_change(&self) -> io::Result<()> {
        let store = self.store()?;
        while store.is_looking() {
            store.look()?;
        }
        match store.guard() {
            Some(guard) if !guard.is_sound() => guard.check(),
            _ => Ok(()),
        }
    }

    /// Claims places of clusters of the disk, before they get data.
    ///
    /// # Errors
    /// A cluster of the place is used otherwise: nothing may be written any more.
    pub(crate) fn claim(&self, mapped: Mapped) -> io::Result<Claimed> {
        let store = self.store()?;
        let mut claimed = Claimed::default();
        let Some(mut guard) = store.guard() else { return Ok(claimed) };
        for (number, place) in (mapped.disk..).zip(mapped.file..).take(mapped.clusters as usize) {
            if guard.is_free(place) {
                guard.claim(place);
                claimed.0.push(place);
            } else if !store.names(&guard, number, place)? {
                let what = format!("data would get the cluster {place}, which is used otherwise");
                return Err(guard.damage(what));
            }
        }
        Ok(claimed)
    }

    /// Gives claimed clusters back, which got no data.
    pub(crate) fn unclaim(&self, claimed: Claimed) -> io::Result<()> {
        if let Some(mut guard) = self.store()?.guard() {
            claimed.0.into_iter().for_each(|cluster| guard.unclaim(cluster));
        }
        Ok(())
    }

    /// Claims the places that imago has given to clusters of a range in which the image had none.
    ///
    /// # Errors
    /// As [`Image::claim`].
    pub(crate) fn claim_changed(&self, range: Range<u64>) -> io::Result<()> {
        let cluster = self.cluster_bytes();
        let mut at = range.start - range.start % cluster;
        let end = range.end.min(self.access.size());
        while at < end {
            let (mapping, found) = self.access.get_mapping(at, end - at)?;
            if let Mapping::Raw { storage, offset, .. } = mapping
                && storage.index() == 0
            {
                self.claim(Mapped::of(at, found, offset, cluster))?;
            }
            if found == 0 {
                return Err(io::Error::other(format!("no mapping at {at}")));
            }
            at += found;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::image::{Answer, Question};
    use crate::tables::tests::overlay;
    use imago::StorageExt;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_table_in_the_place_of_the_header_reaches_no_file_and_ends_all_changes() {
        for (at, bytes) in [(0, 1 << 16), (0, 72), (512, 512)] {
            let (_directory, file, mut image) = overlay();
            assert_eq!(image.answer(Question::Write(0, vec![1; 4096])), Answer::Done(4096));
            let store = image.store().expect("the image");
            let before = store.read(1 << 16, 0).expect("the header");
            assert!(store.write(&vec![0_u8; bytes][..], at).is_err(), "{at} {bytes}");
            assert_eq!(image.commit(), Err(libc::EIO));
            let mut now = vec![0; 1 << 16];
            file.read_exact_at(&mut now, 0).expect("the header");
            assert!(now == before, "{at} {bytes}");
        }
    }

    #[test]
    fn data_in_the_place_of_a_table_reaches_no_file_and_ends_all_changes() {
        let (_directory, _file, mut image) = overlay();
        let store = image.store().expect("the image");
        let places: Vec<u64> = store.guard().expect("it is guarded").places().all().collect();
        for place in places {
            let (store, len) = (image.store().expect("the image"), 1 << 16);
            let before = store.read(len, place << 16).expect("the table");
            assert!(store.write_data(&vec![1; len], place << 16).is_err(), "{place}");
            assert!(store.zero_data((place << 16) - 512 * place.min(1), 1024).is_err(), "{place}");
            assert!(store.read(len, place << 16).expect("the table") == before, "{place}");
        }
        assert_eq!(image.answer(Question::Write(0, vec![1; 4096])), Answer::Done(4096));
        assert_eq!(image.commit(), Err(libc::EIO));
    }
}
