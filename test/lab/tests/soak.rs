// SPDX-License-Identifier: Apache-2.0
//! The short form of `make soak`: one event of each kind, in an order that a seed fixes.

mod common;

use common::{LAB, build_daemon, with_guests};
use kit::soak::{Kind, Length, Options};
use lab::soak;

const SEED: u64 = 19;
const EVENTS: usize = 20;

#[test]
fn a_guest_that_verifies_its_data_sees_no_error_through_events_of_every_kind() {
    let options = Options {
        seed: SEED,
        length: Length::Events(EVENTS),
        nodes: vec!["/dev/vda".to_owned()],
        repeat: format!("make soak SEED={SEED} EVENTS={EVENTS}"),
    };
    with_guests(|| {
        let report = soak::run(&LAB, &build_daemon(), &options)?;
        print!("{report}");
        let kinds: Vec<Kind> = report.kinds().collect();
        let is_missing = |kind: &&Kind| **kind != Kind::Switch && !kinds.contains(kind);
        let missing: Vec<&Kind> = Kind::ALL.iter().filter(is_missing).collect();
        assert!(missing.is_empty(), "no event of the kinds {missing:?}");
        Ok(())
    });
}
