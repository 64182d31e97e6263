// SPDX-License-Identifier: Apache-2.0
//! Measures vhost-user-blk servers natively, without a guest, and compares them. The program is
//! `bench`; this library is its parts, from the load up.

#![forbid(unsafe_code)]

pub mod cpu;
pub mod load;
pub mod socket;
