// SPDX-License-Identifier: GPL-2.0-only
/*
 * Starts, pauses and stops queues, and waits for what is in flight. All of it under dev.mutex, so
 * that one thread at a time does it; vq.mutex is taken for moments only, as the completions that
 * are waited for need it.
 *
 * A queue counts its requests in two generations. Waiting turns to the other one and waits until
 * the old one is empty, so that a queue which goes on taking chains cannot keep the waiter waiting.
 */
#include "vhost_blk.h"

/* A worker that waits for the disk to have a tag holds it as long. */
static int lock_queue(struct vhost_blk_queue *q, bool killable)
{
	if (killable)
		return mutex_lock_killable(&q->vq.mutex);
	mutex_lock(&q->vq.mutex);
	return 0;
}

static bool gen_empty(struct vhost_blk_queue *q, u8 gen)
{
	return !atomic_read(&q->inflight[gen]);
}

/* Waits until a generation is empty. Polled I/O is looked after here, as the worker may be gone. */
static int wait_gen(struct vhost_blk_queue *q, u8 gen, bool killable)
{
	long left;

	while (!gen_empty(q, gen)) {
		if (killable)
			left = wait_event_killable_timeout(q->drained, gen_empty(q, gen),
							   VHOST_BLK_POLL_INTERVAL);
		else
			left = wait_event_timeout(q->drained, gen_empty(q, gen),
						  VHOST_BLK_POLL_INTERVAL);
		if (left < 0)
			return -EINTR;
		/* Whoever waits holds dev.mutex, without which no IOTLB entry can come. */
		if (killable && READ_ONCE(q->blind))
			return -EAGAIN;
		if (lock_queue(q, killable))
			return -EINTR;
		vhost_blk_poll_bdev(q);
		mutex_unlock(&q->vq.mutex);
	}
	return 0;
}

static int drain(struct vhost_blk_queue *q, bool killable)
{
	u8 old;
	int err;

	/* Left by a drain that was killed. */
	err = wait_gen(q, !q->gen, killable);
	if (err)
		return err;
	if (lock_queue(q, killable))
		return -EINTR;
	old = q->gen;
	q->gen = !old;
	mutex_unlock(&q->vq.mutex);
	return wait_gen(q, old, killable);
}

/**
 * vhost_blk_drain - wait until everything that was taken so far is complete
 * @q: the queue, which may go on meanwhile
 *
 * Return: 0; -EINTR when killed; -EAGAIN when the rings cannot be reached before an IOTLB update.
 */
int vhost_blk_drain(struct vhost_blk_queue *q)
{
	return drain(q, true);
}

/**
 * vhost_blk_drain_all - vhost_blk_drain() for all queues
 * @blk: the device
 *
 * Return: as vhost_blk_drain().
 */
int vhost_blk_drain_all(struct vhost_blk *blk)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < VHOST_BLK_QUEUES_MAX && !err; i++)
		err = vhost_blk_drain(blk->queues + i);
	return err;
}

/* Takes no lock that could be waited for: whoever drains after it does. */
static void set_paused(struct vhost_blk *blk, bool paused)
{
	unsigned int i;

	for (i = 0; i < VHOST_BLK_QUEUES_MAX; i++) {
		struct vhost_blk_queue *q = blk->queues + i;

		/*
		 * A worker that has begun already, and so is not queued again, looks at it after
		 * the full barrier of finished() in completion.c.
		 */
		WRITE_ONCE(q->paused, paused);
		if (!paused && vhost_blk_runs(q))
			vhost_poll_queue(&q->vq.poll);
	}
}

/**
 * vhost_blk_pause_all - take nothing any more, and wait for what was taken
 * @blk: the device
 *
 * Return: as vhost_blk_drain(); nothing is paused on failure.
 */
int vhost_blk_pause_all(struct vhost_blk *blk)
{
	int err;

	set_paused(blk, true);
	err = vhost_blk_drain_all(blk);
	if (err)
		set_paused(blk, false);
	return err;
}

/**
 * vhost_blk_resume_all - the reverse of vhost_blk_pause_all(); looks at all rings at once
 * @blk: the device
 */
void vhost_blk_resume_all(struct vhost_blk *blk)
{
	set_paused(blk, false);
}

