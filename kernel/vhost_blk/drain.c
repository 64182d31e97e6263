// SPDX-License-Identifier: GPL-2.0-only
/*
 * Starts, pauses and stops queues, and drains requests in flight. dev.mutex serializes all of it.
 * vq.mutex is held for moments only, because completions need it. vhost_blk.h has the table of states.
 *
 * A queue counts its requests in two generations. A drain switches new requests to the other
 * generation and waits until the old one is empty, so that a queue which continues to take chains
 * cannot delay the drain.
 */
#include "stages.h"

/* Killable, because a worker that waits for a tag holds vq.mutex for that time. */
static int vhost_blk_lock_queue(struct vhost_blk_queue *q, bool killable)
{
	if (killable)
		return mutex_lock_killable(&q->vq.mutex);
	mutex_lock(&q->vq.mutex);
	return 0;
}

/*
 * Waits for a moment. The task may be frozen, because the worker that completes the requests is
 * frozen at the same time. The lock that it holds, dev.mutex, is one of the same process.
 */
static long vhost_blk_wait_gen_killable(struct vhost_blk_queue *q, u8 gen)
{
	const unsigned int state = TASK_KILLABLE | TASK_FREEZABLE_UNSAFE;

	might_sleep();
	return ___wait_event(q->drained, ___wait_cond_timeout(vhost_blk_gen_empty(q, gen)),
			     state, 0, VHOST_BLK_POLL_INTERVAL,
			     __ret = schedule_timeout(__ret));
}

/* Waits until a generation is empty. Polls for polled I/O, because the worker may be gone. */
static int vhost_blk_wait_gen(struct vhost_blk_queue *q, u8 gen, bool killable)
{
	long left;

	while (!vhost_blk_gen_empty(q, gen)) {
		if (killable)
			left = vhost_blk_wait_gen_killable(q, gen);
		else
			left = wait_event_timeout(q->drained, vhost_blk_gen_empty(q, gen),
						  VHOST_BLK_POLL_INTERVAL);
		if (left < 0)
			return -EINTR;
		if (vhost_blk_lock_queue(q, killable))
			return -EINTR;
		vhost_blk_poll_bdev(q);
		mutex_unlock(&q->vq.mutex);
	}
	return 0;
}

static int vhost_blk_drain(struct vhost_blk_queue *q, bool killable)
{
	u8 old;
	int err;

	/* A killed drain left it. Only drains change the generation, so dev.mutex is enough. */
	err = vhost_blk_wait_gen(q, !q->gen, killable);
	if (err)
		return err;
	if (vhost_blk_lock_queue(q, killable))
		return -EINTR;
	old = q->gen;
	q->gen = !old;
	mutex_unlock(&q->vq.mutex);
	return vhost_blk_wait_gen(q, old, killable);
}

/**
 * vhost_blk_drain_all - drain all requests that were taken so far
 * @blk: the device, whose queues may go on meanwhile
 *
 * Needs no IOTLB update for unreachable rings: see vhost_blk_complete_unpublished().
 *
 * Return: 0; -EINTR if killed.
 */
int vhost_blk_drain_all(struct vhost_blk *blk)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < blk->num_queues && !err; i++)
		if (vhost_blk_runs(blk->queues + i))
			err = vhost_blk_drain(blk->queues + i, true);
	return err;
}

static int vhost_blk_pause(struct vhost_blk_queue *q)
{
	if (vhost_blk_lock_queue(q, true))
		return -EINTR;
	if (q->state == VHOST_BLK_RUNNING)
		vhost_blk_set_state(q, VHOST_BLK_PAUSED);
	mutex_unlock(&q->vq.mutex);
	return 0;
}

/**
 * vhost_blk_pause_all - stop taking chains, and drain
 * @blk: the device
 *
 * Return: as vhost_blk_drain_all(); nothing is paused on failure.
 */
int vhost_blk_pause_all(struct vhost_blk *blk)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < blk->num_queues && !err; i++)
		if (vhost_blk_runs(blk->queues + i))
			err = vhost_blk_pause(blk->queues + i);
	if (!err)
		err = vhost_blk_drain_all(blk);
	if (err)
		vhost_blk_resume_all(blk);
	return err;
}

static void vhost_blk_resume(struct vhost_blk_queue *q)
{
	bool paused;

	/*
	 * A large request, or a worker that completes one, holds vq.mutex while it waits for memory
	 * of the owner, which may need the owner's end (a userfaultfd). The queue stays PAUSED then.
	 */
	if (vhost_blk_lock_queue(q, true))
		return;
	paused = q->state == VHOST_BLK_PAUSED;
	if (paused)
		vhost_blk_set_state(q, VHOST_BLK_RUNNING);
	mutex_unlock(&q->vq.mutex);
	/* Kicks had no effect during the pause. */
	if (paused)
		vhost_poll_queue(&q->vq.poll);
}

