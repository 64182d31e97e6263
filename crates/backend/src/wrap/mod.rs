// SPDX-License-Identifier: Apache-2.0
//! Disks around a disk: they delay, fail, limit or record what passes through them.
//!
//! A wrapper's lane is one layer above its inner lane. It pushes timers with its own layer number
//! and hands every other event inward. For tests and diagnosis: they may allocate or lock.

mod delay;
mod fault;
mod limit;
mod ops;
mod record;
mod slots;
mod spec;

pub use delay::Delay;
pub use fault::{Fault, FaultRule};
pub use limit::{Limit, Rates};
pub use ops::OpSet;
pub use record::{Entry, Log, Phase, Record};
pub use spec::{SpecError, from_spec};

use crate::{Disk, Info};

/// The inner disk's facts, with the wrapper's name added to the description.
fn wrapped_info(inner: &dyn Disk, wrapper: &str) -> Info {
    let info = inner.info();
    Info { description: format!("{}, {wrapper}", info.description), ..info }
}
