// SPDX-License-Identifier: Apache-2.0
//! All cases.

use crate::case::Case;
use crate::case::Tier::{Full, Gating};
use crate::fixture::{
    Disk, Dm, DmKind, FileSystem, NullBlkOptions, brd, image, loop_4096, loop_of, scsi_debug,
};
use crate::integrity::Setup;
use crate::{
    abi as interface, charge, control, durability, faults, fixture, fuzz, hostile, integrity,
    notify, over_daemon, owner, ranges, removal, requests, suite, visibility,
};
use anyhow::Result;
use driver::kernel::abi;

macro_rules! cases {
    ($($name:literal $tier:ident $about:literal $run:expr;)*) => {
        &[$(Case { name: $name, tier: $tier, about: $about, run: $run },)*]
    };
}

/// Cases in the order in which they are listed.
pub(crate) const CASES: &[&[Case]] = &[
    INTERFACE,
    REQUESTS,
    DURABILITY,
    RANGES,
    NOTIFY,
    INTEGRITY,
    CONTROL,
    DAEMON,
    SUITE,
    LIFETIME,
    REMOVAL,
    FAULTS,
    HOSTILE,
    VISIBILITY,
    WITHOUT_LOCKDEP,
];

const INTERFACE: &[Case] = cases! {
    "abi-errors" Gating
        "each error that the header promises"
        |env| interface::errors(env, usual());
    "abi-old-order" Gating
        "the order of set-up of the series of 2022"
        |env| interface::old_order(env, usual());
    "abi-inflight" Gating
        "chains are marked in the in-flight region while they are in flight"
        interface::inflight_region;
};

const REQUESTS: &[Case] = cases! {
    "requests-null-blk" Gating
        "every request type, layout and error on null_blk"
        |env| requests::all(env, usual());
    "requests-null-blk-4096" Gating
        "every request type, layout and error on null_blk with blocks of 4096 bytes"
        |env| requests::all(env, null_blk(BLOCKS_4096));
    "requests-null-blk-cache" Full
        "every request type, layout and error on null_blk with a volatile write cache"
        |env| requests::all(env, null_blk(NullBlkOptions { cache_mib: 8, ..USUAL }));
    "requests-brd" Gating
        "every request type, layout and error on a RAM disk, which completes at once"
        |env| requests::all(env, brd());
    "requests-loop-4096" Full
        "every request type, layout and error on a loop device with blocks of 4096 bytes"
        |env| requests::all(env, loop_4096());
    "requests-scsi-debug-4096" Gating
        "every request type, layout and error on a SCSI disk with blocks of 4096 bytes"
        |env| requests::all(env, scsi_debug());
    "requests-dm" Full
        "every request type, layout and error on a device-mapper device"
        |env| requests::all(env, mapped());
    "requests-ext4-direct" Gating
        "every request type, layout and error on an image on ext4, opened with O_DIRECT"
        |env| requests::all(env, image(FileSystem::Ext4, true));
    "requests-ext4-cached" Gating
        "every request type, layout and error on an image on ext4, by way of the page cache"
        |env| requests::all(env, image(FileSystem::Ext4, false));
    "requests-xfs-direct" Full
        "every request type, layout and error on an image on XFS, opened with O_DIRECT"
        |env| requests::all(env, image(FileSystem::Xfs, true));
    "requests-xfs-cached" Full
        "every request type, layout and error on an image on XFS, by way of the page cache"
        |env| requests::all(env, image(FileSystem::Xfs, false));
};

const DURABILITY: &[Case] = cases! {
    "durability-block-device" Gating
        "when the disk below is told to flush its cache, and when not"
        durability::block_device;
    "durability-file" Gating
        "when the disk below an image is told to flush its cache, and when not"
        durability::file;
    "durability-waits" Gating
        "writes that a file system ends only when the disk has them do not keep the queue's worker"
        durability::waits;
};

const RANGES: &[Case] = cases! {
    "discard-read-only" Gating
        "a discard that takes long ends with an error when its disk becomes read-only"
        ranges::become_read_only;
    "discard-closed" Gating
        "a discard that takes long does not keep the device from being closed"
        ranges::closed;
};

const NOTIFY: &[Case] = cases! {
    "notify" Gating
        "no kick and no call is lost, whenever it comes"
        |env| notify::none_is_lost(env, usual(), 0, 8_000);
    "notify-busy-loop" Gating
        "no kick and no call is lost while the device polls before it sleeps"
        |env| notify::none_is_lost(env, usual(), 50, 3_000);
    "notify-long" Full
        "no kick and no call is lost, many more times"
        |env| notify::none_is_lost(env, usual(), 0, 100_000);
};

