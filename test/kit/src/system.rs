// SPDX-License-Identifier: Apache-2.0
//! Programs of the system, and the kernel's modules.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::outcome::skip;
use crate::process::run_to_end;

/// `$XDG_CACHE_HOME/vhost-blk`, by default `$HOME/.cache/vhost-blk`: the place of downloads, kernels and logs. An empty
/// variable counts as one that is not set.
///
/// # Errors
/// Neither variable is set.
pub fn cache_directory() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let base = set("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")));
    let base = base.context("neither XDG_CACHE_HOME nor HOME is set: set one, for the cache")?;
    Ok(base.join("vhost-blk"))
}

/// Runs a program; returns its output. Skips the case if it is not installed.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    run_to_end(&[&[program], arguments].concat()).map(|said| said.trim().to_owned())
}

/// As [`run`], for clean-up: a failure is only told.
pub fn run_quietly(program: &str, arguments: &[&str]) {
    if let Err(why) = run(program, arguments) {
        eprintln!("clean-up: {why:#}");
    }
}

/// Checksum of a file.
pub fn sha256(path: &Path) -> Result<String> {
    let line = run_to_end(&["sha256sum", &path.display().to_string()])?;
    Ok(line.split_whitespace().next().context("no checksum")?.to_owned())
}

/// Loads a module, or skips the case if the kernel has none of that name.
pub fn modprobe(module: &str, parameters: &[&str]) -> Result<()> {
    let arguments = [&["-q", module], parameters].concat();
    run("modprobe", &arguments)
        .map(drop)
        .map_err(|_| skip(format!("this kernel has no module {module}")))
}

/// The numbers of a list of CPUs as the kernel writes it, such as `0-2,5`.
pub fn cpu_list(text: &str) -> Result<Vec<usize>> {
    let number = |text: &str| {
        text.trim().parse::<usize>().with_context(|| format!("`{text}` is not a CPU number"))
    };
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(number(first)?..=number(last)?);
    }
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_have_numbers_and_ranges() {
        assert_eq!(cpu_list("0-2,5\n").unwrap(), [0, 1, 2, 5]);
        assert_eq!(cpu_list("a").unwrap_err().to_string(), "`a` is not a CPU number");
        assert!(cpu_list("").is_err());
    }
}
