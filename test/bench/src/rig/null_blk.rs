// SPDX-License-Identifier: Apache-2.0
//! One null_blk device.

use anyhow::Result;
use kit::null_blk::NullBlk;

/// Speed of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speed {
    /// As fast as the block layer.
    Null,
    /// The same, with a polled hardware queue for each other one.
    Polled,
    /// Each request takes this many microseconds; requests run in parallel without limit.
    Slow(u32),
    /// This many MiB a second in total.
    Capped(u32),
}

impl Speed {
    /// Name in tables.
    pub fn name(self) -> String {
        match self {
            Self::Null => "null_blk".to_owned(),
            Self::Polled => "null_blk, poll queues".to_owned(),
            Self::Slow(us) => format!("null_blk {us} us"),
            Self::Capped(mib) => format!("null_blk {mib} MiB/s"),
        }
    }
}

/// Creates a device with `queues` hardware queues. `name` must be free.
pub fn null_blk(name: &str, size_mib: u64, queues: u16, speed: Speed) -> Result<NullBlk> {
    make(name, size_mib, queues, speed, false)
}

/// Creates a device that stores written data.
pub fn null_blk_with_memory(name: &str, size_mib: u64, queues: u16) -> Result<NullBlk> {
    make(name, size_mib, queues, Speed::Null, true)
}

fn make(name: &str, size_mib: u64, queues: u16, speed: Speed, memory: bool) -> Result<NullBlk> {
    let mut device = NullBlk::new(name)?;
    device.set("size", size_mib)?;
    device.set("submit_queues", queues.into())?;
    device.set("hw_queue_depth", 256)?;
    // Newer kernels add a polled queue by default; polling would outrun the device's timer.
    let poll_queues = if speed == Speed::Polled { queues } else { 0 };
    device.set("poll_queues", poll_queues.into())?;
    device.set("memory_backed", memory.into())?;
    match speed {
        Speed::Null | Speed::Polled => device.set("irqmode", 1)?,
        Speed::Slow(us) => {
            device.set("irqmode", 2)?;
            device.set("completion_nsec", u64::from(us) * 1000)?;
        }
        Speed::Capped(mib) => device.set("mbps", mib.into())?,
    }
    device.power_on()?;
    Ok(device)
}
