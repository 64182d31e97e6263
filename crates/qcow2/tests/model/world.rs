// SPDX-License-Identifier: Apache-2.0
//! The chain of a sequence, its disk with three lanes, and the model of its content.

use crate::common::{PATIENCE, end, options, quick_directory, rig};
use crate::qemu;
use crate::steps::{Base, Format, NUMBERS, Part, Start};
use backend::conformance::Rig;
use backend::mark::{self, InUse};
use qcow2::{AllowBacking, Qcow2Disk};
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Lanes of the disk.
const LANES: usize = 3;

/// An image of the chain.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Name of its file.
    pub(crate) name: String,
    /// None: it is raw.
    pub(crate) format: Option<Format>,
    /// The bytes of its file since there is another image over it.
    pub(crate) frozen: Vec<u8>,
}

/// A disk that the steps change.
pub(crate) struct World {
    directory: TempDir,
    /// The image of the disk is the last one.
    pub(crate) chain: Vec<Layer>,
    /// The content of the disk.
    pub(crate) model: Vec<u8>,
    /// None: it is closed.
    pub(crate) disk: Option<Arc<Qcow2Disk>>,
    pub(crate) rigs: Vec<Rig>,
    /// Files so far.
    made: usize,
}

/// Data of a write: its sectors differ from each other.
pub(crate) fn stamped(byte: u8, at: u64, len: u64) -> Vec<u8> {
    let mut data = vec![byte; len as usize];
    for (number, sector) in (at / 512..).zip(data.chunks_mut(512)) {
        let stamp = number.to_le_bytes();
        let len = stamp.len().min(sector.len() - 1);
        sector[1..=len].copy_from_slice(&stamp[..len]);
    }
    data
}

/// The content of a base: data with holes.
fn first_content(bytes: u64) -> Vec<u8> {
    let mut content = stamped(0x5a, 0, bytes);
    for hole in content.chunks_mut(96 << 10).skip(1).step_by(3) {
        hole.fill(0);
    }
    content
}

impl World {
    /// Makes the images, and opens the disk.
    pub(crate) fn create(start: &Start) -> World {
        let mut world = World {
            directory: quick_directory(),
            chain: Vec::new(),
            model: Vec::new(),
            disk: None,
            rigs: Vec::new(),
            made: 0,
        };
        let size = start.sectors * 512;
        let (options, bytes) = match start.base {
            Base::Nothing(true) => (",preallocation=metadata", 0),
            Base::Nothing(false) => ("", 0),
            Base::Raw(bytes) | Base::Qcow2(_, bytes) | Base::Compressed(_, bytes) => ("", bytes),
        };
        if bytes > 0 {
            world.make_base(&start.base, bytes);
        }
        let name = world.new_name();
        let below = world.chain.last().map(Layer::as_backing);
        qemu::create(world.path(), &name, start.top, below, size, options);
        let mut content = first_content(bytes);
        content.resize(size as usize, 0);
        world.model = content;
        world.push(name, start.top);
        world.open();
        world
    }

    fn make_base(&mut self, base: &Base, bytes: u64) {
        let content = first_content(bytes);
        let (name, raw) = (self.new_name(), "first.raw");
        fs::write(self.file(raw), &content).expect("a raw file");
        let format = match base {
            Base::Nothing(_) | Base::Raw(_) => {
                fs::rename(self.file(raw), self.file(&name)).expect("a name");
                None
            }
            Base::Qcow2(format, _) => {
                qemu::create(self.path(), &name, *format, None, bytes, "");
                let is_data = |(_, part): &(usize, &[u8])| part.iter().any(|byte| *byte != 0);
                for (number, _) in content.chunks(96 << 10).enumerate().filter(is_data) {
                    let at = number * (96 << 10);
                    let len = (bytes as usize - at).min(96 << 10);
                    let write = format!("write -s {raw} {at} {len}");
                    let part = &content[at..at + len];
                    fs::write(self.file(raw), part).expect("a raw file");
                    assert!(qemu::io(self.path(), &name, &write), "{write}");
                }
                Some(*format)
            }
            Base::Compressed(format, _) => {
                qemu::compress(self.path(), raw, &name, *format);
                Some(*format)
            }
        };
        let frozen = fs::read(self.file(&name)).expect("an image");
        self.chain.push(Layer { name, format, frozen });
    }

