// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stages 5 and 6, used and notify: one call each into the vhost core for all requests that ended
 * together, or for more: coalesce.c.
 */
#include <linux/sched/stat.h>

#include "stages.h"
#include "trace.h"

/**
 * vhost_blk_notify - call the driver, if it asked for that
 * @q: the queue, whose rings can be reached; its vq.mutex is held
 * @n: requests that the call answers
 *
 * Notes whether that made another task wait for this CPU.
 */
void vhost_blk_notify(struct vhost_blk_queue *q, unsigned int n)
{
	bool alone = single_task_running();

	q->stats.calls++;

	vhost_signal(q->vq.dev, &q->vq);
	if (alone)
		q->crowded = !single_task_running();
	trace_vhost_blk_notify(q, n);
}

/**
 * vhost_blk_publish - publish used entries, and call the driver or hold the call
 * @q: the queue, whose rings can be reached; its vq.mutex is held in the owner's memory
 * @n: number of entries, the first ones of vq.heads
 */
void vhost_blk_publish(struct vhost_blk_queue *q, unsigned int n)
{
	struct vhost_virtqueue *vq = &q->vq;

	vhost_blk_region_batch(q, n);
	if (unlikely(vhost_blk_add_used(vq, vq->heads, n))) {
		vhost_blk_fault(q);
		q->stats.dropped += n;
		return;
	}
	vhost_blk_region_used(q, n);
	trace_vhost_blk_used(q, n);
	q->stats.completed += n;
	vhost_blk_call_or_hold(q, n);
}

/**
 * vhost_blk_publish_settled - publish used entries of requests that ended without the rings
 * @q: the queue, whose rings can be reached; its vq.mutex is held in the owner's memory
 */
void vhost_blk_publish_settled(struct vhost_blk_queue *q)
{
	vhost_blk_publish(q, q->settled);
	q->settled = 0;
}

/**
 * vhost_blk_drop_settled - drop settled entries: no more IOTLB entries will come
 * @q: the queue; its vq.mutex is held
 */
void vhost_blk_drop_settled(struct vhost_blk_queue *q)
{
	q->stats.dropped += q->settled;
	q->settled = 0;
}
