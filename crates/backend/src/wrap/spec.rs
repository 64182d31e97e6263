// SPDX-License-Identifier: Apache-2.0
//! Wrapper specifications of the form `NAME:KEY=VALUE,KEY=VALUE`.

use super::lie::Lie;
use super::{Delay, Fault, FaultRule, Limit, OpSet, Rates, Record};
use crate::{Disk, IoError};
use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Maximum layers of a disk; keeps layer numbers small.
const LAYERS_MAX: u8 = 16;
const HOUR_US: u64 = 3_600_000_000;

/// Errors in a wrapper's specification.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// No such wrapper.
    #[error("there is no wrapper `{0}`; known are delay, fault, limit and record")]
    UnknownWrapper(String),
    /// Not `KEY=VALUE`.
    #[error("wrapper {wrapper}: `{part}` is not of the form KEY=VALUE; known keys are {known}")]
    NotKeyValue {
        /// Name of the wrapper.
        wrapper: &'static str,
        /// The malformed part.
        part: String,
        /// The known keys.
        known: &'static str,
    },
    /// No such key.
    #[error("wrapper {wrapper}: there is no key `{key}`; known are {known}")]
    UnknownKey {
        /// Name of the wrapper.
        wrapper: &'static str,
        /// The unknown key.
        key: String,
        /// The known keys.
        known: &'static str,
    },
    /// A repeated key.
    #[error("wrapper {wrapper}: `{key}` is given twice; give it once")]
    Repeated {
        /// Name of the wrapper.
        wrapper: &'static str,
        /// The key.
        key: &'static str,
    },
    /// A missing key.
    #[error("wrapper {wrapper}: needs {key}; add it")]
    Missing {
        /// Name of the wrapper.
        wrapper: &'static str,
        /// The key, with an example.
        key: &'static str,
    },
    /// An invalid value.
    #[error("wrapper {wrapper}: {key}={value} is not {expected}")]
    BadValue {
        /// Name of the wrapper.
        wrapper: &'static str,
        /// The key.
        key: &'static str,
        /// The invalid value.
        value: String,
        /// Description of a valid value.
        expected: &'static str,
    },
    /// The file of the log cannot be opened.
    #[error("wrapper record: cannot write {}: {source}; name a file that this user may write", .path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// Too many wrappers.
    #[error("more than {LAYERS_MAX} wrappers around one disk; use fewer")]
    TooMany,
}

/// Opens the file of a record.
type Open = fn(&Path) -> io::Result<File>;

/// Wraps `inner` as specified by `spec`:
///
/// * `delay:us=100,ops=read+write` - delays completions by so many microseconds
/// * `fault:ops=write,sectors=0-7,every=1,errno=EIO` - fails selected I/Os
/// * `limit:iops=1000,mbps=50,burst-ms=10` - limits I/Os and MB (10^6 bytes) per second
/// * `record:path=FILE` - appends the order of starts and ends to FILE
///
/// The default of `ops` is `all`; other values are `read`, `write`, `flush`, `discard`,
/// `write-zeroes` and `secure-erase`, joined by `+`.
///
/// # Errors
/// [`SpecError`]; its text names a valid form.
pub fn from_spec(spec: &str, inner: Arc<dyn Disk>) -> Result<Arc<dyn Disk>, SpecError> {
    build(spec, inner, |path| OpenOptions::new().append(true).create(true).open(path))
}

/// As [`from_spec`], for a check: creates and opens no file of the spec.
///
/// # Errors
/// As [`from_spec`].
pub fn check_spec(spec: &str, inner: Arc<dyn Disk>) -> Result<Arc<dyn Disk>, SpecError> {
    build(spec, inner, |_| File::open("/dev/null"))
}

fn build(spec: &str, inner: Arc<dyn Disk>, open: Open) -> Result<Arc<dyn Disk>, SpecError> {
    if inner.layers() > LAYERS_MAX {
        return Err(SpecError::TooMany);
    }
    let (name, rest) = spec.split_once(':').unwrap_or((spec, ""));
    match name {
        "delay" => delay(Values::parse("delay", rest, &["us", "ops"], "us and ops")?, inner),
        "fault" => {
            let known = "ops, sectors, every and errno";
            fault(
                Values::parse("fault", rest, &["ops", "sectors", "every", "errno"], known)?,
                inner,
            )
        }
        "limit" => {
            let known = "iops, mbps and burst-ms";
            limit(Values::parse("limit", rest, &["iops", "mbps", "burst-ms"], known)?, inner)
        }
        "record" => record(Values::parse("record", rest, &["path"], "path")?, inner, open),
        // Only for negative controls of tests; the help does not list it.
        "lie" => Ok(Arc::new(Lie::new(inner, Values::parse("lie", rest, &["ops"], "ops")?.ops()?))),
        _ => Err(SpecError::UnknownWrapper(name.into())),
    }
}

