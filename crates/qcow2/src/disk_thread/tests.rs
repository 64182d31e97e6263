// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::tables::tests::overlay;
use crate::{AllowBacking, chain};
use backend::Engine;
use backend::conformance::SyncEngine;
use rustix::fs::{SealFlags, fcntl_add_seals};
use std::fs::File;
use std::process::Command;

/// The thread of a disk, whose commits are carried out in place.
fn idle(image: Image) -> Thread {
    Thread::new(image, channel().1, Committer::default())
}

/// The answers to questions, as far as they have come.
struct Answers(Receiver<ToLane>);

impl Answers {
    fn try_iter(&self) -> impl Iterator<Item = (Slot, Answer)> {
        self.0.try_iter().map(|ToLane { slot, answer, .. }| (slot, answer))
    }

    fn try_recv(&self) -> Option<(Slot, Answer)> {
        self.try_iter().next()
    }
}

/// The questions of one batch. The lane wants to know no other places.
fn ask(thread: &mut Thread, questions: Vec<Question>) -> Answers {
    let (answers, answered) = channel();
    let remote = SyncEngine::new().remote();
    for (slot, question) in (0..).zip(questions) {
        let token = Token { slot: Slot(slot), layer: 0 };
        let reply = Reply { token, remote: remote.clone(), window: 0..0, answers: answers.clone() };
        thread.take(Work::Ask(question, reply));
    }
    Answers(answered)
}

/// An image with 66 L2 tables, which have more than is looked at between two batches, and a cluster of data.
fn many_tables() -> (tempfile::TempDir, Image) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("many.qcow2");
    let directory_path = directory.path().to_owned();
    let run = |program: &str, args: &[&str]| {
        let run = Command::new(program).current_dir(&directory_path).args(args).output();
        assert!(run.expect("it runs; scripts/setup.sh installs it").status.success(), "{args:?}");
    };
    let options = ["-o", "preallocation=metadata", "many.qcow2", "33G"];
    run("qemu-img", &[&["create", "-qf", "qcow2"][..], &options].concat());
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 3 0 64k", "many.qcow2"]);
    let links = chain::follow(&path, true, AllowBacking::Off).expect("a chain");
    let header = links[0].header.as_ref().expect("a header");
    let access = chain::open(&links, true, None).expect("it opens");
    let image = Image::new(access, header, std::sync::Arc::default());
    (directory, image)
}

#[test]
fn reads_are_answered_and_changes_wait_while_tables_are_looked_at() {
    let (_directory, image) = many_tables();
    let mut thread = idle(image);
    let write = |at| Question::Write(at, vec![1; 4096]);
    thread.look();
    let reads = || vec![Question::Read(0, 4096), write(0), Question::Read(32 << 30, 4096)];
    let answered = ask(&mut thread, reads());
    let (reply, grown) = channel();
    thread.take(Work::Grow(34 << 30, reply));
    thread.answer(&|_| ());
    let early: Vec<_> = answered.try_iter().collect();
    // The answer has no place yet: the lane could write to it.
    assert_eq!(early[0], (Slot(0), Answer::Data(vec![3; 4096])));
    assert_eq!(early[1], (Slot(2), Answer::Data(vec![0; 4096])));
    assert_eq!((early.len(), grown.try_recv().is_err()), (2, true));
    assert!(thread.has_more());
    thread.look();
    thread.answer(&|_| ());
    let late: Vec<_> = answered.try_iter().collect();
    assert!(matches!(late[..], [(Slot(1), Answer::Extent(..))]), "{late:?}");
    assert!(grown.try_recv().is_ok_and(|grown| grown.is_ok_and(|(_, grown)| grown.is_ok())));
    assert!(!thread.has_more());
    let answered = ask(&mut thread, vec![Question::Read(0, 4096)]);
    assert!(matches!(answered.try_recv(), Some((_, Answer::Extent(..)))));
}

#[test]
fn more_changes_than_a_batch_wait_for_the_tables_and_are_all_answered() {
    let (_directory, image) = many_tables();
    let mut thread = idle(image);
    let count = 2 * BATCH_MAX as u32;
    let answered = ask(&mut thread, (0..count).map(|_| Question::Zero(0, 4096)).collect());
    let mut batches = 0;
    while thread.has_more() {
        thread.look();
        assert!(thread.answered.len() < BATCH_MAX);
        thread.answer(&|_| ());
        batches += 1;
    }
    let slots: Vec<_> = answered.try_iter().map(|(Slot(slot), _)| slot).collect();
    assert_eq!(slots, (0..count).collect::<Vec<_>>());
    assert!(batches > 2);
}

