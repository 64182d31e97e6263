// SPDX-License-Identifier: Apache-2.0
//! A load that verifies every byte: each sector carries its number and a generation.

use super::{pattern, wait_until};
use driver::{Area, Device, GuestMemory, Layout, Request, RequestQueue, Session};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use virtio_spec::blk::S_OK;
use vmm_sys_util::eventfd::EventFd;

/// Most sectors of a request of the mixed load: 1 MiB.
pub const SECTORS_MAX: u64 = 2048;

/// Counters of a load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    pub writes: u64,
    pub reads: u64,
}

/// A load on one queue, over sectors without another writer.
pub struct Load {
    queue: RequestQueue,
    layout: Layout,
    sectors: Range<u64>,
    depth: usize,
    sectors_max: u64,
    /// Generation of each sector of the range, in order.
    generations: Vec<u32>,
    generation: u32,
    /// The scratch memory is used up: the load starts no request until none is in flight.
    draining: bool,
    in_flight: HashMap<u16, InFlight>,
    random: fastrand::Rng,
    done: Done,
}

struct InFlight {
    write: bool,
    sector: u64,
    count: u64,
}

impl Load {
    pub fn new(queue: RequestQueue, layout: Layout, sectors: Range<u64>) -> Self {
        let generations = vec![0; (sectors.end - sectors.start) as usize];
        let random = fastrand::Rng::with_seed(sectors.start);
        Load {
            queue,
            layout,
            sectors,
            depth: 8,
            sectors_max: 16,
            generations,
            generation: 0,
            draining: false,
            in_flight: HashMap::new(),
            random,
            done: Done::default(),
        }
    }

    /// Limits requests to this many sectors.
    pub fn of_up_to(self, sectors_max: u64) -> Self {
        Load { sectors_max, ..self }
    }

    /// Runs until `go_on` returns false, then collects all requests and reads the whole range.
    pub fn run(mut self, go_on: impl FnMut(&Done) -> bool) -> (Done, RequestQueue) {
        self.run_on(go_on);
        self.read_all();
        (self.done, self.queue)
    }

    /// Runs until `go_on` returns false, then collects all requests.
    pub fn run_on(&mut self, mut go_on: impl FnMut(&Done) -> bool) {
        while go_on(&self.done) {
            self.draining &= !self.in_flight.is_empty();
            while !self.draining && self.in_flight.len() < self.depth && self.start_one() {}
            self.queue.queue().publish();
            self.queue.queue().kick_if_asked();
            self.take_one();
        }
        while !self.in_flight.is_empty() {
            self.take_one();
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random.u64(..below)
    }

    /// Adds a request that overlaps none in flight; `false` if this attempt found no room.
    fn start_one(&mut self) -> bool {
        let room = self.sectors.end - self.sectors.start;
        let small = self.random(4) != 0;
        let most = if small { self.sectors_max.min(16) } else { self.sectors_max };
        let count = 1 + self.random(most.min(room));
        let sector = self.sectors.start + self.random(room - count + 1);
        let overlaps =
            |other: &InFlight| sector < other.sector + other.count && other.sector < sector + count;
        if self.in_flight.values().any(overlaps) {
            return false;
        }
        let write = self.random(2) == 0;
        let first = (sector - self.sectors.start) as usize;
        let before = self.generations[first..first + count as usize].to_vec();
        let request = if write {
            self.generation += 1;
            self.generations[first..first + count as usize].fill(self.generation);
            Request::write(sector, &self.expected(sector, count))
        } else {
            Request::read(sector, count as usize * 512)
        };
        match self.queue.add(&request, &self.layout) {
            Ok(id) => {
                self.in_flight.insert(id, InFlight { write, sector, count });
                true
            }
            // The scratch memory starts anew when no request is in flight.
            Err(driver::Error::NoScratch(_)) => {
                assert!(!self.in_flight.is_empty(), "the scratch memory is too small");
                self.generations[first..first + count as usize].copy_from_slice(&before);
                self.draining = true;
                false
            }
            Err(why) => panic!("cannot add a request: {why}"),
        }
    }

    fn take_one(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        let (id, completion) = self.queue.collect().expect("a completion comes");
        let request = self.in_flight.remove(&id).expect("it is in flight");
        let InFlight { write, sector, count } = request;
        assert_eq!(completion.status, Some(S_OK), "{count} sectors at {sector}");
        if write {
            self.done.writes += 1;
            assert_eq!(completion.written, 1);
        } else {
            self.done.reads += 1;
            assert_eq!(u64::from(completion.written), count * 512 + 1);
            self.check(sector, count, &completion.data);
        }
    }

    /// Checks that sectors have the content that they must have now.
    #[track_caller]
    fn check(&self, sector: u64, count: u64, data: &[u8]) {
        let expected = self.expected(sector, count);
        let pairs = (sector..).zip(data.chunks(512).zip(expected.chunks(512)));
        let wrong: Vec<String> = pairs
            .filter(|(_, (data, expected))| data != expected)
            .map(|(sector, (data, expected))| {
                format!("{sector}: {:?} not {:?}", &data[..12], &expected[..12])
            })
            .collect();
        assert!(data == expected, "{count} sectors at {sector} begin with wrong bytes: {wrong:?}");
    }

    /// The content that the sectors must have now.
    fn expected(&self, sector: u64, count: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count as usize * 512);
        for sector in sector..sector + count {
            let generation = self.generations[(sector - self.sectors.start) as usize];
            bytes.extend(sector_content(sector, generation));
        }
        bytes
    }

