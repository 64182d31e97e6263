/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
#ifndef _UAPI_VHOST_BLK_LIMITS_H
#define _UAPI_VHOST_BLK_LIMITS_H

#include <linux/types.h>

/* Limits that several devices share: the memory that VHOST_BLK_SHARE_LIMITS of vhost_blk.h names. */

/**
 * struct vhost_blk_share - a device's part in limits that devices of one owner share
 * @limits_addr: address of the &struct vhost_blk_limits in the owner's memory, aligned to their size
 * @debt_addr: address of the &struct vhost_blk_debt of this device, aligned to its size
 *
 * The module pins both pages, and charges them to RLIMIT_MEMLOCK.
 */
struct vhost_blk_share {
	__u64 limits_addr;
	__u64 debt_addr;
};

/**
 * struct vhost_blk_debt - cost of a device's requests for which no clock was advanced yet
 * @iops_ns: cost for the limit on requests, in nanoseconds
 * @bytes_ns: the same for the limit on bytes
 *
 * A device in debt takes no request, and pays like one that takes: when the limits let a request
 * pass, its debt advances the clocks. The owner keeps the debt when the device is closed, may pay it
 * itself, and forgives it by 0 after a new version of the limits. All by atomic operations.
 */
struct vhost_blk_debt {
	__u64 iops_ns;
	__u64 bytes_ns;
};

/*
 * Longest time, in nanoseconds, by which a request advances a clock beyond the present time, unless
 * 1/@iops of a second is longer. The rest of its cost is debt of its device. So each device waits as
 * long for a large request of another one.
 */
#define VHOST_BLK_LIMITS_LEAD_NS	10000000
/* Longest time, in nanoseconds, that a device gives way to others: less than the least burst. */
#define VHOST_BLK_LIMITS_GIVE_WAY_NS	6000000
/* Time, in nanoseconds, after the end of its wait from which a device does not count as waiting. */
#define VHOST_BLK_LIMITS_BEHIND_AGE_NS	8000000
/*
 * Cost, in nanoseconds, by which a device that returns may lag behind the others: their lead comes from a time in
 * which the limits delayed no request.
 */
#define VHOST_BLK_LIMITS_TAG_LEAD_NS	100000000

/**
 * struct vhost_blk_limits - limits on the rate that devices of one owner share
 * @version: changed by the owner after each change of @burst_ns, @iops and @bytes. A queue that
 *	waits notices it within 100 ms
 * @burst_ns: unused time that later requests may catch up on
 * @iops: most requests a second of all devices together; 0: no limit
 * @iops_clock: time at which the limit on requests lets the next one pass; each request advances it
 *	by its cost, 1/@iops of a second, from @burst_ns before the present time at the earliest, up to
 *	%VHOST_BLK_LIMITS_LEAD_NS or one cost after it at the latest
 * @bytes: most bytes a second, counted as in &vhost_blk_options; 0: no limit
 * @bytes_clock: the same for the limit on bytes
 * @top: the highest cost that a device's requests had so far
 * @behind: the lowest one of a device that waits
 * @behind_ns: the time until which that device waits; 0: no device waits
 * @behind_by: number of that device; the highest bit is set for one of the module's
 * @reserved: 0
 *
 * Times are those of CLOCK_MONOTONIC, outside of any time namespace, and costs are in nanoseconds.
 * The owner may use the limits for requests that it serves itself. @top, @behind, @behind_ns and
 * @reserved are 0 at first. A new version forgives costs: the owner sets @top, @behind and
 * @behind_ns to 0 before it, and the debts of all devices after it.
 *
 * All fields change at any time, the clocks by atomic operations. No value harms more than the
 * rate of the devices that share the limits.
 */
struct vhost_blk_limits {
	__u64 version;
	__u64 burst_ns;
	__u64 iops;
	__u64 iops_clock;
	__u64 bytes;
	__u64 bytes_clock;
	__u64 top;
	__u64 behind;
	__u64 behind_ns;
	__u64 behind_by;
	__u64 reserved[6];
};

#endif /* _UAPI_VHOST_BLK_LIMITS_H */
