// SPDX-License-Identifier: Apache-2.0
//! The images that a sequence begins with, and its steps. Positions and lengths are numbers without a
//! size in mind: [`crate::world`] fits them into the disk.

use proptest::prelude::*;

/// Options of an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    /// Size of a cluster is `1 << cluster_bits` bytes.
    pub(crate) cluster_bits: u32,
    /// Size of a refcount is `1 << refcount_order` bits.
    pub(crate) refcount_order: u32,
}

/// The file below the first disk.
#[derive(Clone, Debug)]
pub(crate) enum Base {
    /// None; all tables are made before if the flag is set.
    Nothing(bool),
    /// A raw file with content, of so many bytes.
    Raw(u64),
    /// A qcow2 image, in whose content are holes and zeroes.
    Qcow2(Format, u64),
    /// A qcow2 image of compressed clusters.
    Compressed(Format, u64),
}

/// The disk before the steps.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    pub(crate) base: Base,
    pub(crate) top: Format,
    /// Sectors of the disk.
    pub(crate) sectors: u64,
}

/// A part of the disk: a first sector and a number of sectors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) at: u64,
    pub(crate) len: u64,
}

/// A request of a lane.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Write(u8),
    /// With FUA.
    WriteThrough(u8),
    Zero(bool),
    Discard,
}

/// A step.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// One request, on the lane of this number.
    Request(usize, Request, Part),
    /// Writes of parts behind each other, in flight together.
    Together(usize, u8, Vec<Part>),
    /// Three threads, each with sectors of its own in the same clusters, and numbers of this seed.
    Threads(u64),
    Flush(usize),
    /// The disk gets so many sectors more.
    Grow(u64),
    /// Discarded clusters leave the image.
    Unmap,
    /// The program is killed: its files are as they are now.
    Kill,
    /// The disk ends, and begins again.
    Reopen,
    /// The disk goes on in an overlay, made by us (or QEMU).
    Snapshot(Format, bool),
    /// The top is merged into the image below. It is copied in pieces of at most so many KiB, with requests
    /// between them.
    Commit(u64, Vec<(Request, Part)>),
    /// The same by `qemu-img commit`, with the disk closed.
    CommitByQemu,
    /// QEMU changes the closed image.
    ByQemu(Vec<(ByQemu, Part)>),
}

/// A command of `qemu-io`.
#[derive(Clone, Debug)]
pub(crate) enum ByQemu {
    Write(u8),
    Zero(bool),
    Discard,
    /// A compressed cluster.
    Compressed(u8),
}

/// The numbers are below this; a part has this many sectors at most.
pub(crate) const NUMBERS: u64 = 1 << 16;
const PART_MAX: u64 = 1200;

fn format() -> impl Strategy<Value = Format> {
    let cluster_bits = prop_oneof![3 => 12..=16u32, 1 => 17..=21u32];
    let refcount_order = prop_oneof![2 => Just(4u32), 1 => 0..=6u32];
    (cluster_bits, refcount_order)
        .prop_map(|(cluster_bits, refcount_order)| Format { cluster_bits, refcount_order })
}

/// Bytes of a base: below and above the size of the disk, within a cluster and within a sector.
fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => (1..=4u64 << 11).prop_map(|sectors| sectors << 9),
        1 => (1..=4u64).prop_map(|mib| mib << 20),
    ]
}

fn base() -> impl Strategy<Value = Base> {
    prop_oneof![
        1 => any::<bool>().prop_map(Base::Nothing),
        1 => (bytes(), 0..512u64).prop_map(|(bytes, more)| Base::Raw(bytes + more)),
        2 => (format(), bytes()).prop_map(|(format, bytes)| Base::Qcow2(format, bytes)),
        2 => (format(), bytes()).prop_map(|(format, bytes)| Base::Compressed(format, bytes)),
    ]
}

/// Half of the parts are of whole 4 KiB.
fn part() -> impl Strategy<Value = Part> {
    (0..NUMBERS, 1..PART_MAX, any::<bool>()).prop_map(|(at, len, is_whole)| match is_whole {
        true => Part { at: at / 8 * 8, len: len.next_multiple_of(8) },
        false => Part { at, len },
    })
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        4 => (1..=255u8).prop_map(Request::Write),
        1 => (1..=255u8).prop_map(Request::WriteThrough),
        2 => any::<bool>().prop_map(Request::Zero),
        3 => Just(Request::Discard),
    ]
}

fn by_qemu() -> impl Strategy<Value = ByQemu> {
    prop_oneof![
        2 => (1..=255u8).prop_map(ByQemu::Write),
        1 => any::<bool>().prop_map(ByQemu::Zero),
        1 => Just(ByQemu::Discard),
        3 => (1..=255u8).prop_map(ByQemu::Compressed),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let lane = 0..3usize;
    let requests = prop::collection::vec((request(), part()), 0..6);
    prop_oneof![
        14 => (lane.clone(), request(), part()).prop_map(|(lane, it, at)| Step::Request(lane, it, at)),
        2 => (lane.clone(), 1..=255u8, prop::collection::vec(part(), 2..6))
            .prop_map(|(lane, byte, parts)| Step::Together(lane, byte, parts)),
        1 => any::<u64>().prop_map(Step::Threads),
        1 => lane.prop_map(Step::Flush),
        1 => (1..3000u64).prop_map(Step::Grow),
        1 => Just(Step::Unmap),
        1 => Just(Step::Kill),
        1 => Just(Step::Reopen),
        2 => (format(), any::<bool>()).prop_map(|(format, ours)| Step::Snapshot(format, ours)),
        2 => (4..1024u64, requests).prop_map(|(kib, requests)| Step::Commit(kib, requests)),
        1 => Just(Step::CommitByQemu),
        2 => prop::collection::vec((by_qemu(), part()), 1..5).prop_map(Step::ByQemu),
    ]
}

/// A disk of 1 to 4 MiB, and up to 30 steps.
pub(crate) fn sequences() -> impl Strategy<Value = (Start, Vec<Step>)> {
    let sectors = prop_oneof![1 => (2..=8u64).prop_map(|n| n << 10), 1 => 2048..8192u64];
    let start =
        (base(), format(), sectors).prop_map(|(base, top, sectors)| Start { base, top, sectors });
    (start, prop::collection::vec(step(), 1..30))
}
