// SPDX-License-Identifier: Apache-2.0
//! All layouts that section 5.2.6 allows carry the same data.

use super::{Subject, pattern};
use anyhow::{Context, Result};
use driver::{Cuts, Layout, Request};
use virtio_spec::blk::S_OK;

/// Checks every layout.
pub(super) fn all(subject: &mut Subject<'_>) -> Result<()> {
    small(subject)?;
    long_chains(subject).context("long chains")?;
    large(subject).context("large requests")
}

/// Writes in the first layout; reads back in the plain layout, and in the second one.
fn carries(
    subject: &mut Subject<'_>,
    [out, back]: [&Layout; 2],
    len: usize,
    seed: u64,
) -> Result<()> {
    let sector = subject.at(3);
    let data = pattern(len, seed);
    subject.ends_in(&Request::write(sector, &data), out, S_OK, 1)?;
    subject.reads_as(sector, &data)?;
    let read = subject.ends_in(&Request::read(sector, len), back, S_OK, len as u32 + 1)?;
    super::same(&read.data, &data).with_context(|| super::brief(back))
}

/// All layouts of a request of 8 KiB.
fn layouts() -> Vec<Layout> {
    let cuts = |readable: Cuts, writable: Cuts| Layout { readable, writable, ..Layout::default() };
    let odd = Cuts::Every(515);
    vec![
        Layout::default(),
        cuts(Cuts::Joined, Cuts::Joined),
        cuts(Cuts::Lengths(vec![1, 2, 3, 4, 6]), Cuts::Usual),
        cuts(Cuts::Lengths(vec![17]), Cuts::Lengths(vec![8191])),
        cuts(Cuts::Lengths(vec![15]), Cuts::Lengths(vec![1])),
        cuts(Cuts::Lengths(vec![0, 16, 0, 512, 0]), Cuts::Lengths(vec![0, 1, 0, 511])),
        cuts(odd.clone(), odd.clone()),
        cuts(Cuts::Every(100), Cuts::Every(100)),
        cuts(Cuts::Every(4096), Cuts::Every(4096)),
        cuts(Cuts::Every(512), Cuts::Every(512)),
        Layout { misalign: 1, ..Layout::default() },
        Layout { misalign: 4, ..Layout::default() },
        Layout { misalign: 256, ..Layout::default() },
        Layout { align: 4096, misalign: 511, ..cuts(odd.clone(), odd) },
        Layout { align: 4096, ..Layout::default() },
        Layout { align: 8192, misalign: 4095, ..cuts(Cuts::Joined, Cuts::Joined) },
    ]
}

fn small(subject: &mut Subject<'_>) -> Result<()> {
    for (n, layout) in layouts().into_iter().enumerate() {
        for indirect in [false, true] {
            let layout = Layout { indirect, ..layout.clone() };
            carries(subject, [&layout, &layout], 8192, n as u64 * 2 + u64::from(indirect))?;
        }
    }
    Ok(())
}

/// Layouts for writing and for reading: a header, `segments` segments of `bytes` bytes, the status.
fn chains_of(segments: usize, bytes: usize, layout: &Layout) -> [Layout; 2] {
    let readable = Cuts::Lengths([vec![16], vec![bytes; segments]].concat());
    let writable = Cuts::Lengths(vec![bytes; segments]);
    [Layout { readable, ..layout.clone() }, Layout { writable, ..layout.clone() }]
}

fn long_chains(subject: &mut Subject<'_>) -> Result<()> {
    for indirect in [false, true] {
        let layout = |align, misalign| Layout { indirect, align, misalign, ..Layout::default() };
        // The most descriptors of the ring and the kernel: header, 1022 segments, status.
        let block = subject.disk.block_bytes as usize;
        let whole = 1022 * 512 / block * block;
        let [out, back] = chains_of(whole / 512, 512, &layout(512, 0));
        carries(subject, [&out, &back], whole, 50)?;
        // A page between segments prevents merging, so the request needs more than 256 vectors.
        let [out, back] = chains_of(600, 4096, &layout(8192, 0));
        carries(subject, [&out, &back], 600 * 4096, 51)?;
        // Segments of odd sizes, each of which needs a bounce buffer.
        let [out, back] = chains_of(1000, 513, &layout(8, 1));
        carries(subject, [&out, &back], 500 << 10, 52)?;
    }
    Ok(())
}

fn large(subject: &mut Subject<'_>) -> Result<()> {
    for misalign in [0, 3, 512] {
        for len in [(1 << 20) + 4096, 4 << 20] {
            let layout = Layout { align: 4096, misalign, ..subject.device.layout() };
            carries(subject, [&layout, &layout], len, len as u64 + misalign as u64)?;
        }
    }
    Ok(())
}
