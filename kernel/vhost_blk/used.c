// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stages 5 and 6, used and notify: one call each into the vhost core for all requests that ended
 * together, or for more: coalesce.c.
 */
#include <linux/sched/stat.h>
#include <linux/uaccess.h>
#include <linux/virtio_ring.h>

#include "stages.h"
#include "trace.h"

/*
 * True if the driver wants a call. Only the counters use this: vhost_signal() decides, and may differ if the driver
 * changes its event index in between.
 */
static bool vhost_blk_call_wanted(struct vhost_virtqueue *vq)
{
	__virtio16 __user *event = (__virtio16 __user *)&vq->avail->ring[vq->num];
	__virtio16 word;

	/* The addresses are the core's to translate. */
	if (unlikely(vq->iotlb))
		return true;
	if (!vhost_has_feature(vq, VIRTIO_RING_F_EVENT_IDX))
		return get_user(word, &vq->avail->flags) ||
		       !(vhost16_to_cpu(vq, word) & VRING_AVAIL_F_NO_INTERRUPT);
	return !vq->signalled_used_valid || get_user(word, event) ||
	       vring_need_event(vhost16_to_cpu(vq, word), vq->last_used_idx, vq->signalled_used);
}

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
	bool wanted = vhost_blk_call_wanted(&q->vq);

	q->stats.calls += wanted && q->vq.call_ctx.ctx;
	q->stats.suppressed += !wanted;
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

	if (unlikely(q->used_broken))
		goto dropped;
	vhost_blk_region_batch(q, n);
	if (unlikely(vhost_blk_add_used(vq, vq->heads, n))) {
		/*
		 * The core may have counted these entries as used. A later batch would publish
		 * them, too, and the next daemon would replay them.
		 */
		q->used_broken = true;
		vhost_blk_fault(q);
		goto dropped;
	}
	vhost_blk_region_used(q, n);
	trace_vhost_blk_used(q, n);
	q->stats.completed += n;
	vhost_blk_call_or_hold(q, n);
	return;

dropped:
	q->stats.dropped += n;
}

/**
 * vhost_blk_publish_pending - publish used entries of requests that ended without the rings
 * @q: the queue, whose rings can be reached; its vq.mutex is held in the owner's memory
 */
void vhost_blk_publish_pending(struct vhost_blk_queue *q)
{
	vhost_blk_publish(q, q->unpublished);
	q->unpublished = 0;
}

/**
 * vhost_blk_drop_pending - drop unpublished entries: no more IOTLB entries will come
 * @q: the queue; its vq.mutex is held
 */
void vhost_blk_drop_pending(struct vhost_blk_queue *q)
{
	q->stats.dropped += q->unpublished;
	q->unpublished = 0;
}