fn delay(values: Values, inner: Arc<dyn Disk>) -> Result<Arc<dyn Disk>, SpecError> {
    let within_an_hour = |text: &str| text.parse().ok().filter(|us| (1..=HOUR_US).contains(us));
    let us = values.map("us", within_an_hour, "a whole number from 1 to 3600000000 (an hour)")?;
    let us = us.ok_or(SpecError::Missing { wrapper: "delay", key: "us=MICROSECONDS" })?;
    Ok(Arc::new(Delay::new(inner, Duration::from_micros(us), values.ops()?)))
}

fn fault(values: Values, inner: Arc<dyn Disk>) -> Result<Arc<dyn Disk>, SpecError> {
    let errno =
        values.map("errno", errno_of, "EIO, ENOSPC, ETIMEDOUT, another errno or its number");
    let rule = FaultRule {
        ops: values.ops()?,
        sectors: values.map("sectors", sectors_of, "of the form FIRST-LAST, such as 0-7")?,
        every: values.number("every")?.map_or(1, NonZeroU64::get),
        error: IoError::Errno(errno?.unwrap_or(libc::EIO)),
    };
    Ok(Arc::new(Fault::new(inner, rule)))
}

fn limit(values: Values, inner: Arc<dyn Disk>) -> Result<Arc<dyn Disk>, SpecError> {
    let megabytes = |text: &str| text.parse().ok().and_then(|n: u64| n.checked_mul(1_000_000));
    let bytes = |text: &str| NonZeroU64::new(megabytes(text)?);
    let rates = Rates {
        ios: values.number("iops")?,
        bytes: values.map("mbps", bytes, "a whole number above 0")?,
        burst: Duration::from_millis(values.number("burst-ms")?.map_or(10, NonZeroU64::get)),
    };
    if rates.ios.is_none() && rates.bytes.is_none() {
        return Err(SpecError::Missing { wrapper: "limit", key: "iops=NUMBER or mbps=NUMBER" });
    }
    Ok(Arc::new(Limit::new(inner, rates)))
}

fn record(values: Values, inner: Arc<dyn Disk>, open: Open) -> Result<Arc<dyn Disk>, SpecError> {
    let path =
        values.map("path", |text| (!text.is_empty()).then(|| PathBuf::from(text)), "a path")?;
    let path = path.ok_or(SpecError::Missing { wrapper: "record", key: "path=FILE" })?;
    match open(&path) {
        Ok(file) => Ok(Arc::new(Record::to_file(inner, file))),
        Err(source) => Err(SpecError::Record { path, source }),
    }
}

fn sectors_of(text: &str) -> Option<RangeInclusive<u64>> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then_some(first..=last)
}

fn errno_of(text: &str) -> Option<i32> {
    const KNOWN: [(&str, i32); 10] = [
        ("EIO", libc::EIO),
        ("ENOSPC", libc::ENOSPC),
        ("ETIMEDOUT", libc::ETIMEDOUT),
        ("EAGAIN", libc::EAGAIN),
        ("EINVAL", libc::EINVAL),
        ("ENOMEM", libc::ENOMEM),
        ("EROFS", libc::EROFS),
        ("ENOLINK", libc::ENOLINK),
        ("EREMOTEIO", libc::EREMOTEIO),
        ("EILSEQ", libc::EILSEQ),
    ];
    let by_name = KNOWN.iter().find(|(name, _)| *name == text).map(|(_, errno)| *errno);
    by_name.or_else(|| text.parse().ok().filter(|errno| (1..4096).contains(errno)))
}

/// The values of a specification, by key.
struct Values {
    wrapper: &'static str,
    values: Vec<(&'static str, String)>,
}

impl Values {
    fn parse(
        wrapper: &'static str,
        text: &str,
        keys: &[&'static str],
        known: &'static str,
    ) -> Result<Values, SpecError> {
        let mut values: Vec<(&'static str, String)> = Vec::new();
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(SpecError::NotKeyValue { wrapper, part: part.into(), known });
            };
            let Some(&key) = keys.iter().find(|known| **known == key) else {
                return Err(SpecError::UnknownKey { wrapper, key: key.into(), known });
            };
            if values.iter().any(|(before, _)| *before == key) {
                return Err(SpecError::Repeated { wrapper, key });
            }
            values.push((key, value.into()));
        }
        Ok(Values { wrapper, values })
    }

    /// The value of `key`, parsed by `read`; `None` if the key is missing.
    fn map<T>(
        &self,
        key: &'static str,
        read: impl Fn(&str) -> Option<T>,
        expected: &'static str,
    ) -> Result<Option<T>, SpecError> {
        let Some((_, value)) = self.values.iter().find(|(known, _)| *known == key) else {
            return Ok(None);
        };
        let (wrapper, bad) = (self.wrapper, value.clone());
        read(value).map(Some).ok_or(SpecError::BadValue { wrapper, key, value: bad, expected })
    }

    fn number(&self, key: &'static str) -> Result<Option<NonZeroU64>, SpecError> {
        self.map(key, |text| text.parse().ok(), "a whole number above 0")
    }

    fn ops(&self) -> Result<OpSet, SpecError> {
        let expected =
            "all, or read, write, flush, discard, write-zeroes, secure-erase joined by +";
        Ok(self.map("ops", OpSet::parse, expected)?.unwrap_or(OpSet::ALL))
    }
}
