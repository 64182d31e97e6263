// SPDX-License-Identifier: Apache-2.0
//! The configuration file of a disk that goes on in another image, or with other live options: comments and other options
//! stay. And that of a disk which has none.

use super::live::Live;
use crate::config;
use crate::disk_options;
use crate::image::inherit;
use crate::options::DiskArgs;
use crate::values::{Burst, Cache, OnError, word};
use backend::create::sync_directory;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::NamedTempFile;
use toml_edit::{DocumentMut, Item, Value};

/// Permission bits of a new file.
const MODE: u32 = 0o644;
/// The first line of a new file.
const HEAD: &str = "# Written by vhost-blk ctl (--save). Comments and changes stay.\n";

/// A new configuration file beside the present one; removed when it is dropped.
#[derive(Debug)]
pub(super) struct NewConfig {
    /// The present file, without symbolic links.
    path: PathBuf,
    /// Its text.
    present: String,
    new: NamedTempFile,
}

impl NewConfig {
    /// Writes the new file, durably. `old`: the options of the running disk; `new`: its next ones.
    ///
    /// # Errors
    /// Cause and remedy, also if the present file describes another image.
    pub(super) fn prepare(file: &Path, old: &DiskArgs, new: &DiskArgs) -> Result<Self, String> {
        let shown = file.display();
        let (path, present) = read(file)?;
        let described = config::disk_of_text(&path, &present).map_err(|it| it.to_string())?;
        if (&described.blk_file, described.format) != (&old.blk_file, old.format) {
            return Err(format!(
                "{shown} describes another image than the running disk has; restore it, or reload"
            ));
        }
        let text = edited(&path, &present, |document| set_image(document, new))?;
        NewConfig::write(path, present, &text)
    }

    /// As [`NewConfig::prepare`], for a part of the options that a running disk can adopt.
    ///
    /// # Errors
    /// Cause and remedy.
    pub(super) fn prepare_live(file: &Path, new: &DiskArgs, part: Live) -> Result<Self, String> {
        let (path, present) = read(file)?;
        let text = edited(&path, &present, |document| {
            set_live(document, new, part);
            Ok(())
        })?;
        // The next start reads this text.
        let read = config::disk_of_text(&path, &text).map_err(|it| it.to_string())?;
        match part.put(new, read.clone()) == read {
            true => NewConfig::write(path, present, &text),
            false => Err(format!("{} cannot hold these options", file.display())),
        }
    }

    fn write(path: PathBuf, present: String, text: &str) -> Result<Self, String> {
        let new = write_beside(&path, text, |file| {
            let old = fs::metadata(&path).map_err(|error| cannot_write(&path, &error))?;
            inherit(&old, file).map_err(|error| {
                let path = path.display();
                format!("{path}: the new file cannot get its owner and mode: {error}; give {path} to the daemon's user (chown)")
            })
        })?;
        Ok(NewConfig { path, present, new })
    }

    /// The present file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the present file. `is_marked`: after a crash the old file may name the old image, whose mark keeps a
    /// disk from it. Without a mark the new file has to be durable.
    ///
    /// # Errors
    /// The cause; the present file stays.
    pub(super) fn replace(self, is_marked: bool) -> Result<(), String> {
        self.replace_by(is_marked, sync_directory)
    }

    fn replace_by(
        self,
        is_marked: bool,
        sync: impl Fn(&Path) -> io::Result<()>,
    ) -> Result<(), String> {
        let NewConfig { path, present, new } = self;
        let failed = |error: io::Error| format!("{} cannot be replaced: {error}", path.display());
        if fs::read_to_string(&path).map_err(failed)? != present {
            return Err(format!("{} was changed meanwhile; repeat the command", path.display()));
        }
        // A second name of the present file.
        let linked = |name: &Path| fs::hard_link(&path, name);
        let second = || names().make_in(directory_of(&path), linked).map_err(failed);
        let present = (!is_marked).then(second).transpose()?;
        new.persist(&path).map_err(|error| failed(error.error))?;
        let Err(error) = sync(&path) else { return Ok(()) };
        let Some(present) = present else {
            tracing::warn!(%error, path = %path.display(), "the new name may not be durable");
            return Ok(());
        };
        let told = failed(error);
        match present.into_temp_path().persist(&path) {
            Ok(()) => Err(told),
            // The file names the new storage, in which the guest goes on then.
            Err(why) => {
                let path = path.display();
                tracing::error!(error = told, %why, %path, "the old configuration could not be restored: keep the new file, which names the storage of the guest, and check its file system");
                Ok(())
            }
        }
    }
}

