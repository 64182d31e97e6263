// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk create`: creates a raw image file.

use crate::failure::Failure;
use crate::values::{self, Size};
use backend::create::{self, Allocation, CreateError};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Arguments of `vhost-blk create`.
#[derive(Args, Debug)]
pub struct CreateArgs {
    /// File to make; it must not exist.
    pub path: PathBuf,
    /// Its size in bytes, or with K, M, G or T
    #[arg(value_parser = values::size)]
    pub size: Size,
    /// Reserve the space now
    #[arg(long, value_name = "MODE", default_value = "off")]
    pub preallocate: Preallocate,
}

/// Reservation of a new image's space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preallocate {
    /// Reserve all of it, zeroed.
    Full,
    /// A sparse file: writes allocate its space.
    Off,
}

/// Runs `vhost-blk create`.
///
/// # Errors
/// [`Failure`] if the file exists or cannot be created. No incomplete file remains.
pub fn create(args: &CreateArgs) -> Result<(), Failure> {
    let allocation = match args.preallocate {
        Preallocate::Full => Allocation::Full,
        Preallocate::Off => Allocation::Sparse,
    };
    create::create(&args.path, args.size.0, allocation).map_err(|error| match error {
        CreateError::Failed { .. } => {
            Failure::run("make the image", error, "check the path and its permissions")
        }
        error => Failure::told("make the image", error),
    })
}
