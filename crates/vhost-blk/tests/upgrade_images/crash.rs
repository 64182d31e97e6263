// SPDX-License-Identifier: Apache-2.0
//! A daemon that is killed during an upgrade leaves sound images with every acknowledged write.

use crate::moments::Moments;
use crate::stamped::Writer;
use crate::{Rig, add, begin, check_after_kill, guest, image, wait_until};
use std::os::unix::net::UnixStream;

const KILLS: u64 = 24;

#[test]
fn a_kill_at_any_moment_of_an_upgrade_loses_no_acknowledged_write() {
    for format in ["raw", "qcow2"] {
        let mut rig = Rig::new();
        image(&rig, "a.img", format);
        add(&rig, "a", &format!("--blk-file a.img --format {format}"));
        rig.ok("snapshot a --to 0");
        let mut moments = Moments::of(|| drop(rig.ok("upgrade")));
        for n in 1..=KILLS / 2 {
            let writer = Writer::start(guest(&rig, "a"));
            writer.wait_for_two_rounds();
            // The guest writes to clusters that the new overlay does not have.
            rig.ok(&format!("snapshot a --to {n}"));
            let mut client = begin(&rig, "upgrade");
            moments.wait();
            rig.daemon.signal(libc::SIGKILL);
            rig.daemon.wait();
            let written = writer.stop();
            moments.learn(client.wait().unwrap().success());
            // A child that has not executed the check yet has the sockets of the killed daemon.
            let socket = rig.path("ctl");
            wait_until("the socket is free", || UnixStream::connect(&socket).is_err());
            rig.restart(&[]);
            let options = format!("--blk-file {n} --format qcow2 --allow-backing same-dir");
            add(&rig, "a", &options);
            written.check(&mut guest(&rig, "a"));
            check_after_kill(&rig.path(&n.to_string()));
        }
        moments.assert_both();
    }
}
