// SPDX-License-Identifier: Apache-2.0
//! The target of a backup: a new image, or the export of an NBD server. It is written, made durable, and
//! read again if the copy is verified.

use super::copier::CopyError;
use super::digest::Digest;
use crate::nbd::{Client, ZEROES_MAX};
use backend::wrap::{CLUSTER_BYTES, Clusters};
use qcow2::copy::{self, Source as Own};
use std::fmt::Display;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

/// Clusters of an export that are read again at once.
const AGAIN_MAX: u64 = 16;

/// A target that is written.
pub(super) enum Target {
    /// A new image.
    File(copy::Target),
    /// An export, which may have other content: each zero is written, too.
    Export(Client),
}

/// The parts of a target that are read again.
pub(super) enum Again {
    /// All of a new image.
    File {
        /// The file.
        file: File,
        /// Its path.
        path: PathBuf,
        /// It is no raw image.
        is_qcow2: bool,
    },
    /// The held ones of these clusters of an export.
    Export(Clusters),
}

impl Target {
    /// Writes data at a position; no position is written twice.
    pub(super) fn write(&mut self, at: u64, data: &[u8]) -> Result<(), CopyError> {
        let client = match self {
            Target::File(target) => return target.write(at, data).map_err(CopyError::Write),
            Target::Export(client) => client,
        };
        let mut done = 0;
        for run in copy::runs(at, data, CLUSTER_BYTES) {
            client.zero(at + done as u64..at + run.start as u64)?;
            client.write(at + run.start as u64, &data[run.clone()])?;
            done = run.end;
        }
        Ok(client.zero(at + done as u64..at + data.len() as u64)?)
    }

    /// Makes a range read as zeroes.
    pub(super) fn zero(&mut self, range: Range<u64>) -> Result<(), CopyError> {
        match self {
            Target::File(target) => target.zero(range).map_err(CopyError::Write),
            Target::Export(client) => Ok(client.zero(range)?),
        }
    }

    /// Most bytes to zero while a guest may wait.
    pub(super) fn zeroes_max(&self) -> u64 {
        match self {
            Target::File(_) => u64::MAX,
            Target::Export(_) => ZEROES_MAX,
        }
    }

    /// Makes the copy durable, and compares it with a digest of what was written.
    pub(super) fn finish(
        self,
        again: Option<(Again, Digest)>,
        goes_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), CopyError> {
        let mut client = match self {
            Target::File(target) => {
                target.finish().map_err(CopyError::Write)?;
                None
            }
            Target::Export(mut client) => {
                client.flush()?;
                Some(client)
            }
        };
        if let Some((again, expected)) = again {
            let found = match (again, &mut client) {
                (Again::Export(clusters), Some(client)) => read_export(client, &clusters, goes_on)?,
                (Again::File { file, path, is_qcow2 }, _) => {
                    let own = Own::own(&file, &path, is_qcow2);
                    read_file(&mut own.map_err(unreadable)?, goes_on)?
                }
                (Again::Export(_), None) => return Err(CopyError::Differs),
            };
            if found != expected {
                return Err(CopyError::Differs);
            }
        }
        client.into_iter().for_each(Client::disconnect);
        Ok(())
    }
}

fn unreadable(why: impl Display) -> CopyError {
    CopyError::ReadCopy(why.to_string())
}

fn read_file(own: &mut Own, goes_on: &mut dyn FnMut(u64) -> bool) -> Result<Digest, CopyError> {
    let mut found = Digest::default();
    let read = own.each(goes_on, &mut |at, data| {
        found.add(at, data);
        Ok(())
    });
    match read {
        Ok(()) => Ok(found),
        Err(copy::CopyError::Stopped) => Err(CopyError::Cancelled),
        Err(copy::CopyError::Read(_, why) | copy::CopyError::Write(why)) => Err(unreadable(why)),
    }
}

fn read_export(
    client: &mut Client,
    clusters: &Clusters,
    goes_on: &mut dyn FnMut(u64) -> bool,
) -> Result<Digest, CopyError> {
    let (mut found, mut next) = (Digest::default(), 0);
    let mut buffer = vec![0; (AGAIN_MAX * CLUSTER_BYTES) as usize];
    while let Some(run) = clusters.first_held(next..clusters.len(), AGAIN_MAX) {
        next = run.end;
        let bytes = clusters.bytes_of(run);
        if !goes_on(bytes.start) {
            return Err(CopyError::Cancelled);
        }
        let part = &mut buffer[..(bytes.end - bytes.start) as usize];
        client.read(bytes.start, part)?;
        found.add(bytes.start, part);
    }
    Ok(found)
}
