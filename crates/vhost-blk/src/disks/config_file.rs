// SPDX-License-Identifier: Apache-2.0
//! The configuration file of a disk that goes on in another image. Comments and other options stay.

use super::exchange::sync_folder;
use crate::config;
use crate::image::inherit;
use crate::options::DiskArgs;
use crate::values::word;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;
use toml_edit::{DocumentMut, Item, Value};

/// A new configuration file beside the present one; removed when it is dropped.
#[derive(Debug)]
pub(super) struct NewConfig {
    /// The present file, without symbolic links.
    path: PathBuf,
    new: NamedTempFile,
}

impl NewConfig {
    /// Writes the new file, durably. `old`: the options of the running disk; `new`: its next ones.
    ///
    /// # Errors
    /// Cause and remedy, also if the present file describes another image.
    pub(super) fn prepare(file: &Path, old: &DiskArgs, new: &DiskArgs) -> Result<Self, String> {
        let shown = file.display();
        let failed = |error: io::Error| {
            format!(
                "{shown} cannot be rewritten: {error}; let the daemon's user write to its folder \
                 (ReadWritePaths= of its unit)"
            )
        };
        let path = fs::canonicalize(file).map_err(failed)?;
        let present = config::disk_of_file(&path).map_err(|failure| failure.to_string())?;
        if (&present.blk_file, present.format) != (&old.blk_file, old.format) {
            return Err(format!(
                "{shown} describes another image than the running disk has; restore it, or reload"
            ));
        }
        let text = edited(&fs::read_to_string(&path).map_err(failed)?, new)
            .map_err(|why| format!("{shown}: {why}; write KEY = VALUE lines (TOML)"))?;
        let written = || {
            let mut made = names().tempfile_in(folder_of(&path))?;
            inherit(&fs::metadata(&path)?, made.as_file())?;
            made.write_all(text.as_bytes())?;
            made.as_file().sync_all()?;
            Ok(made)
        };
        let made = written().map_err(failed)?;
        Ok(NewConfig { path, new: made })
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
        self.replace_by(is_marked, sync_folder)
    }

    fn replace_by(
        self,
        is_marked: bool,
        sync: impl Fn(&Path) -> io::Result<()>,
    ) -> Result<(), String> {
        let NewConfig { path, new } = self;
        let failed = |error: io::Error| format!("{} cannot be replaced: {error}", path.display());
        // A second name of the present file.
        let linked = |name: &Path| fs::hard_link(&path, name);
        let second = || names().make_in(folder_of(&path), linked).map_err(failed);
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
            Err(why) => Err(format!("{told}, nor restored: {}", why.error)),
        }
    }
}

/// Names that are no configuration file.
fn names() -> tempfile::Builder<'static, 'static> {
    let mut names = tempfile::Builder::new();
    names.prefix(".new.").suffix(".part");
    names
}

fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// The text of a configuration file with the options of another image.
fn edited(text: &str, new: &DiskArgs) -> Result<String, String> {
    let mut document: DocumentMut =
        text.parse().map_err(|error: toml_edit::TomlError| error.message().to_owned())?;
    let path = new.blk_file.as_deref().and_then(Path::to_str);
    set(&mut document, "blk-file", path.ok_or("the path of the image is not UTF-8")?.into());
    set(&mut document, "format", new.format.map_or("raw".to_owned(), word).into());
    set(&mut document, "allow-backing", word(new.allow_backing).into());
    if let Some(block) = new.logical_block_size {
        set(&mut document, "logical-block-size", i64::from(block).into());
    }
    Ok(document.to_string())
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
    use toml::Table;

    /// The file of a disk that goes on in `/b`, and the new one.
    fn of_next(folder: &Path) -> (PathBuf, NewConfig) {
        let file = folder.join("a.toml");
        let text = "blk-file = '/a'\nsocket-path = '/s'\n";
        fs::write(&file, text).unwrap();
        let old = config::disk_of_file(&file).unwrap();
        let new = DiskArgs { blk_file: Some("/b".into()), ..old.clone() };
        let config = NewConfig::prepare(&file, &old, &new).unwrap();
        (file, config)
    }

    /// After a crash, the old file would start the disk in its old image, which no mark keeps it from.
    #[test]
    fn a_new_file_that_is_not_durable_is_refused_if_the_old_image_has_no_mark() {
        let folder = tempfile::tempdir().unwrap();
        let fails = |_: &Path| Err(io::Error::from_raw_os_error(libc::EIO));
        for (is_marked, named, done) in [(false, "'/a'", false), (true, "\"/b\"", true)] {
            let (file, config) = of_next(folder.path());
            let replaced = config.replace_by(is_marked, fails);
            assert_eq!(replaced.is_ok(), done, "{replaced:?}");
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.contains(named), "{text}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        }
        let (file, config) = of_next(folder.path());
        config.replace(false).unwrap();
        assert!(fs::read_to_string(&file).unwrap().contains("/b"));
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
        let edited = edited(text, &new).unwrap();
        let again = config::disk_of_table("a test", &edited.parse::<Table>().unwrap()).unwrap();
        assert_eq!(again, new, "{edited}");
        for line in ["# The database.\n", " # raw\n", "# The end.\n", "serial = 'db'\n"] {
            assert!(edited.contains(line), "{line}: {edited}");
        }
    }
}
