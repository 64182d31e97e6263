// SPDX-License-Identifier: Apache-2.0
//! The disks of this process, by name. Each has a thread and a device of its own.
//!
//! One lock protects the table. No thread holds it while a disk is opened, drained or asked, so that a
//! disk whose storage hangs delays no other. States of a name in the table:
//!
//! | State | Begins | Ends |
//! |---|---|---|
//! | absent | at the start, and when the thread of the disk has ended | [`Disks::add`], a file of the directory |
//! | starting | the name is taken, and a thread opens the disk (`starting.rs`); a disk has ended for a restart (`restart.rs`) | its success or failure, or [`Disks::remove`] |
//! | failed | a disk of the directory could not be opened, or has ended late for a restart (`restart.rs`) | the next try (`openers.rs`, a reload), [`Disks::remove`], the end of its file |
//! | served | the thread of the disk runs | its end, after a stop or the end of `--fd` |
//! | stopping | as served, after [`Disks::remove`] or the stop of the process | the end of its thread, or a removal by force |
//!
//! A removal by force leaves the name absent, and the disk among those that were given up (`removal.rs`). So does the
//! removal of a starting disk with its opening (`starting.rs`).
//!
//! During an upgrade ([`Disks::hold`]) no name changes its state, unless the process is stopped.

mod apart;
mod backups;
mod base;
pub(crate) mod bitmaps;
mod changing;
mod checking;
mod config_file;
pub(crate) mod converge;
mod ending;
pub(crate) mod exchange;
mod front_ends;
pub mod growth;
mod held;
mod job;
pub(crate) mod kept;
pub(crate) mod layers;
mod live;
pub mod lost;
pub mod merge;
pub mod mirror;
mod openers;
mod opening;
pub mod reload;
mod removal;
pub mod replacing;
mod restart;
mod saving;
mod sharing;
pub mod snapshot;
mod starting;
mod taking_over;
mod targets;
mod traces;
mod turn;

pub use bitmaps::BitmapFacts;
pub use checking::check_files;
pub use ending::StopReason;
pub use held::Held;
pub use job::JobFacts;
pub use live::Live;
pub use opening::Opened;
pub use removal::{Force, Removed};
pub use starting::Start;
pub use traces::Traced;

use crate::backup;
use crate::disk::LockWait;
use crate::events::{DiskEvents, Events};
use crate::failure::{Failure, Sort};
use crate::options::{DiskArgs, ProcessArgs};
use crate::os;
use crate::server;
use crate::socket_file::SocketFile;
use crate::stop::Stop;
use crate::upgrade::{Parts, Socket, TakenParts, Upgrader};
use data_plane::{Health, PlaneKind, UringPool};
use exchange::Image;
use job::Job;
use layers::Layers;
use removal::GivenUp;
use restart::After;
use serde::{Deserialize, Serialize};
use starting::{Failed, Left, Opening};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use targets::{StorageWaits, Targets};
use traces::Traces;
use turn::Turn;
use vhost_user::{Answer, Command, Control, Posted, Status};

/// Maximum disks of a process.
pub const DISKS_MAX: usize = 1024;

/// Interval of the question whether to go on waiting.
const LOOK: Duration = Duration::from_secs(1);

/// The way in which disks come and go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `serve`: one disk from start to end.
    One,
    /// `daemon`: any number, and the directory of their configuration files.
    Many(Option<PathBuf>),
}

/// The source of a disk's options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A command, or the command line of `serve`.
    Command,
    /// A file of the configuration directory.
    Directory,
}

/// A disk to add.
pub struct NewDisk {
    /// Its name.
    pub name: String,
    /// Its options.
    pub args: DiskArgs,
    /// The source of the options.
    pub origin: Origin,
    /// The descriptor of its image, if a client passed one.
    pub image: Option<OwnedFd>,
    /// The state of an earlier program that this one goes on with.
    pub taken: Option<TakenParts>,
    /// The wait for its image.
    pub wait: LockWait,
}

