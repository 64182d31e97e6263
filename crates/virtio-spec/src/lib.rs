// SPDX-License-Identifier: Apache-2.0
//! Constants and wire structures of the virtio 1.3 specification, each with its section.
//!
//! What is absent: logic. Nothing here reads memory, checks a value or keeps state, so that the
//! device side (`virtqueue`, `virtio-blk`) and the driver side (`driver`) can share it and still
//! be independent witnesses of each other.

#![forbid(unsafe_code)]

pub mod blk;
pub mod features;
pub mod packed;
pub mod split;
