/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Batches: the chains that are taken and started before completions are reaped. Inline, for the
 * loop in queue.c, its only user.
 */
#ifndef _VHOST_BLK_BATCH_H
#define _VHOST_BLK_BATCH_H

#include <linux/blkdev.h>
#include <linux/sched.h>

#include "stages.h"

/* State of one run of the loop. */
struct vhost_blk_run {
	unsigned int chains;
	unsigned int bytes;
	unsigned int batch;	/* chains to start before completions are reaped */
	bool yield;	/* other work of this worker is due; the queue is queued again */
	bool stuck;	/* needs a completion or an IOTLB entry before the next chain */
	bool blind;	/* the rings cannot be reached until an IOTLB entry comes */
};

/*
 * A driver that waits for this CPU cannot work in parallel with the device: early answers to the
 * first of many requests would only add task switches.
 */
static inline unsigned int vhost_blk_first_batch(const struct vhost_blk_queue *q)
{
	return q->crowded ? VHOST_BLK_BATCH_CROWDED : VHOST_BLK_BATCH_FIRST;
}

/*
 * Hands the plugged bios to the disk's driver. A driver with immediate completion uses a softirq,
 * and a softirq that a task raises is left to ksoftirqd: the loop would stop polling and sleep to
 * let it run. It runs here instead; ksoftirqd, already woken, then runs and finds no work.
 */
static inline void vhost_blk_unplug(struct blk_plug *plug)
{
	blk_finish_plug(plug);
	local_bh_disable();
	local_bh_enable();
	cond_resched();
}

/*
 * Takes a batch of chains and starts their requests. No other function takes chains: here the queue
 * is RUNNING until vq.mutex is released, and notifications are disabled. With notifications enabled
 * vhost_get_vq_desc() stops the machine.
 */
static inline void vhost_blk_submit_batch(struct vhost_blk_queue *q, struct vhost_blk_run *run)
{
	struct vhost_blk_chain chain;
	struct blk_plug plug;
	unsigned int left = run->batch;
	unsigned long sleeps = current->nvcsw;
	int taken;

	if (q->state != VHOST_BLK_RUNNING)
		return;
	vhost_disable_notify(q->vq.dev, &q->vq);
	blk_start_plug(&plug);
	while (left-- && !run->yield) {
		taken = vhost_blk_take_chain(q, &chain);		/* 1 chain */
		if (taken > 0)
			taken = vhost_blk_submit(q, &chain, &run->bytes);	/* 2, 3 */
		if (taken <= 0) {
			run->stuck = taken < 0;
			break;
		}
		/* Queues the kick handler again if it returns true. */
		run->yield = vhost_exceeds_weight(&q->vq, ++run->chains, run->bytes);
		/* It slept for a tag, and the next one may, too: waiters of vq.mutex go first. */
		if (unlikely(current->nvcsw != sleeps) && !run->yield) {
			vhost_poll_queue(&q->vq.poll);
			run->yield = true;
		}
	}
	vhost_blk_unplug(&plug);
	run->batch = max(run->batch, min(run->batch * 2, VHOST_BLK_BATCH_MAX));
}

#endif /* _VHOST_BLK_BATCH_H */
