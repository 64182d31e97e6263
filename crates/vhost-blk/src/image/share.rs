// SPDX-License-Identifier: Apache-2.0
//! A new image that shares the space of its source until one of them is written.

use super::convert::{ConvertArgs, WHAT, stopped};
use super::place::{self, Place};
use super::progress::Progress;
use crate::create::Preallocate;
use crate::failure::Failure;
use crate::values::{Format, Reflink};
use backend::reflink::{self, CloneError};
use qcow2::copy::Source;
use qcow2::create::NewImage;
use std::fs::File;

/// The space of a new image.
pub(super) enum Space {
    /// The same as the source has.
    Shared,
    /// Its own; the reason, if the user has not asked for that.
    Own(Option<String>),
}

impl Space {
    /// A line for the user.
    pub(super) fn told(&self, args: &ConvertArgs) -> String {
        let (source, target) = (args.source.display(), args.target.display());
        match self {
            Space::Shared => format!("{target} shares its space with {source}\n"),
            Space::Own(None) => String::new(),
            Space::Own(Some(why)) => format!("{target} has space of its own: {why}\n"),
        }
    }
}

/// The file of the source, if the new image may be a clone of it; otherwise the reason for a copy, as in
/// [`Space::Own`].
///
/// # Errors
/// [`Failure`] if it has to be a clone.
pub(super) fn clonable(
    args: &ConvertArgs,
    source: &Source,
    image: Option<&NewImage>,
) -> Result<Result<File, Option<String>>, Failure> {
    if args.reflink == Reflink::Never {
        return Ok(Err(None));
    }
    let found = if (args.format == Some(Format::Qcow2)) != image.is_some() {
        Err("the formats differ".to_owned())
    } else if args.preallocation != Preallocate::Off {
        Err("--preallocation reserves space for the new image alone".to_owned())
    } else {
        let file = source.clonable(image.map_or(0, |image| image.cluster_bytes));
        file.and_then(|file| file.try_clone().map_err(|why| why.to_string()))
    };
    match found {
        Ok(file) => Ok(Ok(file)),
        Err(why) => or_refused(args, why).map(Err),
    }
}

/// Makes the new file a clone, durably. If that is not possible, it is empty for a copy.
///
/// # Errors
/// [`Failure`], also if it has to be a clone.
pub(super) fn clone(
    args: &ConvertArgs,
    source: &File,
    place: &Place,
    progress: &mut Progress,
) -> Result<Space, Failure> {
    let failed = |size_bytes: u64| move |why| place::failure(&args.target, size_bytes, why);
    let size_bytes = source.metadata().map_err(failed(0))?.len();
    let goes_on = &mut |done| progress.tell(done, size_bytes);
    match reflink::clone(source, place.file(), goes_on) {
        Ok(()) if !goes_on(size_bytes) => Err(stopped()),
        Ok(()) => {
            place.file().sync_all().map_err(failed(size_bytes))?;
            Ok(Space::Shared)
        }
        Err(CloneError::Stopped) => Err(stopped()),
        Err(CloneError::Failed(why)) => Err(failed(size_bytes)(why)),
        Err(error @ CloneError::Refused(_)) => {
            place.file().set_len(0).map_err(failed(size_bytes))?;
            or_refused(args, error.to_string()).map(Space::Own)
        }
    }
}

/// The reason for a copy, which is an error if there has to be a clone.
fn or_refused(args: &ConvertArgs, why: String) -> Result<Option<String>, Failure> {
    if args.reflink == Reflink::Auto {
        return Ok(Some(why));
    }
    let (source, target) = (args.source.display(), args.target.display());
    let why = format!("{target}: it cannot share the space of {source}: {why}");
    Err(Failure::run(WHAT, why, "give --reflink auto, which copies then"))
}
