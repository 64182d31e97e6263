// SPDX-License-Identifier: Apache-2.0
//! Waiting for what the kernel, or another program, does in its own time.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// Looks again and again until there is something, at least once.
///
/// # Errors
/// That of a look; or none has found anything within the limit.
pub fn wait_until<T>(
    limit: Duration,
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
        std::thread::sleep(PAUSE);
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
