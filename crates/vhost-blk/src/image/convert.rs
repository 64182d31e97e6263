// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk convert`: copies the content of an image to a new one.
//!
//! The new image is a temporary file beside its place until it is complete and durable. So the place
//! never has a part of an image, and an image that is replaced stays until then.

use super::place::{self, Place};
use super::progress::Progress;
use super::share::{self, Space};
use crate::create::{self, Preallocate};
use crate::failure::Failure;
use crate::output::print;
use crate::values::{self, AllowBacking, Format, LockMode, Reflink, Size};
use backend::create::Allocation;
use clap::Args;
use qcow2::copy::{self, CopyError, Source, Target};
use qcow2::create::{CLUSTER_BYTES, NewImage};
use std::fs::File;
use std::io;
use std::path::PathBuf;

/// Arguments of `vhost-blk convert`.
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// Image or block device to read
    pub source: PathBuf,
    /// Image to make; it must not exist without --overwrite
    pub target: PathBuf,
    /// Backing files that a qcow2 source may name. Their content is copied
    #[arg(long, value_name = "MODE", default_value = "off")]
    pub allow_backing: AllowBacking,
    /// Cluster size of a qcow2 target, a power of 2 from 4K to 2M [default: 64K]
    #[arg(long, value_name = "N", value_parser = values::size)]
    pub cluster_size: Option<Size>,
    /// Format of the source [default: raw, but a file that begins like a qcow2 image is refused]
    #[arg(short, long, value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Lock of the source; without it, a copy of an image in use is not consistent
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub lock: LockMode,
    /// Format of the target
    #[arg(short = 'O', long, value_name = "FORMAT", default_value = "raw")]
    pub output_format: Format,
    /// Replace the target if it exists; until the copy is complete it stays as it is
    #[arg(long)]
    pub overwrite: bool,
    /// Reserve the space of the target
    #[arg(long, value_name = "MODE", default_value = "off")]
    pub preallocation: Preallocate,
    /// Share the space of the source where the file system can do that (XFS, btrfs), and the format stays.
    /// It is no second copy of the data
    #[arg(long, value_name = "MODE", default_value = "never")]
    pub reflink: Reflink,
}

pub(super) const WHAT: &str = "convert the image";

/// Runs `vhost-blk convert`.
///
/// # Errors
/// [`Failure`]; the target is as it was before.
pub fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    check_options(args)?;
    let mut progress = Progress::start()
        .map_err(|why| Failure::run("wait for signals", why, "raise the limits (ulimit)"))?;
    let locks = args.lock == LockMode::Auto;
    if args.format.is_none() {
        crate::disk::check_is_raw(&args.source, &args.source, "read")?;
    }
    let is_qcow2 = args.format == Some(Format::Qcow2);
    let opened = Source::open(&args.source, is_qcow2, args.allow_backing.into(), locks);
    let mut source = opened.map_err(|why| Failure::told(WHAT, why))?;
    let image = new_image(args, source.size_bytes())?;
    let clonable = share::clonable(args, &source, image.as_ref())?;
    let place = Place::take(&args.target, args.overwrite, &source)?;
    let size_bytes = source.size_bytes();
    let space = match clonable {
        Ok(file) => share::clone(args, &file, &place, &mut progress)?,
        Err(why) => Space::Own(why),
    };
    if let Space::Own(_) = space {
        fill(args, &mut source, &place, image, &mut progress)?;
    }
    place.fill(size_bytes)?;
    print(space.told(args))
}

/// Copies the content to the new file, durably.
fn fill(
    args: &ConvertArgs,
    source: &mut Source,
    place: &Place,
    image: Option<NewImage>,
    progress: &mut Progress,
) -> Result<(), Failure> {
    let size_bytes = source.size_bytes();
    let failed = |why| place::failure(&args.target, size_bytes, why);
    let target = make(args, place.file(), size_bytes, image).map_err(failed)?;
    let copied = copy::copy(source, target, &mut |done| progress.tell(done, size_bytes));
    copied.map_err(|error| match error {
        CopyError::Read(at, why) => {
            let why = format!("{}: reading at {at}: {why}", args.source.display());
            Failure::run(WHAT, why, "check the storage below it")
        }
        CopyError::Write(why) => failed(why),
        CopyError::Stopped => stopped(),
    })
}

pub(super) fn stopped() -> Failure {
    Failure::run(WHAT, "stopped by a signal; no new image was made", "run it again")
}

/// Options that need a qcow2 target or a qcow2 source, or exclude each other.
fn check_options(args: &ConvertArgs) -> Result<(), Failure> {
    if args.output_format == Format::Raw {
        let remedy = "give --output-format qcow2";
        if args.cluster_size.is_some() {
            return Err(Failure::usage(WHAT, "a raw image has no clusters", remedy));
        }
        if args.preallocation == Preallocate::Metadata {
            return Err(Failure::usage(WHAT, "a raw image has no metadata", remedy));
        }
    }
    if args.allow_backing != AllowBacking::Off && args.format != Some(Format::Qcow2) {
        let why = "a raw image has no backing files";
        return Err(Failure::usage(WHAT, why, "give --format qcow2"));
    }
    Ok(())
}

/// The description of a qcow2 target. Its disk is a whole number of sectors.
fn new_image(args: &ConvertArgs, size_bytes: u64) -> Result<Option<NewImage>, Failure> {
    if args.output_format == Format::Raw {
        return Ok(None);
    }
    let image = NewImage {
        size_bytes: size_bytes.next_multiple_of(512),
        cluster_bytes: args.cluster_size.map_or(CLUSTER_BYTES, |size| size.0),
        backing: None,
        preallocation: args.preallocation.into(),
    };
    create::check(&image, WHAT)?;
    Ok(Some(image))
}

fn make(
    args: &ConvertArgs,
    file: &File,
    size_bytes: u64,
    image: Option<NewImage>,
) -> io::Result<Target> {
    let allocation = match args.preallocation {
        Preallocate::Full => Allocation::Full,
        _ => Allocation::Sparse,
    };
    match image {
        Some(image) => Target::qcow2(file, &image),
        None => Target::raw(file, size_bytes, allocation),
    }
}