const INTEGRITY: &[Case] = cases! {
    "integrity-null-blk" Gating
        "two queues and workers, mixed sizes to 4 MiB, every sector verified, on null_blk"
        |env| integrity::run(env, usual(), Setup::usual(300));
    "integrity-null-blk-4096" Full
        "the same with blocks of 4096 bytes"
        |env| integrity::run(env, null_blk(BLOCKS_4096), Setup::usual(2000));
    "integrity-many-queues" Full
        "eight queues on three workers, kicks and calls by flags instead of indices"
        |env| integrity::run(env, usual(), Setup { queues: 8, workers: 3, no_event_idx: true, ..Setup::usual(600) });
    "integrity-brd" Full
        "the load on a RAM disk, which completes at once"
        |env| integrity::run(env, brd(), Setup::usual(2000));
    "integrity-busy-loop" Full
        "the load with busy polling"
        |env| integrity::run(env, usual(), Setup { busyloop_us: 200, ..Setup::usual(2000) });
    "integrity-poll-queues" Gating
        "the load with completions that are polled for on null_blk's poll queues"
        |env| integrity::run(env, null_blk(POLLED), with_flags(abi::OPT_IOPOLL, 200));
    "integrity-poll-queues-flush" Gating
        "polled completions and flushes on a disk with four tags for all, and a cache"
        |env| integrity::run(env, null_blk(FEW_TAGS), with_flags(abi::OPT_IOPOLL, 100));
    "integrity-poll-queues-dm" Gating
        "polled completions by way of dm, of requests that the disk below has to split"
        |env| integrity::run(env, mapped_on(null_blk(SPLIT)), with_flags(abi::OPT_IOPOLL, 100));
    "integrity-pinned" Gating
        "the load with guest memory pinned once"
        |env| integrity::run(env, usual(), with_flags(abi::OPT_PIN_MEMORY, 200));
    "integrity-bounded" Gating
        "the load while fewer bytes may be in flight than one request has"
        |env| integrity::bounded(env, usual(), Setup::usual(300), 256 << 10);
    "integrity-write-through" Full
        "the load in write-through mode on a disk with a volatile cache"
        |env| integrity::run(
            env,
            null_blk(NullBlkOptions { cache_mib: 8, ..USUAL }),
            with_flags(abi::OPT_WRITE_THROUGH, 1000),
        );
    "integrity-slow-disk" Full
        "the load on a disk that takes a millisecond, so that queues are deep"
        |env| integrity::run(env, null_blk(SLOW), Setup::usual(1000));
    "integrity-dm" Full
        "the load on a device-mapper device"
        |env| integrity::run(env, mapped(), Setup::usual(2000));
    "integrity-ext4-direct" Gating
        "the load on an image on ext4, opened with O_DIRECT"
        |env| integrity::run(env, image(FileSystem::Ext4, true), Setup::usual(200));
    "integrity-ext4-cached" Gating
        "the load on an image on ext4, by way of the page cache"
        |env| integrity::run(env, image(FileSystem::Ext4, false), Setup::usual(200));
    "integrity-xfs-direct" Full
        "the load on an image on XFS, opened with O_DIRECT"
        |env| integrity::run(env, image(FileSystem::Xfs, true), Setup::usual(1000));
    "integrity-xfs-cached" Full
        "the load on an image on XFS, by way of the page cache"
        |env| integrity::run(env, image(FileSystem::Xfs, false), Setup::usual(1000));
    "integrity-xfs-fragments" Full
        "large reads of an image on XFS whose extents change all the time: a read that meets a lock on its way is done again"
        |env| integrity::run(env, image(FileSystem::Xfs, true), Setup { fragments: true, ..Setup::usual(20_000) });
    "integrity-long" Full
        "the load on null_blk for much longer"
        |env| integrity::run(env, usual(), Setup::usual(20_000));
};

