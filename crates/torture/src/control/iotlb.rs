// SPDX-License-Identifier: Apache-2.0
//! ACCESS_PLATFORM: the device translates every address by its IOTLB, which starts empty, and which
//! loses entries all the time.

use super::specs_for;
use crate::case::expect_lockdep_limit;
use crate::env::Env;
use crate::fixture::Disk;
use crate::integrity::{Setup, disk_of, tell};
use crate::load::under_load;
use crate::target::need_module;
use anyhow::{Context, Result, anyhow, ensure};
use driver::kernel::{KernelDevice, abi};
use driver::{Device, GuestMemory, Options, QueueSetup};
use lab_case::rng::Rng;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread::JoinHandle;
use std::time::Duration;
use virtio_spec::features::{F_ACCESS_PLATFORM, bit};

/// Where guest memory starts.
const GPA: u64 = 1 << 20;

/// The VMM's IOMMU: answers misses.
struct Iommu {
    stop: Arc<AtomicBool>,
    misses: Arc<AtomicU64>,
    thread: JoinHandle<Result<()>>,
}

impl Iommu {
    fn start(device: KernelDevice, memory: Arc<GuestMemory>, seed: u64) -> Self {
        let (stop, misses) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (stop.clone(), misses.clone());
        let thread = std::thread::spawn(move || {
            let mut rng = Rng::new(seed);
            while !stopped.load(Relaxed) {
                let Some(miss) = device.next_miss(Duration::from_millis(20))? else { continue };
                ensure!(miss.what == abi::IOTLB_MISS, "an IOTLB message of type {}", miss.what);
                count.fetch_add(1, Relaxed);
                answer(&device, &memory, &mut rng, miss.iova)?;
            }
            Ok(())
        });
        Self { stop, misses, thread }
    }

    fn end(self) -> Result<u64> {
        self.stop.store(true, Relaxed);
        self.thread.join().map_err(|_| anyhow!("the IOMMU panicked"))??;
        Ok(self.misses.load(Relaxed))
    }
}

/// Maps a piece around the address, of some size.
fn answer(device: &KernelDevice, memory: &GuestMemory, rng: &mut Rng, iova: u64) -> Result<()> {
    let region = &memory.regions()[0];
    let piece = 4096_u64 << rng.below(9);
    let start = (iova / piece * piece).max(region.gpa());
    let end = (start + piece).min(region.gpa() + region.size());
    ensure!((start..end).contains(&iova), "a miss at {iova:#x}, where there is no memory");
    let user = memory.user_address(start);
    device.map_iotlb(start, end - start, user, abi::ACCESS_RW).context("IOTLB update")
}

/// A load whose addresses are looked up, while entries are taken away.
pub(crate) fn iotlb_with_misses(env: &Env, disk: Result<Disk>, setup: Setup) -> Result<()> {
    need_module()?;
    expect_lockdep_limit();
    let disk = disk_of(env, disk)?;
    println!("on {disk}, {setup:?}");
    let (specs, options) = specs_for(env, &disk, setup);
    let features = options.features | bit(F_ACCESS_PLATFORM);
    // A ring at address 0 would look as if it had no address.
    let regions = vec![(GPA, options.regions[0].1)];
    let options = Options { features, regions, setup: QueueSetup::Untouched, ..options };
    let mut device = Device::open_kernel(disk.open()?, &options, &setup.kernel())?;
    ensure!(device.features() & bit(F_ACCESS_PLATFORM) != 0, "ACCESS_PLATFORM is not offered");
    let memory = device.memory().clone();
    let clone = |device: &mut Device| -> Result<KernelDevice> {
        let kernel = device.session().kernel().context("no kernel device")?;
        Ok(kernel.device().try_clone()?)
    };
    let iommu = Iommu::start(clone(&mut device)?, memory.clone(), env.seed());
    let invalidations = clone(&mut device)?;
    // The vhost core looks at the used rings at the start, and does not wait for their entries.
    for queue in 0..usize::from(setup.queues) {
        let [.., used] = device.queue(queue).queue().addresses();
        let page = used / 4096 * 4096;
        invalidations.map_iotlb(page, 4096, memory.user_address(page), abi::ACCESS_RW)?;
    }
    device.start()?;
    let mut rng = Rng::new(env.seed() ^ 2);
    let count = env.rounds(setup.requests);
    let done = under_load(device, specs, |handles| {
        for round in 0..count {
            let size = 4096_u64 << rng.below(11);
            let iova = GPA + rng.below(memory.regions()[0].size() / 4096) * 4096;
            invalidations.unmap_iotlb(iova, size)?;
            handles.wait_for_progress(1).with_context(|| format!("after {round} invalidations"))?;
        }
        Ok(())
    });
    let misses = iommu.end()?;
    tell(&done?);
    println!("{misses} misses");
    ensure!(misses > 2, "there were no misses: the IOTLB was not used");
    Ok(())
}
