// SPDX-License-Identifier: Apache-2.0
//! Storage that keeps the kernel threads of io_uring keeps no other disk of the same data-plane thread.

use crate::mount::{Mount, may_not_mount, run};
use crate::rig::Rig;
use driver::Request;
use virtio_spec::blk::S_OK;

/// Writes that wait for the file system: more than the usual kernel threads of a data-plane thread.
const WRITES: u64 = 32;

/// A frozen file system; thawed when dropped.
struct Frozen<'a>(&'a Mount);

impl Frozen<'_> {
    fn of(mount: &Mount) -> Frozen<'_> {
        run(&["fsfreeze", "--freeze", mount.place.path().to_str().unwrap()]);
        Frozen(mount)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        run(&["fsfreeze", "--unfreeze", self.0.place.path().to_str().unwrap()]);
    }
}

#[test]
fn a_frozen_file_system_keeps_no_other_disk_of_its_thread() {
    if may_not_mount() {
        return;
    }
    let rig = Rig::with(&["--threads", "1"]);
    let mount = Mount::ext4(rig.place.dir.path(), 64);
    let image = mount.path("image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    rig.ok(&format!(
        "add frozen --blk-file {} --socket-path frozen.sock --data-plane uring --num-queues 1",
        image.display()
    ));
    rig.add("other", "");
    let (mut guest, mut other) = (rig.guest("frozen"), rig.guest("other"));
    let layout = guest.layout();
    let frozen = Frozen::of(&mount);
    for n in 0..WRITES {
        guest.queue(0).submit(&Request::write(n * 8, &[n as u8 + 1; 4096]), &layout).unwrap();
    }
    rig.place.wait_until("the writes are taken", || {
        rig.json("status frozen")["queues"][0]["inflight"] == WRITES
    });
    // A sync needs a kernel thread.
    other.write(0, &[1; 4096]).unwrap();
    other.flush().unwrap();
    other.write_zeroes(8, 8, 0).unwrap();
    assert_eq!(rig.json("status frozen")["queues"][0]["inflight"], WRITES);
    drop(frozen);
    for _ in 0..WRITES {
        let (_, done) = guest.queue(0).collect().unwrap();
        assert_eq!(done.status, Some(S_OK));
    }
    let mut data = vec![0; 4096];
    for n in 0..WRITES {
        guest.read(n * 8, &mut data).unwrap();
        assert_eq!(data, [n as u8 + 1; 4096], "write {n}");
    }
}
