/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_COALESCE_H
#define _VHOST_BLK_COALESCE_H

#include "trial.h"

/**
 * struct vhost_blk_coalesce - coalescing of a queue's calls; see coalesce.c. Under vq.mutex
 * @held: requests whose call is held; 0: no call is held
 * @held_since: time at which the oldest of them was published
 * @chosen: calls are held, as the last trial decided
 * @trial: compares that with the other way
 * @tally: tallies of the trial, of the present choice and of the other one
 * @was_idle: the last window took too long
 * @window: tally of the present window; its time is that of its start
 * @deepest: greatest depth at a publication of the window: see vhost_blk_depth()
 */
struct vhost_blk_coalesce {
	unsigned int held;
	u64 held_since;
	bool chosen;
	struct vhost_blk_trial trial;
	struct vhost_blk_tally tally[2];
	bool was_idle;
	struct vhost_blk_tally window;
	unsigned int deepest;
};

#endif /* _VHOST_BLK_COALESCE_H */
