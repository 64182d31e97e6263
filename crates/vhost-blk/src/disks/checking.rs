// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk daemon --check`: reads the configuration folder, and serves nothing.

use super::reload::read_folder;
use crate::failure::Failure;
use crate::options::{DiskArgs, ProcessArgs};
use crate::socket::Source;
use crate::values::LockMode;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The errors in the files of a folder, and the number of files. Opens neither images nor sockets.
///
/// # Errors
/// [`Failure`] if the folder cannot be read.
pub fn check_files(process: &ProcessArgs, folder: &Path) -> Result<(Vec<Failure>, usize), Failure> {
    let files = read_folder(folder)?;
    let count = files.len();
    let (mut failures, mut sockets, mut images) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    for (name, file) in files {
        let checked = file.and_then(|args| {
            process.check_socket(args.socket_path.as_ref())?;
            Source::of_disk(&args)?;
            Ok(args)
        });
        match checked {
            Err(failure) => failures.push(of_file(folder, &name, failure)),
            Ok(args) => {
                failures.extend(socket_failure(&mut sockets, &name, &args));
                failures.extend(image_failure(&mut images, &name, &args));
            }
        }
    }
    Ok((failures, count))
}

/// The failure, with the path of the file in it.
fn of_file(folder: &Path, name: &str, failure: Failure) -> Failure {
    let path = folder.join(format!("{name}.toml")).display().to_string();
    match failure.what.contains(&path) {
        true => failure,
        false => {
            let what = format!("use the configuration {path}");
            Failure { what, why: format!("cannot {}: {}", failure.what, failure.why), ..failure }
        }
    }
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

/// A writer has its image alone. Links are not followed: the lock of the image finds the rest.
fn image_failure(
    images: &mut BTreeMap<PathBuf, (String, bool)>,
    name: &str,
    args: &DiskArgs,
) -> Option<Failure> {
    let path = args.blk_file.clone().filter(|_| args.lock == LockMode::Auto)?;
    let writes = !args.read_only.is_on();
    let (other, other_writes) = images.insert(path.clone(), (name.to_owned(), writes))?;
    let why = format!("both have the image {}, and one of them writes to it", path.display());
    let remedy = "give one of them another image, or both read-only = true";
    (writes || other_writes)
        .then(|| Failure::usage(format!("serve {other} and {name}"), why, remedy))
}
