// SPDX-License-Identifier: GPL-2.0-only
/*
 * The portion of a queue: chains that it takes before it looks for completions, and completions that
 * it publishes before it takes chains again.
 *
 * Device, worker and driver work in parallel only while each of them has some of the requests in
 * flight. With large portions all requests go to and fro together. Small ones cost calls of the
 * driver and turns of the loop. A trial decides (trial.c), as in the daemon's own data plane
 * (crates/data-plane/src/batch_size.rs), and its result stays for the queue. As trial.c, this file is
 * also built for userspace.
 */
#include "portion.h"

/*
 * Sizes in requests. 0 stands between 8 and 64: batches begin small in each run of the loop and grow
 * to 16, and all completions are published together.
 */
const unsigned int vhost_blk_portion_sizes[VHOST_BLK_PORTION_SIZES] = { 2, 4, 8, 0, 64 };

/**
 * vhost_blk_portion_init - begin with batches that grow
 * @portion: the portion
 */
void vhost_blk_portion_init(struct vhost_blk_portion *portion)
{
	*portion = (struct vhost_blk_portion) { .chosen = VHOST_BLK_PORTION_FIRST };
	vhost_blk_trial_init(&portion->trial, false);
}

static void vhost_blk_choose_candidate(struct vhost_blk_portion *portion)
{
	unsigned int at_end = portion->smaller_next ? 0 : VHOST_BLK_PORTION_SIZES - 1;

	if (portion->chosen == at_end)
		portion->smaller_next = !portion->smaller_next;
	portion->candidate = portion->smaller_next ? portion->chosen - 1 : portion->chosen + 1;
}

/**
 * vhost_blk_portion_window - count a window, in which several requests were in flight
 * @portion: the portion
 * @window: tally of the window
 *
 * Return: true if a trial has ended.
 */
bool vhost_blk_portion_window(struct vhost_blk_portion *portion,
			      const struct vhost_blk_tally *window)
{
	switch (vhost_blk_trial_window(&portion->trial, window, VHOST_BLK_TRIAL_GAIN)) {
	case VHOST_BLK_TRIAL_BEGINS:
		vhost_blk_choose_candidate(portion);
		return false;
	case VHOST_BLK_TRIAL_CHANGES:
		portion->chosen = portion->candidate;
		return true;
	case VHOST_BLK_TRIAL_KEEPS:
		portion->smaller_next = !portion->smaller_next;
		return true;
	default:
		return false;
	}
}
