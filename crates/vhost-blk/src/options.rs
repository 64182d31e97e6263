// SPDX-License-Identifier: Apache-2.0
//! The options of `serve`, `daemon` and `ctl add`: the only definition for the command line, the
//! configuration file, the control protocol, the man pages, the completions and `docs/options.md`.

use crate::failure::Failure;
use crate::values::{
    self, AllowBacking, BackendKind, BatchSize, Burst, Cache, Coalesce, CpuList, Format, IoPoll,
    IoTimeout, LockMode, LogFormat, LogLevel, MetricsAddress, OnError, OnOff, OnReadError, Plane,
    Size,
};
use clap::Args;
use data_plane::{ErrorPolicies, ErrorPolicy, ErrorRules, Limits};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

/// Options of one disk. Alphabetical within each heading.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct DiskArgs {
    /// Group of the socket file, by name or number
    #[arg(long, value_name = "GROUP", help_heading = "Socket")]
    pub socket_group: Option<String>,
    /// Permission bits of the socket file, octal [default: 0600, with --socket-group 0660]
    #[arg(long, value_name = "MODE", value_parser = values::socket_mode, help_heading = "Socket")]
    pub socket_mode: Option<u32>,
    /// Listen on this UNIX socket. A stale socket file is replaced, a live one never
    #[arg(long, value_name = "PATH", help_heading = "Socket")]
    pub socket_path: Option<PathBuf>,

    /// Backing files that a qcow2 image may name. The guest can read every file that is allowed
    #[arg(long, value_name = "RULE", default_value = "off", help_heading = "Disk")]
    pub allow_backing: AllowBacking,
    /// Kind of storage
    #[arg(long, value_name = "KIND", default_value = "file", help_heading = "Disk")]
    pub backend: BackendKind,
    /// Image file or block device to serve
    #[arg(long, value_name = "PATH", help_heading = "Disk")]
    pub blk_file: Option<PathBuf>,
    /// Durability of a completed write. writeback: it may be in a volatile cache until the guest's
    /// FLUSH; writethrough: it is on stable storage
    #[arg(long, value_name = "MODE", default_value = "writeback", help_heading = "Disk")]
    pub cache: Cache,
    /// Bypass the page cache (O_DIRECT); if the file system refuses it, the daemon logs a warning
    /// and uses the page cache
    #[arg(
        long,
        value_name = "on|off",
        default_value = "on",
        hide_possible_values = true,
        help_heading = "Disk"
    )]
    pub direct: OnOff,
    /// Free space if the storage supports it: offer DISCARD, and let WRITE_ZEROES unmap
    #[arg(
        long,
        value_name = "on|off",
        default_value = "on",
        hide_possible_values = true,
        help_heading = "Disk"
    )]
    pub discard: OnOff,
    /// Format of the image [default: raw, but a file that begins like a qcow2 image is refused]
    #[arg(long, value_name = "FORMAT", help_heading = "Disk")]
    pub format: Option<Format>,
    /// Wait for a guest that migrates from another daemon with the same image: lock the image only
    /// when the guest arrives, and write nothing before
    #[arg(
        long,
        value_name = "on|off",
        default_value = "off",
        hide_possible_values = true,
        help_heading = "Disk"
    )]
    pub incoming: OnOff,
    /// Log a request that the storage has not answered within this time, 0.1 to 86400 seconds, and count
    /// it in the metrics. The request is not aborted
    #[arg(long, value_name = "SECONDS", value_parser = values::io_timeout, help_heading = "Disk")]
    pub io_timeout: Option<IoTimeout>,
    /// Lock the image against other writers, the way QEMU does
    #[arg(long, value_name = "MODE", default_value = "auto", help_heading = "Disk")]
    pub lock: LockMode,
    /// Logical block size that the guest sees, 512 or 4096 [default: a block device's own, else
    /// 512]
    #[arg(long, value_name = "BYTES", value_parser = values::logical_block, help_heading = "Disk")]
    pub logical_block_size: Option<u32>,
    /// Effect of an error of the storage. report: the guest gets it; stop: the disk halts and keeps
    /// the request (the guest gets the error of a FLUSH at once), until `vhost-blk ctl resume`; enospc: it
    /// halts if no space is left, and the guest gets other errors
    #[arg(long, value_name = "POLICY", default_value = "report", help_heading = "Disk")]
    pub on_error: OnError,
    /// The same for reads alone [default: as --on-error]
    #[arg(long, value_name = "POLICY", help_heading = "Disk")]
    pub on_read_error: Option<OnReadError>,
    /// Serve the disk read-only: the guest sees a read-only disk
    #[arg(long, value_name = "on|off", default_value = "off", default_missing_value = "on",
          num_args = 0..=1, require_equals = true, hide_possible_values = true,
          help_heading = "Disk")]
    pub read_only: OnOff,
    /// Serial number that the guest sees: at most 20 printable ASCII characters
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true,
          value_parser = values::serial, help_heading = "Disk")]
    pub serial: String,
    /// Size of a null or mem backend, with K, M, G or T (powers of 1024)
    #[arg(long, value_name = "SIZE", value_parser = values::size, help_heading = "Disk")]
    pub size: Option<Size>,
    /// Put a wrapper around the backend: delay:us=100, fault:ops=write,errno=EIO, limit:iops=1000,
    /// record:path=FILE (may be repeated, the last one is outermost)
    #[arg(long, value_name = "SPEC", help_heading = "Disk")]
    pub wrap: Vec<String>,

    /// Maximum bytes per second that requests read, write or zero, with K, M, G or T (powers of 1024)
    #[arg(long, value_name = "SIZE", value_parser = values::rate_of_bytes, help_heading = "Limits")]
    pub limit_bandwidth: Option<NonZeroU64>,
    /// Unused time, in seconds, that requests may catch up on when the disk has limits: 0.01 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "0.1", value_parser = values::burst,
          help_heading = "Limits")]
    pub limit_burst: Burst,
    /// Share limits with all disks in this group; the limits set last apply. Only for
    /// the disks of vhost-blk daemon
    #[arg(long, value_name = "GROUP", value_parser = values::disk_name, help_heading = "Limits")]
    pub limit_group: Option<String>,
    /// Maximum requests per second, of any kind
    #[arg(long, value_name = "N", value_parser = values::iops, help_heading = "Limits")]
    pub limit_iops: Option<NonZeroU64>,

    /// Number of virtqueues [default: number of host CPUs, at most 64]
    #[arg(long, value_name = "N", value_parser = values::num_queues, help_heading = "Queues")]
    pub num_queues: Option<u16>,
    /// Offer packed virtqueues. Not offered if the kernel plane was chosen at the start: it supports only
    /// split ones
    #[arg(
        long,
        value_name = "on|off",
        default_value = "on",
        hide_possible_values = true,
        help_heading = "Queues"
    )]
    pub packed: OnOff,
    /// Maximum number of descriptors in a virtqueue: a power of two from 2 to 32768
    #[arg(long, value_name = "N", default_value = "1024", value_parser = values::queue_size,
          help_heading = "Queues")]
    pub queue_size: u16,

    /// The data plane that runs the queues. auto: the kernel module if it is loaded and supports
    /// the disk, else the daemon itself
    #[arg(long, value_name = "PLANE", default_value = "auto", help_heading = "Data plane")]
    pub data_plane: Plane,
}