    fn read_all(&mut self) {
        let mut sector = self.sectors.start;
        while sector < self.sectors.end {
            let count = (self.sectors.end - sector).min(256);
            let request = Request::read(sector, count as usize * 512);
            let completion = self.queue.execute(&request, &self.layout).expect("a last read");
            self.check(sector, count, &completion.data);
            sector += count;
        }
    }
}

/// A sector's content: zeroes before the first write, then number, generation and filling.
fn sector_content(sector: u64, generation: u32) -> Vec<u8> {
    if generation == 0 {
        return vec![0; 512];
    }
    let mut content = pattern(8, sector << 20 | u64::from(generation)).repeat(64);
    content[..8].copy_from_slice(&sector.to_le_bytes());
    content[8..12].copy_from_slice(&generation.to_le_bytes());
    content[504..].copy_from_slice(&sector.to_le_bytes());
    content
}

/// The parts of a device under load: the connection, and each queue's descriptors.
pub struct Loaded {
    pub session: Session,
    pub memory: Arc<GuestMemory>,
    pub kicks: Vec<EventFd>,
    pub calls: Vec<EventFd>,
    /// The device area of each queue (split: the used ring).
    pub used: Vec<Area>,
    progress: Vec<Arc<AtomicU64>>,
}

impl Loaded {
    /// Waits until every queue has completed `count` requests more.
    pub fn wait_for_progress(&self, count: u64) {
        let before: Vec<_> = self.progress.iter().map(|done| done.load(Relaxed)).collect();
        wait_until("the load goes on", || {
            let grown =
                |(done, before): (&Arc<AtomicU64>, &u64)| done.load(Relaxed) >= before + count;
            self.progress.iter().zip(&before).all(grown)
        });
    }
}

/// Loads all queues of a device, each from its own thread, while `act` runs. Verifies everything
/// and returns the counters of each queue.
pub fn under_load(
    mut device: Device,
    num_queues: usize,
    mut act: impl FnMut(&mut Loaded),
) -> (Vec<Done>, Session) {
    let (layout, memory) = (device.layout(), device.memory().clone());
    let (mut kicks, mut calls, mut used) = (Vec::new(), Vec::new(), Vec::new());
    for index in 0..num_queues {
        let queue = device.queue(index).queue();
        kicks.push(queue.kick_fd().try_clone().expect("a descriptor"));
        calls.push(queue.call_fd().try_clone().expect("a descriptor"));
        used.push(memory.area(queue.addresses()[2], 4));
    }
    let (session, queues) = device.into_parts();
    let stop = Arc::new(AtomicBool::new(false));
    let progress: Vec<_> = queues.iter().map(|_| Arc::new(AtomicU64::new(0))).collect();
    let threads: Vec<_> = (0..)
        .zip(queues)
        .map(|(index, queue)| {
            let (stop, progress) = (stop.clone(), progress[index].clone());
            let first = index as u64 * 4096;
            let load = Load::new(queue, layout.clone(), first..first + 1024).of_up_to(64);
            let go_on = move |done: &Done| {
                progress.store(done.reads + done.writes, Relaxed);
                !stop.load(Relaxed)
            };
            std::thread::spawn(move || load.run(go_on).0)
        })
        .collect();
    let mut loaded = Loaded { session, memory, kicks, calls, used, progress };
    act(&mut loaded);
    stop.store(true, Relaxed);
    let done = threads.into_iter().map(|thread| thread.join().expect("all verified")).collect();
    (done, loaded.session)
}
