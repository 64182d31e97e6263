// SPDX-License-Identifier: Apache-2.0
//! Many disks at once, some under a load that verifies every byte.

use crate::load::{Loaded, under_load};
use crate::rig::Rig;
use driver::{Device, Options};
use serde_json::json;
use std::time::Duration;

const UPGRADES: usize = 20;

/// A disk of the configuration directory.
pub(crate) fn file(name: &str, more: &str) -> String {
    format!(
        "blk-file = '@/{name}.img'\nsocket-path = '@/{name}.sock'\nnum-queues = 1\n\
         data-plane = 'uring'\n{more}"
    )
}

/// An empty image of 1 MiB in the directory of the rig.
pub(crate) fn image(rig: &Rig, name: &str) {
    let image = std::fs::File::create(rig.path(&format!("{name}.img"))).unwrap();
    image.set_len(1 << 20).unwrap();
}

/// Adds a disk whose image the daemon gets as a descriptor.
pub(crate) fn add_passed(rig: &Rig, name: &str) {
    image(rig, name);
    rig.ok(&format!(
        "add {name} --pass-file --blk-file {name}.img --socket-path {name}.sock --num-queues 1 \
         --data-plane uring"
    ));
}

/// Writes a sector with the byte `n`, and reads it and the one of an earlier call.
#[track_caller]
pub(crate) fn write_and_read(guest: &mut Device, n: u64) {
    guest.write(n, &[n as u8; 512]).unwrap();
    let mut data = [0; 512];
    for sector in [n.saturating_sub(1), n] {
        guest.read(sector, &mut data).unwrap();
        assert_eq!(data, [sector as u8; 512], "sector {sector}");
    }
}

/// Loads all guests while `act` runs.
fn all_under_load(mut guests: Vec<Device>, loads: &[&Loaded], act: &mut dyn FnMut(&[&Loaded])) {
    let Some(guest) = guests.pop() else { return act(loads) };
    let (done, _session) = under_load(guest, 1, |loaded| {
        let more: Vec<&Loaded> = loads.iter().copied().chain([&*loaded]).collect();
        all_under_load(std::mem::take(&mut guests), &more, act);
    });
    assert!(done.iter().all(|done| done.reads + done.writes > 0), "{done:?}");
}

#[test]
fn twenty_upgrades_of_eight_disks_lose_no_byte_and_no_descriptor() {
    let mut rig =
        Rig::of_directory(&[("f0", &file("f0", "")), ("f1", &file("f1", "serial = 'F'"))]);
    rig.daemon.close_stderr(); // more lines than a pipe holds
    ["f0", "f1"].iter().for_each(|name| image(&rig, name));
    rig.ok("reload");
    ["a0", "a1", "a2", "a3"].iter().for_each(|name| rig.add(name, ""));
    ["p0", "p1"].iter().for_each(|name| add_passed(&rig, name));
    let id = rig.daemon.id();
    let guest = |name: &str, packed: bool, inflight: bool| {
        let options = Options { packed, inflight, ..Options::default() };
        Device::connect(rig.path(&format!("{name}.sock")), &options).unwrap()
    };
    let loaded = vec![
        guest("f0", false, false),
        guest("a0", true, false),
        guest("a1", false, true),
        guest("p0", true, true),
    ];
    let mut quiet = rig.guest("a2");
    let mut pauses = Vec::new();
    all_under_load(loaded, &[], &mut |loads| {
        rig.upgrade();
        let descriptors = rig.daemon.settled_descriptors();
        for n in 0..UPGRADES {
            loads.iter().for_each(|load| load.wait_for_progress(10));
            pauses.push(rig.upgrade());
            write_and_read(&mut quiet, n as u64);
        }
        loads.iter().for_each(|load| load.wait_for_progress(10));
        rig.daemon.assert_descriptors(&descriptors);
    });
    assert_eq!(rig.json("status f0")["pid"], id);
    assert_eq!(rig.names(), ["a0", "a1", "a2", "a3", "f0", "f1", "p0", "p1"]);
    ["a3", "f1", "p1"].iter().for_each(|name| write_and_read(&mut rig.guest(name), 0));
    assert_eq!(rig.guest("f1").get_id().unwrap()[..2], *b"F\0");
    pauses.sort();
    println!("pause of 8 disks: {:?}, at most {:?}", pauses[UPGRADES / 2], pauses[UPGRADES - 1]);
    // A clock judges nothing here: the machine may be busy. A pause without an end is a failure.
    assert!(pauses[UPGRADES - 1] < Duration::from_secs(30), "{pauses:?}");
}

#[test]
fn sixty_four_disks_pass_on_with_their_guests_and_their_socket_files() {
    const DISKS: usize = 64;
    let mut rig = Rig::with(&["--threads", "1"]);
    rig.daemon.close_stderr(); // more lines than a pipe holds
    let names: Vec<String> = (0..DISKS).map(|n| format!("d{n}")).collect();
    names.iter().for_each(|name| rig.add(name, ""));
    // Half of them have a guest.
    let mut guests: Vec<_> = names.iter().step_by(2).map(|name| rig.guest(name)).collect();
    for round in 0..3 {
        println!("pause of {DISKS} disks: {:?}", rig.upgrade());
        guests.iter_mut().for_each(|guest| write_and_read(guest, round));
    }
    assert_eq!(rig.names().len(), DISKS);
    for name in names.iter().skip(1).step_by(2) {
        write_and_read(&mut rig.guest(name), 0);
    }
    let statuses = rig.json("list");
    let connected = |disk: &&serde_json::Value| disk["front_end_connected"] == json!(true);
    assert_eq!(statuses.as_array().unwrap().iter().filter(connected).count(), guests.len());
    rig.daemon.signal(libc::SIGTERM);
    assert!(rig.daemon.wait().success());
    assert!(!rig.place.files().iter().any(|name| name.ends_with(".sock") || name == "ctl"));
}
