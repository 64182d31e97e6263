// SPDX-License-Identifier: Apache-2.0
//! The loads that a comparison measures.

use clap::Args;
use kit::metric::{Point, point};

use crate::load::{Load, Mode, Op};
use crate::server::Storage;

/// Bytes of the requests that have goals.
pub(crate) const GOAL_BYTES: u32 = 4096;

/// Requests in flight of every quick report, and of two queues.
pub(crate) const EVERY_DEPTH: &[u16] = &[1, 4, 32, 128];

const KIB: u32 = 1 << 10;

/// A load, at its depths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) op: Op,
    pub(crate) block_bytes: u32,
    pub(crate) depths: Vec<u16>,
    pub(crate) modes: Vec<Mode>,
}

impl Shape {
    /// A shape whose client sleeps.
    fn event(op: Op, block_bytes: u32, depths: &[u16]) -> Self {
        Self { op, block_bytes, depths: depths.to_vec(), modes: vec![Mode::Event] }
    }

    /// Returns whether it is the load of the goals for the rate.
    pub(crate) fn is_of_goals(&self) -> bool {
        (self.op, self.block_bytes) == (Op::Randread, GOAL_BYTES)
    }
}

/// The options that choose loads, but for their depths.
#[derive(Clone, Debug, Args)]
pub(crate) struct Choice {
    /// Reads, writes or both
    #[arg(long = "op", value_enum, value_delimiter = ',', default_value = "randread")]
    ops: Vec<Op>,
    /// Bytes of each request
    #[arg(long = "block-size", value_delimiter = ',', default_value = "4096")]
    block_sizes: Vec<u32>,
    /// All loads of `make report` instead of --op, --block-size, --depth and --mode
    #[arg(long)]
    pub(crate) all_loads: bool,
    /// Wait of the client: asleep until a call, or polling
    #[arg(long = "mode", value_enum, value_delimiter = ',', default_value = "event,spin")]
    modes: Vec<Mode>,
}

impl Choice {
    /// The chosen loads at these depths; all loads have their own, fewer if they are to be quick.
    pub(crate) fn shapes(&self, depths: &[u16], quick: bool) -> Vec<Shape> {
        match self.all_loads {
            true => all(quick),
            false => of(&self.ops, &self.block_sizes, depths, &self.modes),
        }
    }
}

/// The loads of some operations and sizes.
fn of(ops: &[Op], block_sizes: &[u32], depths: &[u16], modes: &[Mode]) -> Vec<Shape> {
    let mut shapes = Vec::new();
    for &op in ops {
        // Mixed sizes are one load, whatever the sizes of the others.
        let mut sizes: Vec<_> = block_sizes.iter().map(|&bytes| op.block_bytes(bytes)).collect();
        sizes.dedup();
        let shape =
            |block_bytes| Shape { op, block_bytes, depths: depths.to_vec(), modes: modes.to_vec() };
        shapes.extend(sizes.into_iter().map(shape));
    }
    shapes
}

/// All loads of the report; fewer points if it is to be quick.
fn all(quick: bool) -> Vec<Shape> {
    let few = |few: &'static [u16], many: &'static [u16]| if quick { few } else { many };
    let every = few(EVERY_DEPTH, &[1, 4, 16, 32, 64, 128]);
    let random = Shape::event(Op::Randread, GOAL_BYTES, every);
    vec![
        Shape { modes: vec![Mode::Event, Mode::Spin], ..random },
        Shape::event(Op::Randwrite, 4 * KIB, few(&[1, 32], every)),
        Shape::event(Op::Randrw, 4 * KIB, few(&[32], every)),
        Shape::event(Op::Randread, 512, few(&[32], &[1, 32])),
        // The loads of 2011.
        Shape::event(Op::Read, 512, few(&[1, 3], &[1, 2, 3])),
        Shape::event(Op::Write, 512, few(&[1], &[1, 2, 3])),
        Shape::event(Op::Randread, 64 * KIB, &[32]),
        Shape::event(Op::Randread, 1024 * KIB, &[32]),
        Shape::event(Op::Read, 64 * KIB, few(&[4], &[1, 4, 32])),
        Shape::event(Op::Write, 64 * KIB, few(&[4], &[1, 4, 32])),
        Shape::event(Op::Read, 1024 * KIB, few(&[4], &[1, 4, 32])),
        Shape::event(Op::Write, 1024 * KIB, few(&[4], &[1, 4, 32])),
        Shape::event(Op::Writeflush, 4 * KIB, &[1, 8]),
        Shape::event(Op::Mixed, Op::Mixed.block_bytes(0), few(&[32], &[1, 4, 32])),
    ]
}

/// The point of a load on a kind of storage.
pub(crate) fn point_of(storage: Storage, load: &Load) -> Point {
    let Load { op, block_bytes, mode, queues, depth, .. } = load;
    point(&[
        ("storage", &storage),
        ("load", op),
        ("block", block_bytes),
        ("client", mode),
        ("queues", queues),
        ("depth", depth),
    ])
}

/// The point of bare fio, which has no client to wait.
pub(crate) fn bare_point(storage: Storage, load: &Load) -> Point {
    let mut point = point_of(storage, load);
    point.remove("client");
    point
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_report_has_every_load_of_a_whole_one() {
        let kinds = |quick| -> Vec<_> {
            all(quick).into_iter().map(|shape| (shape.op, shape.block_bytes)).collect()
        };
        assert_eq!(kinds(true), kinds(false));
        for (quick, whole) in all(true).iter().zip(all(false)) {
            assert!(quick.depths.iter().all(|depth| whole.depths.contains(depth)));
        }
    }
}
