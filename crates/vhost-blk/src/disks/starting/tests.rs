// SPDX-License-Identifier: Apache-2.0
//! The names of disks that are being opened.

use super::*;
use crate::disks::removal::{Purpose, Which};
use crate::disks::{Force, Removed};
use crate::options::ProcessArgs;
use clap::{Args, FromArgMatches};
use serde_json::Value;

#[test]
fn tries_come_less_and_less_often_and_never_end() {
    let pauses: Vec<u64> = (1..12).map(|tries| pause_after(tries).as_secs()).collect();
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
    assert_eq!(pause_after(u32::MAX), RETRY_MAX);
}

pub(in crate::disks) fn disks() -> Arc<Disks> {
    let command = ProcessArgs::augment_args(clap::Command::new("process"));
    let matches = command.get_matches_from(["process"]);
    Disks::new(ProcessArgs::from_arg_matches(&matches).unwrap(), Mode::Many(None))
}

fn which(disks: &Disks, name: &str) -> Which {
    Which::of(&disks.lock().table[name])
}

fn state(disks: &Disks) -> Option<RowState> {
    disks.statuses(Duration::ZERO).first().map(|row| row.state)
}

#[test]
fn a_removal_takes_its_disk_and_no_other_one_of_the_name() {
    let disks = disks();
    let reserve = || disks.reserve("a", None, Origin::Directory).unwrap();
    let first = reserve();
    let of_first = which(&disks, "a");
    drop(first);
    let second = reserve();
    let failure = disks.remove_this("a", &of_first, Purpose::Removal, || true).unwrap_err();
    assert_eq!(failure.sort, Sort::NoSuchDisk);
    second.check().unwrap();
    let of_second = which(&disks, "a");
    assert_eq!(
        disks.remove_this("a", &of_second, Purpose::Removal, || true).unwrap(),
        Removed::GivenUp
    );
    assert_eq!(state(&disks), Some(RowState::GivenUp));
    // The name is free, and the opening that was left does nothing to the next one.
    let third = reserve();
    assert!(second.check().unwrap_err().why.contains("removed while it was being opened"));
    second.fail(None, &Failure::run("open", "late", "none"));
    drop(second);
    third.check().unwrap();
    assert_eq!(state(&disks), Some(RowState::Starting));
    drop(third);
    assert_eq!(state(&disks), None);
}

#[test]
fn a_failed_disk_keeps_its_name_for_the_directory_until_the_stop() {
    let disks = disks();
    let failure = Failure::run("open", "it is away", "bring it back");
    assert!(disks.note_failed("a", &failure));
    assert!(!disks.note_failed("a", &failure), "the same error is no news");
    assert!(disks.note_failed("a", &Failure { why: "it is wrong".to_owned(), ..failure }));
    let start = disks.start_of(None).unwrap().start.unwrap();
    assert_eq!((start.tries, start.failure.unwrap().why.as_str()), (3, "it is wrong"));
    assert!(disks.reserve("a", None, Origin::Command).is_err());
    disks.stop();
    disks.wait();
    assert!(!disks.note_failed("a", &Failure::run("open", "late", "none")));
    assert_eq!(state(&disks), None);
}

#[test]
fn the_removal_of_a_disk_that_is_tried_is_one_event_if_its_failure_was_one() {
    let disks = disks();
    let subscriber = disks.events.subscribe().unwrap();
    let told = || -> Vec<String> {
        let name = |message: Value| message["event"].as_str().unwrap().to_owned();
        subscriber.take().into_iter().map(name).collect()
    };
    for (has_told, events) in [(false, vec![]), (true, vec!["start_failed", "removed"])] {
        let tried = disks.reserve("a", None, Origin::Directory).unwrap();
        if has_told {
            tried.tell_failure(&Failure::run("open", "its new options are wrong", "none"));
        }
        disks.remove("a", Force::No, || true).unwrap();
        // The thread of the opening finds that the file has gone, and another disk has the name.
        let next = disks.reserve("a", None, Origin::Directory).unwrap();
        tried.give_back();
        drop(tried);
        assert_eq!(told(), events);
        next.check().unwrap();
        next.give_back();
        assert_eq!((told(), state(&disks)), (vec!["removed".to_owned()], None));
    }
}
