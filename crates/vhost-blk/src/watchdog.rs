// SPDX-License-Identifier: Apache-2.0
//! The service manager's watchdog (`sd_watchdog_enabled(3)`): it restarts the daemon if a thread of
//! the io_uring data plane stops.
//!
//! A ping goes to the manager after each of these threads has answered. Storage that hangs delays
//! no answer, so it brings no restart. The threads of the kernel data plane belong to the kernel and
//! are not watched.

use crate::disks::Disks;
use crate::notify;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pings in each period of the manager.
const PINGS: u32 = 3;

/// Starts to ping the service manager, if it wants that.
pub(crate) fn start(disks: &Arc<Disks>) {
    let variable = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
    let (period, process) = (variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"));
    let period = match period_of(period, process, std::process::id()) {
        Ok(Some(period)) => period,
        Ok(None) => return,
        Err(why) => return tracing::warn!("the watchdog is off: {why}"),
    };
    let disks = Arc::clone(disks);
    let body = move || ping(&disks, period / PINGS);
    if let Err(error) = std::thread::Builder::new().name("watchdog".into()).spawn(body) {
        tracing::error!(%error, "the watchdog cannot start; the service manager ends the daemon");
    }
}

/// The manager's period; `None`: it watches no process, or another one.
fn period_of(
    period: Option<OsString>,
    process: Option<OsString>,
    own_id: u32,
) -> Result<Option<Duration>, String> {
    let number = |name: &str, value: OsString| {
        let number = value.to_str().and_then(|value| value.parse::<u64>().ok());
        number.filter(|&number| number > 0).ok_or_else(|| format!("{name} is {value:?}"))
    };
    let Some(period) = period else { return Ok(None) };
    let period = Duration::from_micros(number("WATCHDOG_USEC", period)?);
    let process = process.map(|process| number("WATCHDOG_PID", process)).transpose()?;
    Ok(process.is_none_or(|process| process == u64::from(own_id)).then_some(period))
}

/// Pings until the process ends.
fn ping(disks: &Disks, interval: Duration) {
    loop {
        let begin = Instant::now();
        match disks.silent_thread(interval) {
            None => drop(notify::notify("WATCHDOG=1")),
            Some(thread) => tracing::error!(
                thread,
                ?interval,
                "a thread of the data plane does not answer; the service manager restarts the \
                 daemon if this lasts"
            ),
        }
        std::thread::sleep(interval.saturating_sub(begin.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn period(usec: &str, pid: Option<&str>) -> Result<Option<Duration>, String> {
        period_of(Some(usec.into()), pid.map(Into::into), 7)
    }

    #[test]
    fn the_manager_gives_the_period_and_the_process() {
        let second = Duration::from_secs(1);
        assert_eq!(period_of(None, Some("7".into()), 7), Ok(None));
        assert_eq!(period("1000000", None), Ok(Some(second)));
        assert_eq!(period("1000000", Some("7")), Ok(Some(second)));
        assert_eq!(period("1000000", Some("8")), Ok(None));
    }

    #[test]
    fn a_wrong_variable_is_named() {
        for value in ["0", "-1", "soon", "1.5"] {
            let why = period(value, None).unwrap_err();
            assert!(why.starts_with("WATCHDOG_USEC is "), "{why}");
        }
        assert_eq!(period("1", Some("x")).unwrap_err(), "WATCHDOG_PID is \"x\"");
    }
}
