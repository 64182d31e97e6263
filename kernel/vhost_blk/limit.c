// SPDX-License-Identifier: GPL-2.0-only
/*
 * Limits on the rate of a device, shared by all its queues.
 *
 * A taken request advances the clock of each bucket by its cost, also beyond the present time: that
 * debt delays the next request. An idle clock lags behind the present time by the burst at most.
 *
 * A queue asks before it takes a chain, so that no request in flight waits for a limit, and a stop
 * is not delayed. A queue that has to wait sleeps for VHOST_BLK_LIMIT_QUANTUM at least, and makes
 * up for it by the burst. The queue that took last sleeps longer than the others: it is their turn.
 */
#include <linux/math64.h>
#include <linux/overflow.h>
#include <linux/timekeeping.h>

#include "stages.h"

/* Shortest sleep, in nanoseconds: bounds the timers for a high limit. */
#define VHOST_BLK_LIMIT_QUANTUM		NSEC_PER_MSEC
/* The burst, in milliseconds, unless the owner wants another one; and the smallest. */
#define VHOST_BLK_LIMIT_BURST		100
#define VHOST_BLK_LIMIT_BURST_MIN	10
/* Largest cost of a request in seconds, two years: the debts of all queues do not overflow. */
#define VHOST_BLK_LIMIT_COST_MAX	(1ULL << 26)

static enum hrtimer_restart vhost_blk_limit_timer(struct hrtimer *timer)
{
	struct vhost_blk_turn *turn = container_of(timer, struct vhost_blk_turn, timer);

	vhost_poll_queue(&container_of(turn, struct vhost_blk_queue, turn)->vq.poll);
	return HRTIMER_NORESTART;
}

/**
 * vhost_blk_limit_init - prepare the limits of a device: there are none
 * @blk: the device, zeroed
 */
void vhost_blk_limit_init(struct vhost_blk *blk)
{
	spin_lock_init(&blk->limit.lock);
}

/**
 * vhost_blk_limit_init_queue - prepare a queue's timer
 * @q: the queue
 */
void vhost_blk_limit_init_queue(struct vhost_blk_queue *q)
{
	vhost_blk_hrtimer_setup(&q->turn.timer, vhost_blk_limit_timer);
}

static void vhost_blk_bucket_set(struct vhost_blk_bucket *bucket, u64 rate, u64 clock)
{
	bucket->rate = rate;
	bucket->clock = rate ? clock : 0;
}

static void vhost_blk_bucket_charge(struct vhost_blk_bucket *bucket, u64 units, u64 now, u64 burst)
{
	u64 rest, seconds, cost;

	if (!bucket->rate)
		return;
	seconds = div64_u64_rem(units, bucket->rate, &rest);
	/* In two parts: the product of all units would overflow. */
	cost = min(seconds, VHOST_BLK_LIMIT_COST_MAX) * NSEC_PER_SEC +
	       mul_u64_u64_div_u64(rest, NSEC_PER_SEC, bucket->rate);
	bucket->clock = max(bucket->clock, now > burst ? now - burst : 0) + cost;
}

/* The time at which a request may be taken. */
static u64 vhost_blk_limit_opens_at(const struct vhost_blk_limit *limit)
{
	lockdep_assert_held(&limit->lock);
	return max(limit->iops.clock, limit->bytes.clock);
}

/* Makes the queue wait. It runs, so that a stop will cancel the timer. */
static void vhost_blk_limit_close(struct vhost_blk_queue *q, u64 until, u64 now)
{
	lockdep_assert_held(&q->vq.mutex);
	if (!q->turn.closed_at)
		q->turn.closed_at = now;
	q->turn.closed_until = until;
	hrtimer_start(&q->turn.timer, ns_to_ktime(until - now), HRTIMER_MODE_REL);
}

/* Ends the wait of the queue, if it waits. */
static void vhost_blk_limit_open(struct vhost_blk_queue *q, u64 now)
{
	q->turn.closed_until = 0;
	if (!q->turn.closed_at)
		return;
	q->turn.waited_ns = now - q->turn.closed_at;
	q->turn.waited_turn = q->now_ns;
	q->turn.closed_at = 0;
}

/**
 * vhost_blk_limit_set - change the limits
 * @blk: the device; its dev.mutex is held
 * @opt: the options with the new limits
 *
 * The debt of the old limits is forgiven, and replaced by that of the options. Nothing changes
 * without a change of the limits: a driver that switches the cache mode pays its debt.
 */
