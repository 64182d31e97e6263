// SPDX-License-Identifier: Apache-2.0
//! Opens the disk that the options describe.

use crate::failure::Failure;
use crate::options::DiskArgs;
use crate::values::{BackendKind, Format, LockMode, OnOff};
use crate::wrappers;
use backend::file::{File, FileError, FileOptions, OpenAs};
use backend::mem::Mem;
use backend::null::Null;
use backend::{Disk, ImageLock, Info, Lane, LockError};
use qcow2::{Qcow2Disk, Qcow2Error, Qcow2Options, TakesOver};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum wait for an image that a running program, or the host, has locked. A service manager that
/// restarts the daemon at most five times in ten seconds does not reach its limit during this wait.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Maximum wait for an image whose user is no process that is seen: it may have been killed, and the kernel
/// still completes its I/O. An old write must not land on top of a new one.
const ENDED_PATIENCE: Duration = Duration::from_secs(30);
/// Interval at which a waiting daemon looks for the user.
const USER_LOOK: Duration = Duration::from_millis(500);

/// The act of a failure to lock an image.
const LOCK: &str = "lock the image";

/// The wait for an image that another program uses.
#[derive(Clone, Copy, Debug)]
pub enum LockWait {
    /// None: the image is refused at once.
    No,
    /// For the maximum time that its user may need, from this moment on.
    Since(Instant),
}

impl LockWait {
    /// The whole wait.
    pub fn from_now() -> LockWait {
        LockWait::Since(Instant::now())
    }
}

/// An open disk.
pub struct Opened {
    /// The disk with its wrappers.
    pub disk: Arc<dyn Disk>,
    /// The file of the image.
    pub top: Option<Arc<File>>,
    /// The qcow2 image below the wrappers; `None`: the file is a raw one.
    pub qcow2: Option<Arc<Qcow2Disk>>,
    /// The lock of the image, and whether it is held; `None`: nothing is locked.
    pub lock: Option<(ImageLock, bool)>,
    /// Notices for the user, for example about an option without effect.
    pub notices: Vec<String>,
}

/// The source of the image.
#[derive(Debug)]
pub enum From {
    /// The path of `--blk-file`.
    Path,
    /// The path of `--blk-file`: a new overlay of the image of a disk of this process, which has
    /// that image locked, writes no more, and will be dropped.
    Overlay {
        /// The identity of the open image.
        image: (u64, u64),
    },
    /// The path of `--blk-file`: this process has it locked for writing, writes no more, and will give
    /// the lock up. It may have the mark of a backing file.
    Locked {
        /// The identity of the locked file: another one at the path is refused.
        identity: (u64, u64),
        /// Serve this part of a larger block device at first.
        first_bytes: Option<u64>,
        /// [`Qcow2Options::known`] of a qcow2 image.
        known: Option<Vec<u8>>,
    },
    /// The path of `--blk-file`: a block device in place of one that has gone.
    Returned {
        /// Serve this part of a larger device at first.
        first_bytes: u64,
    },
    /// A descriptor at this path below `/proc`; `--blk-file` is its name.
    Descriptor(PathBuf),
    /// Storage that another process serves, which is opened without writing: `opened` below `/proc`, or `--blk-file`.
    Served {
        /// The path.
        opened: Option<PathBuf>,
        /// [`File::punches`] there.
        punches: Option<bool>,
    },
    /// An earlier program of this process, which has opened it.
    Program {
        /// The open image.
        image: TakenImage,
        /// The options may have changed: `--blk-file` has to name the same file.
        is_checked: bool,
    },
}

impl From {
    /// A descriptor that a client has passed.
    pub fn passed(image: &OwnedFd) -> From {
        From::Descriptor(backend::file::place(image))
    }
}

/// An image that an earlier program of this process has opened.
#[derive(Debug)]
pub struct TakenImage {
    /// The file of the image.
    pub file: fs::File,
    /// The backing files of a qcow2 image; `None`: it is raw.
    pub backing: Option<Vec<fs::File>>,
    /// [`File::punches`] of the earlier program.
    pub punches: Option<bool>,
    /// [`Qcow2Options::known`] of a qcow2 image.
    pub clusters: Option<Vec<u8>>,
}