const CONTROL: &[Case] = cases! {
    "control-stop-start" Gating
        "queues stop with their exact index and start again under load"
        |env| control::stop_and_start(env, usual(), Setup::usual(60));
    "control-memory-table" Gating
        "the memory table is exchanged under load"
        |env| control::memory_table(env, usual(), Setup::usual(40));
    "control-memory-table-pinned" Full
        "the memory table is exchanged under load while guest memory is pinned"
        |env| control::memory_table(env, usual(), with_flags(abi::OPT_PIN_MEMORY, 40));
    "control-reset-owner" Gating
        "RESET_OWNER and everything anew under load"
        |env| control::reset_owner(env, usual(), Setup::usual(20));
    "control-features" Gating
        "LOG_ALL on and off under load"
        |env| control::features(env, usual(), Setup::usual(40));
    "control-calls" Gating
        "call eventfds are exchanged under load"
        |env| control::replace_calls(env, usual(), Setup::usual(60));
    "control-tune" Gating
        "options, workers, busy-loop time and serial change under load"
        |env| control::tune(env, usual(), Setup { workers: 0, ..Setup::usual(60) });
    "control-tune-poll-queues" Full
        "the same on a disk with poll queues"
        |env| control::tune(env, null_blk(POLLED), Setup { workers: 0, ..Setup::usual(400) });
    "control-swap-mapped" Gating
        "the backend is exchanged for another name of the same disk under load"
        |env| control::swap_mapped(env, Setup::usual(30));
    "control-swap-files" Gating
        "an image is swapped between O_DIRECT and the page cache under load"
        |env| control::swap_files(env, Setup::usual(30));
    "dirty-log" Gating
        "every page that the device wrote is in the dirty log"
        |env| control::dirty_log_is_complete(env, usual(), 0);
    "dirty-log-pinned" Full
        "every page that the device wrote is in the dirty log, with pinned memory"
        |env| control::dirty_log_is_complete(env, usual(), abi::OPT_PIN_MEMORY);
    "dirty-log-4096" Full
        "every page that the device wrote is in the dirty log, with blocks of 4096 bytes"
        |env| control::dirty_log_is_complete(env, null_blk(BLOCKS_4096), 0);
    "dirty-log-ext4-cached" Full
        "every page that the device wrote is in the dirty log, on an image"
        |env| control::dirty_log_is_complete(env, image(FileSystem::Ext4, false), 0);
};

const DAEMON: &[Case] = cases! {
    "daemon-requests" Gating
        "every request type, layout and error on null_blk, by way of the daemon's kernel plane"
        |env| requests::all(&env.over_daemon(), usual());
    "daemon-requests-ext4" Full
        "the same on an image on ext4"
        |env| requests::all(&env.over_daemon(), image(FileSystem::Ext4, true));
    "daemon-integrity" Gating
        "two queues, every sector verified, by way of the daemon's kernel plane"
        |env| integrity::run(&env.over_daemon(), usual(), Setup::usual(200));
    "daemon-switch" Gating
        "a running disk moves between the kernel and the io_uring plane under load"
        |env| over_daemon::switch_planes(env, usual(), Setup::usual(6));
    "daemon-switch-ext4" Full
        "the same on an image on ext4, many times"
        |env| over_daemon::switch_planes(env, image(FileSystem::Ext4, true), Setup::usual(50));
    "daemon-sigkill" Gating
        "the daemon is killed under load; a successor takes up what was in flight"
        |env| over_daemon::kill_daemon(env, usual(), Setup::usual(6));
    "daemon-sigkill-50" Full
        "the same fifty times, on a disk that takes a millisecond"
        |env| over_daemon::kill_daemon(env, null_blk(SLOW), Setup::usual(50));
};

const SUITE: &[Case] = cases! {
    "suite-loop" Full
        "the daemon's own test suite with queues on the kernel plane, on a loop device"
        |env| suite::on_block_device(env, loop_of(512, SUITE_MIB));
    "suite-dm" Full
        "the same on a device-mapper device"
        |env| suite::on_block_device(env, mapped_on(loop_of(512, SUITE_MIB)));
    "suite-ext4" Full
        "the same on image files on ext4"
        |env| suite::on_images(env, FileSystem::Ext4);
    "suite-xfs" Full
        "the same on image files on XFS"
        |env| suite::on_images(env, FileSystem::Xfs);
    "suite-restart" Full
        "the suite's killed daemons, on a disk that takes a millisecond"
        |env| suite::restart(env, null_blk(SLOW));
};

const LIFETIME: &[Case] = cases! {
    "owner-sigkill" Gating
        "the owner of a loaded device is killed; the module can be exchanged after"
        |env| owner::kill_owners(env, 3);
    "owner-sigkill-50" Full
        "the same fifty times"
        |env| owner::kill_owners(env, 50);
};

const REMOVAL: &[Case] = cases! {
    "removal-null-blk" Gating
        "null_blk goes away under load: requests end with IOERR"
        |env| removal::null_blk_goes(env, Setup::usual(0), USUAL);
    "removal-null-blk-slow" Full
        "the same with requests in flight for a millisecond"
        |env| removal::null_blk_goes(env, Setup::usual(0), SLOW);
    "removal-null-blk-polled" Full
        "the same with polled completions"
        |env| removal::null_blk_goes(env, with_flags(abi::OPT_IOPOLL, 0), POLLED);
    "removal-scsi" Gating
        "a SCSI disk is deleted under load; its driver can be unloaded"
        |env| removal::scsi_goes(env, Setup::usual(0));
    "removal-dm" Full
        "a device-mapper device is removed by force under load"
        |env| removal::mapper_goes(env, Setup::usual(0));
    "removal-replaced" Gating
        "after its disk went away a device serves another one"
        |env| removal::replaced_after_removal(env);
    "removal-number" Gating
        "the descriptor of a disk that is gone does not attach the one that has its number now"
        |_| removal::number_given_anew();
    "removal-attach" Gating
        "a disk comes and goes while it is attached and detached"
        |env| removal::goes_while_attached(env);
    "dm-error" Gating
        "a device-mapper table fails everything for a while under load"
        |env| removal::mapper_fails_for_a_while(env, Setup::usual(0));
    "dm-flakey" Full
        "dm-flakey fails every other second under load"
        |env| removal::mapper_flakes(env, Setup::usual(0), 6);
};

