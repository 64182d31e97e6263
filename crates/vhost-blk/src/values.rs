// SPDX-License-Identifier: Apache-2.0
//! The types and parsers of option values. The error of each parser names the valid values.

mod errors;

pub use errors::{IoTimeout, NewIoTimeout, OnError, OnReadError, io_timeout, new_io_timeout};

use clap::ValueEnum;
use data_plane::{BATCH_CHAINS_MAX, Limits};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

/// The word of a value on the command line.
pub fn word<T: ValueEnum>(value: T) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// `on` or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum OnOff {
    /// Yes.
    On,
    /// No.
    Off,
}

impl OnOff {
    /// Returns whether the value is `on`.
    pub fn is_on(self) -> bool {
        self == OnOff::On
    }
}

/// Kind of storage behind the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// A raw image file or a block device.
    File,
    /// Memory of the daemon, lost at its end.
    Mem,
    /// No storage: reads leave the guest's memory unchanged, writes have no effect.
    Null,
}

/// Format of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// The file has the content of the disk.
    Raw,
    /// A qcow2 image, in the io_uring data plane.
    Qcow2,
}

/// Use of clones in place of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Reflink {
    /// The new image shares the space of the other one if it can; it is a copy otherwise.
    Auto,
    /// It shares the space, or there is no new image.
    Always,
    /// It has space of its own.
    Never,
}

/// Backing files that a qcow2 image may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AllowBacking {
    /// None: an image with a backing file is refused.
    Off,
    /// Files in the directory of the image that names them.
    SameDir,
    /// Any file that the daemon can read.
    Any,
}

impl From<AllowBacking> for qcow2::AllowBacking {
    fn from(allowed: AllowBacking) -> Self {
        match allowed {
            AllowBacking::Off => qcow2::AllowBacking::Off,
            AllowBacking::SameDir => qcow2::AllowBacking::SameDir,
            AllowBacking::Any => qcow2::AllowBacking::Any,
        }
    }
}

/// State of a completed write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Cache {
    /// It may be in a volatile cache until a FLUSH.
    Writeback,
    /// It is on stable storage.
    Writethrough,
}

/// The data plane that runs the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Plane {
    /// The kernel module if it supports the disk, else the daemon.
    Auto,
    /// The kernel module.
    Kernel,
    /// The daemon's own io_uring threads.
    Uring,
}

/// Use of the storage device's poll queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoPoll {
    /// Poll if the device has poll queues.
    Auto,
    /// Always; the start fails if the device has no poll queues.
    On,
    /// Never.
    Off,
}

/// Coalescing of interrupts of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Coalesce {
    /// If a trial of the queue shows that it pays.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Lock of the image against other writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LockMode {
    /// The same lock as QEMU.
    Auto,
    /// No lock.
    Off,
}

/// Minimum severity of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[value(rename_all = "lower")]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names are the usual ones")]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object per line.
    Json,
    /// Plain text.
    Text,
}

/// A sorted list of different CPU numbers; all of these CPUs are online.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

/// A size in bytes; displayed with its largest whole unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut count, mut unit) = (self.0, 0);
        while count > 0 && count.is_multiple_of(1024) && unit < 4 {
            (count, unit) = (count / 1024, unit + 1);
        }
        write!(f, "{count}{}", ["", "K", "M", "G", "T"][unit])
    }
}

/// A number of virtqueues.
pub fn num_queues(text: &str) -> Result<u16, String> {
    in_range(text, 1, u64::from(NUM_QUEUES_MAX)).map(|n| n as u16)
}

/// Maximum virtqueues of one disk.
pub const NUM_QUEUES_MAX: u16 = 64;
/// Largest limit on the requests per second.
pub const IOPS_MAX: u64 = 1_000_000_000;
/// Largest limit on the bytes per second: a number of a TOML file.
pub const BANDWIDTH_MAX: u64 = i64::MAX as u64;

/// Maximum data-plane threads.
pub const THREADS_MAX: usize = 64;

/// A number of data-plane threads.
pub fn threads(text: &str) -> Result<usize, String> {
    in_range(text, 1, THREADS_MAX as u64).map(|n| n as usize)
}

