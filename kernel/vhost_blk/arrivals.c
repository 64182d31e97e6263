// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bounds the time for which a chain was in the ring before the loop took it, while a trace is on.
 *
 * The driver notes no times. But a look at its index that does not show a chain is earlier than the
 * chain. So each look has a horizon, the index that it shows: the chains from there on came after it.
 * A queue that has found its ring empty waits for a kick, and then the kick counts in place of the
 * look, or all the time of an idle driver would be a wait.
 *
 * kicked_ns, by row from and by column to:
 *
 *                NOT_WAITING           NO_KICK            a time
 *   NOT_WAITING  -                     sleep (traced)     -
 *   NO_KICK      batch, chains found   sleep              kick
 *   a time       batch, chains found   sleep              -
 *
 * Only the transition "kick" is made without vq.mutex, by cmpxchg(). If it loses against another one,
 * the queue is awake, and the kick says nothing.
 */
#include <linux/sched/clock.h>

#include "stages.h"

/* The driver has kicked. Any context; the vhost core's handler follows. */
static int vhost_blk_wake(struct wait_queue_entry *wait, unsigned int mode, int flags, void *key)
{
	struct vhost_blk_queue *q = container_of(wait, struct vhost_blk_queue, vq.poll.wait);
	u64 *kicked_ns = &q->arrivals.kicked_ns;

	if (unlikely(READ_ONCE(*kicked_ns) == VHOST_BLK_NO_KICK))
		cmpxchg64(kicked_ns, VHOST_BLK_NO_KICK, local_clock());
	return q->arrivals.core_wake(wait, mode, flags, key);
}

/**
 * vhost_blk_arrivals_init - prepare a queue, after vhost_dev_init() and before its first kick
 * @q: the queue
 */
void vhost_blk_arrivals_init(struct vhost_blk_queue *q)
{
	struct wait_queue_entry *wait = &q->vq.poll.wait;

	WRITE_ONCE(q->arrivals.kicked_ns, VHOST_BLK_NOT_WAITING);
	q->arrivals.core_wake = wait->func;
	wait->func = vhost_blk_wake;
}

/**
 * vhost_blk_arrivals_forget - forget all times: the trace is off, or the queue starts
 * @q: the queue; its vq.mutex is held
 */
void vhost_blk_arrivals_forget(struct vhost_blk_queue *q)
{
	struct vhost_blk_arrivals *arrivals = &q->arrivals;

	arrivals->after_ns = 0;
	arrivals->horizon_ns = 0;
	arrivals->look_ns = 0;
	WRITE_ONCE(arrivals->kicked_ns, VHOST_BLK_NOT_WAITING);
}

/* True if the next chain makes the core read the driver's index again. */
static bool vhost_blk_reads_index(const struct vhost_blk_queue *q)
{
	return q->vq.avail_idx == q->vq.last_avail_idx;
}

/* No chain was there at @now: all that follow came later. */
static void vhost_blk_ring_was_empty(struct vhost_blk_queue *q, u64 now)
{
	q->arrivals.horizon_ns = max(q->arrivals.horizon_ns, now);
	q->arrivals.horizon = q->vq.last_avail_idx;
}

/**
 * vhost_blk_note_batch - note that a batch of chains is to be taken
 * @q: the queue; its vq.mutex is held, and a trace is on
 */
void vhost_blk_note_batch(struct vhost_blk_queue *q)
{
	u64 kicked_ns = READ_ONCE(q->arrivals.kicked_ns);

	WRITE_ONCE(q->arrivals.kicked_ns, VHOST_BLK_NOT_WAITING);
	/* Woken by something else: a kick that has not come until now is later. */
	if (kicked_ns == VHOST_BLK_NO_KICK)
		kicked_ns = q->now_ns;
	if (kicked_ns != VHOST_BLK_NOT_WAITING)
		vhost_blk_ring_was_empty(q, kicked_ns);
	if (vhost_blk_reads_index(q))
		q->arrivals.look_ns = q->now_ns;
}

/**
 * vhost_blk_note_chain - note that a chain was taken, or that there was none
 * @q: the queue; its vq.mutex is held, and a trace is on
 * @taken: as returned by vhost_blk_take_chain()
 */
void vhost_blk_note_chain(struct vhost_blk_queue *q, int taken)
{
	struct vhost_blk_arrivals *arrivals = &q->arrivals;
	u16 index = q->vq.last_avail_idx - 1;

	if (!taken) {
		vhost_blk_ring_was_empty(q, q->now_ns);
	} else if (!arrivals->horizon_ns || index == arrivals->horizon) {
		arrivals->after_ns = arrivals->horizon_ns;
		arrivals->horizon_ns = arrivals->look_ns;
		arrivals->horizon = q->vq.avail_idx;
	}
}

/**
 * vhost_blk_note_look - note that the loop is about to look for more chains
 * @q: the queue; its vq.mutex is held, and a trace is on
 */
void vhost_blk_note_look(struct vhost_blk_queue *q)
{
	if (vhost_blk_reads_index(q))
		q->arrivals.look_ns = q->now_ns;
}

/**
 * vhost_blk_wait_for_kick - enable kicks
 * @q: the queue, whose ring was found empty; its vq.mutex is held
 *
 * Return: true if chains have come in the meantime.
 */
bool vhost_blk_wait_for_kick(struct vhost_blk_queue *q)
{
	bool timed = vhost_blk_times_stages(q->blk);

	/* Before kicks are enabled, so that the first one is seen. */
	WRITE_ONCE(q->arrivals.kicked_ns, timed ? VHOST_BLK_NO_KICK : VHOST_BLK_NOT_WAITING);
	if (!vhost_enable_notify(q->vq.dev, &q->vq))
		return false;
	WRITE_ONCE(q->arrivals.kicked_ns, VHOST_BLK_NOT_WAITING);
	return true;
}

/**
 * vhost_blk_ring_wait - the longest time for which the chain that was taken last was in the ring
 * @q: the queue; its vq.mutex is held by the loop
 * @limit_ns: part of it in which the queue waited for a limit
 *
 * Return: nanoseconds without @limit_ns; U64_MAX: unknown.
 */
u64 vhost_blk_ring_wait(const struct vhost_blk_queue *q, u64 limit_ns)
{
	u64 known_ns = q->arrivals.after_ns + limit_ns;

	if (!q->arrivals.after_ns)
		return U64_MAX;
	return q->now_ns > known_ns ? q->now_ns - known_ns : 0;
}
