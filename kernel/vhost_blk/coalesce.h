/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_COALESCE_H
#define _VHOST_BLK_COALESCE_H

#include <linux/types.h>

/**
 * struct vhost_blk_tally - requests and calls of some time
 * @ns: the time
 * @requests: published requests
 * @calls: calls of the driver
 */
struct vhost_blk_tally {
	u64 ns;
	u64 requests;
	u64 calls;
};

/**
 * struct vhost_blk_coalesce - coalescing of a queue's calls; see coalesce.c. Under vq.mutex
 * @held: requests whose call is held; 0: no call is held
 * @held_since: time at which the oldest of them was published
 * @chosen: calls are held, as the last trial decided
 * @windows: windows of the present trial that have ended, plus 1; 0: there is no trial
 * @trial: tallies without coalescing and with it
 * @pause: windows between two trials
 * @until_trial: windows until the next one
 * @was_idle: the last window took too long
 * @window: tally of the present window; its time is that of its start
 * @largest: most requests that one call of the window answered
 */
struct vhost_blk_coalesce {
	unsigned int held;
	u64 held_since;
	bool chosen;
	unsigned int windows;
	struct vhost_blk_tally trial[2];
	unsigned int pause;
	unsigned int until_trial;
	bool was_idle;
	struct vhost_blk_tally window;
	unsigned int largest;
};

#endif /* _VHOST_BLK_COALESCE_H */
