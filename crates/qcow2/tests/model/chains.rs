// SPDX-License-Identifier: Apache-2.0
//! Overlays that come and go, and QEMU at the closed image.

use crate::qemu;
use crate::requests::discarded;
use crate::steps::{ByQemu, Format, Part, Request};
use crate::world::{Layer, World};
use qcow2::AllowBacking;
use qcow2::create::NewImage;
use qcow2::merge::Merge;
use std::fs::{self, File};
use std::ops::Range;
use std::path::Path;

/// Most images of a chain.
const LAYERS_MAX: usize = 5;
/// The overlay of a raw image that got the content of the disk.
const USUAL: Format = Format { cluster_bits: 16, refcount_order: 4 };

impl World {
    /// The disk goes on in an overlay.
    pub(crate) fn snapshot(&mut self, format: Format, is_ours: bool) {
        if self.chain.len() >= LAYERS_MAX {
            return;
        }
        self.close();
        self.cover(format, is_ours);
        self.compare(0..self.model.len() as u64);
    }

    /// Makes an overlay of the size of the disk, and opens it.
    fn cover(&mut self, format: Format, is_ours: bool) {
        let (name, size) = (self.new_name(), self.model.len() as u64);
        let below = self.top().as_backing();
        if is_ours {
            let (path, backing) = (self.file(&name), self.file(below.0));
            let new = NewImage::over(&path, size, &backing, below.1 == "qcow2").expect("a name");
            let new = NewImage { cluster_bytes: 1 << format.cluster_bits, ..new };
            new.write(&File::create_new(path).expect("a file")).expect("an image");
        } else {
            qemu::create(self.path(), &name, format, Some(below), size, "");
        }
        self.push(name, format);
        self.open();
    }

    /// The image below the top, if the top can be merged into it.
    fn below(&self) -> Option<&Layer> {
        let below = &self.chain[self.chain.len().checked_sub(2)?];
        let size = match below.format {
            None => fs::metadata(self.file(&below.name)).expect("a file").len() / 512 * 512,
            Some(_) => qemu::read(self.path(), &below.name).len() as u64,
        };
        (size <= self.model.len() as u64).then_some(below)
    }

    /// Merges the top into the image below it while lanes change the disk.
    pub(crate) fn commit(&mut self, max: u64, requests: &[(Request, Part)]) {
        let Some(below) = self.below() else { return };
        let (path, is_qcow2) = (self.file(&below.name), below.format.is_some());
        let opened = Merge::open(self.disk().clone(), &path, is_qcow2, AllowBacking::SameDir);
        let mut merge = match opened {
            Err(why) => {
                assert!(why.to_string().contains("compressed clusters"), "{why}");
                return self.refused(&path);
            }
            Ok(merge) => merge,
        };
        let size = self.model.len() as u64;
        if merge.target_bytes().expect("a size") < size {
            merge.grow(size).expect("it grows");
        }
        let mut changed: Vec<Range<u64>> = Vec::new();
        let mut range = 0..size;
        let mut lanes = (0..self.rigs.len()).cycle();
        let mut requests = requests.iter();
        while !range.is_empty() {
            merge.copy_piece(&mut range, max).expect("a copy");
            if let Some((request, part)) = requests.next() {
                self.request(lanes.next().expect("a lane"), request, *part);
                changed.push(self.range(*part));
            }
        }
        for mut range in changed {
            while !range.is_empty() {
                merge.copy_piece(&mut range, max).expect("a copy");
            }
        }
        merge.sync().expect("a sync");
        self.compare(0..size);
        drop(merge);
        self.rigs.clear();
        drop(self.disk.take());
        self.pop();
    }

    /// The opening for a commit may have filled the last cluster of the file up.
    fn refused(&mut self, below: &Path) {
        let number = self.chain.len() - 2;
        let (found, frozen) = (fs::read(below).expect("an image"), &mut self.chain[number].frozen);
        frozen.resize(found.len().max(frozen.len()), 0);
        assert!(found == *frozen, "a refused commit has changed the image below");
    }

    /// The image below has the content by now, and its disk goes on there.
    fn pop(&mut self) {
        let merged = self.chain.pop().expect("an image");
        fs::remove_file(self.file(&merged.name)).expect("a file");
        let Layer { name, format, .. } = self.top();
        if format.is_some() {
            qemu::judge(self.path(), name, &self.model, true);
            self.open();
        } else {
            let found = fs::read(self.file(name)).expect("a file");
            qemu::assert_same(&found[..self.model.len()], &self.model, 0, "the raw base");
            self.cover(USUAL, true);
        }
        self.compare(0..self.model.len() as u64);
    }

    pub(crate) fn commit_by_qemu(&mut self) {
        if self.below().is_none() {
            return;
        }
        self.close();
        crate::common::qemu_ok(
            "qemu-img",
            self.path(),
            &["commit", "-q", "-f", "qcow2", &self.top().name],
        );
        self.pop();
    }

    /// QEMU changes the closed image.
    pub(crate) fn by_qemu(&mut self, commands: &[(ByQemu, Part)]) {
        self.close();
        for (command, part) in commands {
            self.command(command, *part);
        }
        self.open();
        self.compare(0..self.model.len() as u64);
    }

    fn command(&mut self, command: &ByQemu, part: Part) {
        let mut range = self.range(part);
        let cluster = 1 << self.top().format.expect("an image").cluster_bits;
        if let ByQemu::Compressed(_) = command {
            range.start = range.start / cluster * cluster;
            range.end = range.start + cluster;
        }
        let (at, len) = (range.start, range.end - range.start);
        let text = match command {
            ByQemu::Write(byte) => format!("write -P {byte} {at} {len}"),
            ByQemu::Zero(true) => format!("write -z -u {at} {len}"),
            ByQemu::Zero(false) => format!("write -z {at} {len}"),
            ByQemu::Discard => format!("discard {at} {len}"),
            ByQemu::Compressed(byte) => format!("write -c -P {byte} {at} {len}"),
        };
        let is_done = qemu::io(self.path(), &self.top().name, &text);
        // QEMU compresses whole clusters only, and none that has data.
        assert!(is_done || matches!(command, ByQemu::Compressed(_)), "{text}");
        let bytes = at as usize..(range.end as usize).min(self.model.len());
        match command {
            ByQemu::Write(byte) => self.model[bytes].fill(*byte),
            ByQemu::Compressed(byte) if is_done => self.model[bytes].fill(*byte),
            ByQemu::Zero(_) => self.model[bytes].fill(0),
            ByQemu::Discard => {
                let found = qemu::read(self.path(), &self.top().name);
                discarded(&found[bytes.clone()], &mut self.model[bytes]);
            }
            ByQemu::Compressed(_) => {}
        }
    }
}