/// A virtqueue size.
pub fn queue_size(text: &str) -> Result<u16, String> {
    match text.parse::<u16>() {
        Ok(n) if n.is_power_of_two() && (2..=32768).contains(&n) => Ok(n),
        _ => Err("give a power of two from 2 to 32768".into()),
    }
}

/// A number of requests; `None`: found by trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSize(pub Option<usize>);

/// A batch size.
pub fn batch_size(text: &str) -> Result<BatchSize, String> {
    match text {
        "auto" => Ok(BatchSize(None)),
        _ => match in_range(text, 1, BATCH_CHAINS_MAX as u64) {
            Ok(n) => Ok(BatchSize(Some(n as usize))),
            Err(range) => Err(format!("{range}, or auto")),
        },
    }
}

/// The address of the metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A UNIX socket to create.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            MetricsAddress::Tcp(address) => address.fmt(f),
        }
    }
}

/// An address of metrics: `unix:PATH`, or a numeric address with a port.
pub fn metrics(text: &str) -> Result<MetricsAddress, String> {
    match text.strip_prefix("unix:") {
        Some("") => Err("give a path after unix:".into()),
        Some(path) => Ok(MetricsAddress::Unix(path.into())),
        None => text.parse().map(MetricsAddress::Tcp).map_err(|_| {
            "give unix:PATH, or an address and a port such as 127.0.0.1:9100 or [::1]:9100".into()
        }),
    }
}

/// A polling time in microseconds.
pub fn poll_max_us(text: &str) -> Result<u32, String> {
    in_range(text, 0, 1_000_000).map(|n| n as u32)
}

/// A logical block size.
pub fn logical_block(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" => Ok(4096),
        _ => Err("give 512 or 4096".into()),
    }
}

/// Maximum length of the name of a disk.
const DISK_NAME_MAX: usize = 64;

/// The name of a disk.
pub fn disk_name(text: &str) -> Result<String, String> {
    let first = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    match first && text.len() <= DISK_NAME_MAX && text.bytes().all(is_known) {
        true => Ok(text.into()),
        false => Err(format!(
            "give 1 to {DISK_NAME_MAX} letters, digits, `.`, `_` and `-`, first a letter or digit"
        )),
    }
}

/// A serial number for GET_ID: at most 20 printable ASCII characters.
pub fn serial(text: &str) -> Result<String, String> {
    if text.len() > 20 {
        return Err(format!("it has {} bytes; give at most 20", text.len()));
    }
    if !text.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        return Err("give printable ASCII characters only".into());
    }
    Ok(text.into())
}

/// Permission bits of the socket file.
pub fn socket_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 && !text.starts_with('+') => Ok(mode),
        _ => Err("give permission bits as an octal number such as 0660".into()),
    }
}

/// A file descriptor number.
pub fn fd(text: &str) -> Result<i32, String> {
    in_range(text, 0, i32::MAX as u64).map(|n| n as i32)
}

/// The seconds to wait for an answer.
pub fn patience(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "give a whole number of seconds, or 0 for no limit".to_owned())
}

/// A size in bytes with an optional K, M, G or T (powers of 1024).
pub fn size(text: &str) -> Result<Size, String> {
    backend::create::parse_size(text).map(Size).map_err(|error| error.to_string())
}

/// Time of a slow request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowerThan(pub Duration);

/// The time of a slow request in milliseconds.
pub fn slower_than(text: &str) -> Result<SlowerThan, String> {
    let ms = decimal_in_range(text, "milliseconds", 0.001, 3_600_000.0)?;
    Ok(SlowerThan(Duration::from_secs_f64(ms / 1e3)))
}

/// Time that requests may catch up on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst(pub Duration);

/// A burst in seconds.
pub fn burst(text: &str) -> Result<Burst, String> {
    let (min, max) = (Limits::BURST_MIN.as_secs_f64(), Limits::BURST_MAX.as_secs_f64());
    decimal_in_range(text, "seconds", min, max).map(Duration::from_secs_f64).map(Burst)
}

/// A number of requests per second.
pub fn iops(text: &str) -> Result<NonZeroU64, String> {
    let count = in_range(text, 1, IOPS_MAX)?;
    NonZeroU64::new(count).ok_or_else(|| "give at least 1".to_owned())
}