#[test]
fn a_table_that_cannot_be_read_fails_the_changes_and_the_next_one_looks_again() {
    let (directory, image) = many_tables();
    let mut thread = idle(image);
    let unreadable = File::create(directory.path().join("unreadable")).expect("a file");
    let store = thread.image.store().expect("the image");
    let kept = store.exchange(&unreadable);
    let answered = ask(&mut thread, vec![Question::Zero(0, 4096)]);
    let (reply, grown) = channel();
    thread.take(Work::Grow(34 << 30, reply));
    thread.look();
    assert_eq!(answered.try_recv(), Some((Slot(0), Answer::Failed(libc::EBADF))));
    assert!(grown.try_recv().is_ok_and(|grown| grown.is_ok_and(|(_, grown)| grown.is_err())));
    assert!(!thread.has_more(), "it waits for the next change");
    thread.image.store().expect("the image").exchange(&kept);
    let answered = ask(&mut thread, vec![Question::Zero(0, 4096)]);
    while thread.has_more() {
        thread.look();
        thread.answer(&|_| ());
    }
    assert!(matches!(answered.try_recv(), Some((Slot(0), Answer::Extent(..)))));
}

#[test]
fn a_place_that_is_committed_is_told_before_the_commit_and_no_other_one() {
    const CLUSTER: u64 = 64 << 10;
    let (_directory, _file, image) = overlay();
    let mut thread = idle(image);
    let write = |at| Question::Write(at, vec![1; 4096]);
    ask(&mut thread, vec![write(0), write(CLUSTER), write(3 * CLUSTER)]);
    thread.answer(&|_| ());
    let questions = vec![
        write(2 * CLUSTER),
        Question::Read(0, 4096),
        Question::Read(2 * CLUSTER, 4096),
        Question::Read(1 << 20, 4096),
        write(CLUSTER),
    ];
    let answered = ask(&mut thread, questions);
    let early: Vec<_> = answered.try_iter().collect();
    let slots: Vec<_> = early.iter().map(|(Slot(slot), _)| *slot).collect();
    assert_eq!(slots, [1, 3, 4]);
    // The extent of the first clusters ends before the one that waits.
    for (_, answer) in [&early[0], &early[2]] {
        let Answer::Extent(extent, _) = answer else { panic!("{answer:?}") };
        assert_eq!((extent.file, extent.end), (0, 2 * CLUSTER));
    }
    thread.answer(&|_| ());
    assert_eq!(answered.try_iter().map(|(Slot(slot), _)| slot).collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn a_failed_commit_gives_no_question_of_its_batch_a_place_that_the_file_lacks() {
    let (_directory, file, image) = overlay();
    let mut thread = idle(image);
    let questions = vec![
        Question::Write(4096, vec![1; 4096]),
        Question::Read(0, 4096),
        Question::Write(0, vec![1; 4096]),
        Question::Read(1 << 20, 4096),
    ];
    let answered = ask(&mut thread, questions);
    let (reply, piece) = channel();
    thread.take(Work::Tell(Of::Disk, 0, 4096, reply));
    fcntl_add_seals(&file, SealFlags::WRITE).expect("a seal");
    let failures = std::cell::RefCell::new(Vec::new());
    thread.answer(&|errno| failures.borrow_mut().push(errno));
    assert_eq!(*failures.borrow(), [libc::EPERM]);
    let mut found: Vec<_> = answered.try_iter().collect();
    found.sort_by_key(|(Slot(slot), _)| *slot);
    let found: Vec<Answer> = found.into_iter().map(|(_, answer)| answer).collect();
    let failed = Answer::Failed(libc::EPERM);
    assert_eq!(found[..3], [failed, Answer::Data(vec![9; 4096]), Answer::Failed(libc::EPERM)]);
    assert!(matches!(found[3], Answer::Extent(extent, _) if extent.file == 1));
    assert!(piece.recv().expect("an answer").is_err());
}
