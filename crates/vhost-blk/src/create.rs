// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk create`: creates a raw or qcow2 image file.

use crate::failure::Failure;
use crate::values::{self, Format, Size};
use backend::create::{self, Allocation, CreateError};
use clap::{Args, ValueEnum};
use qcow2::create::{CLUSTER_BYTES, NewImage, Preallocation, backing_bytes};
use std::path::{Path, PathBuf};

/// Arguments of `vhost-blk create`.
#[derive(Args, Debug)]
pub struct CreateArgs {
    /// File to make; it must not exist.
    pub path: PathBuf,
    /// Its size in bytes, or with K, M, G or T (powers of 1024); that of the backing file if there is one
    #[arg(value_parser = values::size, required_unless_present = "backing")]
    pub size: Option<Size>,
    /// Format of the image
    #[arg(long, value_name = "FORMAT", default_value = "raw")]
    pub format: Format,
    /// Backing file of a qcow2 image, relative to the image's directory
    #[arg(long, value_name = "FILE", requires = "backing_format")]
    pub backing: Option<String>,
    /// Format of the backing file
    #[arg(long, value_name = "FORMAT", requires = "backing")]
    pub backing_format: Option<Format>,
    /// Cluster size of a qcow2 image, a power of 2 from 4K to 2M [default: 64K]
    #[arg(long, value_name = "N", value_parser = values::size)]
    pub cluster_size: Option<Size>,
    /// Reserve the space now
    #[arg(long, value_name = "MODE", default_value = "off", visible_alias = "preallocate")]
    pub preallocation: Preallocate,
}

/// Reservation of a new image's space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preallocate {
    /// Reserve all of it, zeroed.
    Full,
    /// Only write the tables of a qcow2 image.
    Metadata,
    /// A sparse file: writes allocate its space.
    Off,
}

impl From<Preallocate> for Preallocation {
    fn from(preallocate: Preallocate) -> Self {
        match preallocate {
            Preallocate::Full => Preallocation::Full,
            Preallocate::Metadata => Preallocation::Metadata,
            Preallocate::Off => Preallocation::Off,
        }
    }
}

/// Checks the description of a new image; `what` is the act for the failure.
pub(crate) fn check(image: &NewImage, what: &str) -> Result<(), Failure> {
    image.check().map_err(|why| {
        let (why, remedy) = why.rsplit_once("; ").unwrap_or((&why, ""));
        Failure::usage(what, why, remedy)
    })
}

const WHAT: &str = "make the image";

/// Runs `vhost-blk create`.
///
/// # Errors
/// [`Failure`] if the arguments do not fit, the file exists or cannot be created. No incomplete
/// file remains.
pub fn create(args: &CreateArgs) -> Result<(), Failure> {
    match args.format {
        Format::Raw => create_raw(args),
        Format::Qcow2 => create_qcow2(args),
    }
    .map_err(|error| match error {
        Error::Create(error) => failure(error),
        Error::Failure(failure) => failure,
    })
}

/// The failure of a new image.
pub(crate) fn failure(error: CreateError) -> Failure {
    match error {
        CreateError::Failed { .. } => {
            Failure::run(WHAT, error, "check the path and its permissions")
        }
        _ => Failure::told(WHAT, error),
    }
}

/// An error of either layer.
enum Error {
    Create(CreateError),
    Failure(Failure),
}

fn misused(why: &str, remedy: &str) -> Error {
    Error::Failure(Failure::usage(WHAT, why, remedy))
}

fn create_raw(args: &CreateArgs) -> Result<(), Error> {
    let allocation = match args.preallocation {
        Preallocate::Full => Allocation::Full,
        Preallocate::Off => Allocation::Sparse,
        Preallocate::Metadata => {
            return Err(misused("a raw image has no metadata", "give --format qcow2"));
        }
    };
    match args.size {
        Some(size) if args.backing.is_none() && args.cluster_size.is_none() => {
            create::create(&args.path, size.0, allocation).map_err(Error::Create)
        }
        _ => Err(misused("a raw image has no backing file and no clusters", "give --format qcow2")),
    }
}

fn create_qcow2(args: &CreateArgs) -> Result<(), Error> {
    let backing = args.backing.clone().zip(args.backing_format);
    let backing = backing.map(|(name, format)| (name, format == Format::Qcow2));
    let mut size_bytes = args.size.map_or(0, |size| size.0);
    if let Some((name, is_qcow2)) = &backing {
        let path = args.path.parent().unwrap_or(Path::new(".")).join(name);
        let bytes = backing_bytes(&path, *is_qcow2)
            .map_err(|error| Error::Failure(Failure::told("use the backing file", error)))?;
        size_bytes = args.size.map_or(bytes, |size| size.0);
    }
    let image = NewImage {
        size_bytes,
        cluster_bytes: args.cluster_size.map_or(CLUSTER_BYTES, |size| size.0),
        backing,
        preallocation: args.preallocation.into(),
    };
    check(&image, WHAT).map_err(Error::Failure)?;
    create::create_with(&args.path, size_bytes, |file| image.write(file))
        .map(drop)
        .map_err(Error::Create)
}
