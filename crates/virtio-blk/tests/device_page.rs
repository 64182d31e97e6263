// SPDX-License-Identifier: Apache-2.0
//! The table of features in `docs/device.md` against the bits that disks offer.

mod common;

use backend::Info;
use common::info;
use docs::Document;
use virtio_blk::DeviceConfig;
use virtio_spec::blk::*;
use virtio_spec::features::*;

const PAGE: &str = include_str!("../../../docs/device.md");

/// The names of the bits in the specification.
const NAMES: [(u32, &str); 21] = [
    (F_SIZE_MAX, "SIZE_MAX"),
    (F_SEG_MAX, "SEG_MAX"),
    (F_GEOMETRY, "GEOMETRY"),
    (F_RO, "RO"),
    (F_BLK_SIZE, "BLK_SIZE"),
    (F_FLUSH, "FLUSH"),
    (F_TOPOLOGY, "TOPOLOGY"),
    (F_CONFIG_WCE, "CONFIG_WCE"),
    (F_MQ, "MQ"),
    (F_DISCARD, "DISCARD"),
    (F_WRITE_ZEROES, "WRITE_ZEROES"),
    (F_LIFETIME, "LIFETIME"),
    (F_SECURE_ERASE, "SECURE_ERASE"),
    (F_ZONED, "ZONED"),
    (F_ANY_LAYOUT, "ANY_LAYOUT"),
    (F_INDIRECT_DESC, "INDIRECT_DESC"),
    (F_EVENT_IDX, "EVENT_IDX"),
    (F_VERSION_1, "VERSION_1"),
    (F_ACCESS_PLATFORM, "ACCESS_PLATFORM"),
    (F_RING_PACKED, "RING_PACKED"),
    (F_IN_ORDER, "IN_ORDER"),
];

/// The bits that a disk offers if it can do everything, sorted by name; a bit without a name here
/// by its number.
fn offered(read_only: bool) -> Vec<String> {
    let info = Info { read_only, ..info() };
    let features = DeviceConfig { info, num_queues: 4, seg_max: 126, packed: true }.features();
    let name = |number| NAMES.iter().find(|(known, _)| *known == number).map(|(_, name)| *name);
    (0..64)
        .filter(|number| features & bit(*number) != 0)
        .map(|number| name(number).map_or(format!("bit {number}"), String::from))
        .collect()
}

#[test]
fn the_page_lists_every_feature_that_some_disk_offers_and_no_other() {
    let mut all = [offered(false), offered(true)].concat();
    all.sort();
    all.dedup();
    assert_eq!(Document::parse("docs/device.md", PAGE).first_column("Feature bits"), all);
}

#[test]
fn a_feature_that_the_page_calls_not_offered_is_not() {
    let line = PAGE.lines().find_map(|line| line.strip_prefix("Not offered: ")).unwrap();
    for name in line.trim_end_matches('.').split(", ") {
        assert!(NAMES.iter().any(|(_, known)| *known == name), "{name} is no feature");
        assert!(!offered(false).iter().any(|offered| offered == name), "{name} is offered");
    }
}