/// The properties of the disk of `args`, which has no qcow2 image, and its open image, without a lock
/// and without wrappers.
///
/// # Errors
/// [`Failure`] if the storage cannot be opened.
pub fn examine(args: &DiskArgs, from: From) -> Result<(Info, Option<OpenAs>), Failure> {
    // The first program has checked the first bytes; the guest may have written others since.
    let format = Some(Format::Raw);
    let args = DiskArgs { lock: LockMode::Off, wrap: Vec::new(), format, ..args.clone() };
    let opened = open(&args, from, LockWait::No)?;
    Ok((opened.disk.info(), opened.top.map(|top| opened_as(&top)).transpose()?))
}

/// The properties of the disk of `args` in the open files of a qcow2 image, at these paths below
/// `/proc`, without a lock and without wrappers. Changes nothing.
///
/// # Errors
/// [`Failure`] if they are not the image, or it cannot be served.
pub fn examine_qcow2(args: &DiskArgs, opened: &[PathBuf]) -> Result<Info, Failure> {
    let path = args.blk_file.as_deref().unwrap_or(Path::new(""));
    Qcow2Disk::examine(path, opened, &qcow2_options(args)).map_err(qcow2_failure)
}

/// The identity of the file that `args` names.
///
/// # Errors
/// [`Failure`] if it cannot be opened.
pub fn identify(args: &DiskArgs) -> Result<OpenAs, Failure> {
    let path = args.blk_file.as_deref().unwrap_or(Path::new(""));
    let options =
        FileOptions { container: true, punches: Some(false), ..file_options(args, false) };
    opened_as(&File::open(path, options).map_err(file_failure)?)
}

fn opened_as(file: &File) -> Result<OpenAs, Failure> {
    let remedy = "check the storage below it";
    file.opened_as().map_err(|error| Failure::run("examine the image", error, remedy))
}

/// Opens, locks and wraps the disk of `args`. The caller has checked `args`.
///
/// # Errors
/// [`Failure`] if the storage cannot be opened or is in use, or a wrapper's specification is wrong.
pub fn open(args: &DiskArgs, from: From, wait: LockWait) -> Result<Opened, Failure> {
    let size = args.size.map_or(0, |size| size.0);
    let mut opened = match (args.backend, &args.blk_file) {
        (BackendKind::File, Some(path)) => open_file(path, from, args, wait)?,
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
    opened.disk = wrappers::wrapped(opened.disk, args)?;
    Ok(opened)
}

fn open_file(path: &Path, from: From, args: &DiskArgs, wait: LockWait) -> Result<Opened, Failure> {
    let mut punches = None;
    let passed = match from {
        From::Path => None,
        From::Served { opened, punches: known } => {
            punches = known;
            opened
        }
        From::Overlay { image: identity } => {
            return open_qcow2(path, args, wait, Some(TakesOver { number: 1, identity }), None);
        }
        From::Locked { identity, known, .. } if args.format == Some(Format::Qcow2) => {
            return open_qcow2(path, args, wait, Some(TakesOver { number: 0, identity }), known);
        }
        From::Locked { identity, first_bytes, known: _ } => {
            return open_locked(path, identity, first_bytes, args);
        }
        From::Returned { first_bytes } => {
            // The guest of the disk is here.
            let args = DiskArgs { incoming: OnOff::Off, ..args.clone() };
            return open_raw(path, path, Some(first_bytes), &args, (wait, None));
        }
        From::Descriptor(passed) => Some(passed),
        From::Program { image, is_checked } => return adopt(path, image, is_checked, args),
    };
    let opened_path = passed.as_deref().unwrap_or(path);
    match args.format {
        Some(Format::Qcow2) if passed.is_some() => Err(Failure::usage(
            "serve a passed descriptor as qcow2",
            "the image may name other files by their paths",
            "give --blk-file without a descriptor",
        )),
        Some(Format::Qcow2) => open_qcow2(path, args, wait, None, None),
        Some(Format::Raw) => open_raw(opened_path, path, None, args, (wait, punches)),
        None => {
            check_is_raw(opened_path, path, "serve")?;
            open_raw(opened_path, path, None, args, (wait, punches))
        }
    }
}

/// Refuses a file without `--format` that begins like a qcow2 image: a guest can write such a
/// header to a raw disk, so the daemon does not guess the format from it.
pub(crate) fn check_is_raw(opened_path: &Path, path: &Path, act: &str) -> Result<(), Failure> {
    let is_regular = std::fs::metadata(opened_path).is_ok_and(|meta| meta.is_file());
    // A file that cannot be read is refused when it is opened.
    let looks_like_qcow2 = is_regular
        && std::fs::File::open(opened_path)
            .and_then(|file| qcow2::header::is_qcow2(&file))
            .unwrap_or(false);
    match looks_like_qcow2 {
        false => Ok(()),
        true => Err(Failure::run(
            format!("{act} {} as a raw image", path.display()),
            "it begins like a qcow2 image",
            "give --format qcow2, or --format raw if its content is a guest's raw disk",
        )),
    }
}

/// Goes on with an image that an earlier program has opened, with the lock that it has.
fn adopt(
    path: &Path,
    image: TakenImage,
    is_checked: bool,
    args: &DiskArgs,
) -> Result<Opened, Failure> {
    const WHAT: &str = "take over the disk";
    let TakenImage { file, backing, punches, clusters } = image;
    let options = FileOptions { punches, ..file_options(args, false) };
    check_format(args, backing.is_some()).map_err(|why| Failure::told(WHAT, why))?;
    if let Some(backing) = backing {
        let files = std::iter::once(file).chain(backing).collect();
        let options = Qcow2Options { file: options, known: clusters, ..qcow2_options(args) };
        let disk = Qcow2Disk::adopt(path, files, is_checked, &options);
        return Ok(of_qcow2(disk.map_err(|error| Failure::told(WHAT, error))?));
    }
    let adopted = File::adopt(path, file, is_checked, options);
    // The device takes over whether there is a lock, and whether it is held.
    Ok(of_raw(adopted.map_err(|error| Failure::told(WHAT, error))?, true, true))
}

/// Compares `--format` with the format of a running disk. A guest can write the header of a qcow2 image
/// to its raw disk.
///
/// # Errors
/// Cause and remedy.
pub fn check_format(args: &DiskArgs, is_qcow2: bool) -> Result<(), &'static str> {
    match (args.format == Some(Format::Qcow2), is_qcow2) {
        (false, true) => Err("the running disk has a qcow2 image; give --format qcow2"),
        (true, false) => Err("the running disk has a raw image; give --format raw"),
        _ => Ok(()),
    }
}