/// Options of a process, for all of its disks. Alphabetical within each heading.
#[derive(Args, Clone, Debug)]
pub struct ProcessArgs {
    /// Requests that a queue hands to the storage, and completions that it shows to the guest, at a
    /// time, from 1 to 32. auto: each thread (kernel plane: each queue) measures which is fastest.
    /// Only for I/O that io_uring or the kernel does
    #[arg(long, value_name = "auto|N", default_value = "auto", value_parser = values::batch_size,
          help_heading = "Data plane")]
    pub batch_size: BatchSize,
    /// Hold an interrupt of the guest while the guest sends more requests, for at most 100
    /// microseconds. auto: each queue measures whether that is faster. Needs --poll-max-us
    #[arg(long, value_name = "MODE", default_value = "auto", help_heading = "Data plane")]
    pub coalesce: Coalesce,
    /// Bind the data plane's threads to these CPUs, in turn; a list such as 0-3,6
    #[arg(long, value_name = "LIST", value_parser = values::cpus, help_heading = "Data plane")]
    pub cpus: Option<CpuList>,
    /// Poll the storage device for completions (only for devices that have poll queues). auto: each
    /// thread tries whether that is faster; the kernel plane always polls
    #[arg(long, value_name = "MODE", default_value = "auto", help_heading = "Data plane")]
    pub iopoll: IoPoll,
    /// Register guest memory once for all I/O. This pins it: do not use it with
    /// ballooning or free page reporting, because pages that the guest gave back stay referenced
    /// and I/O would go to them instead of the pages that replaced them
    #[arg(
        long,
        value_name = "on|off",
        default_value = "off",
        hide_possible_values = true,
        help_heading = "Data plane"
    )]
    pub pin_memory: OnOff,
    /// Maximum time in microseconds that a thread polls before it sleeps; it polls only while
    /// polls find work. 0: never
    #[arg(long, value_name = "N", default_value = "50", value_parser = values::poll_max_us,
          help_heading = "Data plane")]
    pub poll_max_us: u32,
    /// Data-plane threads; queues are spread over them [default: number of CPUs (of --cpus, if given),
    /// at most 4, for serve also at most the number of queues; in the kernel one for each queue]
    #[arg(long, value_name = "N", value_parser = values::threads, help_heading = "Data plane")]
    pub threads: Option<usize>,

    /// Group of the control socket, by name or number. A member of this group can read and overwrite
    /// everything that the daemon's user can
    #[arg(long, value_name = "GROUP", help_heading = "General")]
    pub control_group: Option<String>,
    /// Permission bits of the control socket, octal. A user who may write to it can read and overwrite
    /// everything that the daemon's user can [default: 0600, with --control-group 0660]
    #[arg(long, value_name = "MODE", value_parser = values::socket_mode, help_heading = "General")]
    pub control_mode: Option<u32>,
    /// Listen for commands of `vhost-blk ctl` (Varlink, io.vhostblk) on this UNIX socket; without the
    /// option daemon has /run/vhost-blk/control, and serve none
    #[arg(long, value_name = "PATH", help_heading = "General")]
    pub control_path: Option<PathBuf>,
    /// Format of log lines
    #[arg(long, value_name = "FORMAT", default_value = "text", help_heading = "General")]
    pub log_format: LogFormat,
    /// Minimum severity of log lines on stderr
    #[arg(long, value_name = "LEVEL", default_value = "info", help_heading = "General")]
    pub log_level: LogLevel,
    /// Serve counters of the disks over HTTP at /metrics, in the OpenMetrics format, on a UNIX socket
    /// or on a TCP port without authentication (prefer a loopback address)
    #[arg(long, value_name = "unix:PATH|ADDR:PORT", value_parser = values::metrics,
          help_heading = "General")]
    pub metrics: Option<MetricsAddress>,
    /// Group of the UNIX socket of --metrics, by name or number: its members may read the counters
    #[arg(long, value_name = "GROUP", help_heading = "General")]
    pub metrics_group: Option<String>,
    /// Permission bits of that socket, octal [default: 0600, with --metrics-group 0660]
    #[arg(long, value_name = "MODE", value_parser = values::socket_mode, help_heading = "General")]
    pub metrics_mode: Option<u32>,
    /// Write the process id to this file when the sockets listen. A second daemon with the same file is refused; a
    /// stop removes the file
    #[arg(long, value_name = "PATH", help_heading = "General")]
    pub pidfile: Option<PathBuf>,
}

