// SPDX-License-Identifier: Apache-2.0
//! What a descriptor chain means to a block device (virtio 1.3, section 5.2).
//!
//! [`Request::parse`] (stage *request*) is the one place that distrusts the driver's words; what
//! it lets through is in range and allowed. [`Completion`] (stage *completion*) is what goes back.
//!
//! What is absent: I/O. Nothing here starts, waits or fails.

#![forbid(unsafe_code)]

mod completion;
mod config;
mod request;

pub use completion::Completion;
pub use config::{DeviceConfig, MAX_RANGES};
pub use request::{DiskView, Kind, Range, RangeList, Refused, Request, id_bytes};