/// The disks of this process.
pub struct Disks {
    /// The file of the process id.
    pub pidfile: OnceLock<Socket>,
    /// The start of the process.
    pub started: SystemTime,
    /// The start of the program, if it has replaced another one.
    pub upgraded: OnceLock<SystemTime>,
    /// Options of the process.
    pub process: ProcessArgs,
    /// The way in which disks come and go.
    pub mode: Mode,
    /// Events of the disks.
    pub events: Arc<Events>,
    traces: Arc<Traces>,
    /// Replaces the program, if it has a control socket.
    pub upgrader: OnceLock<Upgrader>,
    /// The cause of the stop of the process.
    stop_reason: OnceLock<StopReason>,
    state: Mutex<State>,
    /// A disk has gone, or the process stops.
    changed: Condvar,
    /// The sizes of block devices are watched.
    watched: AtomicBool,
    failures: lost::Failures,
    /// One reload, upgrade or exchange of a storage or of options at a time.
    turn: Turn,
    reload_request: reload::ReloadRequest,
    /// A thread tries disks that have failed again.
    retries: AtomicBool,
    /// The service manager gets the number of disks as `STATUS=`.
    tells_manager: AtomicBool,
    /// The last status that it got.
    told_manager: Mutex<String>,
    /// The threads of all disks, after the first disk.
    pool: Mutex<Option<UringPool>>,
}

#[derive(Default)]
struct State {
    stopping: bool,
    /// An upgrade is in progress: the table does not change.
    is_held: bool,
    table: BTreeMap<String, Slot>,
    /// Disks without a name, whose storage has not answered.
    given_up: Vec<GivenUp>,
    /// Openings of disks that were removed meanwhile.
    left: Vec<Left>,
    /// Disks that a reload treats.
    treatments: usize,
    /// Disks without requests in flight that end their copy, or write what the next program needs: bitmaps, and tables
    /// of qcow2 images.
    closing: usize,
    /// The begins of permits of threads that work on disks of the directory.
    permits: Vec<Arc<Instant>>,
    worked_on: apart::WorkedOn,
    targets: Targets,
    storage_waits: StorageWaits,
}

impl State {
    /// Disks of the table, and those whose storage has not answered.
    fn count(&self) -> usize {
        self.table.len() + self.given_up.len() + self.left.len()
    }
}

enum Slot {
    Starting(Arc<Opening>),
    Failed(Box<Failed>),
    Served(Box<Entry>),
}

/// A served disk.
struct Entry {
    args: DiskArgs,
    origin: Origin,
    stop: Arc<Stop>,
    control: Arc<Control>,
    health: Arc<Health>,
    events: Arc<DiskEvents>,
    socket: Option<Arc<SocketFile>>,
    device: Option<(u32, u32)>,
    /// The state of that device.
    watch: lost::Watch,
    /// The parts that an upgrade passes on.
    parts: Arc<Parts>,
    /// The place of its backup.
    backup: Arc<backup::Slot>,
    /// The open image; a disk in memory has none.
    image: Option<Image>,
    /// Warnings of its start.
    notices: Vec<String>,
    /// A snapshot, a merge or a mirror has put `image` in place of that of the first options.
    is_exchanged: bool,
    /// The layers around its image.
    layers: Arc<Layers>,
    /// The merge or the mirror of the disk, which stays until its end.
    job: Option<Arc<Job>>,
    /// The reason for which the last mirror has ended, if it has failed.
    last_mirror: Option<String>,
    /// The next state of its name.
    after: After,
}

/// The place of a disk among the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowState {
    /// It is being opened.
    Starting,
    /// It could not be opened, and will be tried again.
    Failed,
    /// It is served.
    Served,
    /// A stop was requested.
    Stopping,
    /// It has left its name, and its storage has not answered.
    GivenUp,
}