/// A raw disk. `held`: the guest is here, with the lock if there is one. `has_lock`: the lock follows a guest.
fn of_raw(file: File, held: bool, has_lock: bool) -> Opened {
    let notices = file.notices().to_vec();
    let lock = if has_lock { file.image_lock() } else { file.image_lock().without_lock() };
    let file = Arc::new(file);
    Opened { disk: file.clone(), top: Some(file), qcow2: None, lock: Some((lock, held)), notices }
}

fn open_raw(
    opened_path: &Path,
    path: &Path,
    first_bytes: Option<u64>,
    args: &DiskArgs,
    (wait, punches): (LockWait, Option<bool>),
) -> Result<Opened, Failure> {
    let open = |options: FileOptions| File::open_as(opened_path, path, options);
    let follows = args.lock == LockMode::Auto;
    // Without a lock the guest is at the start where it was last: here, or it is on its way.
    let is_here = !args.incoming.is_on();
    let locks_at_start = follows && is_here;
    let options = FileOptions { first_bytes, punches, ..file_options(args, locks_at_start) };
    let opened = open_patiently(path, wait, options, open, |error| match error {
        FileError::Lock(error) => Some(error),
        _ => None,
    });
    Ok(of_raw(opened.map_err(file_failure)?, is_here, follows))
}

fn open_qcow2(
    path: &Path,
    args: &DiskArgs,
    wait: LockWait,
    takes_over: Option<TakesOver>,
    known: Option<Vec<u8>>,
) -> Result<Opened, Failure> {
    let ignores_mark = takes_over.is_some_and(|file| file.number == 0);
    let open = |file| {
        let file = FileOptions { ignores_mark, ..file };
        let known = known.clone();
        Qcow2Disk::open(path, &Qcow2Options { file, takes_over, known, ..qcow2_options(args) })
    };
    let options = file_options(args, args.lock == LockMode::Auto);
    let opened = open_patiently(path, wait, options, open, |error| match error {
        Qcow2Error::File(FileError::Lock(error)) => Some(error),
        _ => None,
    });
    opened.map(of_qcow2).map_err(qcow2_failure)
}

