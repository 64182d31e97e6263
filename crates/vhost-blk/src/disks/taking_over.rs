// SPDX-License-Identifier: Apache-2.0
//! The disks of an earlier program of this process.

use super::{Disks, NewDisk, Origin};
use crate::disk::LockWait;
use crate::failure::Failure;
use crate::upgrade::TakenDisk;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Threads that take disks over: the start of one may wait, for example for the kernel.
const TAKERS_MAX: usize = 8;

impl Disks {
    /// Continues the disks of an earlier program of `daemon`. Returns the names of those that
    /// failed; they hurt no other.
    pub fn take_over(self: &Arc<Self>, taken: Vec<TakenDisk>) -> Vec<String> {
        let takers = taken.len().min(TAKERS_MAX);
        let waiting = Mutex::new(taken.into_iter());
        let failed = Mutex::new(Vec::new());
        let take = || {
            loop {
                let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(disk) = next else { return };
                let (name, origin) = (disk.name.clone(), disk.origin);
                if let Err(failure) = self.take_one(disk) {
                    tracing::error!(disk = name, "{failure}");
                    if origin == Origin::Directory {
                        self.note_failed(&name, &failure);
                    }
                    failed.lock().unwrap_or_else(PoisonError::into_inner).push(name);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..takers {
                let spawned = thread::Builder::new().name("taker".into()).spawn_scoped(scope, take);
                if let Err(error) = spawned {
                    tracing::debug!(%error, "fewer threads take the disks over");
                    break;
                }
            }
            take();
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_one(self: &Arc<Self>, taken: TakenDisk) -> Result<(), Failure> {
        let TakenDisk { name, args, origin, parts } = taken;
        let Some(args) = args else {
            let remedy = "start the daemon again";
            return Err(Failure::run(format!("take over {name}"), "it has no options", remedy));
        };
        let wait = LockWait::from_now();
        self.add(NewDisk { name, args, origin, image: None, taken: Some(parts), wait })
    }
}