/// A row of [`Disks::statuses`].
pub struct Row {
    /// Name of the disk.
    pub name: String,
    /// Its options; `None`: its file cannot be used.
    pub args: Option<DiskArgs>,
    /// The source of its options.
    pub origin: Origin,
    /// Its place among the disks.
    pub state: RowState,
    /// Its start, if it is not served.
    pub start: Option<Start>,
    /// Bytes of discarded data whose places in qcow2 images were freed.
    pub unmapped_bytes: u64,
    /// Its mirror, if it has one.
    pub mirror: Option<mirror::Facts>,
    /// The work in progress on it.
    pub jobs: Vec<JobFacts>,
    /// The loss of its block device.
    pub loss: Option<lost::Loss>,
    /// Its status; `None` if it did not answer in time.
    pub status: Option<Box<Status>>,
}

impl Disks {
    /// No disk yet.
    pub fn new(process: ProcessArgs, mode: Mode) -> Arc<Disks> {
        Arc::new(Disks {
            pidfile: OnceLock::new(),
            started: os::process_started().unwrap_or_else(SystemTime::now),
            upgraded: OnceLock::new(),
            process,
            mode,
            events: Arc::default(),
            traces: Arc::default(),
            upgrader: OnceLock::new(),
            stop_reason: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
            watched: AtomicBool::new(false),
            failures: lost::Failures::default(),
            turn: Turn::default(),
            reload_request: reload::ReloadRequest::default(),
            retries: AtomicBool::new(false),
            tells_manager: AtomicBool::new(false),
            told_manager: Mutex::default(),
            pool: Mutex::default(),
        })
    }