/**
 * vhost_blk_resume_all - undo vhost_blk_pause_all(); runs the loop of each queue
 * @blk: the device
 *
 * A queue may stay PAUSED after SIGKILL, until the close.
 */
void vhost_blk_resume_all(struct vhost_blk *blk)
{
	unsigned int i;

	/* A ring fault ends PAUSED, too, so the test needs vq.mutex. */
	for (i = 0; i < blk->num_queues; i++)
		if (READ_ONCE(blk->queues[i].state) == VHOST_BLK_PAUSED)
			vhost_blk_resume(blk->queues + i);
}

static void vhost_blk_free_reqs(struct vhost_blk_queue *q)
{
	struct vhost_blk_req *reqs = q->reqs;

	vhost_blk_empty_reserve(q);
	spin_lock(&q->reqs_lock);
	q->reqs = NULL;
	q->nr_reqs = 0;
	spin_unlock(&q->reqs_lock);
	kvfree(reqs);
	q->free = NULL;
}

static int vhost_blk_alloc_reqs(struct vhost_blk_queue *q)
{
	struct vhost_blk_req *reqs;
	unsigned int i;

	reqs = kvcalloc(q->vq.num, sizeof(*reqs), GFP_KERNEL_ACCOUNT);
	if (!reqs)
		return -ENOMEM;
	spin_lock(&q->reqs_lock);
	q->reqs = reqs;
	q->nr_reqs = q->vq.num;
	spin_unlock(&q->reqs_lock);
	if (vhost_blk_fill_reserve(q)) {
		vhost_blk_free_reqs(q);
		return -ENOMEM;
	}
	q->free = NULL;
	for (i = q->vq.num; i--;) {
		struct vhost_blk_req *req = reqs + i;

		req->q = q;
		req->vecs = req->inline_vecs;
		req->max_vecs = VHOST_BLK_INLINE_VECS;
		INIT_LIST_HEAD(&req->polled);
		req->next_free = q->free;
		q->free = req;
	}
	return 0;
}

/*
 * The backend stays until no request is in flight: the core takes a ring without one for stopped,
 * and allows unchecked changes of its addresses and size.
 */
static int vhost_blk_begin_stop(struct vhost_blk_queue *q, bool killable)
{
	if (vhost_blk_lock_queue(q, killable))
		return -EINTR;
	vhost_blk_set_state(q, VHOST_BLK_STOPPING);
	WRITE_ONCE(q->starved, false);
	mutex_unlock(&q->vq.mutex);
	/* Only a loop that takes chains starts it. Its callback uses the worker. */
	hrtimer_cancel(&q->throttle.timer);
	return 0;
}

/*
 * Publishes entries if an IOTLB update has made the rings reachable; otherwise sends a miss. The
 * update itself wakes the worker only if the owner has read the miss that it answers.
 */
static void vhost_blk_try_publish_pending(struct vhost_blk_queue *q)
{
	if (q->unpublished && vhost_blk_rings_mapped(q))
		vhost_blk_publish_pending(q);
}

/* Drains, and checks that all used entries are published: the position must be exact. */
static int vhost_blk_await_stop(struct vhost_blk_queue *q, bool killable)
{
	int err = vhost_blk_drain(q, killable);

	if (err)
		return err;
	if (vhost_blk_lock_queue(q, killable))
		return -EINTR;
	/* An ioctl runs in the owner's address space. After the close no IOTLB entries come. */
	if (killable)
		vhost_blk_try_publish_pending(q);
	else
		vhost_blk_drop_pending(q);
	err = q->unpublished ? -EAGAIN : 0;
	mutex_unlock(&q->vq.mutex);
	return err;
}

static void vhost_blk_end_stop(struct vhost_blk_queue *q)
{
	mutex_lock(&q->vq.mutex);
	vhost_vq_set_backend(&q->vq, NULL);
	vhost_blk_set_state(q, VHOST_BLK_STOPPED);
	vhost_blk_free_reqs(q);
	q->rings_miss_sent = false;
	q->chain_miss_sent = false;
	mutex_unlock(&q->vq.mutex);
}

