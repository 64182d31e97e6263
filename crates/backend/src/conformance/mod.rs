// SPDX-License-Identifier: Apache-2.0
//! The conformance suite: requirements for every kind of disk on every engine.
//!
//! `conformance!(name, target)` makes a test module of all cases. `target` is an expression of type
//! `Result<Target, String>`: a fresh disk, or the reason to skip the test on this machine.

pub mod cases;
mod delivered;
mod manual_engine;
mod memory;
mod model;
mod rig;
mod sync_engine;

pub use delivered::Delivered;
pub use manual_engine::ManualEngine;
pub use memory::Memory;
pub use rig::{Request, Rig};
pub use sync_engine::{Quirks, SyncEngine};

use crate::{Disk, Engine, Token};
use std::any::Any;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// An engine that the suite can drive.
pub trait TestEngine: Engine {
    /// Registers the files of a lane; called once, before the first operation.
    ///
    /// # Errors
    /// The error of the engine.
    fn register(&mut self, files: &[RawFd]) -> io::Result<()>;

    /// Submits the pushed operations and waits for the next event. Returns `None` if no operation
    /// is outstanding, and after `limit`.
    fn next_event(&mut self, limit: Duration) -> Option<(Token, i32)>;
}

/// Makes an engine on the thread that uses it.
pub type MakeEngine = Box<dyn Fn() -> Box<dyn TestEngine> + Send + Sync>;

/// A disk under test of at least 8 MiB, without any other user.
pub struct Target {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Makes the engine of each lane.
    pub engine: MakeEngine,
    /// Values that must outlive the disk, for example its file.
    pub keep: Box<dyn Any>,
}

impl Target {
    /// A target on a [`SyncEngine`].
    pub fn new(disk: impl Disk + 'static) -> Target {
        Target::of(Arc::new(disk))
    }

    /// A target of a shared disk on a [`SyncEngine`].
    pub fn of(disk: Arc<dyn Disk>) -> Target {
        Target { disk, engine: Box::new(|| Box::new(SyncEngine::new())), keep: Box::new(()) }
    }

    /// Keeps `guard` as long as the target.
    pub fn keeping(self, guard: impl Any) -> Target {
        Target { keep: Box::new(guard), ..self }
    }

    /// The same disk on other engines.
    pub fn run_by(
        self,
        engine: impl Fn() -> Box<dyn TestEngine> + Send + Sync + 'static,
    ) -> Target {
        Target { engine: Box::new(engine), ..self }
    }
}

/// Runs `case`, or prints the reason to skip it.
pub fn run_case(target: Result<Target, String>, case: fn(&Target)) {
    match target {
        Ok(target) => case(&target),
        Err(reason) => println!("SKIP: {reason}"),
    }
}

/// Makes a module `$name` of tests that run every case over `$target`.
#[macro_export]
macro_rules! conformance {
    ($name:ident, $target:expr) => {
        $crate::conformance_cases!(
            $name,
            $target,
            [
                describes_itself_consistently,
                a_zero_length_io_succeeds,
                nothing_lies_behind_the_end,
                odd_values_do_no_harm,
                flush_succeeds,
                unsupported_commands_say_so,
                reads_back_what_was_written,
                takes_memory_of_any_alignment,
                takes_segments_of_any_split,
                takes_more_segments_than_one_system_call,
                splits_large_unaligned_transfers,
                durable_writes_are_read_back,
                write_zeroes_zeroes_its_range_only,
                discard_touches_its_range_only,
                secure_erase_zeroes_its_range_only,
                serves_its_first_and_last_block,
                many_ios_in_flight_end_once_each,
                lanes_see_each_others_writes,
                writers_of_neighbouring_blocks_lose_nothing,
                agrees_with_a_plain_vector,
            ]
        );
    };
}

/// The cases of [`conformance!`] for a disk that stores no data.
#[macro_export]
macro_rules! conformance_without_data {
    ($name:ident, $target:expr) => {
        $crate::conformance_cases!(
            $name,
            $target,
            [
                describes_itself_consistently,
                a_zero_length_io_succeeds,
                nothing_lies_behind_the_end,
                odd_values_do_no_harm,
                flush_succeeds,
                unsupported_commands_say_so,
            ]
        );
    };
}

/// One test for each listed case; used by [`conformance!`].
#[macro_export]
macro_rules! conformance_cases {
    ($name:ident, $target:expr, [$($case:ident),* $(,)?]) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;
            $(#[test]
            fn $case() {
                $crate::conformance::run_case($target, $crate::conformance::cases::$case);
            })*
        }
    };
}