const FAULTS: &[Case] = cases! {
    "faults-bio" Gating
        "bios fail (fail_make_request): S_IOERR, nothing else"
        |env| faults::bios_fail(env, Setup::usual(0));
    "faults-slab" Gating
        "allocations of the workers fail (failslab): S_IOERR at worst"
        |env| faults::memory_fails(env, Setup::usual(0), "failslab");
    "faults-page-alloc" Gating
        "page allocations of the workers fail (fail_page_alloc): S_IOERR at worst"
        |env| faults::memory_fails(env, Setup::usual(0), "fail_page_alloc");
    "faults-set-up" Gating
        "allocations fail while devices are set up: an error, and nothing is left behind"
        |env| faults::set_up_fails(env, 60);
};

const HOSTILE: &[Case] = cases! {
    "hostile-rings" Gating
        "malformed chains on one queue while another one is served; the queue serves again after"
        |env| hostile::run(env, usual(), 20_000, false);
    "hostile-rings-raced" Gating
        "malformed chains that a second thread changes while the device reads them"
        |env| hostile::run(env, usual(), 20_000, true);
    "hostile-rings-file" Full
        "malformed chains, raced, on an image"
        |env| hostile::run(env, image(FileSystem::Ext4, true), 100_000, true);
    "hostile-rings-million" Full
        "a million malformed chains, raced"
        |env| hostile::run(env, usual(), 1_000_000, true);
};

const VISIBILITY: &[Case] = cases! {
    "fdinfo" Gating
        "the counters in fdinfo are those of the requests that were made"
        |env| visibility::fdinfo(env, usual());
    "trace-events" Gating
        "one request is seen at each stage, in order"
        |env| visibility::trace_events(env, usual());
    "fdinfo-stalled" Full
        "who reads the counters while the worker waits for a disk can be killed"
        visibility::killed_while_it_looks;
    "charge" Gating
        "reads, writes and discards are counted for the owner's control group"
        |env| charge::to_the_owner(env, usual());
};

/// Last, as they make lockdep give up (see [`crate::case::expect_lockdep_limit`]).
const WITHOUT_LOCKDEP: &[Case] = cases! {
    "control-iotlb" Gating
        "addresses go through the IOTLB, which misses and loses entries under load"
        |env| control::iotlb_with_misses(env, usual(), Setup::usual(100));
    "ioctl-fuzz" Gating
        "random ioctls with random arguments from two threads; a new device serves after"
        |env| fuzz::run(env, 4_000);
    "ioctl-fuzz-long" Full
        "the same for much longer"
        |env| fuzz::run(env, 400_000);
};

/// Size of the disk that the daemon's own tests expect.
const SUITE_MIB: u64 = 16;

const USUAL: NullBlkOptions = NullBlkOptions::USUAL;
const BLOCKS_4096: NullBlkOptions = NullBlkOptions { block_bytes: 4096, ..USUAL };
const POLLED: NullBlkOptions = NullBlkOptions { poll_queues: 2, ..USUAL };
const FEW_TAGS: NullBlkOptions = NullBlkOptions { shared_tags: 4, cache_mib: 16, ..POLLED };
const SPLIT: NullBlkOptions = NullBlkOptions { max_sectors: 64, ..POLLED };
const SLOW: NullBlkOptions = NullBlkOptions { irqmode: 2, completion_ns: 1_000_000, ..USUAL };

fn with_flags(flags: u32, requests: u64) -> Setup {
    Setup { flags, ..Setup::usual(requests) }
}

fn null_blk(options: NullBlkOptions) -> Result<Disk> {
    fixture::null_blk(options).map(|(disk, _)| disk)
}

fn usual() -> Result<Disk> {
    null_blk(USUAL)
}

fn mapped() -> Result<Disk> {
    mapped_on(usual())
}

fn mapped_on(below: Result<Disk>) -> Result<Disk> {
    Dm::over(below?, "mapped", DmKind::Linear).map(|(disk, _)| disk)
}
