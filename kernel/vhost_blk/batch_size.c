// SPDX-License-Identifier: GPL-2.0-only
/*
 * The size of a queue's batches: chains that it takes before it looks for completions, and
 * completions that it publishes before it takes chains again.
 *
 * Device, worker and driver work in parallel only while each of them has some of the requests in
 * flight. With large batches all requests go to and fro together. Small ones cost calls of the
 * driver and turns of the loop. A trial decides (trial.c), as in the daemon's own data plane
 * (crates/data-plane/src/batch_size.rs), and its result stays for the queue. As trial.c, this file is
 * also built for userspace.
 */
#include "batch_size.h"

/*
 * Sizes in requests. 0 stands between 8 and 64: batches begin small in each run of the loop and grow
 * to 16, and all completions are published together.
 */
const unsigned int vhost_blk_batch_sizes[VHOST_BLK_BATCH_SIZES] = { 2, 4, 8, 0, 64 };

/**
 * vhost_blk_batch_size_init - begin with batches that grow
 * @size: the size of a queue's batches
 */
void vhost_blk_batch_size_init(struct vhost_blk_batch_size *size)
{
	*size = (struct vhost_blk_batch_size) { .chosen = VHOST_BLK_BATCH_SIZE_FIRST };
	vhost_blk_trial_init(&size->trial, false);
}

static void vhost_blk_choose_candidate(struct vhost_blk_batch_size *size)
{
	unsigned int at_end = size->smaller_next ? 0 : VHOST_BLK_BATCH_SIZES - 1;

	if (size->chosen == at_end)
		size->smaller_next = !size->smaller_next;
	size->candidate = size->smaller_next ? size->chosen - 1 : size->chosen + 1;
}

/**
 * vhost_blk_batch_size_window - count a window, in which several requests were in flight
 * @size: the size of a queue's batches
 * @window: tally of the window
 *
 * Return: true if a trial has ended.
 */
bool vhost_blk_batch_size_window(struct vhost_blk_batch_size *size,
				 const struct vhost_blk_tally *window)
{
	switch (vhost_blk_trial_window(&size->trial, window, VHOST_BLK_TRIAL_GAIN)) {
	case VHOST_BLK_TRIAL_BEGINS:
		vhost_blk_choose_candidate(size);
		return false;
	case VHOST_BLK_TRIAL_CHANGES:
		size->chosen = size->candidate;
		return true;
	case VHOST_BLK_TRIAL_KEEPS:
		size->smaller_next = !size->smaller_next;
		return true;
	default:
		return false;
	}
}
