// SPDX-License-Identifier: Apache-2.0
//! Random requests, snapshots, commits, growth and ends of a disk, in turn with changes by QEMU. A model of
//! the content knows every byte, and QEMU judges each image that is closed.
//!
//! * [`steps`]: the images to begin with, and the steps.
//! * [`world`]: the chain, the disk and its model. [`requests`] and [`chains`] carry the steps out.
//! * [`qemu`]: QEMU's programs.
//!
//! `PROPTEST_CASES` is the number of sequences, and `MODEL_SEED` repeats those of a seed.

mod chains;
#[path = "../common/mod.rs"]
mod common;
mod qemu;
mod requests;
mod steps;
mod world;

use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use steps::{Start, Step};
use world::World;

/// Sequences of a short run.
const CASES: u32 = 6;
/// Tries to make a failing sequence shorter, and their milliseconds.
const SHRINKS_MAX: u32 = 300;
const SHRINK_MS_MAX: u32 = 120_000;

/// Carries the steps out on a disk, and ends it.
fn follow(start: &Start, steps: &[Step]) {
    let mut world = World::create(start);
    for (number, step) in steps.iter().enumerate() {
        // The last line before a failure tells the step.
        println!("{number}: {step:?}");
        world.carry_out(step);
    }
    world.reopen();
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|why| panic!("{name}={text}: {why}; give a number")))
}

#[test]
fn a_chain_has_the_content_of_its_model_after_any_steps_of_ours_and_of_qemu() {
    let seed = number("MODEL_SEED").unwrap_or_else(|| fastrand::u64(..));
    let cases = number("PROPTEST_CASES").map_or(CASES, |cases| cases as u32);
    println!(
        "{cases} sequences, seed {seed}; repeat with MODEL_SEED={seed} PROPTEST_CASES={cases}"
    );
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config {
        cases,
        max_shrink_iters: SHRINKS_MAX,
        max_shrink_time: SHRINK_MS_MAX,
        failure_persistence: None,
        ..Config::default()
    };
    let ended = TestRunner::new_with_rng(config, rng).run(&steps::sequences(), |(start, steps)| {
        follow(&start, &steps);
        Ok(())
    });
    if let Err(TestError::Fail(why, (start, steps))) = &ended {
        panic!("seed {seed}: {why}\nthe shortest sequence that fails: {start:#?}, {steps:#?}");
    }
    ended.expect("the sequences are made");
}
