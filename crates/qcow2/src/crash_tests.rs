// SPDX-License-Identifier: Apache-2.0
//! Crashes at every recorded change of the image file.
//!
//! A run of random I/Os records each change that reaches the file. For each prefix of the record,
//! an image is made as a crash may leave it: changes that are not durable are kept, dropped, or
//! every second one is kept, and the change at the crash may be torn. QEMU then checks the image,
//! and each sector has a content that its writes allow. The end of the process alone keeps all changes, and so each
//! write that has completed.

use crate::chain;
use crate::check::check;
use crate::image::{Answer, Image, Question};
use crate::in_use::reclaim;
use crate::job::Job;
use crate::storage::{Change, Log, Store, punch};
use crate::target::Target;
use crate::unmap::Progress;
use crate::versions::Versions;
use crate::{AllowBacking, header};
use backend::mark::InUse as Mark;
use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

const SECTOR: u64 = 512;
const DISK: u64 = 6 << 20;
/// Largest cluster of the images.
const CLUSTER_MAX: u64 = 64 << 10;
/// The first content of a disk that has some.
const FIRST: u8 = 0xbb;

/// The place of the first content of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum First {
    /// The disk is empty.
    Nowhere,
    Backing,
    Compressed,
}

/// One value that a sector got, with positions in the record.
#[derive(Clone, Copy, Debug)]
struct Value {
    byte: u8,
    started: usize,
    /// The record had this length when the write completed.
    done: usize,
    /// The record has this length when the value is durable.
    durable: Option<usize>,
}

struct Run {
    directory: TempDir,
    start: Vec<u8>,
    record: Vec<Change>,
    sectors: HashMap<u64, Vec<Value>>,
    first_byte: u8,
}

