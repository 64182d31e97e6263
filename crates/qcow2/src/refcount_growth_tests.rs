// SPDX-License-Identifier: Apache-2.0
//! The refcount table moves while one question also allocates tables and data.

use crate::check::check;
use crate::crash_tests::{First, make, qemu_img, writer};
use crate::image::{Answer, Image, Question};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

const CLUSTER: u64 = 4096;
/// Bytes of the disk whose clusters one L2 table names.
const L2_BYTES: u64 = CLUSTER / 8 * CLUSTER;
/// The longest file that a refcount table of one cluster counts, with counts of 64 bits.
const TABLE_BYTES: u64 = 512 * 512 * CLUSTER;
/// The part of the disk in which each cluster has a place: the file is nearly as long as its refcount table counts.
const FULL: u64 = TABLE_BYTES - (6 << 20);
const DISK: u64 = 2 * TABLE_BYTES + (64 << 20);

/// An image over a backing file with content everywhere.
fn nearly_full(directory: &Path) -> PathBuf {
    let options = "cluster_size=4k,refcount_bits=64,preallocation=metadata";
    let path = make(directory, options, First::Nowhere, FULL);
    let disk = DISK.to_string();
    let base = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", "base.qcow2", &disk];
    for args in [
        &base[..],
        &["resize", "-q", "a.qcow2", &disk],
        &["rebase", "-u", "-b", "base.qcow2", "-F", "qcow2", "a.qcow2"],
    ] {
        assert_eq!(qemu_img(directory, args).0, Some(0), "{args:?}");
    }
    path
}

fn refcount_table(image: &Image) -> Range<u64> {
    let guard = image.store().expect("the image").guard().expect("it is writable");
    guard.places().refcount_table.clone()
}

/// Asks the questions, with a commit after each batch of them, until the refcount table has moved.
fn ask_until_it_moves(questions: impl Iterator<Item = Question>) {
    let directory = tempfile::TempDir::new().expect("a directory");
    let path = nearly_full(directory.path());
    let mut image = writer(&path).image;
    let at_first = refcount_table(&image);
    let has_moved = questions.zip(1..).any(|(question, number)| {
        let answer = image.answer(question);
        assert!(matches!(answer, Answer::Done(CLUSTER..)), "{answer:?}");
        if number % 5 == 0 {
            assert_eq!(image.commit(), Ok(()));
        }
        refcount_table(&image) != at_first
    });
    assert!(has_moved);
    drop(image);
    let found = check(&path, &File::open(&path).expect("the image")).expect("a check");
    assert_eq!(found.errors, 0, "{found:?}");
}

/// Each write allocates an L2 table and a cluster of data. The one at the end of the refcount table is a table in one
/// case and data in the other.
#[test]
fn the_refcount_table_moves_within_a_write() {
    for first in 0..2 {
        let write = |at| Question::Write(at, vec![1; CLUSTER as usize]);
        let shift = (0..first).map(|cluster| FULL + (1 + cluster) * CLUSTER);
        ask_until_it_moves(shift.chain((FULL..DISK).step_by(L2_BYTES as usize)).map(write));
    }
}

/// Each question allocates an L2 table alone.
#[test]
fn the_refcount_table_moves_within_zeroes() {
    let zero = |at| Question::Zero(at, L2_BYTES);
    ask_until_it_moves((FULL..DISK).step_by(L2_BYTES as usize).map(zero));
}
