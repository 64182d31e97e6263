// SPDX-License-Identifier: Apache-2.0
//! Places that fail and free: what an allocation has left there, what a failed commit has freed, and what a zero
//! cluster has kept. Also the size of the disk in the header.

use crate::check::check;
use crate::crash_tests::{First, make, writer};
use crate::entry::{EXCLUSIVE, PLACE, ZERO};
use crate::fields::{SIZE_AT, u64_at};
use crate::image::{Answer, Image, Question};
use crate::job::Begun;
use crate::storage::CommitError;
use crate::tables::tests::overlay;
use imago::StorageExt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const CLUSTER: u64 = 64 << 10;

fn write(image: &mut Image, at: u64) {
    let question = Question::Write(at, vec![1; 4096]);
    assert_eq!(image.answer(question), Answer::Done(4096));
    assert_eq!(image.commit(), Ok(()));
}

/// Content that imago copies to a new cluster stays there if the allocation fails behind it.
#[test]
fn a_place_that_an_allocation_has_left_reads_as_zeroes_when_it_is_used() {
    for is_committed in [false, true] {
        let (_directory, file, mut image) = overlay();
        write(&mut image, 0);
        // Behind the clusters that the other writes get.
        let place = file.metadata().expect("a size").len() + 16 * CLUSTER;
        assert!(place.is_multiple_of(CLUSTER));
        image.store().expect("the image").keep(&[7; 4096], place + 512).expect("it is kept");
        if is_committed {
            write(&mut image, 4 * CLUSTER);
        }
        let store = image.store().expect("the image");
        store.make_zero(place, CLUSTER).expect("a place");
        write(&mut image, 8 * CLUSTER);
        let mut found = vec![1; CLUSTER as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, place).expect("the place");
        assert!(!found.contains(&7), "old content, committed: {is_committed}");
    }
}

/// The commit that frees the cluster of a position, and carries its writes out.
fn freeing(image: &mut Image, at: u64) -> Begun {
    image.free(at..at + CLUSTER).expect("a zero cluster");
    image.flush().expect("imago's tables");
    let store = image.store().expect("the image");
    store.begin_commit(CLUSTER).expect("a commit").expect("changes")
}

fn end(image: &Image, begun: Begun, fails: bool) -> Result<Vec<Range<u64>>, CommitError> {
    let Begun { job, rest } = begun;
    job.run().expect("the writes succeed");
    let full = || CommitError::Full(io::Error::from_raw_os_error(libc::ENOSPC));
    image.store().expect("the image").end_commit(rest, if fails { Err(full()) } else { Ok(()) })
}

#[test]
fn clusters_that_a_failed_commit_has_freed_are_free_after_the_next_one() {
    let (_directory, file, mut image): (_, File, _) = overlay();
    [0, CLUSTER].into_iter().for_each(|at| write(&mut image, at));
    let before = file.metadata().expect("a size").len();
    let begun = freeing(&mut image, 0);
    assert!(matches!(end(&image, begun, true), Err(CommitError::Full(_))));
    let store = image.store().expect("the image");
    let again = store.begin_commit(CLUSTER).expect("a commit").expect("the changes wait");
    let freed = end(&image, again, false).expect("a commit");
    let is_one = |range: &&Range<u64>| range.end - range.start == CLUSTER && range.end <= before;
    assert!(freed.iter().any(|range| is_one(&range)), "{freed:?}");
    // A later commit does not list them again.
    let begun = freeing(&mut image, CLUSTER);
    assert!(!end(&image, begun, false).expect("a commit").iter().any(|it| freed.contains(it)));
}

/// QEMU has made zero clusters of two clusters, which keep their places in the opposite order.
fn zero_clusters_with_places(directory: &Path) -> PathBuf {
    let path = make(directory, "cluster_size=64k", First::Nowhere, 8 << 20);
    let commands = ["write 64k 64k", "write 0 64k", "write -z 0 128k"];
    let options = commands.iter().flat_map(|command| ["-c", command]);
    let ran = Command::new("qemu-io").current_dir(directory).args(options).arg("a.qcow2").output();
    assert!(ran.expect("qemu-io runs; scripts/setup.sh installs it").status.success());
    path
}

fn entry(image: &Image, cluster: u64) -> (u64, u64) {
    let store = image.store().expect("the image");
    let guard = store.guard().expect("it is writable");
    let (table, number) = guard.places().l2_entry(cluster).expect("a table");
    let at = table + number * 8;
    (at, u64_at(&store.read(8, at).expect("the entry"), 0))
}

/// The next allocation could get a place that the file still names.
#[test]
fn a_write_over_zero_clusters_with_places_uses_them_or_frees_them_with_a_commit() {
    for exclusive in [EXCLUSIVE, 0] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = zero_clusters_with_places(directory.path());
        let before = [0, 1].map(|cluster| entry(&writer(&path).image, cluster));
        assert!(before[0].1 & PLACE > before[1].1 & PLACE && before[1].1 & ZERO > 0, "{before:?}");
        let file = File::options().write(true).open(&path).expect("the image");
        for (at, entry) in before {
            let entry = entry & !EXCLUSIVE | exclusive;
            file.write_all_at(&entry.to_be_bytes(), at).expect("an entry");
        }
        let mut image = writer(&path).image;
        for part in [0..2 * CLUSTER, 16 * CLUSTER..19 * CLUSTER] {
            let mut at = part.start;
            while at < part.end {
                let data = vec![1; (part.end - at) as usize];
                at = match image.answer(Question::Write(at, data)) {
                    Answer::Extent(extent, _) => extent.end.min(part.end),
                    other => panic!("{other:?} at {at}"),
                };
            }
        }
        assert_eq!(image.commit(), Ok(()));
        let after = [0, 1].map(|cluster| entry(&image, cluster).1 & PLACE);
        let same = before.map(|(_, entry)| entry & PLACE) == after;
        assert_eq!(same, exclusive > 0, "an exclusive place is used");
        drop(image);
        let found = check(&path, &File::open(&path).expect("the image")).expect("a check");
        assert_eq!(found.errors, 0, "{found:?}");
    }
}

#[test]
fn a_header_of_imago_keeps_the_size_of_the_disk() {
    let (_directory, _file, image) = overlay();
    let store = image.store().expect("the image");
    let mut header = store.read(72, 0).expect("the header");
    let size = u64_at(&header, SIZE_AT);
    header[SIZE_AT..SIZE_AT + 8].copy_from_slice(&(2 * size).to_be_bytes());
    store.write(&header[..], 0).expect("a write");
    assert_eq!(u64_at(&store.read(72, 0).expect("the header"), SIZE_AT), size);
}