/// Options of `vhost-blk serve`.
#[derive(Args, Clone, Debug)]
#[command(next_display_order = None)]
pub struct ServeArgs {
    /// Options of the disk.
    #[command(flatten)]
    pub disk: DiskArgs,
    /// Options of the process.
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Serve a socket that this process inherited: a listening one, or a connected one (then the
    /// daemon ends with the connection)
    #[arg(long, value_name = "N", value_parser = values::fd, help_heading = "Socket")]
    pub fd: Option<i32>,

    /// Take options from this TOML file: same names without the dashes in front. The command
    /// line wins
    #[arg(long, value_name = "FILE", help_heading = "General")]
    pub config: Option<PathBuf>,
    /// Name of the disk, for commands and metrics: letters, digits, `.`, `_` and `-`
    #[arg(long, value_name = "NAME", default_value = "disk", value_parser = values::disk_name,
          help_heading = "General")]
    pub name: String,
    /// Print the capabilities of this program as JSON and exit; other options are ignored
    #[arg(long, help_heading = "General")]
    pub print_capabilities: bool,
}

/// The control socket of `daemon`, and of its clients, without an option.
pub const CONTROL_PATH: &str = "/run/vhost-blk/control";
/// The variable that names the control socket to clients.
pub const CONTROL_VARIABLE: &str = "VHOST_BLK_CONTROL";

