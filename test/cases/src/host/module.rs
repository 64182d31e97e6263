// SPDX-License-Identifier: Apache-2.0
//! The module itself: its users, unloading and reloading.

use crate::host::env::Env;
use crate::host::fixture::{wait_for, wait_until};
use anyhow::{Context, Result};
use driver::kernel::KernelDevice;
use kit::outcome::skip;
use kit::system::run;
use std::path::{Path, PathBuf};

/// Directory of the module in sysfs.
const SYSFS: &str = "/sys/module/vhost_blk";

/// Number of users of the module.
pub(crate) fn references() -> Result<u64> {
    let path = format!("{SYSFS}/refcnt");
    let text = std::fs::read_to_string(&path).map_err(|_| skip("vhost_blk is not a module"))?;
    text.trim().parse().context(path)
}

/// Waits until the module has at most `count` users.
pub(crate) fn wait_for_references(count: u64) -> Result<()> {
    let look = || Ok((references()? <= count).then_some(()));
    wait_until(&format!("the module to be used {count} times at most"), look)
        .with_context(|| format!("it is used {:?} times", references().ok()))
}

/// Unloads and reloads the module, which must have no user.
pub(crate) fn reload(env: &Env) -> Result<()> {
    wait_for_references(0)?;
    let path = env.modules.join("vhost_blk.ko");
    if !path.exists() {
        return Err(skip(format!("{} is missing", path.display())));
    }
    run("rmmod", &["vhost_blk"])?;
    run("insmod", &[&path.to_string_lossy()])?;
    wait_for(KernelDevice::PATH)
}

/// A parameter of the module with a temporary value, restored on drop.
pub(crate) struct Parameter {
    path: PathBuf,
    before: String,
}

impl Parameter {
    /// Sets the temporary value.
    pub(crate) fn set(name: &str, value: u64) -> Result<Self> {
        let path = Path::new(SYSFS).join("parameters").join(name);
        let before = std::fs::read_to_string(&path)
            .map_err(|_| skip(format!("the module has no parameter {name}")))?;
        std::fs::write(&path, value.to_string()).with_context(|| path.display().to_string())?;
        Ok(Self { path, before })
    }
}

impl Drop for Parameter {
    fn drop(&mut self) {
        if let Err(why) = std::fs::write(&self.path, self.before.trim()) {
            eprintln!("clean-up: {}: {why}", self.path.display());
        }
    }
}