static int alloc_reqs(struct vhost_blk_queue *q)
{
	unsigned int i;

	q->reqs = kvcalloc(q->vq.num, sizeof(*q->reqs), GFP_KERNEL_ACCOUNT);
	if (!q->reqs)
		return -ENOMEM;
	q->free = NULL;
	for (i = q->vq.num; i--;) {
		struct vhost_blk_req *req = q->reqs + i;

		req->q = q;
		req->vecs = req->inline_vecs;
		req->max_vecs = VHOST_BLK_INLINE_VECS;
		INIT_LIST_HEAD(&req->polled);
		req->next_free = q->free;
		q->free = req;
	}
	return 0;
}

static void free_reqs(struct vhost_blk_queue *q)
{
	kvfree(q->reqs);
	q->reqs = NULL;
	q->free = NULL;
}

static int stop(struct vhost_blk_queue *q, bool killable)
{
	int err;

	/*
	 * The backend stays until nothing is in flight: to the core, a ring without one is at rest,
	 * and it lets its addresses and size change unchecked.
	 */
	if (lock_queue(q, killable))
		return -EINTR;
	q->stopping = true;
	WRITE_ONCE(q->starved, false);
	mutex_unlock(&q->vq.mutex);
	err = drain(q, killable);
	if (err)
		return err;
	/* vhost_blk_end_io() and uncharge() may still look at the worker: it may be freed soon. */
	if (q->reqs)
		synchronize_rcu_expedited();
	mutex_lock(&q->vq.mutex);
	vhost_vq_set_backend(&q->vq, NULL);
	q->stopping = false;
	free_reqs(q);
	mutex_unlock(&q->vq.mutex);
	return 0;
}

static int start_locked(struct vhost_blk_queue *q, struct vhost_blk_backend *be)
{
	struct vhost_virtqueue *vq = &q->vq;
	int err;

	if (vhost_vq_get_backend(vq))
		return 0;
	if (!vq->num || vq->num > VHOST_BLK_QUEUE_SIZE_MAX)
		return -EINVAL;
	if (!vhost_vq_is_setup(vq))
		return -EFAULT;
	err = alloc_reqs(q);
	if (err)
		return err;
	vhost_vq_set_backend(vq, be);
	err = vhost_vq_init_access(vq);
	if (!err)
		err = vhost_blk_region_ready(q);
	if (err) {
		vhost_vq_set_backend(vq, NULL);
		free_reqs(q);
		return err;
	}
	q->broken = false;
	q->poll = (struct vhost_blk_polling) {};
	return 0;
}

/**
 * vhost_blk_start_queue - let a queue serve
 * @q: the queue; nothing happens when it does already
 * @be: the attached backend
 *
 * Return: 0, or a negative errno as in VHOST_BLK_SET_QUEUE.
 */
int vhost_blk_start_queue(struct vhost_blk_queue *q, struct vhost_blk_backend *be)
{
	int err;

	/* A stop that was killed, or could not reach the rings. */
	if (unlikely(q->stopping)) {
		err = stop(q, true);
		if (err)
			return err;
	}
	if (lock_queue(q, true))
		return -EINTR;
	err = start_locked(q, be);
	mutex_unlock(&q->vq.mutex);
	/* Chains may be there already, and their kick may be gone. */
	if (!err)
		vhost_poll_queue(&q->vq.poll);
	return err;
}

/**
 * vhost_blk_stop_queue - take nothing any more, finish what was taken
 * @q: the queue; nothing happens when it is stopped already
 *
 * Return: as vhost_blk_drain(); on failure the queue takes nothing, but some is in flight.
 */
int vhost_blk_stop_queue(struct vhost_blk_queue *q)
{
	return stop(q, true);
}

/**
 * vhost_blk_stop_all - stop all queues for good, waiting as long as it takes
 * @blk: the device, whose last descriptor is gone
 *
 * The wait is for the storage only: I/O that is under way could reach the disk after the next
 * owner's, and change what that one wrote.
 */
void vhost_blk_stop_all(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < VHOST_BLK_QUEUES_MAX; i++) {
		struct vhost_blk_queue *q = blk->queues + i;

		if (!llist_empty(&q->done))
			vhost_blk_queue_done(q);
		stop(q, false);
	}
}
