// SPDX-License-Identifier: Apache-2.0
//! The guest's block is 512 bytes even if O_DIRECT needs 4096. Concurrent writers lose no data, and
//! an image looks the same on every file system.

mod common;

use backend::conformance::{Memory, Rig, SyncEngine, Target, TestEngine};
use backend::{Disk, File, FileOptions, Info, Io, IoError, IoKind, Lane, Slot, Step};
use common::{DISK, Image, Mounted};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use std::fs;
use std::path::Path;
use std::time::Duration;

const SECTOR: usize = 512;
/// Length of the disk: four blocks of 4096 bytes and a tail of three sectors.
const SECTORS: usize = 35;
const SIZE: u64 = (SECTORS * SECTOR) as u64;

fn mounted() -> Option<Mounted> {
    Mounted::with_4k_sectors("mkfs.ext4").inspect_err(|why| println!("SKIP: {why}")).ok()
}

fn open(path: &Path) -> File {
    let disk = File::open(path, FileOptions::default()).expect("the image opens");
    assert!(!disk.fell_back_from_direct());
    disk
}

/// The disk's properties in the form that the guest sees.
fn seen(disk: &File) -> Info {
    Info { description: String::new(), ..disk.info() }
}

#[test]
fn a_partition_table_is_where_it_was_on_hosts_with_other_disks() {
    let Some(mounted) = mounted() else { return };
    let here = Image::new(DISK, SIZE).expect("an image can be made");
    let there = mounted.image(0);
    let (head, backup) = (SECTOR as u64, SIZE - SECTOR as u64);
    let table = |text: &str| [text.as_bytes(), &[0x5a; SECTOR]].concat()[..SECTOR].to_vec();
    let disk = open(&here.path);
    let facts = |info: Info| (info.capacity_sectors, info.logical_block_bytes);
    let mut rig = Rig::new(&Target::new(open(&here.path)));
    rig.write(head, &table("EFI PART"));
    rig.write(backup, &table("EFI PART backup"));
    fs::copy(&here.path, &there).expect("the image moves to a host with 4Kn disks");
    let moved = open(&there);
    assert_eq!(facts(moved.info()), facts(disk.info()));
    assert_eq!(moved.info().physical_block_bytes, 4096);
    let [notice] = moved.notices() else { panic!("{:?}", moved.notices()) };
    assert!(notice.contains("wants blocks of 4096 bytes"), "{notice}");
    let mut rig = Rig::new(&Target::new(moved));
    assert_eq!(rig.read(head, SECTOR), table("EFI PART"));
    assert_eq!(rig.read(backup, SECTOR), table("EFI PART backup"));
    rig.write(head, &table("EFI PART changed"));
    rig.write(backup, &table("EFI PART changed, too"));
    assert_eq!(fs::metadata(&there).unwrap().len(), SIZE, "the image grew");
    fs::copy(&there, &here.path).expect("the image moves back");
    let mut rig = Rig::new(&Target::new(open(&here.path)));
    assert_eq!(rig.read(head, SECTOR), table("EFI PART changed"));
    assert_eq!(rig.read(backup, SECTOR), table("EFI PART changed, too"));
}

#[test]
fn a_partition_table_for_other_blocks_is_told_of() {
    for (made_for, given) in [(512, 4096), (4096, 512)] {
        let image = Image::new(DISK, 1 << 20).expect("an image can be made");
        let with =
            |block| FileOptions { logical_block_bytes: Some(block), ..FileOptions::default() };
        let disk = File::open(&image.path, with(made_for)).expect("the image opens");
        let mut block = vec![0; made_for as usize];
        block[..8].copy_from_slice(b"EFI PART");
        Rig::new(&Target::new(disk)).write(made_for.into(), &block);
        let as_made = File::open(&image.path, with(made_for)).expect("the image opens");
        assert!(as_made.notices().is_empty(), "{:?}", as_made.notices());
        let other = File::open(&image.path, with(given)).expect("the image opens");
        let [notice] = other.notices() else { panic!("{:?}", other.notices()) };
        assert!(notice.contains(&format!("use --logical-block-size {made_for}")), "{notice}");
    }
}

#[test]
fn a_guest_that_asks_for_4k_blocks_is_not_warned() {
    let Some(mounted) = mounted() else { return };
    let options = FileOptions { logical_block_bytes: Some(4096), ..FileOptions::default() };
    let disk = File::open(mounted.image(1 << 20), options).expect("the image opens");
    assert!(disk.notices().is_empty(), "{:?}", disk.notices());
    assert_eq!(seen(&disk).logical_block_bytes, 4096);
}

#[test]
fn an_image_that_shrank_is_told_of_and_does_not_grow() {
    let Some(mounted) = mounted() else { return };
    let path = mounted.image(64 << 10);
    let mut rig = Rig::new(&Target::new(open(&path)));
    let shrunk = fs::OpenOptions::new().write(true).open(&path).expect("the image opens");
    shrunk.set_len(32 << 10).expect("it can be cut");
    let memory = |n: usize| vec![n as u8; SECTOR];
    let mut write = backend::conformance::Request::write(40 << 10, &memory(1), &[SECTOR], 0);
    assert_eq!(rig.run(&mut write), Err(IoError::EndOfStorage));
    assert_eq!(fs::metadata(&path).unwrap().len(), 32 << 10);
}

