// SPDX-License-Identifier: Apache-2.0
//! Waits for the kernel or another program.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// Pause between two tries that are expensive, such as a question to a guest.
const LONG_PAUSE: Duration = Duration::from_millis(50);

/// Calls `look`, at least once, until it finds something.
///
/// # Errors
/// Fails if `look` fails, or finds nothing within the limit.
pub fn wait_until<T>(
    limit: Duration,
    what: &str,
    look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    wait(limit, PAUSE, what, look)
}

/// Calls `is_so`, less often, until it is true.
///
/// # Errors
/// Fails if `is_so` fails, or stays false for the whole limit.
pub fn wait_until_so(
    limit: Duration,
    what: &str,
    mut is_so: impl FnMut() -> Result<bool>,
) -> Result<()> {
    wait(limit, LONG_PAUSE, what, || Ok(is_so()?.then_some(())))
}

fn wait<T>(
    limit: Duration,
    pause: Duration,
    what: &str,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() > end {
            bail!("waited {} s in vain: {what}", limit.as_secs());
        }
        std::thread::sleep(pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_at_the_third_look_is_found() {
        let mut looks = 0..;
        let third = || Ok(looks.next().filter(|look| *look == 2));
        assert_eq!(wait_until(Duration::from_secs(60), "a third look", third).unwrap(), 2);
    }

    #[test]
    fn a_wait_in_vain_says_for_what() {
        let error = wait_until(Duration::ZERO, "the moon", || Ok(None::<()>)).unwrap_err();
        assert_eq!(error.to_string(), "waited 0 s in vain: the moon");
    }

    #[test]
    fn a_look_that_fails_ends_the_wait() {
        let error = wait_until::<()>(Duration::from_secs(60), "", || bail!("blind")).unwrap_err();
        assert_eq!(error.to_string(), "blind");
    }
}