void vhost_blk_limit_set(struct vhost_blk *blk, const struct vhost_blk_options *opt)
{
	struct vhost_blk_limit *limit = &blk->limit;
	u64 clock = ktime_get_ns() + (u64)opt->limit_debt_ms * NSEC_PER_MSEC;
	u64 burst_ms = opt->limit_burst_ms ?: VHOST_BLK_LIMIT_BURST;
	unsigned int i;

	if (opt->limit_iops == blk->opt.limit_iops && opt->limit_bytes == blk->opt.limit_bytes &&
	    opt->limit_burst_ms == blk->opt.limit_burst_ms)
		return;
	spin_lock(&limit->lock);
	vhost_blk_bucket_set(&limit->iops, opt->limit_iops, clock);
	vhost_blk_bucket_set(&limit->bytes, opt->limit_bytes, clock);
	limit->burst_ns = max_t(u64, burst_ms, VHOST_BLK_LIMIT_BURST_MIN) * NSEC_PER_MSEC;
	limit->version++;
	WRITE_ONCE(limit->set, opt->limit_iops || opt->limit_bytes);
	spin_unlock(&limit->lock);
	/* A wait for the old limits may be long. */
	for (i = 0; i < blk->num_queues; i++)
		if (vhost_blk_runs(blk->queues + i))
			vhost_poll_queue(&blk->queues[i].vq.poll);
}

/**
 * vhost_blk_limit_debt - the time until a request may be taken
 * @blk: the device
 *
 * Return: milliseconds, rounded up.
 */
u64 vhost_blk_limit_debt(struct vhost_blk *blk)
{
	u64 at, now = ktime_get_ns();

	spin_lock(&blk->limit.lock);
	at = vhost_blk_limit_opens_at(&blk->limit);
	spin_unlock(&blk->limit.lock);
	return at > now ? div_u64(at - now + NSEC_PER_MSEC - 1, NSEC_PER_MSEC) : 0;
}

/**
 * vhost_blk_limit_waited - the wait that ended right before the chains of this turn were taken
 * @q: the queue; its vq.mutex is held by the loop
 *
 * Return: nanoseconds; 0 if it did not wait.
 */
u64 vhost_blk_limit_waited(const struct vhost_blk_queue *q)
{
	return q->turn.waited_turn == q->now_ns ? q->turn.waited_ns : 0;
}

/**
 * vhost_blk_limit_look - ask whether the queue may take a chain
 * @q: the queue, which runs; its vq.mutex is held, and there is a limit
 *
 * Return: true if it may; otherwise a timer runs the loop when it may.
 */
bool vhost_blk_limit_look(struct vhost_blk_queue *q)
{
	struct vhost_blk_limit *limit = &q->blk->limit;
	u64 at, now = ktime_get_ns();

	spin_lock(&limit->lock);
	if (q->turn.version != limit->version) {
		q->turn.version = limit->version;
		q->turn.closed_until = 0;
		q->turn.closed_at = 0;
	}
	at = vhost_blk_limit_opens_at(limit);
	spin_unlock(&limit->lock);
	if (now < q->turn.closed_until) {
		/* The timer may have ended in a pause. */
		vhost_blk_limit_close(q, q->turn.closed_until, now);
		return false;
	}
	if (at <= now) {
		vhost_blk_limit_open(q, now);
		return true;
	}
	q->stats.throttled++;
	vhost_blk_limit_close(q, max(at, now + VHOST_BLK_LIMIT_QUANTUM), now);
	return false;
}

/**
 * vhost_blk_limit_took - charge a request
 * @q: the queue, which runs; its vq.mutex is held, and there is a limit
 * @bytes: bytes that the request moves
 */
void vhost_blk_limit_took(struct vhost_blk_queue *q, u64 bytes)
{
	struct vhost_blk_limit *limit = &q->blk->limit;
	u64 at, now = ktime_get_ns();

	spin_lock(&limit->lock);
	vhost_blk_bucket_charge(&limit->iops, 1, now, limit->burst_ns);
	vhost_blk_bucket_charge(&limit->bytes, bytes, now, limit->burst_ns);
	at = vhost_blk_limit_opens_at(limit);
	spin_unlock(&limit->lock);
	if (at <= now)
		return;
	q->stats.throttled++;
	at = max(at, now + VHOST_BLK_LIMIT_QUANTUM);
	vhost_blk_limit_close(q, at + VHOST_BLK_LIMIT_QUANTUM, now);
}
