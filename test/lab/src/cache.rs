// SPDX-License-Identifier: Apache-2.0
//! Expensive files are made once and kept under the user's cache directory.
//!
//! An entry is a directory that exists whole or not at all: it is built beside its place and renamed
//! into it. One builder works at a time; others wait for it and use its result.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The lab's directory under `$XDG_CACHE_HOME`.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// Opens (and makes) `$XDG_CACHE_HOME/vhost-blk`, by default `$HOME/.cache/vhost-blk`.
    pub fn open() -> Result<Self> {
        Self::open_in(&kit::system::cache_directory()?)
    }

    /// Opens (and makes) a cache in a given directory.
    pub fn open_in(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir)
            .with_context(|| format!("cannot create the cache directory {}", dir.display()))?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// The cache directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of entry `name`, filled by `build` if it is not there yet.
    pub fn entry(&self, name: &str, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let place = self.dir.join(name);
        if place.exists() {
            return Ok(place);
        }
        let _lock = self.lock(name)?;
        if place.exists() {
            return Ok(place);
        }
        // We hold the lock, so a directory here is the remainder of a builder that was killed.
        let staging = self.dir.join(format!(".building-{name}"));
        if staging.exists() {
            fs::remove_dir_all(&staging)?;
        }
        fs::create_dir(&staging)?;
        let built = build(&staging).and_then(|()| Ok(fs::rename(&staging, &place)?));
        if built.is_err() {
            let _ = fs::remove_dir_all(&staging);
        }
        built.with_context(|| format!("cannot make {name} in {}", self.dir.display()))?;
        Ok(place)
    }

    /// Names of the entries that start with `prefix`, the newest last.
    pub fn entries(&self, prefix: &str) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(prefix) && entry.file_type()?.is_dir() {
                found.push((entry.metadata()?.modified()?, name));
            }
        }
        found.sort();
        Ok(found.into_iter().map(|(_, name)| name).collect())
    }

    fn lock(&self, name: &str) -> Result<File> {
        let file = File::create(self.dir.join(format!(".lock-{name}")))?;
        if file.try_lock().is_err() {
            eprintln!("lab: another process is making {name}, waiting for it");
            file.lock()?;
        }
        Ok(file)
    }
}

/// A short name for a set of inputs: another input, another name.
pub fn key_of(inputs: &[&str]) -> String {
    let mut hasher = DefaultHasher::new();
    inputs.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open_in(dir.path()).unwrap();
        (dir, cache)
    }

    #[test]
    fn an_entry_is_built_once() {
        let (_dir, cache) = cache();
        let first = cache.entry("thing-1", |at| Ok(fs::write(at.join("file"), "made")?)).unwrap();
        let again = cache.entry("thing-1", |_| bail!("built twice")).unwrap();
        assert_eq!(first, again);
        assert_eq!(fs::read_to_string(again.join("file")).unwrap(), "made");
        assert_eq!(cache.entries("thing-").unwrap(), ["thing-1"]);
    }

    #[test]
    fn a_failed_build_leaves_no_entry_and_can_be_repeated() {
        let (_dir, cache) = cache();
        let failed = cache.entry("thing-1", |at| {
            fs::write(at.join("half"), "")?;
            bail!("no network")
        });
        assert!(format!("{:#}", failed.unwrap_err()).contains("no network"));
        assert!(cache.entries("").unwrap().is_empty());
        let made = cache.entry("thing-1", |_| Ok(())).unwrap();
        assert!(!made.join("half").exists());
    }

    #[test]
    fn what_a_killed_builder_left_is_not_used() {
        let (dir, cache) = cache();
        let left = dir.path().join(".building-thing-1");
        fs::create_dir(&left).unwrap();
        fs::write(left.join("half"), "").unwrap();
        let made = cache.entry("thing-1", |_| Ok(())).unwrap();
        assert!(!made.join("half").exists());
    }

    #[test]
    fn two_builders_at_once_make_one_entry() {
        let (_dir, cache) = cache();
        let builds = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    cache.entry("thing-1", |_| {
                        builds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        Ok(())
                    })
                });
            }
        });
        assert_eq!(builds.into_inner(), 1);
    }

    #[test]
    fn another_input_gives_another_key() {
        assert_eq!(key_of(&["a", "b"]), key_of(&["a", "b"]));
        assert_ne!(key_of(&["a", "b"]), key_of(&["ab", ""]));
    }
}