/// A number of bytes per second, with an optional K, M, G or T.
pub fn rate_of_bytes(text: &str) -> Result<NonZeroU64, String> {
    let bytes = backend::create::parse_bytes(text).map_err(|error| error.to_string())?;
    if bytes > BANDWIDTH_MAX {
        return Err(format!("give at most {BANDWIDTH_MAX}"));
    }
    NonZeroU64::new(bytes).ok_or_else(|| "give at least 1".to_owned())
}

/// A list of CPUs such as `0-3,6`; all of them must be online.
pub fn cpus(text: &str) -> Result<CpuList, String> {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let online = online.trim();
    let known = parse_cpu_list(online);
    let list = parse_cpu_list(text).ok_or("give numbers and ranges such as 0-3,6")?;
    for cpu in &list {
        if known.as_ref().is_some_and(|known| !known.contains(cpu)) {
            return Err(format!("CPU {cpu} is not online; choose from {online}"));
        }
    }
    Ok(CpuList(list))
}

/// The numbers of a list in the kernel's format; `None` if it is malformed or too long.
fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    const CPUS_MAX: usize = 8192;
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if first > last || last >= CPUS_MAX {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

/// A number from `min` to `max`.
fn in_range(text: &str, min: u64, max: u64) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!("give a number from {min} to {max}")),
    }
}

/// A number of a unit from `min` to `max`, which may have a decimal point.
fn decimal_in_range(text: &str, unit: &str, min: f64, max: f64) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!("give a number of {unit} from {min} to {max}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_sizes_are_powers_of_two_within_the_specification() {
        assert_eq!(queue_size("2"), Ok(2));
        assert_eq!(queue_size("32768"), Ok(32768));
        for wrong in ["0", "1", "3", "65536", "-2", "many", ""] {
            assert!(queue_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_batch_is_at_most_what_a_turn_takes() {
        assert_eq!(batch_size("auto"), Ok(BatchSize(None)));
        assert_eq!(batch_size("1"), Ok(BatchSize(Some(1))));
        assert_eq!(batch_size("32"), Ok(BatchSize(Some(32))));
        for wrong in ["0", "33", "-1", "many", ""] {
            let why = batch_size(wrong).unwrap_err();
            assert!(why.contains("32") && why.contains("auto"), "{wrong}: {why}");
        }
    }

    #[test]
    fn metrics_have_a_path_or_a_numeric_address_with_a_port() {
        for right in ["unix:/run/disk.metrics", "127.0.0.1:9100", "[::1]:0"] {
            assert_eq!(metrics(right).unwrap().to_string(), right);
        }
        for wrong in ["", "unix:", "9100", "127.0.0.1", "localhost:9100", "1.2.3.4:70000"] {
            assert!(metrics(wrong).unwrap_err().starts_with("give "), "{wrong}");
        }
    }

    #[test]
    fn a_size_is_shown_with_its_largest_whole_unit() {
        assert_eq!(Size(10 << 30).to_string(), "10G");
        assert_eq!(Size(1536).to_string(), "1536");
        assert_eq!(Size(1536 << 10).to_string(), "1536K");
    }

    #[test]
    fn cpu_lists_are_sorted_and_bounded() {
        assert_eq!(parse_cpu_list("6,0-2,1"), Some(vec![0, 1, 2, 6]));
        for wrong in ["", "a", "3-1", "0-99999999999", "0,,1", "1-"] {
            assert_eq!(parse_cpu_list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_name_is_fit_for_a_label_and_a_file() {
        for right in ["a", "0", "db-1.data_2", &"x".repeat(64)] {
            assert!(disk_name(right).is_ok(), "{right}");
        }
        for wrong in ["", ".", "-a", "_a", "a b", "a/b", "é", "a\0", &"x".repeat(65)] {
            assert!(disk_name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_serial_is_at_most_twenty_printable_bytes() {
        assert!(serial("12345678901234567890").is_ok());
        assert!(serial("123456789012345678901").is_err());
        assert!(serial("tab\there").is_err());
        assert!(serial("é").is_err());
    }

    #[test]
    fn socket_modes_are_octal_permission_bits() {
        assert_eq!(socket_mode("0660"), Ok(0o660));
        assert_eq!(socket_mode("777"), Ok(0o777));
        for wrong in ["888", "1777", "rw", "", "+7", "-7"] {
            assert!(socket_mode(wrong).is_err(), "{wrong}");
        }
    }
}