/// Names that are no configuration file.
fn names() -> tempfile::Builder<'static, 'static> {
    let mut names = tempfile::Builder::new();
    names.prefix(".new.").suffix(".part");
    names
}

fn directory_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// The real path of a configuration file, and its text.
fn read(file: &Path) -> Result<(PathBuf, String), String> {
    let cannot = |error: io::Error| {
        let file = file.display();
        format!(
            "{file} cannot be rewritten: {error}; write it again, and let the daemon's user read it"
        )
    };
    let path = fs::canonicalize(file).map_err(cannot)?;
    let text = fs::read_to_string(&path).map_err(cannot)?;
    Ok((path, text))
}

/// Writes a temporary file beside `path`, durably, after `permit` has set its permissions.
fn write_beside(
    path: &Path,
    text: &str,
    permit: impl FnOnce(&File) -> Result<(), String>,
) -> Result<NamedTempFile, String> {
    let failed = |error: io::Error| cannot_write(path, &error);
    let mut made = names().tempfile_in(directory_of(path)).map_err(failed)?;
    permit(made.as_file())?;
    let mut write = || {
        made.write_all(text.as_bytes())?;
        made.as_file().sync_all()
    };
    write().map_err(failed)?;
    Ok(made)
}

fn cannot_write(file: &Path, error: &io::Error) -> String {
    format!(
        "{} cannot be written: {error}; let the daemon's user write to its directory (ReadWritePaths= of its unit)",
        file.display()
    )
}

/// Writes the file of a disk that has none, durably.
///
/// # Errors
/// Cause and remedy, also if there is a file at the path.
pub(super) fn create(path: &Path, args: &DiskArgs) -> Result<(), String> {
    let made = write_new(path, args)?;
    match made.persist_noclobber(path) {
        Ok(_) => sync_directory(path).map_err(|error| {
            let _ = fs::remove_file(path); // the disk is not saved
            cannot_write(path, &error)
        }),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
            Err(format!("{} exists; remove or rename that file", path.display()))
        }
        Err(error) => Err(cannot_write(path, &error.error)),
    }
}

/// Checks that [`create`] can write a file.
///
/// # Errors
/// Cause and remedy. Nothing remains in any case.
pub(super) fn check_create(path: &Path, args: &DiskArgs) -> Result<(), String> {
    write_new(path, args).map(drop)
}

fn write_new(path: &Path, args: &DiskArgs) -> Result<NamedTempFile, String> {
    let text = text_of(args)?;
    write_beside(path, &text, |file| {
        let set = file.set_permissions(fs::Permissions::from_mode(MODE));
        set.map_err(|error| cannot_write(path, &error))
    })
}

/// A file with the options of a disk that differ from the defaults.
fn text_of(args: &DiskArgs) -> Result<String, String> {
    let utf8 =
        |path: &Path| path.to_str().map(str::to_owned).ok_or("a path is not UTF-8; rename it");
    let options = disk_options::of_disk(args, utf8)?;
    let mut document = DocumentMut::new();
    for (name, value) in disk_options::differing(&options) {
        let value = value_of(&value).ok_or("an option cannot be written; give it by hand")?;
        document.insert(&name.replace('_', "-"), Item::Value(value));
    }
    let text = format!("{HEAD}{document}");
    match config::disk_of_text(Path::new("a new file"), &text) {
        Ok(described) if described == *args => Ok(text),
        _ => Err("an option cannot be written; write the file by hand".to_owned()),
    }
}

