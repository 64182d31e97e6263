// SPDX-License-Identifier: Apache-2.0
//! The mark of an image that is open for writing, and the leaked clusters of one that was not closed.
//!
//! A crash within a commit leaves clusters with a reference count that no table names. The mark is set
//! before the first write of a disk, and removed at its end, so that an image with a mark at its opening
//! may have such clusters. They are freed then, before imago reads the counts.

use crate::check;
use backend::File;
use backend::mark::{self, InUse as Mark};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Maximum clusters of a file whose leaked clusters are freed at the opening of the disk.
const RECLAIM_CLUSTERS_MAX: u64 = 4 << 20;

/// The mark of an open image.
#[derive(Debug)]
pub(crate) struct InUse {
    file: Arc<File>,
    mark: Mark,
}

impl InUse {
    pub(crate) fn begin(file: &Arc<File>, mark: Mark) -> io::Result<InUse> {
        // A mark that is there is durable: an upgrade must not wait for a sync of all data.
        if file.in_use()? != Some(mark) {
            file.set_in_use(mark)?;
        }
        Ok(InUse { file: Arc::clone(file), mark })
    }
}

impl InUse {
    /// Removes the mark, unless leaked clusters may be left. Nothing writes to the image any more.
    pub(crate) fn end(&self) {
        // A commit that failed is remembered as a failed sync.
        if self.mark == Mark::Sound && !self.file.has_failed_sync() {
            let _ = self.file.unset_in_use(); // then the next opening checks the image in vain
        }
    }
}

/// The outcome of [`reclaim`].
pub(crate) struct Reclaimed {
    /// The mark from now on.
    pub(crate) mark: Mark,
    /// A line for the user.
    pub(crate) notice: Option<String>,
}

/// Frees the leaked clusters of the image `opened`, which was not closed properly and is locked. Its name is
/// `path`.
pub(crate) fn reclaim(path: &Path, opened: &Path, cluster_bytes: u64) -> Reclaimed {
    reclaim_within(path, opened, cluster_bytes, RECLAIM_CLUSTERS_MAX)
}

fn reclaim_within(path: &Path, opened: &Path, cluster_bytes: u64, clusters_max: u64) -> Reclaimed {
    let shown = path.display();
    let by_hand = format!(
        "stop the disk and free them with `vhost-blk check --repair leaks {shown}`; the disk is \
         served meanwhile"
    );
    let left = |why: &str| Reclaimed {
        mark: Mark::Leaks,
        notice: Some(format!(
            "{shown}: it was not closed properly and may have leaked clusters, which only take space; \
             {why}; {by_hand}"
        )),
    };
    let open = || -> io::Result<(fs::File, u64)> {
        let file = fs::File::options().read(true).write(true).open(opened)?;
        let clusters = file.metadata()?.len().div_ceil(cluster_bytes);
        Ok((file, clusters))
    };
    let file = match open() {
        Ok((_, clusters)) if clusters > clusters_max => {
            return left(&format!("{clusters} clusters are too many for a check at the start"));
        }
        Ok((file, _)) => file,
        Err(why) => return left(&format!("it cannot be checked: {why}")),
    };
    match check::repair_leaks(path, &file) {
        Ok(report) if report.errors > 0 => left("its tables have errors (`vhost-blk check`)"),
        Ok(report) => {
            let (freed, bytes) = (report.repaired_leaks, report.repaired_leaks * cluster_bytes);
            let text = || {
                format!(
                    "{shown}: it was not closed properly; {freed} leaked clusters ({bytes} bytes) were \
                     freed"
                )
            };
            let mark = if report.leaks == 0 { Mark::Sound } else { Mark::Leaks };
            Reclaimed { mark, notice: (freed > 0).then(text) }
        }
        Err(why) => left(&format!("it cannot be checked: {why}")),
    }
}

/// Frees leaked clusters for `vhost-blk check`: as [`check::repair_leaks`], and removes the mark of an image
/// that was not closed properly.
///
/// # Errors
/// As there.
pub fn repair(path: &Path, file: &fs::File) -> Result<check::Report, crate::Qcow2Error> {
    let report = check::repair_leaks(path, file)?;
    if report.errors == 0 && report.leaks == 0 {
        let _ = mark::unset_in_use(file); // then the next opening checks the image in vain
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_with_too_many_clusters_is_not_checked_at_the_start() {
        let directory = tempfile::TempDir::new().expect("a directory");
        let path = directory.path().join("image");
        fs::write(&path, vec![0; 3 << 16]).expect("a file");
        let found = reclaim_within(&path, &path, 1 << 16, 2);
        let notice = found.notice.expect("a notice");
        assert_eq!(found.mark, Mark::Leaks);
        assert!(notice.contains("3 clusters are too many") && notice.contains("--repair leaks"));
    }
}
