// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets as plain functions: each takes any bytes and panics if an invariant breaks.
//!
//! [`TARGETS`] pairs each body with a maker of valid inputs, which [`mutate::mutate`] then breaks,
//! so that a short run reaches deep code without a corpus.

mod call;
mod chain;
mod guest;
mod image;
mod message;
mod message_seed;
pub mod mutate;
mod request;
mod rng;

pub use call::call;
pub use chain::chain;
pub use image::image;
pub use message::message;
pub use request::request;
pub use rng::Rng;

/// A fuzz target.
pub struct Target {
    /// Its name, as libFuzzer's binary is called.
    pub name: &'static str,
    /// Runs one input.
    pub body: fn(&[u8]),
    /// Makes a valid input.
    pub seed: fn(&mut Rng) -> Vec<u8>,
}

/// All targets.
pub const TARGETS: [Target; 5] = [
    Target { name: "call", body: call::call, seed: call::seed },
    Target { name: "chain", body: chain::chain, seed: chain::seed },
    Target { name: "image", body: image::image, seed: image::seed },
    Target { name: "request", body: request::request, seed: request::seed },
    Target { name: "message", body: message::message, seed: message_seed::seed },
];