fn value_of(value: &serde_json::Value) -> Option<Value> {
    use serde_json::Value as Json;
    Some(match value {
        Json::Bool(is_on) => (*is_on).into(),
        Json::Number(number) => match number.as_i64() {
            Some(number) => number.into(),
            None => number.as_f64()?.into(),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(items) => {
            Value::Array(items.iter().map(value_of).collect::<Option<toml_edit::Array>>()?)
        }
        Json::Null | Json::Object(_) => return None,
    })
}

/// The text of the configuration file at `path` after an edit.
fn edited(
    path: &Path,
    text: &str,
    edit: impl Fn(&mut DocumentMut) -> Result<(), String>,
) -> Result<String, String> {
    let parsed = text.parse().map_err(|error: toml_edit::TomlError| error.message().to_owned());
    let done = parsed.and_then(|mut document: DocumentMut| {
        edit(&mut document)?;
        Ok(document.to_string())
    });
    done.map_err(|why| format!("{}: {why}; write KEY = VALUE lines (TOML)", path.display()))
}

/// Sets the options of another image.
fn set_image(document: &mut DocumentMut, new: &DiskArgs) -> Result<(), String> {
    let path = new.blk_file.as_deref().and_then(Path::to_str);
    set(document, "blk-file", path.ok_or("the path of the image is not UTF-8")?.into());
    set(document, "format", new.format.map_or("raw".to_owned(), word).into());
    set(document, "allow-backing", word(new.allow_backing).into());
    if let Some(block) = new.logical_block_size {
        set(document, "logical-block-size", i64::from(block).into());
    }
    Ok(())
}

/// Sets this part of the options that a running disk can adopt.
fn set_live(document: &mut DocumentMut, new: &DiskArgs, part: Live) {
    let number = |number: std::num::NonZeroU64| i64::try_from(number.get()).unwrap_or(i64::MAX);
    let burst = (new.limit_burst != Burst(data_plane::Limits::BURST_DEFAULT))
        .then(|| new.limit_burst.0.as_secs_f64().into());
    // A line with the default stays.
    let on_error = (new.on_error != OnError::Report || document.contains_key("on-error"))
        .then(|| word(new.on_error).into());
    let cache = (new.cache != Cache::Writeback || document.contains_key("cache"))
        .then(|| word(new.cache).into());
    let all = [
        ("limit-iops", new.limit_iops.map(|iops| number(iops).into())),
        ("limit-bandwidth", new.limit_bandwidth.map(|bytes| number(bytes).into())),
        ("limit-burst", burst),
        ("limit-group", new.limit_group.as_deref().map(Value::from)),
        ("cache", cache),
        ("on-error", on_error),
        ("on-read-error", new.on_read_error.map(|policy| word(policy).into())),
        ("io-timeout", new.io_timeout.map(|limit| seconds(limit.0))),
    ];
    for (key, value) in all.into_iter().filter(|(key, _)| part.has(key)) {
        match value {
            Some(value) => set(document, key, value),
            None => drop(document.remove(key)),
        }
    }
}

/// Seconds, without a fraction if there is none.
fn seconds(time: Duration) -> Value {
    match i64::try_from(time.as_secs()) {
        Ok(seconds) if time.subsec_nanos() == 0 => seconds.into(),
        _ => time.as_secs_f64().into(),
    }
}

/// Sets a key; a comment on its line stays.
fn set(document: &mut DocumentMut, key: &str, mut value: Value) {
    match document.get_mut(key).and_then(Item::as_value_mut) {
        Some(present) => {
            *value.decor_mut() = present.decor().clone();
            *present = value;
        }
        None => {
            document.insert(key, Item::Value(value));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Uid, getuid};
    use rustix::thread::set_thread_res_uid;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use toml::Table;

    /// The file of a disk that goes on in `/b`, and the new one.
    fn of_next(directory: &Path) -> (PathBuf, NewConfig) {
        let file = directory.join("a.toml");
        let text = "blk-file = '/a'\nsocket-path = '/s'\n";
        fs::write(&file, text).unwrap();
        let config = of_next_in(&file).unwrap();
        (file, config)
    }

    fn of_next_in(file: &Path) -> Result<NewConfig, String> {
        let old = config::disk_of_file(file).unwrap();
        let new = DiskArgs { blk_file: Some("/b".into()), ..old.clone() };
        NewConfig::prepare(file, &old, &new)
    }

    /// After a crash, the old file would start the disk in its old image, which no mark keeps it from.
    #[test]
    fn a_new_file_that_is_not_durable_is_refused_if_the_old_image_has_no_mark() {
        let directory = tempfile::tempdir().unwrap();
        let fails = |_: &Path| Err(io::Error::from_raw_os_error(libc::EIO));
        for (is_marked, named, done) in [(false, "'/a'", false), (true, "\"/b\"", true)] {
            let (file, config) = of_next(directory.path());
            let replaced = config.replace_by(is_marked, fails);
            assert_eq!(replaced.is_ok(), done, "{replaced:?}");
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.contains(named), "{text}");
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
        }
        let (file, config) = of_next(directory.path());
        config.replace(false).unwrap();
        assert!(fs::read_to_string(&file).unwrap().contains("/b"));
    }

    #[test]
    fn the_file_of_another_user_stays_and_the_error_has_the_remedy() {
        if !getuid().is_root() {
            return println!("SKIP: only root can give a file away");
        }
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
        drop(of_next(directory.path()).1);
        let as_another_user = std::thread::scope(|scope| {
            let prepare = scope.spawn(|| {
                let nobody = Uid::from_raw(65_534);
                set_thread_res_uid(nobody, nobody, nobody).unwrap();
                of_next_in(&directory.path().join("a.toml")).err()
            });
            prepare.join().unwrap()
        });
        let told = as_another_user.unwrap();
        assert!(told.contains("give") && told.contains("to the daemon's user (chown)"), "{told}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_the_options_of_the_storage_change_and_comments_stay() {
        let text = "# The database.\nserial = 'db'\n\nblk-file = '/a.img' # raw\n\
                    socket-path = \"/s\"\nwrap = [\"delay:us=1\"]\nformat = 'raw'\n# The end.\n";
        let old = config::disk_of_table("a test", &text.parse::<Table>().unwrap()).unwrap();
        let new = DiskArgs {
            blk_file: Some("/o's.qcow2".into()),
            format: Some(crate::values::Format::Qcow2),
            allow_backing: crate::values::AllowBacking::SameDir,
            logical_block_size: Some(4096),
            ..old
        };
        let edited =
            edited(Path::new("a.toml"), text, |document| set_image(document, &new)).unwrap();
        let again = config::disk_of_table("a test", &edited.parse::<Table>().unwrap()).unwrap();
        assert_eq!(again, new, "{edited}");
        for line in ["# The database.\n", " # raw\n", "# The end.\n", "serial = 'db'\n"] {
            assert!(edited.contains(line), "{line}: {edited}");
        }
    }

    #[test]
    fn limits_and_the_cache_mode_change_and_comments_stay() {
        let text = "# The database.\nblk-file = '/a.img' # raw\nsocket-path = '/s'\n\
                    limit-iops = 5 # slow\nlimit-group = 'gold'\non-read-error = 'stop'\n\
                    on-error = 'stop' # halts\n";
        let old = config::disk_of_table("a test", &text.parse::<Table>().unwrap()).unwrap();
        let new = DiskArgs {
            limit_iops: std::num::NonZeroU64::new(7),
            limit_bandwidth: std::num::NonZeroU64::new(1 << 20),
            limit_burst: Burst(std::time::Duration::from_millis(250)),
            limit_group: None,
            cache: crate::values::Cache::Writethrough,
            on_error: OnError::Enospc,
            on_read_error: None,
            io_timeout: Some(crate::values::IoTimeout(std::time::Duration::from_millis(1500))),
            ..old
        };
        let text_with = |new: &DiskArgs, text: &str| {
            let change = |document: &mut DocumentMut| {
                set_live(document, new, Live::All);
                Ok(())
            };
            edited(Path::new("a.toml"), text, change).unwrap()
        };
        let edited = text_with(&new, text);
        let again = config::disk_of_table("a test", &edited.parse::<Table>().unwrap()).unwrap();
        assert_eq!(again, new, "{edited}");
        for line in
            ["# The database.\n", " # raw\n", "limit-iops = 7 # slow\n", "\"enospc\" # halts\n"]
        {
            assert!(edited.contains(line), "{line}: {edited}");
        }
        let seconds = Some(crate::values::IoTimeout(std::time::Duration::from_secs(5)));
        let plain = DiskArgs { on_error: OnError::Report, io_timeout: seconds, ..new };
        let edited = text_with(&plain, &edited);
        for line in ["on-error = \"report\" # halts\n", "io-timeout = 5\n"] {
            assert!(edited.contains(line), "{line}: {edited}");
        }
    }

    #[test]
    fn a_file_that_was_changed_meanwhile_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (file, config) = of_next(directory.path());
        fs::write(&file, "blk-file = '/c'\nsocket-path = '/s'\n").unwrap();
        let why = config.replace(false).unwrap_err();
        assert!(why.contains("was changed meanwhile"), "{why}");
        assert!(fs::read_to_string(&file).unwrap().contains("/c"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_new_file_has_the_options_that_are_no_defaults_and_replaces_no_other_one() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.toml");
        for table in [
            "blk-file = '/a'\nsocket-path = '/s'",
            "blk-file = '/o''s\"'\nsocket-path = '/s'\nwrap = ['delay:us=1', 'limit:iops=5']\n\
             io-timeout = 2.5\nsocket-mode = '0640'\nread-only = true\nserial = 'b'",
            "backend = 'mem'\nsize = '1G'\nsocket-path = '/s'\nlimit-bandwidth = '5M'",
        ] {
            let table = table.replace("''s", "\u{2019}s");
            let args = config::disk_of_table("a test", &table.parse::<Table>().unwrap()).unwrap();
            create(&file, &args).unwrap();
            assert_eq!(config::disk_of_file(&file).unwrap(), args);
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, MODE);
            let text = fs::read_to_string(&file).unwrap();
            assert!(!text.contains("queue-size"), "{text}");
            let why = create(&file, &args).unwrap_err();
            assert!(why.contains("exists; remove or rename"), "{why}");
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
            fs::remove_file(&file).unwrap();
        }
    }
}
