// SPDX-License-Identifier: Apache-2.0
//! Compares random I/Os with a model, a vector of bytes.

use super::cases::pattern;
use super::{Request, Rig, Target};
use crate::IoKind;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

/// Blocks of the disk that are used.
const BLOCKS: usize = 200;

#[derive(Clone, Debug)]
enum Command {
    Write { split: Vec<usize>, misalign: usize, seed: u64, durable: bool },
    Read { split: Vec<usize>, misalign: usize },
    Zero { unmap: bool, durable: bool },
    Discard,
    Flush,
}

/// A command and its range in blocks.
type Step = (Command, usize, usize);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Cuts are positions within the range, in thousandths.
    let split = || prop_oneof![Just(vec![]), prop::collection::vec(0..1000usize, 0..6)];
    let misalign = || prop_oneof![3 => Just(0usize), 1 => 0..4096usize];
    let command = prop_oneof![
        4 => (split(), misalign(), any::<u64>(), any::<bool>()).prop_map(
            |(split, misalign, seed, durable)| Command::Write { split, misalign, seed, durable }),
        4 => (split(), misalign()).prop_map(|(split, misalign)| Command::Read { split, misalign }),
        2 => (any::<bool>(), any::<bool>())
            .prop_map(|(unmap, durable)| Command::Zero { unmap, durable }),
        1 => Just(Command::Discard),
        1 => Just(Command::Flush),
    ];
    let range = (0..BLOCKS).prop_flat_map(|first| (Just(first), 1..=(BLOCKS - first).min(80)));
    prop::collection::vec((command, range).prop_map(|(c, (first, count))| (c, first, count)), 1..30)
}

/// Segment lengths of `total` bytes, split at `cuts` thousandths.
fn segments(total: usize, cuts: &[usize]) -> Vec<usize> {
    let mut places: Vec<usize> = cuts.iter().map(|cut| total * cut / 1000).collect();
    places.push(total);
    places.sort_unstable();
    let mut from = 0;
    places.into_iter().map(|to| to - std::mem::replace(&mut from, to)).collect()
}

/// After any sequence of I/Os the disk equals the model.
pub fn agrees_with_a_plain_vector(target: &Target) {
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    let mut rig = Rig::new(target);
    TestRunner::new(config)
        .run(&steps(), |steps| {
            let block = rig_block(target);
            let rig = &mut Rig::new(target);
            rig.write(0, &pattern(BLOCKS * block, 11));
            let mut model: Vec<Option<u8>> = known(&pattern(BLOCKS * block, 11));
            for step in steps {
                run_step(rig, &mut model, block, step)?;
            }
            compare(&rig.read(0, BLOCKS * block), &model)
        })
        .unwrap_or_else(|why| panic!("{why}"));
    // One lane stays usable through all sequences.
    let _still_reads = rig.read(0, rig_block(target));
}

fn rig_block(target: &Target) -> usize {
    target.disk.info().logical_block_bytes as usize
}

fn known(bytes: &[u8]) -> Vec<Option<u8>> {
    bytes.iter().copied().map(Some).collect()
}

fn compare(found: &[u8], model: &[Option<u8>]) -> Result<(), TestCaseError> {
    let differs = |(found, wanted): (&u8, &Option<u8>)| wanted.is_some_and(|byte| byte != *found);
    match found.iter().zip(model).position(differs) {
        None => Ok(()),
        Some(at) => Err(TestCaseError::fail(format!(
            "byte {at}: {:#x}, the model has {:?}",
            found[at], model[at]
        ))),
    }
}

fn run_step(
    rig: &mut Rig,
    model: &mut [Option<u8>],
    block: usize,
    (command, first, count): Step,
) -> Result<(), TestCaseError> {
    let (at, len) = (first * block, count * block);
    let range = at..at + len;
    let mut request = match &command {
        Command::Write { split, misalign, seed, durable } => {
            let data = pattern(len, *seed);
            model[range.clone()].copy_from_slice(&known(&data));
            let write = Request::write(at as u64, &data, &segments(len, split), *misalign);
            Request { durable: *durable, ..write }
        }
        Command::Read { split, misalign } => {
            Request::read(at as u64, &segments(len, split), *misalign)
        }
        Command::Zero { .. } if rig.info.write_zeroes.is_none() => return Ok(()),
        Command::Zero { unmap, durable } => {
            model[range.clone()].fill(Some(0));
            let kind = IoKind::WriteZeroes { unmap: *unmap };
            Request { durable: *durable, ..Request::command(kind, at as u64, len as u64) }
        }
        Command::Discard if rig.info.discard.is_none() => return Ok(()),
        Command::Discard => {
            model[range.clone()].fill(None);
            Request::command(IoKind::Discard, at as u64, len as u64)
        }
        Command::Flush => Request::command(IoKind::Flush, 0, 0),
    };
    prop_assert_eq!(rig.run(&mut request), Ok(()), "{:?} at {}+{}", command, at, len);
    if let (Command::Read { .. }, Some(memory)) = (&command, &request.memory) {
        compare(&memory.content(), &model[range])?;
    }
    Ok(())
}
