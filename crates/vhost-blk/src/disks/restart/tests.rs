// SPDX-License-Identifier: Apache-2.0
use super::*;
use crate::config;
use crate::disks::{Force, Mode, Origin, Removed, RowState};
use crate::options::ProcessArgs;
use clap::{Args, FromArgMatches};
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// A disk `a` of the directory that is served.
struct Rig {
    disks: Arc<Disks>,
    directory: TempDir,
}

impl Rig {
    fn new() -> Rig {
        let command = ProcessArgs::augment_args(clap::Command::new("process"));
        let matches = command.get_matches_from(["process"]);
        let process = ProcessArgs::from_arg_matches(&matches).unwrap();
        let rig = Rig {
            disks: Disks::new(process, Mode::Many(None)),
            directory: tempfile::tempdir().unwrap(),
        };
        let reservation = rig.disks.reserve("a", None, Origin::Directory).unwrap();
        let (reservation, wait) = (Arc::new(reservation), LockWait::No);
        rig.disks.open_of_directory(&reservation, rig.args("old"), wait).unwrap();
        rig
    }

    fn args(&self, serial: &str) -> DiskArgs {
        let socket = self.directory.path().join("a.sock");
        let text = format!(
            "backend = 'mem'\nsize = '1M'\nsocket-path = '{}'\nserial = '{serial}'\n\
             num-queues = 1\ndata-plane = 'uring'\n",
            socket.display()
        );
        config::disk_of_text(Path::new("a.toml"), &text).unwrap()
    }

    fn known(&self) -> Known {
        match &self.disks.lock().table["a"] {
            Slot::Served(entry) => Known::of(entry),
            _ => panic!("it is not served"),
        }
    }

    fn row(&self) -> Option<(RowState, Option<String>)> {
        let row = self.disks.statuses(Duration::ZERO).pop()?;
        Some((row.state, row.args.map(|args| args.serial)))
    }

    /// A restart that waits for nothing any more.
    fn ended(&self) -> Arc<Reservation> {
        let known = self.known();
        let reservation = self
            .disks
            .stop_for_restart("restart a".into(), "a", &known, &self.args("new"))
            .unwrap();
        self.disks.wait_for_end("a", &known).unwrap();
        Arc::new(reservation)
    }

    fn removed(&self) -> Result<Removed, Failure> {
        self.disks.remove("a", Force::No, || true)
    }
}

#[test]
fn a_removal_between_the_end_and_the_start_of_a_restart_finds_the_disk_and_ends_both() {
    let rig = Rig::new();
    let reservation = rig.ended();
    assert_eq!(rig.row(), Some((RowState::Starting, Some("new".to_owned()))));
    // The opening, which has the name, is left to its thread.
    assert_eq!(rig.removed().unwrap(), Removed::GivenUp);
    let done = rig.disks.open_again(&reservation, rig.args("new"), rig.args("old"));
    assert_eq!(done.unwrap(), Outcome::Removed);
    drop(reservation);
    assert_eq!(rig.row(), None);
    assert_eq!(rig.removed().unwrap_err().sort, Sort::NoSuchDisk);
}

#[test]
fn a_removal_before_the_end_of_a_restart_leaves_no_disk() {
    let rig = Rig::new();
    let known = rig.known();
    let reservation =
        rig.disks.stop_for_restart("restart a".into(), "a", &known, &rig.args("new")).unwrap();
    assert!(rig.removed().is_ok());
    rig.disks.wait_for_end("a", &known).unwrap();
    let done = rig.disks.open_again(&Arc::new(reservation), rig.args("new"), rig.args("old"));
    assert_eq!(done.unwrap(), Outcome::Removed);
    assert_eq!(rig.row(), None);
}

#[test]
fn a_restart_without_a_removal_serves_the_new_options_or_the_old_ones() {
    let rig = Rig::new();
    let reservation = rig.ended();
    let new = rig.args("new");
    let done = rig.disks.open_again(&reservation, new, rig.args("old"));
    assert_eq!(done.unwrap(), Outcome::Restarted);
    assert_eq!(rig.row(), Some((RowState::Served, Some("new".to_owned()))));
    drop(reservation);
    let reservation = rig.ended();
    let wrong = DiskArgs { blk_file: Some("/none".into()), size: None, ..rig.args("wrong") };
    let done = rig.disks.open_again(&reservation, wrong, rig.args("old"));
    done.unwrap_err();
    assert_eq!(rig.row(), Some((RowState::Served, Some("old".to_owned()))));
    rig.removed().unwrap();
    assert_eq!(rig.row(), None);
}