/// Options of `vhost-blk daemon`.
#[derive(Args, Clone, Debug)]
#[command(next_display_order = None)]
pub struct DaemonArgs {
    /// Options of the process.
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Check the files of --config-dir, print each error and exit. Opens no image and no socket
    #[arg(long, requires = "config_dir", help_heading = "General")]
    pub check: bool,
    /// Serve each disk that a file NAME.toml in this directory describes, with the options of serve
    /// that belong to one disk. SIGHUP and `vhost-blk ctl reload` read the directory again
    #[arg(long, value_name = "DIR", help_heading = "General")]
    pub config_dir: Option<PathBuf>,
}

impl DaemonArgs {
    /// Checks the combination of options.
    ///
    /// # Errors
    /// [`Failure`] if options contradict each other or one is missing.
    pub fn check(&self) -> Result<(), Failure> {
        self.process.check()
    }

    /// With the control socket of a daemon, if the options name none.
    #[must_use]
    pub fn with_defaults(mut self) -> DaemonArgs {
        self.process.control_path.get_or_insert_with(|| CONTROL_PATH.into());
        self
    }
}

/// Maximum default number of threads.
const THREADS_DEFAULT_MAX: usize = 4;

impl ServeArgs {
    /// Checks the combination of options.
    ///
    /// # Errors
    /// [`Failure`] if options contradict each other or one is missing.
    pub fn check(&self) -> Result<(), Failure> {
        self.disk.check()?;
        if self.disk.limit_group.is_some() {
            return Err(Failure::usage(
                "share limits between disks",
                "`vhost-blk serve` has one disk, and --limit-group is for the disks of one daemon",
                "use vhost-blk daemon, or drop --limit-group",
            ));
        }
        self.process.check()?;
        self.process.check_socket(self.disk.socket_path.as_ref())
    }
}

impl DiskArgs {
    /// Checks the combination of options.
    ///
    /// # Errors
    /// [`Failure`] if options contradict each other or one is missing.
    pub fn check(&self) -> Result<(), Failure> {
        self.check_storage()?;
        let file_wanted = self.socket_mode.is_some() || self.socket_group.is_some();
        if file_wanted && self.socket_path.is_none() {
            return Err(Failure::usage(
                "set the mode or group of the socket",
                "they apply only to a socket file that this process creates",
                "give --socket-path, or drop --socket-mode and --socket-group",
            ));
        }
        Ok(())
    }

    fn check_storage(&self) -> Result<(), Failure> {
        let kind = format!("{:?}", self.backend).to_lowercase();
        let what = format!("serve a disk of kind {kind}");
        let (why, remedy) = match (self.backend, &self.blk_file, self.size) {
            (BackendKind::File, None, _) => ("no image is given", "give --blk-file PATH"),
            (BackendKind::File, _, Some(_)) => {
                ("--size is for null and mem", "drop --size: a file has its own size")
            }
            (BackendKind::Null | BackendKind::Mem, Some(_), _) => {
                ("--blk-file is for kind file", "drop --blk-file or --backend")
            }
            (BackendKind::Null | BackendKind::Mem, _, None) => {
                ("it needs a size", "give --size SIZE")
            }
            (BackendKind::Null | BackendKind::Mem, ..) if self.format.is_some() => {
                ("--format is for kind file", "drop --format or --backend")
            }
            _ => return self.check_incoming(),
        };
        Err(Failure::usage(what, why, remedy))
    }

    fn check_incoming(&self) -> Result<(), Failure> {
        if !self.incoming.is_on() {
            return Ok(());
        }
        if self.format == Some(Format::Qcow2) {
            return Err(Failure::usage(
                "wait for a guest that migrates",
                "the daemon keeps tables of a qcow2 image, which another daemon changes meanwhile",
                "drop --incoming, or migrate with a raw image",
            ));
        }
        if self.backend == BackendKind::File && self.lock == LockMode::Auto {
            return Ok(());
        }
        Err(Failure::usage(
            "wait for a guest that migrates",
            "--incoming on delays the lock of an image, and nothing is locked",
            "drop --incoming, or serve a file without --lock off",
        ))
    }

    /// Limits of the disk.
    pub fn limits(&self) -> Limits {
        let (iops, bytes) = (self.limit_iops, self.limit_bandwidth);
        Limits { iops, bytes, burst: self.limit_burst.0 }
    }

