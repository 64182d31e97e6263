// SPDX-License-Identifier: GPL-2.0-only
/*
 * The loop: vhost_blk_serve() is the whole life of a request. A kick or a completion runs it; the
 * functions around it decide when it continues and when it sleeps. batch.c has the batches, poll.c
 * the polling.
 */
#include "stages.h"

/*
 * The size of the first batch, where batches grow. Early answers to the first of many requests would
 * only add task switches for a driver that waits for this CPU.
 */
static unsigned int vhost_blk_first_batch(const struct vhost_blk_queue *q)
{
	return q->crowded ? VHOST_BLK_BATCH_CROWDED : VHOST_BLK_BATCH_FIRST;
}

/**
 * vhost_blk_batch_chosen - the size of batches, but for trials
 * @q: the queue; its vq.mutex is held
 *
 * Return: the size that the owner has fixed or the last trial has chosen, or that of the first batch.
 */
unsigned int vhost_blk_batch_chosen(const struct vhost_blk_queue *q)
{
	u32 fixed = READ_ONCE(q->blk->opt.batch);

	if (fixed)
		return fixed;
	return (q->crowded ? 0 : vhost_blk_batch_sizes[q->batch_size.chosen]) ?:
	       vhost_blk_first_batch(q);
}

/**
 * vhost_blk_rings_mapped - true if the rings can be reached
 * @q: the queue, which translates by an IOTLB; its vq.mutex is held
 *
 * Sends one IOTLB miss per update: the vhost core keeps each miss until userspace answers it, and a
 * driver can kick without limit.
 *
 * Return: true if the IOTLB has the rings.
 */
bool vhost_blk_rings_mapped(struct vhost_blk_queue *q)
{
	if (!q->rings_miss_sent)
		q->rings_miss_sent = !vq_meta_prefetch(&q->vq);
	return !q->rings_miss_sent;
}

/**
 * vhost_blk_iotlb_updated - go on after an update of the IOTLB
 * @blk: the device; its dev.mutex is held, so that no queue stops and no worker goes
 *
 * The update may answer an IOTLB miss that the core no longer tracks as pending.
 */
void vhost_blk_iotlb_updated(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->num_queues; i++) {
		struct vhost_blk_queue *q = blk->queues + i;
		bool sent;

		if (!vhost_blk_runs(q))
			continue;
		mutex_lock(&q->vq.mutex);
		sent = q->rings_miss_sent || q->chain_miss_sent;
		q->rings_miss_sent = false;
		q->chain_miss_sent = false;
		mutex_unlock(&q->vq.mutex);
		if (sent)
			vhost_poll_queue(&q->vq.poll);
	}
}

static void vhost_blk_loop_begin(struct vhost_blk_queue *q, struct vhost_blk_run *run)
{
	WRITE_ONCE(q->looping, true);
	run->rings_unmapped = q->vq.iotlb && !vhost_blk_rings_mapped(q);
	if (unlikely(run->rings_unmapped))
		vhost_blk_complete_unpublished(q);
	else if (unlikely(q->unpublished))
		vhost_blk_publish_pending(q);
}

/* From here on a completion runs the loop again. */
static void vhost_blk_loop_end(struct vhost_blk_queue *q, struct vhost_blk_run *run)
{
	while (unlikely(run->ended))
		vhost_blk_complete(q, run);
	vhost_blk_send_held_call(q);
	WRITE_ONCE(q->looping, false);
	/* Pairs with llist_add() in vhost_blk_end_io(). */
	smp_mb();
	/* Without the rings it would spin for polled I/O; a drain polls for it, too. */
	if (!llist_empty(&q->done) || (!run->rings_unmapped && !list_empty(&q->polled)))
		vhost_blk_queue_done(q);
}

/* True if the loop takes another turn; otherwise enables kicks, if a kick can help. */
static bool vhost_blk_go_on(struct vhost_blk_queue *q, struct vhost_blk_run *run)
{
	struct vhost_virtqueue *vq = &q->vq;

	if (run->yield)
		return false;
	vhost_blk_send_due_call(q);
	if (run->ended || !llist_empty(&q->done))
		return true;
	if (run->stuck || !vhost_blk_takes(q))
		return false;
	if (!list_empty(&q->polled))
		return vhost_blk_poll_device(q);
	vhost_blk_arrivals_look(q);
	if (!vhost_vq_avail_empty(vq->dev, vq))
		return true;
	if (vhost_blk_wait_before_call(q))
		return true;
	if (vhost_blk_poll_begin(q) && vhost_blk_poll_ring(q)) {
		run->growing_batch = vhost_blk_first_batch(q);
		return true;
	}
	/* Chains may have come between the last check and the enabling. */
	return vhost_blk_wait_for_kick(q);
}

/**
 * vhost_blk_serve - the life of all requests of a queue
 * @q: the queue
 * @kicked: run by a kick of the driver
 *
 * Runs on the queue's worker, in the owner's address space. Repeats until no work is left, or until
 * other queues of the worker are due.
 */
static void vhost_blk_serve(struct vhost_blk_queue *q, bool kicked)
{
	struct vhost_blk_run run = {};

	mutex_lock(&q->vq.mutex);
	run.growing_batch = vhost_blk_first_batch(q);
	q->stats.kicks += kicked;
	vhost_blk_loop_begin(q, &run);
	if (likely(!run.rings_unmapped)) {
		do {
			q->stats.turns++;
			q->now_ns = local_clock();
			run.stuck = false;
			run.batch_size = vhost_blk_batch_limit(q);
			vhost_blk_submit_batch(q, &run);	/* 1 chain, 2 request, 3 submit */
			if (!list_empty(&q->polled))
				vhost_blk_poll_bdev(q);
			if (vhost_blk_complete(q, &run))	/* 4 completion, 5 used, 6 notify */
				run.stuck = false;	/* its resources may be the missing ones */
		} while (vhost_blk_go_on(q, &run));
	}
	vhost_blk_loop_end(q, &run);
	mutex_unlock(&q->vq.mutex);
}

static void vhost_blk_handle_kick(struct vhost_work *work)
{
	struct vhost_virtqueue *vq = container_of(work, struct vhost_virtqueue, poll.work);

	vhost_blk_serve(vhost_blk_queue_of(vq), true);
}

static void vhost_blk_handle_done(struct vhost_work *work)
{
	vhost_blk_serve(container_of(work, struct vhost_blk_queue, done_work), false);
}

/**
 * vhost_blk_queue_init - prepare a queue, before vhost_dev_init()
 * @blk: the device
 * @q: the queue, zeroed
 */
void vhost_blk_queue_init(struct vhost_blk *blk, struct vhost_blk_queue *q)
{
	q->blk = blk;
	q->vq.handle_kick = vhost_blk_handle_kick;
	init_llist_head(&q->done);
	vhost_work_init(&q->done_work, vhost_blk_handle_done);
	INIT_DELAYED_WORK(&q->orphan_work, vhost_blk_orphan_work);
	init_waitqueue_head(&q->drained);
	spin_lock_init(&q->reqs_lock);
	vhost_blk_init_reserve(q);
	vhost_blk_coalesce_init(q);
	vhost_blk_batch_size_init(&q->batch_size);
	INIT_LIST_HEAD(&q->polled);
	vhost_blk_limit_init_queue(q);
}
