// SPDX-License-Identifier: Apache-2.0
//! Disks around a disk: they delay, fail, limit, record, track or hold I/Os.
//!
//! A wrapper's lane is one layer above its inner lane. It pushes timers with its own layer number
//! and passes every other event to the inner lane. Wrappers are for tests and diagnosis, for the
//! time of a backup ([`CopyFirst`]), and for that of a merge, of a mirror ([`Braked`]) or between
//! backups ([`Track`]): they may allocate and lock, except `Track`.

mod brake;
mod copy_first;
mod delay;
mod fault;
mod lie;
mod limit;
mod ops;
mod record;
mod slots;
mod spec;
mod track;

pub use brake::{Brake, Braked};
pub use copy_first::{CLUSTER_BYTES, CLUSTER_BYTES_MAX, Clusters, CopyFirst, TooLarge, Turn};
pub use delay::Delay;
pub use fault::{Fault, FaultRule};
pub use limit::{Limit, Rates};
pub use ops::OpSet;
pub use record::{Entry, Log, Phase, Record};
pub use slots::BySlot;
pub use spec::{SpecError, check_spec, from_spec};
pub use track::{Growth, Taken, Track, Written};

use crate::{Disk, Info};

/// The properties of the inner disk, with the wrapper's name added to the description.
fn wrapped_info(inner: &dyn Disk, wrapper: &str) -> Info {
    let info = inner.info();
    Info { description: format!("{}, {wrapper}", info.description), ..info }
}
