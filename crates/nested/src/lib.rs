// SPDX-License-Identifier: Apache-2.0
//! Inner guests in the lab's VM: cases and measurements of the whole stack, with real KVM, real
//! ioeventfds and irqfds. The program is `nested`.

#![forbid(unsafe_code)]

pub mod cases;
pub mod daemon;
pub mod exec;
pub mod guest;
pub mod kvm;
pub mod measure;