    /// The treatment of storage that fails or hangs.
    pub fn error_rules(&self) -> ErrorRules {
        let others = self.on_error.into();
        let reads = self.on_read_error.map_or(others, ErrorPolicy::from);
        let io_timeout = self.io_timeout.map(|limit| limit.0);
        ErrorRules { policies: ErrorPolicies { reads, others }, io_timeout }
    }

    /// The same disk without limits, for one that takes over those of a running disk. With the limits of
    /// its options it would change those of a group for a moment.
    pub fn without_limits(&self) -> Self {
        DiskArgs { limit_iops: None, limit_bandwidth: None, limit_group: None, ..self.clone() }
    }

    /// Number of virtqueues offered.
    pub fn queues(&self) -> u16 {
        let cpus = u16::try_from(host_cpus()).unwrap_or(u16::MAX);
        self.num_queues.unwrap_or(cpus.min(values::NUM_QUEUES_MAX))
    }
}

impl ProcessArgs {
    /// Number of workers of the kernel data plane for a disk with so many queues. Idle workers
    /// sleep, and one for each queue lets every queue use another CPU.
    pub fn worker_count(&self, queues: u16) -> usize {
        self.threads.unwrap_or_else(|| usize::from(queues))
    }

    /// Number of data-plane threads for so many queues.
    pub fn thread_count(&self, queues: u16) -> usize {
        let cpus = self.cpus.as_ref().map_or_else(host_cpus, |list| list.0.len());
        self.threads.unwrap_or_else(|| usize::from(queues).min(cpus).min(THREADS_DEFAULT_MAX))
    }

    /// Maximum polling time.
    pub fn poll_max(&self) -> Duration {
        Duration::from_micros(self.poll_max_us.into())
    }

    /// The path of the metrics, if they have one.
    pub fn metrics_path(&self) -> Option<&PathBuf> {
        match &self.metrics {
            Some(MetricsAddress::Unix(path)) => Some(path),
            _ => None,
        }
    }

    /// Checks that each socket file has a path of its own, and that the control and the metrics socket exist
    /// if they have options.
    ///
    /// # Errors
    /// [`Failure`] if the options contradict each other.
    pub fn check(&self) -> Result<(), Failure> {
        if self.control_path.is_some() && self.control_path.as_ref() == self.metrics_path() {
            return Err(same_path("--control-path", "--metrics"));
        }
        for (option, socket) in
            [("--control-path", self.control_path.as_ref()), ("--metrics", self.metrics_path())]
        {
            if self.pidfile.is_some() && self.pidfile.as_ref() == socket {
                return Err(same_path("--pidfile", option));
            }
        }
        let wanted = self.control_mode.is_some() || self.control_group.is_some();
        if wanted && self.control_path.is_none() {
            return Err(Failure::usage(
                "set the mode or group of the control socket",
                "there is none",
                "give --control-path, or drop --control-mode and --control-group",
            ));
        }
        let wanted = self.metrics_mode.is_some() || self.metrics_group.is_some();
        if wanted && self.metrics_path().is_none() {
            return Err(Failure::usage(
                "set the mode or group of the metrics socket",
                "there is none",
                "give --metrics unix:PATH, or drop --metrics-mode and --metrics-group",
            ));
        }
        if self.coalesce == Coalesce::On && self.poll_max().is_zero() {
            return Err(Failure::usage(
                "hold calls",
                "--poll-max-us 0 ends polling, and a thread that does not poll holds no call",
                "drop --poll-max-us or --coalesce",
            ));
        }
        Ok(())
    }

    /// Checks that the socket of a disk has not the path of a socket of the process.
    ///
    /// # Errors
    /// [`Failure`] if it has.
    pub fn check_socket(&self, socket: Option<&PathBuf>) -> Result<(), Failure> {
        if socket.is_some() && socket == self.control_path.as_ref() {
            return Err(same_path("--socket-path", "--control-path"));
        }
        if socket.is_some() && socket == self.metrics_path() {
            return Err(same_path("--socket-path", "--metrics"));
        }
        if socket.is_some() && socket == self.pidfile.as_ref() {
            return Err(same_path("--socket-path", "--pidfile"));
        }
        Ok(())
    }
}

fn same_path(one: &str, other: &str) -> Failure {
    Failure::usage(
        format!("listen for {one} and {other}"),
        "both have the same path",
        format!("choose another {other}"),
    )
}

/// CPUs that this process may use.
pub fn host_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