/// A command for one of the lanes, in sectors.
#[derive(Clone, Debug)]
struct Command {
    lane: usize,
    kind: IoKind,
    first: usize,
    count: usize,
    fill: u8,
}

fn command() -> impl Strategy<Value = Command> {
    let kind = prop_oneof![
        6 => Just(IoKind::Write),
        2 => Just(IoKind::WriteZeroes { unmap: false }),
        1 => Just(IoKind::WriteZeroes { unmap: true }),
        1 => Just(IoKind::Read),
    ];
    let range = (0..SECTORS).prop_flat_map(|first| (Just(first), 1..=(SECTORS - first).min(20)));
    (0..2usize, kind, range, 1..=255u8).prop_map(|(lane, kind, (first, count), fill)| Command {
        lane,
        kind,
        first,
        count,
        fill,
    })
}

/// A lane and its ops in flight.
struct Half {
    lane: Box<dyn Lane>,
    engine: SyncEngine,
    running: usize,
}

impl Half {
    fn of(disk: &File) -> Half {
        let lane = disk.open_lane().expect("the lane opens");
        let mut engine = SyncEngine::new();
        engine.register(&lane.files()).expect("the engine takes the files");
        Half { lane, engine, running: 0 }
    }

    /// Executes the lane's oldest op and passes the result to the lane. Returns `false` if all its I/Os wait for the
    /// other lane.
    fn step(&mut self, ios: &mut [Io]) -> bool {
        let Some(event) = self.engine.next_event(Duration::ZERO) else { return false };
        let io = &mut ios[event.0.slot.0 as usize];
        match self.lane.event(io, event.0, event.1, &mut self.engine) {
            Step::Pending => {}
            done => {
                assert_eq!(done, Step::Done(Ok(())));
                self.running -= 1;
            }
        }
        true
    }
}

/// Runs the commands concurrently, their ops in the order of `schedule`.
fn run_together(halves: &mut [Half; 2], commands: &[Command], schedule: &[bool]) {
    let mut memories: Vec<Memory> = commands
        .iter()
        .map(|command| {
            let mut memory = Memory::new(&[command.count * SECTOR], 0);
            memory.fill(&vec![command.fill; command.count * SECTOR]);
            memory
        })
        .collect();
    let mut ios: Vec<Io> = commands
        .iter()
        .zip(&mut memories)
        .map(|(command, memory)| {
            let (at, len) = (command.first * SECTOR, command.count * SECTOR);
            Io::new(command.kind, at as u64, len as u64, memory.bufs())
        })
        .collect();
    for (n, command) in commands.iter().enumerate() {
        let half = &mut halves[command.lane];
        match half.lane.start(&mut ios[n], Slot(n as u32), &mut half.engine) {
            Step::Pending => half.running += 1,
            step => panic!("{step:?}: a lane has buffers for all of them"),
        }
    }
    // Both lanes get their turn in the end, because one may wait for the other.
    let mut choices = schedule.iter().chain(&[true, false]).cycle();
    while halves.iter().any(|half| half.running > 0) {
        let wanted = usize::from(*choices.next().expect("a schedule goes on for ever"));
        let did_step = halves[wanted].step(&mut ios) || halves[1 - wanted].step(&mut ios);
        assert!(did_step, "no op is outstanding");
    }
}

/// Checks that each sector holds its old content or that of one of the concurrent commands.
fn check(found: &[u8], before: &[u8], commands: &[Command]) -> Result<(), TestCaseError> {
    for sector in 0..SECTORS {
        let of = |bytes: &[u8]| bytes[sector * SECTOR..][..SECTOR].to_vec();
        let writers = commands.iter().filter(|command| command.kind != IoKind::Read);
        let mut allowed: Vec<Vec<u8>> = writers
            .filter(|command| (command.first..command.first + command.count).contains(&sector))
            .map(|command| {
                let fill = if command.kind == IoKind::Write { command.fill } else { 0 };
                vec![fill; SECTOR]
            })
            .collect();
        if allowed.is_empty() {
            allowed.push(of(before));
        }
        prop_assert!(
            allowed.contains(&of(found)),
            "sector {} is {:#x}, allowed are {:x?} of {:?}",
            sector,
            of(found)[0],
            allowed.iter().map(|bytes| bytes[0]).collect::<Vec<_>>(),
            commands
        );
    }
    Ok(())
}

#[test]
fn writers_of_one_block_lose_no_update_in_any_order_of_their_ops() {
    let Some(mounted) = mounted() else { return };
    let path = mounted.image(SIZE);
    let disk = open(&path);
    let rounds = prop::collection::vec(prop::collection::vec(command(), 1..=4), 1..6);
    let schedule = prop::collection::vec(any::<bool>(), 8..40);
    let config = Config { cases: 200, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&(rounds, schedule), |(rounds, schedule)| {
            let mut halves = [Half::of(&disk), Half::of(&disk)];
            for commands in rounds {
                let before = fs::read(&path).expect("the image can be read");
                run_together(&mut halves, &commands, &schedule);
                let found = fs::read(&path).expect("the image can be read");
                prop_assert_eq!(found.len() as u64, SIZE);
                check(&found, &before, &commands)?;
            }
            Ok(())
        })
        .unwrap_or_else(|why| panic!("{why}"));
}
