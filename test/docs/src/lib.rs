// SPDX-License-Identifier: Apache-2.0
//! Reads the documents of this repository for the tests that compare them with the sources.
//!
//! The tests of this crate check what concerns all documents. A page that describes one crate is
//! compared with real values by a test of that crate.

#![forbid(unsafe_code)]

mod document;
mod tree;

pub use document::{Cell, Document, Table};
pub use tree::{documents, files, read, root};
