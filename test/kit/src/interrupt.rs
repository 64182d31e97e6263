// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C and SIGTERM become a flag that every wait for a process looks at, so that the owners of
//! processes end them on the way out. A program that does not [`install`] it ends at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use anyhow::{Result, bail};

static REQUESTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(|| Arc::new(AtomicBool::new(false)));

/// Turns SIGINT, SIGTERM and SIGHUP into the flag that [`check`] reads.
pub fn install() -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&REQUESTED))?;
    }
    Ok(())
}

/// Fails once a signal has asked the program to end.
pub fn check() -> Result<()> {
    if REQUESTED.load(Ordering::Relaxed) {
        bail!("interrupted: everything that was started is being ended");
    }
    Ok(())
}
