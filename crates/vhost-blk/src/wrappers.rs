// SPDX-License-Identifier: Apache-2.0
//! The wrappers of `--wrap` around a disk.

use crate::failure::Failure;
use crate::options::DiskArgs;
use backend::wrap::{SpecError, check_spec, from_spec};
use backend::{Disk, Null};
use std::sync::Arc;

/// A disk with the wrappers of the options.
///
/// # Errors
/// [`Failure`] if one of them is malformed.
pub(crate) fn wrapped(disk: Arc<dyn Disk>, args: &DiskArgs) -> Result<Arc<dyn Disk>, Failure> {
    wrapped_by(from_spec, disk, args)
}

/// Checks the wrappers of the options.
///
/// # Errors
/// [`Failure`] if one of them is malformed.
pub(crate) fn check(args: &DiskArgs) -> Result<(), Failure> {
    wrapped_by(check_spec, Arc::new(Null::new(512)), args).map(drop)
}

fn wrapped_by(
    wrap: impl Fn(&str, Arc<dyn Disk>) -> Result<Arc<dyn Disk>, SpecError>,
    disk: Arc<dyn Disk>,
    args: &DiskArgs,
) -> Result<Arc<dyn Disk>, Failure> {
    args.wrap.iter().try_fold(disk, |disk, spec| {
        wrap(spec, disk).map_err(|error| {
            let what = format!("use --wrap {spec}");
            Failure::usage(what, error, "see --wrap in vhost-blk serve --help")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::disk_of_text;
    use std::path::Path;

    #[test]
    fn a_check_finds_what_is_malformed_and_creates_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let args = |wrap: &[&str]| {
            let text = format!("blk-file = \"a\"\nwrap = {wrap:?}");
            disk_of_text(Path::new("a.toml"), &text).unwrap()
        };
        let record = format!("record:path={}", log.display());
        check(&args(&["delay:us=1", &record])).unwrap();
        assert!(!log.exists());
        for wrong in ["record", "record:file=x", "nonsense"] {
            let failure = check(&args(&["delay:us=1", wrong])).unwrap_err();
            assert!(failure.what.contains(wrong), "{failure}");
        }
        wrapped(Arc::new(Null::new(512)), &args(&[&record])).unwrap();
        assert!(log.exists());
    }
}
