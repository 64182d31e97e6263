// SPDX-License-Identifier: Apache-2.0
//! Places that fail and free: what an allocation has left there, and what a failed commit has freed.

use crate::image::{Answer, Image, Question};
use crate::job::Begun;
use crate::storage::CommitError;
use crate::tables::tests::overlay;
use std::fs::File;
use std::io;
use std::ops::Range;

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