    /// The directory of the images.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The path of a file.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// A name that no file had.
    pub(crate) fn new_name(&mut self) -> String {
        self.made += 1;
        format!("{}.img", self.made)
    }

    /// The image of the disk.
    pub(crate) fn top(&self) -> &Layer {
        self.chain.last().expect("an image")
    }

    pub(crate) fn disk(&self) -> &Arc<Qcow2Disk> {
        self.disk.as_ref().expect("it is open")
    }

    /// Adds an image to the chain; the one below it is frozen.
    pub(crate) fn push(&mut self, name: String, format: Format) {
        if let Some(below) = self.chain.last().map(|below| self.file(&below.name)) {
            let frozen = fs::read(below).expect("an image");
            self.chain.last_mut().expect("an image").frozen = frozen;
        }
        self.chain.push(Layer { name, format: Some(format), frozen: Vec::new() });
    }

    /// The part of the disk in bytes.
    pub(crate) fn range(&self, part: Part) -> Range<u64> {
        let sectors = self.model.len() as u64 / 512;
        let at = part.at % NUMBERS * sectors / NUMBERS;
        // Keeps the alignment of the part to 4 KiB.
        let at = if part.at.is_multiple_of(8) { at / 8 * 8 } else { at };
        let end = (at + part.len).min(sectors);
        at * 512..end * 512
    }

    /// Opens the image as a disk that no other program may change.
    pub(crate) fn open(&mut self) {
        let disk = Arc::new(open(&self.file(&self.top().name)));
        assert_eq!(disk_bytes(&disk), self.model.len() as u64);
        self.rigs = (0..LANES).map(|_| rig(&disk)).collect();
        self.disk = Some(disk);
    }

    /// Closes the disk in order. QEMU finds no fault, and the frozen images are as they were.
    pub(crate) fn close(&mut self) {
        self.rigs.clear();
        let disk = Arc::try_unwrap(self.disk.take().expect("it is open")).ok();
        let disk = disk.expect("it has no other user");
        disk.unmap_discarded(PATIENCE).expect("the clusters leave");
        end(disk);
        qemu::judge(self.path(), &self.top().name, &self.model, false);
        let below = &self.chain[..self.chain.len() - 1];
        for Layer { name, frozen, .. } in below {
            assert!(fs::read(self.file(name)).expect("an image") == *frozen, "{name} has changed");
        }
    }

    /// The disk ends, and begins again.
    pub(crate) fn reopen(&mut self) {
        self.close();
        self.open();
        self.compare(0..self.model.len() as u64);
    }

    /// All lanes read the model in this range and around it.
    pub(crate) fn compare(&mut self, range: Range<u64>) {
        const AROUND: u64 = 64 << 10;
        let from = range.start.saturating_sub(AROUND);
        let end = (range.end + AROUND).min(self.model.len() as u64);
        let wanted = &self.model[from as usize..end as usize];
        for (lane, rig) in self.rigs.iter_mut().enumerate() {
            let found = rig.read(from, wanted.len());
            qemu::assert_same(&found, wanted, from as usize, &format!("lane {lane}"));
        }
    }

    /// The image as a killed program leaves it has the content, and our next opening frees its leaks.
    pub(crate) fn kill(&mut self) {
        let (name, top) = ("killed.img", self.file(&self.top().name));
        // The copy is the state of one moment only if the thread of the disk has nothing left to do.
        self.disk().unmap_discarded(PATIENCE).expect("the clusters leave");
        fs::copy(top, self.file(name)).expect("a copy");
        qemu::judge(self.path(), name, &self.model, true);
        let file = File::options().write(true).open(self.file(name)).expect("it opens");
        mark::set_in_use(&file, InUse::Leaks).expect("a mark");
        drop(file);
        end(open(&self.file(name)));
        qemu::judge(self.path(), name, &self.model, false);
    }
}

impl Layer {
    /// Its name and format, as those of a backing file.
    pub(crate) fn as_backing(&self) -> (&str, &'static str) {
        (&self.name, if self.format.is_some() { "qcow2" } else { "raw" })
    }
}

fn disk_bytes(disk: &Qcow2Disk) -> u64 {
    backend::Disk::info(disk).capacity_sectors * 512
}

fn open(path: &Path) -> Qcow2Disk {
    let mut options = options(AllowBacking::SameDir, true);
    options.file.lock = Some(PATIENCE);
    Qcow2Disk::open(path, &options).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}
