// SPDX-License-Identifier: Apache-2.0
//! `vhost-blk ctl upgrade` under a load that verifies every byte.
//!
//! With `VHOST_BLK_TEST_PLANE=kernel` on the kernel's data plane: `VHOST_BLK_TEST_DISK` is then a
//! block device of 8 MiB or more, or a directory.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../vhost-user/tests/common/load.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses its part")]
mod load;
#[path = "../common/served.rs"]
mod served;

use common::{pattern, wait_until};
use driver::{Device, Options};
use load::under_load;
use serde_json::Value;
use served::{Served, on_kernel, served};
use std::time::Duration;

const UPGRADES: usize = 20;

/// Requests so far, by the metrics, which count over all starts of a queue.
fn counters(served: &Served) -> Vec<u64> {
    let told = served.status();
    let of = |queue: &Value| {
        let counts = ["read", "write"].map(|name| queue["latency"][name]["count"].as_u64());
        counts.into_iter().flatten().sum()
    };
    told["queues"].as_array().unwrap().iter().map(of).collect()
}

fn upgraded_under_load(packed: bool, inflight: bool) {
    if packed && on_kernel() {
        println!("SKIP: the kernel's data plane has no packed rings");
        return;
    }
    let served = served(&[]);
    let id = served.daemon.id();
    let options = Options { num_queues: 2, packed, inflight, ..Options::default() };
    let mut device = Device::connect(&served.place.socket, &options).unwrap();
    // The load expects zeroes, and the disk of the kernel's data plane may hold those of a test before.
    device.write_zeroes(0, 8192, 0).unwrap();
    let mut pauses = Vec::new();
    let (done, _session) = under_load(device, 2, |loaded| {
        let mut before = counters(&served);
        served.upgrade();
        let descriptors = served.daemon.settled_descriptors();
        for _ in 0..UPGRADES {
            loaded.wait_for_progress(20);
            pauses.push(served.upgrade());
            let now = counters(&served);
            let grown = now.iter().zip(&before).all(|(now, before)| now > before);
            assert!(grown, "{now:?} after {before:?}");
            before = now;
        }
        loaded.wait_for_progress(20);
        served.daemon.assert_descriptors(&descriptors);
    });
    assert!(done.iter().all(|done| done.reads + done.writes > 0), "{done:?}");
    assert_eq!(served.status()["pid"], id);
    pauses.sort();
    let (median, longest) = (pauses[UPGRADES / 2], pauses[UPGRADES - 1]);
    println!("packed {packed}, in-flight region {inflight}: pause {median:?}, at most {longest:?}");
    // A clock judges nothing here: the machine may be busy. A pause without an end is a failure.
    assert!(longest < Duration::from_secs(30), "{pauses:?}");
}

#[test]
fn twenty_upgrades_under_load_lose_no_byte_of_split_rings() {
    upgraded_under_load(false, false);
}

#[test]
fn twenty_upgrades_under_load_lose_no_byte_of_split_rings_with_an_inflight_region() {
    upgraded_under_load(false, true);
}

#[test]
fn twenty_upgrades_under_load_lose_no_byte_of_packed_rings() {
    upgraded_under_load(true, false);
}

#[test]
fn twenty_upgrades_under_load_lose_no_byte_of_packed_rings_with_an_inflight_region() {
    upgraded_under_load(true, true);
}
