// SPDX-License-Identifier: Apache-2.0
//! Options of a qcow2 disk.

use backend::FileOptions;

/// Backing files that an image may name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllowBacking {
    /// None.
    #[default]
    Off,
    /// Files in the directory of the image that names them.
    SameDir,
    /// Any file.
    Any,
}

/// Options of [`Qcow2Disk::open`](crate::Qcow2Disk::open).
#[derive(Clone, Debug, Default)]
pub struct Qcow2Options {
    /// Options of the files. The blocks of the disk have 512 bytes unless told otherwise.
    pub file: FileOptions,
    /// Backing files that the image may name.
    pub allow_backing: AllowBacking,
    /// The file that a disk of this process has locked for writing. That disk writes no more, and will
    /// be dropped.
    pub takes_over: Option<TakesOver>,
    /// The claimed clusters, as the last writer of the image knew them ([`Qcow2Disk::known`]). Give them only if the
    /// image has not changed since. Without them, all tables are read before the first change.
    ///
    /// [`Qcow2Disk::known`]: crate::Qcow2Disk::known
    pub known: Option<Vec<u8>>,
}

/// A file that another disk gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakesOver {
    /// Its number in the chain, 0 for the image itself.
    pub number: usize,
    /// Its [`identity`](backend::file::OpenAs::identity): another file at the path is refused.
    pub identity: (u64, u64),
}

impl Qcow2Options {
    /// The options of the files of the chain.
    pub(crate) fn of_files(&self) -> FileOptions {
        FileOptions { container: true, logical_block_bytes: None, ..self.file.clone() }
    }
}