pub(crate) fn qemu_img(directory: &Path, args: &[&str]) -> (Option<i32>, String) {
    let ran = Command::new("qemu-img").current_dir(directory).args(args).output();
    let ran = ran.expect("qemu-img runs; scripts/setup.sh installs it");
    let text = [ran.stdout, ran.stderr].concat();
    (ran.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// The writer of a run: the image, and the lane's direct access to the file.
pub(crate) struct Writer {
    pub(crate) image: Image,
    file: File,
    pub(crate) log: Log,
    sectors: HashMap<u64, Vec<Value>>,
}

impl Writer {
    fn recorded(&self) -> usize {
        self.log.lock().expect("no thread panics").len()
    }

    /// Runs the questions as one batch of the thread of the disk, and what a lane does afterwards.
    fn batch(&mut self, batch: &[(u64, u64, u8)]) {
        let started = self.recorded();
        let mut answers = Vec::new();
        for &(at, len, byte) in batch {
            let question = match byte {
                0 if (at | len).is_multiple_of(CLUSTER_MAX) => Question::Discard(at, len),
                0 => Question::Zero(at, len),
                byte => Question::Write(at, vec![byte; len as usize]),
            };
            answers.push((at, len, byte, self.image.answer(question)));
        }
        self.image.commit().expect("the commit succeeds");
        for (at, len, byte, answer) in answers {
            match answer {
                Answer::Done(done) => self.wrote(at, done.min(len), byte, started),
                Answer::Extent(extent, _) => {
                    let len = len.min(extent.end - at);
                    let (offset, data) =
                        (extent.host + at - extent.start, vec![byte; len as usize]);
                    let started = self.recorded();
                    match byte {
                        0 => punch(&self.file, offset, len).expect("the file is punched"),
                        _ => self.file.write_all_at(&data, offset).expect("the file is written"),
                    }
                    let change = Change::Write { offset, data };
                    self.log.lock().expect("no thread panics").push(change);
                    if byte == 0 {
                        self.image.note_discarded(at, len);
                    }
                    self.wrote(at, len, byte, started);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn wrote(&mut self, at: u64, len: u64, byte: u8, started: usize) {
        let value = Value { byte, started, done: self.recorded(), durable: None };
        for sector in at / SECTOR..(at + len) / SECTOR {
            self.sectors.entry(sector).or_default().push(value);
        }
    }

    fn flush(&mut self) {
        self.log.lock().expect("no thread panics").push(Change::Sync);
        let now = self.recorded();
        for value in self.sectors.values_mut().flatten() {
            value.durable.get_or_insert(now);
        }
    }
}

/// Makes an image of a disk of so many bytes.
pub(crate) fn make(directory: &Path, options: &str, first: First, disk: u64) -> PathBuf {
    if first != First::Nowhere {
        fs::write(directory.join("base.raw"), vec![FIRST; disk as usize]).expect("a base");
    }
    let size = disk.to_string();
    let create = ["create", "-q", "-f", "qcow2", "-o", options];
    let args = match first {
        First::Nowhere => [&create[..], &["a.qcow2", &size]].concat(),
        First::Backing => {
            [&create[..], &["-b", "base.raw", "-F", "raw", "a.qcow2", &size]].concat()
        }
        First::Compressed => {
            let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options];
            [&convert[..], &["base.raw", "a.qcow2"]].concat()
        }
    };
    assert_eq!(qemu_img(directory, &args).0, Some(0));
    directory.join("a.qcow2")
}

/// Opens the image at `path`, and records its changes.
pub(crate) fn writer(path: &Path) -> Writer {
    let log = Log::default();
    let links = chain::follow(path, true, AllowBacking::SameDir).expect("a good chain");
    let access = chain::open(&links, true, Some(Arc::clone(&log))).expect("it opens");
    let file = File::options().read(true).write(true).open(path).expect("it opens");
    let found = header::read(path, &file).expect("a good header");
    let image = Image::new(access, &found, Arc::new(Versions::default()));
    image.store().map(Store::may_reserve).expect("the image");
    Writer { image, file, log, sectors: HashMap::new() }
}

fn run(seed: u64, steps: u32, options: &str, first: First) -> Run {
    let directory = TempDir::new().expect("a directory");
    let path = make(directory.path(), options, first, DISK);
    let start = fs::read(&path).expect("the image");
    let mut writer = writer(&path);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut byte = 0u8;
    for step in 0..steps {
        let batch: Vec<_> = (0..random.u32(1..=4))
            .map(|_| {
                byte = byte.wrapping_add(1).max(1);
                let at = random.u64(..DISK - 4 * CLUSTER_MAX) / SECTOR * SECTOR;
                let len = random.u64(1..=48) * SECTOR;
                match random.u32(..12) {
                    0 => (at, len, 0),
                    // A discard of whole clusters.
                    1 => (at / CLUSTER_MAX * CLUSTER_MAX, (1 + len / (8 << 10)) * CLUSTER_MAX, 0),
                    _ => (at, len, byte),
                }
            })
            .collect();
        writer.batch(&batch);
        if step % 7 == 3 {
            writer.flush();
        }
        if step % 3 == 1 {
            // The writer knows no place between two batches.
            let left = writer.image.unmap_discarded(true, &mut Job::in_place);
            let left = left.expect("the commit succeeds");
            assert_eq!(left, Progress::Nothing);
        }
        if step == steps / 2 {
            writer.image.grow(DISK + (u64::from(step) << 20)).expect("it grows");
        }
    }
    let record = writer.log.lock().expect("no thread panics").clone();
    let first_byte = if first == First::Nowhere { 0 } else { FIRST };
    Run { directory, start, record, sectors: writer.sectors, first_byte }
}

/// Writes pieces to the target of a copy, as a mirror does: they begin and end inside of clusters, and come
/// again and again.
fn run_target(seed: u64, steps: u32, options: &str) -> Run {
    let directory = TempDir::new().expect("a directory");
    let path = make(directory.path(), options, First::Nowhere, DISK);
    let (start, log) = (fs::read(&path).expect("the image"), Log::default());
    let opened = Target::recorded(&path, None, true, AllowBacking::Off, Some(Arc::clone(&log)));
    let mut target = opened.expect("it opens");
    let recorded = || log.lock().expect("no thread panics").len();
    let mut sectors: HashMap<u64, Vec<Value>> = HashMap::new();
    let mut random = fastrand::Rng::with_seed(seed);
    for step in 0..steps {
        let byte = if step % 6 == 5 { 0 } else { step as u8 + 1 };
        let at = random.u64(..(DISK - (2 << 20)) / SECTOR) * SECTOR;
        let most = 1 << random.u32(1..=12);
        let len = random.u64(1..=most) * SECTOR;
        let started = recorded();
        let done = match byte {
            0 => target.zero(at, len),
            byte => target.write(at, &vec![byte; len as usize]),
        };
        done.expect("it is written");
        // Nothing is promised before a sync.
        let value = Value { byte, started, done: usize::MAX, durable: None };
        for sector in at / SECTOR..(at + len) / SECTOR {
            sectors.entry(sector).or_default().push(value);
        }
        if step % 4 == 3 || step + 1 == steps {
            target.sync().expect("a sync");
            let now = Some(recorded());
            let values = sectors.values_mut().flatten();
            values.for_each(|value| value.durable = value.durable.or(now));
        }
    }
    let record = log.lock().expect("no thread panics").clone();
    Run { directory, start, record, sectors, first_byte: 0 }
}

fn apply(image: &mut Vec<u8>, change: &Change, torn: bool) {
    match change {
        Change::Write { offset, data } => {
            let half = data.len() / 2 / SECTOR as usize * SECTOR as usize;
            let data = if torn { &data[..half] } else { &data[..] };
            let end = *offset as usize + data.len();
            image.resize(image.len().max(end), 0);
            image[*offset as usize..end].copy_from_slice(data);
        }
        Change::SetLen(len) => image.resize((*len as usize).max(image.len()), 0),
        Change::Sync => {}
    }
}

impl Run {
    /// The image after a crash at `point`. Of the changes that are not durable, number `n` is kept
    /// if `keeps(n)`.
    fn crashed(&self, point: usize, keeps: impl Fn(usize) -> bool, torn: bool) -> Vec<u8> {
        let mut image = self.start.clone();
        let past = &self.record[..point];
        let synced = past.iter().rposition(|change| matches!(change, Change::Sync)).unwrap_or(0);
        for (n, change) in past.iter().enumerate() {
            if n < synced || keeps(n) {
                apply(&mut image, change, false);
            }
        }
        if let (true, Some(next)) = (torn, self.record.get(point)) {
            apply(&mut image, next, true);
        }
        image
    }

    /// Checks an image after a crash. With `keeps_all` only the process has ended.
    fn check(&self, point: usize, variant: &str, keeps_all: bool, image: &[u8]) {
        let directory = self.directory.path();
        fs::write(directory.join("crashed.qcow2"), image).expect("the image is written");
        let (code, text) = qemu_img(directory, &["check", "-f", "qcow2", "crashed.qcow2"]);
        let change = self.record.get(point);
        let at = format!("crash {point} of {}, {variant}", self.record.len());
        assert!(matches!(code, Some(0 | 3)), "{at}: {text} before {:?}", change.map(kind));
        let path = directory.join("crashed.qcow2");
        let ours = check(&path, &File::open(&path).expect("it opens")).expect("it is checked");
        assert_eq!(ours.errors, 0, "{at}: {ours:?}");
        assert_eq!(ours.leaks > 0, code == Some(3), "{at}: {ours:?}, {text}");
        // Leaked clusters are freed at the next opening, and the content stays.
        if ours.leaks > 0 {
            let mark = reclaim(&path, &path, ours.cluster_bytes).mark;
            let (code, text) = qemu_img(directory, &["check", "-f", "qcow2", "crashed.qcow2"]);
            assert_eq!((mark, code), (Mark::Sound, Some(0)), "{at}: {text}");
        }
        let to_raw = ["convert", "-f", "qcow2", "-O", "raw", "crashed.qcow2", "crashed.raw"];
        assert_eq!(qemu_img(directory, &to_raw).0, Some(0), "{at}");
        let content = fs::read(directory.join("crashed.raw")).expect("the content");
        for (sector, values) in &self.sectors {
            let from = (sector * SECTOR) as usize;
            let found = &content[from..from + SECTOR as usize];
            let is_kept = |value: &Value| {
                (keeps_all && value.done <= point) || value.durable.is_some_and(|end| end <= point)
            };
            let last = values.iter().rposition(is_kept);
            let begun = values[last.unwrap_or(0)..].iter().filter(|value| value.started <= point);
            let mut allowed: Vec<u8> = begun.map(|value| value.byte).collect();
            if last.is_none() {
                allowed.push(self.first_byte);
            }
            let byte = found[0];
            assert!(found.iter().all(|b| *b == byte), "{at}: sector {sector} is mixed");
            assert!(allowed.contains(&byte), "{at}: sector {sector} is {byte}: {values:?}");
        }
    }

    /// Checks every `stride`th crash, in all variants.
    fn check_all(&self, stride: usize) {
        for point in (0..=self.record.len()).step_by(stride) {
            self.check(point, "kept", true, &self.crashed(point, |_| true, false));
            self.check(point, "dropped", false, &self.crashed(point, |_| false, false));
            self.check(point, "every second", false, &self.crashed(point, |n| n % 2 == 0, false));
            self.check(point, "torn", false, &self.crashed(point, |n| n % 2 == 1, true));
        }
    }
}

fn kind(change: &Change) -> String {
    match change {
        Change::Write { offset, data } => format!("write of {} at {offset:#x}", data.len()),
        other => format!("{other:?}"),
    }
}

/// The image has tables and data, and its backing file is larger: what that has behind the old end becomes zero.
/// A growth moves the L1 table, and needs L2 tables and a place for the cluster with the old end.
#[test]
fn an_overlay_that_grows_below_a_larger_backing_file_survives_a_crash_at_any_change() {
    for (options, old) in [
        ("cluster_size=4k", 4 << 20),
        ("cluster_size=4k", (5 << 20) + SECTOR),
        ("cluster_size=64k", (5 << 20) + SECTOR),
    ] {
        let directory = TempDir::new().expect("a directory");
        fs::write(directory.path().join("base.raw"), vec![FIRST; 2 * DISK as usize])
            .expect("a base");
        let size = old.to_string();
        let create = ["create", "-qf", "qcow2", "-o", options, "-b", "base.raw", "-F", "raw"];
        let args = [&create[..], &["a.qcow2", &size]].concat();
        assert_eq!(qemu_img(directory.path(), &args).0, Some(0));
        let path = directory.path().join("a.qcow2");
        let mut writer = writer(&path);
        // Each L2 table has an entry.
        (0..old >> 20).for_each(|mib| writer.batch(&[(mib << 20, 4096, mib as u8 + 1)]));
        writer.flush();
        let (start, before) = (fs::read(&path).expect("the image"), writer.recorded());
        for more in [1, 2, 4096] {
            writer.image.grow(old + more * SECTOR).expect("it grows");
        }
        let record = writer.log.lock().expect("no thread panics")[before..].to_vec();
        let first = |byte| Value { byte, started: 0, done: 0, durable: Some(0) };
        let sectors =
            writer.sectors.iter().map(|(sector, values)| (*sector, vec![first(values[0].byte)]));
        let mut sectors: HashMap<_, _> = sectors.collect();
        sectors.entry(old / SECTOR - 1).or_insert_with(|| vec![first(FIRST)]);
        let run = Run { directory, start, record, sectors, first_byte: FIRST };
        run.check_all(3);
        for point in (0..=run.record.len()).step_by(3) {
            fs::write(path.with_extension("raw"), run.crashed(point, |_| true, false))
                .expect("a file");
            let to_raw = ["convert", "-f", "qcow2", "-O", "raw", "a.raw", "content"];
            assert_eq!(qemu_img(run.directory.path(), &to_raw).0, Some(0), "{point}");
            let content = fs::read(run.directory.path().join("content")).expect("the content");
            let grown = &content[old as usize..];
            assert!(grown.iter().all(|byte| *byte == 0), "{options}: crash {point}: old content");
        }
    }
}

/// A new cluster has a sync if its count is not reserved, or if it hides content. Each level of the tables that
/// changes below another one has a sync.
#[test]
fn a_commit_syncs_what_a_later_phase_names_and_nothing_else() {
    let count = |writer: &mut Writer, at: u64, byte: u8| {
        let before = writer.recorded();
        writer.batch(&[(at, CLUSTER_MAX, byte)]);
        let log = writer.log.lock().expect("no thread panics");
        log[before..].iter().filter(|change| matches!(change, Change::Sync)).count()
    };
    let directory = TempDir::new().expect("a directory");
    let mut writer = writer(&make(directory.path(), "cluster_size=64k", First::Compressed, DISK));
    writer.image.grow(600 << 20).expect("it grows");
    let mut syncs = |at: u64, byte: u8| count(&mut writer, at, byte);
    assert_eq!(syncs(7 << 20, 1), 1, "refcounts");
    assert_eq!(syncs(8 << 20, 2), 0, "the refcount is reserved");
    assert_eq!(syncs(560 << 20, 3), 1, "a new L2 table");
    assert_eq!(syncs(0, 4), 2, "data that hides other data, then the L2 table");
    assert_eq!(syncs(1 << 20, 0), 1, "the L2 table, before the counts of freed clusters");
    let directory = TempDir::new().expect("a directory");
    let mut writer =
        self::writer(&make(directory.path(), "cluster_size=64k", First::Backing, DISK));
    let mut syncs = |at: u64, byte: u8| count(&mut writer, at, byte);
    assert_eq!(syncs(0, 1), 2, "refcounts and data, then a new L2 table");
    assert_eq!(syncs(1 << 20, 2), 1, "data that hides that of the backing file");
    assert_eq!(syncs(1 << 20, 3), 0, "the cluster has its place");
}

#[test]
fn an_image_survives_a_crash_at_any_change() {
    run(1, 24, "cluster_size=4k", First::Nowhere).check_all(5);
}

#[test]
fn an_overlay_survives_a_crash_at_any_change() {
    run(2, 24, "cluster_size=64k", First::Backing).check_all(5);
}

#[test]
fn a_compressed_image_survives_a_crash_at_any_change() {
    run(3, 24, "cluster_size=64k", First::Compressed).check_all(5);
}

#[test]
fn a_target_of_a_copy_survives_a_crash_at_any_change() {
    for (seed, options) in [(4, "cluster_size=4k"), (5, "cluster_size=64k"), (6, "cluster_size=2M")]
    {
        run_target(seed, 24, options).check_all(17);
    }
}

/// Thousands of crashes; some minutes.
#[test]
#[ignore = "takes minutes: scripts/qcow2-long.sh"]
fn images_survive_thousands_of_crashes() {
    for seed in 10..16 {
        for options in ["cluster_size=4k", "refcount_bits=1"] {
            let first = [First::Nowhere, First::Backing, First::Compressed][seed as usize % 3];
            let run = run(seed, 60, options, first);
            run.check_all(2);
            println!("seed {seed}, {options}: {} changes", run.record.len());
            run_target(seed, 60, options).check_all(2);
        }
    }
}
