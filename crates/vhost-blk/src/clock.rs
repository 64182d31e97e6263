// SPDX-License-Identifier: Apache-2.0
//! Times as text: RFC 3339 in UTC, as in the log.

use jiff::Timestamp;
use std::time::{Duration, SystemTime};

/// The present time, with milliseconds: of an event or a slow request.
pub(crate) fn now() -> String {
    format!("{:.3}", Timestamp::now())
}

/// A time in the past, in whole seconds. A clock beyond the year 9999 tells 1970.
pub(crate) fn told(time: SystemTime) -> String {
    format!("{:.0}", Timestamp::try_from(time).unwrap_or_default())
}

/// The time since a told one, in its largest unit; `None`: it is no time.
pub(crate) fn age(told: &str) -> Option<String> {
    let since = SystemTime::from(told.parse::<Timestamp>().ok()?);
    Some(unit(since.elapsed().unwrap_or_default()))
}

fn unit(age: Duration) -> String {
    match age.as_secs() {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3600 => format!("{}m", seconds / 60),
        seconds @ 3600..86_400 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_in_utc_with_a_fixed_number_of_digits() {
        let at = |ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
        assert_eq!(told(at(1_795_603_812_999)), "2026-11-25T10:50:12Z");
        assert_eq!(told(at(0)), "1970-01-01T00:00:00Z");
        let now = now();
        assert_eq!((now.len(), now.find('.'), now.find('Z')), (24, Some(19), Some(23)), "{now}");
    }

    #[test]
    fn an_age_is_that_of_its_time_in_the_largest_unit() {
        let of =
            [0, 59, 60, 3599, 3600, 86_400 * 3].map(|seconds| unit(Duration::from_secs(seconds)));
        assert_eq!(of, ["0s", "59s", "1m", "59m", "1h", "3d"]);
        let before = SystemTime::now() - Duration::from_secs(7200);
        assert_eq!(age(&told(before)).as_deref(), Some("2h"));
        assert_eq!(age("yesterday"), None);
    }
}
