// SPDX-License-Identifier: Apache-2.0
//! A guest that writes numbered sectors until its daemon is dead.

use crate::wait_until;
use driver::{Device, Request};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

const DEPTH: usize = 8;
const SECTORS: u64 = 1024;

/// Writes of a guest by sector: the number of the last one that was acknowledged, and of one that was
/// not.
#[derive(Default)]
pub(crate) struct Written {
    acknowledged: BTreeMap<u64, u64>,
    sent: BTreeMap<u64, u64>,
}

fn stamp(n: u64) -> Vec<u8> {
    n.to_le_bytes().repeat(64)
}

/// Writes until `stop`, which is set after the death of the daemon.
fn write_on(mut device: Device, stop: &AtomicBool, done: &AtomicU64) -> Written {
    let layout = device.layout();
    let (mut written, mut in_flight, mut next) = (Written::default(), HashMap::new(), 1);
    let mut is_full = false;
    loop {
        is_full &= !in_flight.is_empty();
        while !is_full && in_flight.len() < DEPTH {
            let sector = next % SECTORS;
            match device.queue(0).submit(&Request::write(sector, &stamp(next)), &layout) {
                Ok(id) => in_flight.insert(id, next),
                // The memory for requests begins anew when none is in flight.
                Err(driver::Error::NoScratch(_)) => {
                    is_full = true;
                    break;
                }
                Err(why) => panic!("{why}"),
            };
            written.sent.insert(sector, next);
            next += 1;
        }
        match device.queue(0).try_collect().unwrap() {
            Some((id, completion)) => {
                assert_eq!(completion.status, Some(0));
                let n = in_flight.remove(&id).expect("each request completes once");
                written.acknowledged.insert(n % SECTORS, n);
                done.fetch_add(1, Ordering::Relaxed);
            }
            None if stop.load(Ordering::Acquire) => return written,
            None => std::thread::yield_now(),
        }
    }
}

impl Written {
    /// Expects that the disk has each acknowledged write, or a later one to the same sector.
    #[track_caller]
    pub(crate) fn check(&self, device: &mut Device) {
        assert_eq!(
            self.acknowledged.len() as u64,
            SECTORS,
            "the guest has not written each sector"
        );
        for (sector, &n) in &self.acknowledged {
            let mut data = [0; 512];
            device.read(*sector, &mut data).unwrap();
            let found = u64::from_le_bytes(data[..8].try_into().unwrap());
            assert!(data[..] == stamp(found)[..], "sector {sector} is torn");
            let expected = [n, self.sent[sector]];
            assert!(expected.contains(&found), "{found} in place of {expected:?}");
        }
    }
}

/// The guest, on a thread of its own.
pub(crate) struct Writer {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: JoinHandle<Written>,
}

impl Writer {
    pub(crate) fn start(device: Device) -> Writer {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (its_stop, its_done) = (Arc::clone(&stop), Arc::clone(&done));
        let thread = std::thread::spawn(move || write_on(device, &its_stop, &its_done));
        Writer { stop, done, thread }
    }

    /// Waits until each sector was written twice.
    #[track_caller]
    pub(crate) fn wait_for_two_rounds(&self) {
        wait_until("writes", || self.done.load(Ordering::Relaxed) > 2 * SECTORS);
    }

    /// Ends the guest. The daemon is dead.
    pub(crate) fn stop(self) -> Written {
        self.stop.store(true, Ordering::Release);
        self.thread.join().unwrap()
    }
}
