// SPDX-License-Identifier: GPL-2.0-only
/*
 * Batches: the chains that are taken and started before completions are reaped.
 */
#include <linux/blkdev.h>
#include <linux/sched.h>

#include "stages.h"

/* Requests that a plug takes tags for at once: the block layer flushes it at this number. */
#define VHOST_BLK_PLUG_IOS	32u

/*
 * The request that follows takes tags for the rest of the batch, too, as far as its chains are known
 * to be in the ring. A tag that is not used goes back at the end of the plug, or when the worker
 * sleeps.
 */
static void vhost_blk_expect_ios(struct vhost_blk_queue *q, struct blk_plug *plug,
				 unsigned int left)
{
	u16 waiting = q->vq.avail_idx - q->vq.last_avail_idx;

	plug->nr_ios = 1 + min3(left, (unsigned int)waiting, VHOST_BLK_PLUG_IOS - 1);
}

/*
 * Hands the plugged bios to the disk's driver. A driver with immediate completion uses a softirq,
 * and a softirq that a task raises is left to ksoftirqd: the loop would stop polling and sleep to
 * let it run. It runs here instead; ksoftirqd, already woken, then runs and finds no work.
 */
static void vhost_blk_unplug(struct blk_plug *plug)
{
	blk_finish_plug(plug);
	local_bh_disable();
	local_bh_enable();
	cond_resched();
}

/**
 * vhost_blk_submit_batch - take a batch of chains and start their requests
 * @q: the queue; vq.mutex is held
 * @run: the run of the loop
 *
 * No other function takes chains: here the queue is RUNNING until vq.mutex is released, and
 * notifications are disabled. With notifications enabled vhost_get_vq_desc() hits a BUG_ON().
 */
void vhost_blk_submit_batch(struct vhost_blk_queue *q, struct vhost_blk_run *run)
{
	struct vhost_blk_chain chain;
	struct blk_plug plug;
	unsigned int left = run->batch_size ?: run->growing_batch;
	unsigned long sleeps = current->nvcsw;
	int taken;

	if (!vhost_blk_takes(q))
		return;
	vhost_disable_notify(q->vq.dev, &q->vq);
	vhost_blk_arrivals_batch(q);
	blk_start_plug(&plug);
	while (left-- && !run->yield) {
		if (!vhost_blk_limit_admits(q)) {
			run->stuck = true;
			break;
		}
		taken = vhost_blk_take_chain(q, &chain);		/* 1 chain */
		vhost_blk_arrivals_chain(q, taken);
		if (taken > 0) {
			vhost_blk_expect_ios(q, &plug, left);
			taken = vhost_blk_submit(q, &chain, &run->bytes);	/* 2, 3 */
		}
		if (taken <= 0) {
			run->stuck = taken < 0;
			break;
		}
		/* Queues the kick handler again if it returns true. */
		run->yield = vhost_exceeds_weight(&q->vq, ++run->chains, run->bytes);
		/*
		 * The worker slept, probably for a tag. Yield: waiters of vq.mutex must not wait
		 * for the next sleep too.
		 */
		if (unlikely(current->nvcsw != sleeps) && !run->yield) {
			vhost_poll_queue(&q->vq.poll);
			run->yield = true;
		}
	}
	vhost_blk_unplug(&plug);
	if (!run->batch_size)
		run->growing_batch = max(run->growing_batch,
					 min(run->growing_batch * 2, VHOST_BLK_BATCH_MAX));
}
