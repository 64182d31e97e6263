// SPDX-License-Identifier: Apache-2.0
//! Constants and wire structures of the virtio 1.3 specification, each with its section.
//!
//! This crate has no logic: it reads no memory, checks no value and keeps no state. The device
//! side (`virtqueue`, `virtio-blk`) and the driver side (`driver`) can therefore share it and
//! still be independent witnesses of each other.

#![forbid(unsafe_code)]

pub mod blk;
pub mod features;
pub mod packed;
pub mod split;