/// A qcow2 disk. Its tables are in memory, so that the lock follows no guest to another daemon.
fn of_qcow2(disk: Qcow2Disk) -> Opened {
    let top = Some(Arc::clone(disk.top()));
    let (notices, disk) = (disk.notices(), Arc::new(disk));
    Opened { disk: disk.clone(), top, qcow2: Some(disk), lock: None, notices }
}

fn qcow2_options(args: &DiskArgs) -> Qcow2Options {
    let allow_backing = args.allow_backing.into();
    Qcow2Options { file: file_options(args, false), allow_backing, takes_over: None, known: None }
}

fn qcow2_failure(error: Qcow2Error) -> Failure {
    match error {
        Qcow2Error::File(error) => file_failure(error),
        error => Failure::told("open the disk", error),
    }
}

fn open_locked(
    path: &Path,
    identity: (u64, u64),
    first_bytes: Option<u64>,
    args: &DiskArgs,
) -> Result<Opened, Failure> {
    let options = FileOptions { ignores_mark: true, first_bytes, ..file_options(args, false) };
    let file = File::open(path, options).map_err(file_failure)?;
    // Before the lock, which checks no other program.
    file.check_identity(identity).map_err(file_failure)?;
    let locks = args.lock == LockMode::Auto;
    if locks {
        let remedy = "check the file system";
        file.take_over_lock().map_err(|error| Failure::run(LOCK, error, remedy))?;
    }
    Ok(of_raw(file, true, locks))
}

fn file_failure(error: FileError) -> Failure {
    match error {
        FileError::Lock(error) => {
            let in_use = match &error {
                LockError::InUse { path, .. } => Some(path.clone().into_boxed_path()),
                _ => None,
            };
            Failure { in_use, ..Failure::told(LOCK, error) }
        }
        error => Failure::told("open the disk", error),
    }
}

fn file_options(args: &DiskArgs, locks: bool) -> FileOptions {
    FileOptions {
        read_only: args.read_only.is_on(),
        direct: args.direct.is_on(),
        logical_block_bytes: args.logical_block_size,
        discard: args.discard.is_on(),
        lock: locks.then_some(Duration::ZERO),
        container: false,
        ignores_mark: false,
        first_bytes: None,
        punches: None,
    }
}

/// Opens an image; if another program uses it, says so once and waits for it.
fn open_patiently<T, E>(
    path: &Path,
    wait: LockWait,
    options: FileOptions,
    open: impl Fn(FileOptions) -> Result<T, E>,
    lock_error: impl Fn(&E) -> Option<&LockError>,
) -> Result<T, E> {
    let mut opened = open(options.clone());
    let LockWait::Since(begin) = wait else { return opened };
    let mut told = Duration::ZERO;
    while let Some((user, limit)) = opened.as_ref().err().and_then(&lock_error).and_then(patience) {
        if begin.elapsed() >= limit {
            break;
        }
        // Another limit: the user has ended meanwhile.
        if told != limit {
            told = limit;
            let (image, limit) = (path.display(), limit.as_secs());
            tracing::warn!("waits at most {limit} s for {image}, in use by {user}");
        }
        opened = open(FileOptions { lock: Some(USER_LOOK), ..options.clone() });
    }
    opened
}

/// The user of a locked image, and the maximum wait for it. `None`: a wait does not help.
fn patience(error: &LockError) -> Option<(&str, Duration)> {
    match error {
        LockError::InUse { holder: Some(holder), .. } => Some((holder, LOCK_PATIENCE)),
        LockError::InUse { .. } => {
            let user = "a process that cannot be seen (a killed one may still have I/O in flight)";
            Some((user, ENDED_PATIENCE))
        }
        LockError::Claimed { .. } => Some(("the host's kernel", LOCK_PATIENCE)),
        _ => None,
    }
}

/// Applies the options that every disk has to a disk without options of its own.
fn presented(disk: Arc<dyn Disk>, args: &DiskArgs) -> Opened {
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
    let disk = Arc::new(Presented { disk, info });
    Opened { disk, top: None, qcow2: None, lock: None, notices: Vec::new() }
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

    fn sync(&self) -> std::io::Result<()> {
        self.disk.sync()
    }

    fn open_lane(&self) -> std::io::Result<Box<dyn Lane>> {
        self.disk.open_lane()
    }

    fn layers(&self) -> u8 {
        self.disk.layers()
    }
}

#[cfg(test)]
mod tests;