/* Stops those of the @count queues from @first on that are not stopped. */
static int vhost_blk_stop(struct vhost_blk_queue *first, unsigned int count, bool killable)
{
	struct vhost_blk_queue *q, *end = first + count;
	bool any = false;
	int err;

	for (q = first; q < end; q++) {
		if (!vhost_blk_runs(q))
			continue;
		any = true;
		err = vhost_blk_begin_stop(q, killable);
		if (err)
			return err;
	}
	if (!any)
		return 0;
	for (q = first; q < end; q++) {
		err = vhost_blk_runs(q) ? vhost_blk_await_stop(q, killable) : 0;
		if (err)
			return err;
	}
	/* vhost_blk_end_io() and vhost_blk_uncharge() may still use the worker, freed soon. */
	synchronize_rcu_expedited();
	for (q = first; q < end; q++)
		if (vhost_blk_runs(q))
			vhost_blk_end_stop(q);
	return 0;
}

static int vhost_blk_start_locked(struct vhost_blk_queue *q, struct vhost_blk_backend *be)
{
	struct vhost_virtqueue *vq = &q->vq;
	int err;

	if (!vq->num || vq->num > VHOST_BLK_QUEUE_SIZE_MAX)
		return -EINVAL;
	if (!vhost_vq_is_setup(vq))
		return -EFAULT;
	err = vhost_blk_alloc_reqs(q);
	if (err)
		return err;
	vhost_blk_set_state(q, VHOST_BLK_RUNNING);
	vhost_vq_set_backend(vq, be);
	err = vhost_vq_init_access(vq);
	if (!err)
		err = vhost_blk_region_ready(q);
	if (err) {
		vhost_vq_set_backend(vq, NULL);
		vhost_blk_set_state(q, VHOST_BLK_STOPPED);
		vhost_blk_free_reqs(q);
		return err;
	}
	q->rings_miss_sent = false;
	q->chain_miss_sent = false;
	q->used_broken = false;
	q->nr_kept = 0;
	memset(q->poll, 0, sizeof(q->poll));
	q->throttle.closed_until = 0;
	WRITE_ONCE(q->throttle.closed_at, 0);
	q->throttle.yields = 0;
	q->throttle.waited_ns = 0;
	vhost_blk_arrivals_forget(q);
	q->stats = (struct vhost_blk_stats) {};
	return 0;
}

/**
 * vhost_blk_start_queue - start a queue
 * @q: the queue; no effect if it runs already or is faulted
 * @be: the attached backend
 *
 * Return: 0, or a negative errno as in VHOST_BLK_SET_QUEUE.
 */
int vhost_blk_start_queue(struct vhost_blk_queue *q, struct vhost_blk_backend *be)
{
	int err;

	/* Left by a stop that was killed, or could not reach the rings. */
	if (unlikely(READ_ONCE(q->state) == VHOST_BLK_STOPPING)) {
		err = vhost_blk_stop(q, 1, true);
		if (err)
			return err;
	}
	if (vhost_blk_runs(q))
		return 0;
	if (vhost_blk_lock_queue(q, true))
		return -EINTR;
	if (!vhost_blk_any_runs(q->blk))
		vhost_blk_end_halt(q->blk);
	err = vhost_blk_start_locked(q, be);
	mutex_unlock(&q->vq.mutex);
	/* Chains may be there already, and their kick may be lost. */
	if (!err)
		vhost_poll_queue(&q->vq.poll);
	return err;
}

/**
 * vhost_blk_stop_queue - stop taking chains, and drain
 * @q: the queue; no effect if it is stopped already
 *
 * Return: 0; -EINTR if killed; -EAGAIN if the rings cannot be reached before an IOTLB update. On
 * failure the queue takes no chains, and taken ones may be unfinished.
 */
int vhost_blk_stop_queue(struct vhost_blk_queue *q)
{
	return vhost_blk_stop(q, 1, true);
}

/**
 * vhost_blk_stop_all - vhost_blk_stop_queue() for all queues
 * @blk: the device
 *
 * Return: as vhost_blk_stop_queue(); on failure some or all queues take no chains.
 */
int vhost_blk_stop_all(struct vhost_blk *blk)
{
	return vhost_blk_stop(blk->queues, blk->num_queues, true);
}

/**
 * vhost_blk_close_all - stop all queues for good; waits for the storage without a limit
 * @blk: the device, whose last descriptor is gone
 *
 * I/O in flight could otherwise reach the disk after the next owner's writes, and overwrite them.
 */
void vhost_blk_close_all(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->num_queues; i++)
		if (!llist_empty(&blk->queues[i].done))
			vhost_blk_queue_done(blk->queues + i);
	vhost_blk_stop(blk->queues, blk->num_queues, false);
}