    /// The threads that all disks share. They start with the first disk, which has so many queues.
    fn pool(&self, queues: u16) -> Result<UringPool, Failure> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = &*pool {
            return Ok(pool.clone());
        }
        Ok(pool.insert(server::start_pool(&self.process, self.queues_of_pool(queues))?).clone())
    }

    /// The queues for which the pool has threads, if the first disk has so many.
    fn queues_of_pool(&self, queues: u16) -> u16 {
        if self.mode == Mode::One { queues } else { u16::MAX }
    }

    /// Number of threads that run the queues of a disk: those of the pool, or workers in the kernel.
    fn threads_of(&self, plane: PlaneKind, queues: u16) -> usize {
        match plane {
            PlaneKind::Kernel => self.process.worker_count(queues),
            PlaneKind::Uring => self.process.thread_count(self.queues_of_pool(queues)),
        }
    }

    /// The first thread of the data plane that does not answer within `limit`.
    pub fn silent_thread(&self, limit: Duration) -> Option<usize> {
        let pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner).clone();
        pool?.silent_thread(limit)
    }

    /// The disk of the log lines of a thread. A process with one disk does not name it.
    fn span(&self, name: &str) -> tracing::Span {
        match self.mode {
            Mode::One => tracing::Span::none(),
            Mode::Many(_) => tracing::error_span!(parent: None, "disk", disk = name),
        }
    }

    /// Requests the stop of all disks, and lets no other begin.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.stopping = true;
        state.table.retain(|_, slot| !matches!(slot, Slot::Failed(_)));
        for slot in state.table.values() {
            if let Slot::Served(entry) = slot {
                entry.stop.request();
                entry.cancel_work();
            }
        }
        self.changed.notify_all();
    }

    /// Returns whether [`Disks::stop`] was called.
    pub fn is_stopping(&self) -> bool {
        self.lock().stopping
    }

    /// Waits until all disks have gone, also those that were given up, and each opening has its end; if disks come
    /// and go, also until [`Disks::stop`].
    pub fn wait(&self) {
        let done = self.changed.wait_while(self.lock(), |state| !self.is_done(state));
        drop(done.unwrap_or_else(PoisonError::into_inner));
    }

    /// As [`Disks::wait`], for this time at most. Returns whether they have gone.
    pub fn wait_at_most(&self, patience: Duration) -> bool {
        let waited =
            self.changed.wait_timeout_while(self.lock(), patience, |state| !self.is_done(state));
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        self.is_done(&state)
    }

    fn is_done(&self, state: &State) -> bool {
        state.count() == 0 && (state.stopping || self.mode == Mode::One)
    }

    /// Removes the socket files, for an exit without a drain.
    pub fn remove_socket_files(&self) {
        let of_slot = |slot: &Slot| match slot {
            Slot::Served(entry) => entry.socket.clone(),
            Slot::Starting(_) | Slot::Failed(_) => None,
        };
        let files: Vec<_> = self.lock().table.values().filter_map(of_slot).collect();
        files.iter().for_each(|file| file.remove());
    }

    /// The name of the wanted disk, or of the only one.
    ///
    /// # Errors
    /// [`Failure`] if it does not exist, or none is wanted among several.
    pub fn resolve(&self, wanted: Option<&str>) -> Result<String, Failure> {
        let state = self.lock();
        match (wanted, state.table.len()) {
            (Some(name), _) => state.entry(name).map(|_| name.to_owned()),
            (None, 1) => {
                let name = state.table.keys().next().expect("there is one").clone();
                state.entry(&name).map(|_| name)
            }
            (None, 0) => Err(Failure {
                sort: Sort::NoSuchDisk,
                ..Failure::run("choose the disk", "there is none", "add one: vhost-blk ctl add")
            }),
            (None, count) => Err(Failure {
                sort: Sort::NoSuchDisk,
                ..Failure::run(
                    "choose the disk",
                    format!("none is named, and there are {count}"),
                    "name one; vhost-blk ctl list shows them",
                )
            }),
        }
    }

    /// The warnings of the start of a disk that is served.
    pub fn notices_of(&self, name: &str) -> Vec<String> {
        self.lock().entry(name).map_or_else(|_| Vec::new(), |entry| entry.notices.clone())
    }

    /// Sends a command to a disk.
    ///
    /// # Errors
    /// [`Failure`] if there is no such disk.
    pub fn post(&self, name: &str, command: Command) -> Result<Posted, Failure> {
        Ok(self.lock().entry(name)?.control.post(command))
    }

    /// The state of all disks that answer within `patience`. The others delay nothing but this. Those that
    /// were given up come last.
    pub fn statuses(&self, patience: Duration) -> Vec<Row> {
        let (posted, given_up): (Vec<_>, Vec<_>) = {
            let state = self.lock();
            let of_table = state.table.iter().filter_map(|(name, slot)| match slot {
                Slot::Served(entry) => {
                    Some((entry.row(name), Some(entry.control.post(Command::Status))))
                }
                other => other.start_row(name).map(|row| (row, None)),
            });
            let left = state.left.iter().map(Left::row);
            (of_table.collect(), state.given_up.iter().map(GivenUp::row).chain(left).collect())
        };
        let deadline = Instant::now() + patience;
        let answered = posted.into_iter().map(|(row, posted)| {
            let left = deadline.saturating_duration_since(Instant::now());
            let status = match posted.and_then(|posted| posted.wait(Some(left))) {
                Some(Answer::Status(status)) => Some(status),
                _ => None,
            };
            Row { status, ..row }
        });
        answered.chain(given_up).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn row(&self, name: &str) -> Row {
        Row {
            name: name.to_owned(),
            args: Some(self.args.clone()),
            origin: self.origin,
            state: if self.stop.asked() { RowState::Stopping } else { RowState::Served },
            start: None,
            unmapped_bytes: self.image.as_ref().map_or(0, Image::unmapped_bytes),
            mirror: self.mirror(),
            jobs: self.jobs(),
            loss: self.watch.loss().cloned(),
            status: None,
        }
    }
}

impl State {
    /// A served disk.
    fn entry(&self, name: &str) -> Result<&Entry, Failure> {
        let (why, remedy) = match self.table.get(name) {
            Some(Slot::Served(entry)) => return Ok(entry),
            Some(Slot::Failed(failed)) => return Err(failed.refusal(name)),
            Some(Slot::Starting(_)) => {
                ("it is being opened", "try again later; check its storage if this lasts")
            }
            None => return Err(removal::no_such_disk(name)),
        };
        let failure = Failure::run(format!("find the disk {name}"), why, remedy);
        Err(Failure { sort: Sort::NoSuchDisk, ..failure })
    }
}
