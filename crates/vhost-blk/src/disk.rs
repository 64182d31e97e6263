// SPDX-License-Identifier: Apache-2.0
//! Opens the disk that the options describe.

use crate::failure::Failure;
use crate::options::ServeArgs;
use crate::values::{BackendKind, LockMode};
use backend::file::{File, FileError, FileOptions, OpenAs};
use backend::mem::Mem;
use backend::null::Null;
use backend::{Disk, Info, Lane, LockError};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Maximum wait for a locked image: a killed daemon holds its lock until the kernel has completed
/// its I/O. A service manager that restarts the daemon at most five times in ten seconds does not
/// reach its limit during this wait.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// An open disk.
pub struct Opened {
    /// The disk with its wrappers.
    pub disk: Arc<dyn Disk>,
    /// The image below the wrappers.
    pub image: Option<Arc<File>>,
    /// Notices for the user, for example about an option without effect.
    pub notices: Vec<String>,
}

/// The properties of the disk of `args`, and its open image, without a lock and without wrappers.
///
/// # Errors
/// [`Failure`] if the storage cannot be opened.
pub fn examine(args: &ServeArgs) -> Result<(Info, Option<OpenAs>), Failure> {
    let args = ServeArgs { lock: LockMode::Off, wrap: Vec::new(), ..args.clone() };
    let opened = open(&args, None)?;
    let open_as = opened.image.map(|image| image.open_as()).transpose();
    let open_as = open_as
        .map_err(|error| Failure::run("examine the image", error, "check the storage below it"))?;
    Ok((opened.disk.info(), open_as))
}

/// Opens, locks and wraps the disk of `args`. The caller has checked `args`. The image is `taken`
/// from an earlier program, if there is one.
///
/// # Errors
/// [`Failure`] if the storage cannot be opened or is in use, or a wrapper's specification is wrong.
pub fn open(args: &ServeArgs, taken: Option<fs::File>) -> Result<Opened, Failure> {
    let size = args.size.map_or(0, |size| size.0);
    let mut opened = match (args.backend, &args.blk_file) {
        (BackendKind::File, Some(path)) => open_file(path, args, taken)?,
        (BackendKind::Mem, _) => {
            let mem = Mem::new(size).map_err(|error| {
                Failure::run("get memory for the disk", error, "give a smaller --size")
            })?;
            presented(Arc::new(mem), args)
        }
        (BackendKind::Null, _) => presented(Arc::new(Null::new(size)), args),
        (BackendKind::File, None) => {
            return Err(Failure::usage(
                "serve a disk of kind file",
                "no image is given",
                "give --blk-file PATH",
            ));
        }
    };
    for spec in &args.wrap {
        opened.disk = backend::wrap::from_spec(spec, opened.disk).map_err(|error| {
            Failure::usage(
                format!("use --wrap {spec}"),
                error,
                "see --wrap in vhost-blk serve --help",
            )
        })?;
    }
    Ok(opened)
}

fn open_file(path: &Path, args: &ServeArgs, taken: Option<fs::File>) -> Result<Opened, Failure> {
    let mut options = FileOptions {
        read_only: args.read_only.is_on(),
        direct: args.direct.is_on(),
        logical_block_bytes: args.logical_block_size,
        discard: args.discard.is_on(),
        lock: (args.lock == LockMode::Auto).then_some(Duration::ZERO),
    };
    if let Some(file) = taken {
        // The open file has the lock.
        let adopted = File::adopt(path, file, FileOptions { lock: None, ..options });
        return adopted.map(of_file).map_err(|error| Failure::told("take over the disk", error));
    }
    let mut opened = File::open(path, options.clone());
    let holder = match &opened {
        Err(FileError::Lock(LockError::InUse { holder, .. })) => {
            Some(holder.as_deref().unwrap_or("an unknown program"))
        }
        Err(FileError::Lock(LockError::Claimed { .. })) => Some("the host's kernel"),
        _ => None,
    };
    if let Some(holder) = holder {
        let limit = LOCK_PATIENCE.as_secs();
        let image = path.display();
        let line = format!("vhost-blk: waits for {image}, in use by {holder}, {limit} s at most");
        let _ = writeln!(std::io::stderr(), "{line}"); // stderr may be gone
        options.lock = Some(LOCK_PATIENCE);
        opened = File::open(path, options);
    }
    let file = opened.map_err(|error| match error {
        FileError::Lock(error) => Failure::told("lock the image", error),
        error => Failure::told("open the disk", error),
    })?;
    Ok(of_file(file))
}

fn of_file(file: File) -> Opened {
    let notices = file.notices().to_vec();
    let file = Arc::new(file);
    Opened { disk: file.clone(), image: Some(file), notices }
}

/// Applies the options that every disk has to a disk without options of its own.
fn presented(disk: Arc<dyn Disk>, args: &ServeArgs) -> Opened {
    let mut info = disk.info();
    info.read_only |= args.read_only.is_on();
    if let Some(block) = args.logical_block_size {
        info.logical_block_bytes = block;
        info.physical_block_bytes = info.physical_block_bytes.max(block);
        info.capacity_sectors -= info.capacity_sectors % u64::from(block / 512);
    }
    if !args.discard.is_on() {
        info.discard = None;
    }
    if info.read_only {
        (info.discard, info.write_zeroes, info.secure_erase) = (None, None, None);
        info.write_zeroes_unmaps = false;
    }
    Opened { disk: Arc::new(Presented { disk, info }), image: None, notices: Vec::new() }
}

/// A disk with another description.
struct Presented {
    disk: Arc<dyn Disk>,
    info: Info,
}

impl Disk for Presented {
    fn info(&self) -> Info {
        self.info.clone()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        self.disk.open_lane()
    }

    fn layers(&self) -> u8 {
        self.disk.layers()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Serve {
        #[command(flatten)]
        args: ServeArgs,
    }

    #[test]
    fn without_an_image_there_is_no_disk_and_no_null_disk_in_its_place() {
        let args = Serve::parse_from(["serve", "--socket-path", "s"]).args;
        let Err(failure) = open(&args, None) else { panic!("a disk of nothing") };
        assert!(
            failure.to_string().contains("no image is given; give --blk-file PATH"),
            "{failure}"
        );
    }
}
