// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk daemon --check`: reads the configuration directory, and serves nothing.

use super::reload::{path_of, read_directory};
use super::sharing;
use crate::config;
use crate::failure::Failure;
use crate::options::{DiskArgs, ProcessArgs};
use crate::socket::Source;
use crate::values::LockMode;
use crate::wrappers;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The errors in the files of a directory, and the number of files. Opens neither images nor sockets.
///
/// # Errors
/// [`Failure`] if the directory cannot be read.
pub fn check_files(
    process: &ProcessArgs,
    directory: &Path,
) -> Result<(Vec<Failure>, usize), Failure> {
    let files = read_directory(directory)?;
    let count = files.len();
    let (mut failures, mut sockets, mut images) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    for (name, file) in files {
        let checked = file.and_then(|args| {
            process.check_socket(args.socket_path.as_ref())?;
            Source::of_disk(&args)?;
            wrappers::check(&args)?;
            Ok(args)
        });
        match checked {
            Err(failure) => failures.push(config::of_file(&path_of(directory, &name), failure)),
            Ok(args) => {
                failures.extend(socket_failure(&mut sockets, &name, &args));
                failures.extend(image_failure(&mut images, &name, &args));
            }
        }
    }
    Ok((failures, count))
}

fn socket_failure(
    sockets: &mut BTreeMap<PathBuf, String>,
    name: &str,
    args: &DiskArgs,
) -> Option<Failure> {
    let path = args.socket_path.clone()?;
    let other = sockets.insert(path.clone(), name.to_owned())?;
    let why = format!("both have the socket {}", path.display());
    Some(Failure::usage(format!("serve {other} and {name}"), why, "give one of them another path"))
}

/// Links are not followed: the lock of the image finds the rest.
fn image_failure(
    images: &mut BTreeMap<PathBuf, (String, DiskArgs)>,
    name: &str,
    args: &DiskArgs,
) -> Option<Failure> {
    let path = args.blk_file.clone().filter(|_| args.lock == LockMode::Auto)?;
    let (other, other_args) = images.insert(path.clone(), (name.to_owned(), args.clone()))?;
    let why = format!("both have the image {}, and one of them writes to it", path.display());
    let remedy = "give one of them another image, or both read-only = true";
    sharing::exclude_each_other(args, &other_args)
        .then(|| Failure::usage(format!("serve {other} and {name}"), why, remedy))
}
