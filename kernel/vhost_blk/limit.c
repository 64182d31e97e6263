// SPDX-License-Identifier: GPL-2.0-only
/*
 * Limits on the rate of a device, or of several devices together, shared by all their queues.
 *
 * A taken request advances the clock of each limit by its cost, also beyond the present time: that
 * debt delays the next request. An idle clock lags behind the present time by the burst at most.
 * The clocks are changed without a lock: when two queues take a request at the same time, the second
 * one becomes debt. Limits of several devices lie in memory of their owner, so every value is read
 * once and may be anything; a request of one device delays the others for a short time only: see
 * share.c.
 *
 * A queue asks before it takes a chain, so that no request in flight waits for a limit, and a stop
 * is not delayed. A queue that has to wait sleeps for VHOST_BLK_LIMIT_QUANTUM at least, and makes
 * up for it by the burst. When the limit opens, it lets those queues of its device go first that wait
 * and took their last chain earlier. One that does not come, because its worker is busy, delays it by
 * VHOST_BLK_LIMIT_YIELDS sleeps at most.
 */
#include <linux/math64.h>
#include <linux/overflow.h>
#include <linux/rcupdate.h>
#include <linux/timekeeping.h>

#include "stages.h"

/* Shortest sleep, in nanoseconds: bounds the timers for a high limit. */
#define VHOST_BLK_LIMIT_QUANTUM		NSEC_PER_MSEC
/* Most sleeps for which a queue lets others go first; shorter together than the least burst. */
#define VHOST_BLK_LIMIT_YIELDS		4
/* The burst, in milliseconds, unless the owner wants another one; and the smallest. */
#define VHOST_BLK_LIMIT_BURST		100
#define VHOST_BLK_LIMIT_BURST_MIN	10
/* Largest cost of a request, and longest sleep, in seconds: two years. */
#define VHOST_BLK_LIMIT_COST_MAX	(1ULL << 26)
/* Longest sleep, in nanoseconds, for shared limits: no event reports a change by the owner. */
#define VHOST_BLK_LIMIT_RELOOK		(100 * NSEC_PER_MSEC)
/* Attempts to advance a clock: the owner may change a shared one all the time. */
#define VHOST_BLK_LIMIT_TRIES		16

static enum hrtimer_restart vhost_blk_limit_timer(struct hrtimer *timer)
{
	struct vhost_blk_throttle *throttle =
		container_of(timer, struct vhost_blk_throttle, timer);

	vhost_poll_queue(&container_of(throttle, struct vhost_blk_queue, throttle)->vq.poll);
	return HRTIMER_NORESTART;
}

/**
 * vhost_blk_limit_init_queue - prepare a queue's timer
 * @q: the queue
 */
void vhost_blk_limit_init_queue(struct vhost_blk_queue *q)
{
	vhost_blk_hrtimer_setup(&q->throttle.timer, vhost_blk_limit_timer);
}

/* The limits that hold for the device. */
static struct vhost_blk_limits *vhost_blk_limits_of(struct vhost_blk *blk,
						     struct vhost_blk_member *member)
{
	return member ? vhost_blk_member_limits(member) : &blk->limit.own;
}

/* Another number after each change of the limits, and after each change to other ones. */
static u64 vhost_blk_limit_version(const struct vhost_blk_limits *limits, u32 joins)
{
	/* Pairs with the owner's release, or that of vhost_blk_limit_set(): the limits are those of it. */
	return smp_load_acquire(&limits->version) + ((u64)joins << 32);
}

/* The cost of a request in nanoseconds. */
static u64 vhost_blk_limit_cost(u64 rate, u64 units)
{
	u64 rest, seconds;

	if (!rate)
		return 0;
	seconds = div64_u64_rem(units, rate, &rest);
	/* In two parts: the product of all units would overflow. */
	return min(seconds, VHOST_BLK_LIMIT_COST_MAX) * NSEC_PER_SEC +
	       mul_u64_u64_div_u64(rest, NSEC_PER_SEC, rate);
}

/**
 * vhost_blk_limit_advance - advance the clock of a limit
 * @clock: the clock, which others change, too
 * @cost: nanoseconds
 * @earliest: time from which it advances at the earliest
 * @latest: time up to which it advances at the latest
 *
 * Return: the part of the cost by which it has advanced.
 */
u64 vhost_blk_limit_advance(u64 *clock, u64 cost, u64 earliest, u64 latest)
{
	unsigned int tries = VHOST_BLK_LIMIT_TRIES;
	u64 from, part, old = READ_ONCE(*clock);

	if (!cost)
		return 0;
	do {
		from = max(old, earliest);
		part = latest > from ? min(cost, latest - from) : 0;
	} while (!try_cmpxchg64(clock, &old, from + part) && --tries);
	return part;
}

/* The time at which a request may be taken. */
static u64 vhost_blk_limit_opens_at(const struct vhost_blk_limits *limits)
{
	u64 iops = READ_ONCE(limits->iops) ? READ_ONCE(limits->iops_clock) : 0;
	u64 bytes = READ_ONCE(limits->bytes) ? READ_ONCE(limits->bytes_clock) : 0;

	return max(iops, bytes);
}

/* Makes the queue wait. It runs, so that a stop will cancel the timer. */
static void vhost_blk_limit_close(struct vhost_blk_queue *q, u64 until, u64 now)
{
	bool shared = rcu_access_pointer(q->blk->limit.member);
	u64 wait = min(until - now, VHOST_BLK_LIMIT_COST_MAX * NSEC_PER_SEC);

	lockdep_assert_held(&q->vq.mutex);
	if (!q->throttle.closed_at)
		WRITE_ONCE(q->throttle.closed_at, now);
	q->throttle.closed_until = now + wait;
	if (shared)
		wait = min(wait, VHOST_BLK_LIMIT_RELOOK);
	hrtimer_start(&q->throttle.timer, ns_to_ktime(wait), HRTIMER_MODE_REL);
}

/* Ends the wait of the queue, if it waits. */
static void vhost_blk_limit_open(struct vhost_blk_queue *q, u64 now)
{
	q->throttle.closed_until = 0;
	if (!q->throttle.closed_at)
		return;
	q->throttle.waited_ns = now - q->throttle.closed_at;
	q->throttle.waited_turn = q->now_ns;
	WRITE_ONCE(q->throttle.closed_at, 0);
}

/* Returns whether the queue, which may take, lets another one of its device go first. */
static bool vhost_blk_limit_yields(struct vhost_blk_queue *q)
{
	struct vhost_blk *blk = q->blk;
	unsigned int i;

	if (!q->throttle.closed_at || q->throttle.yields >= VHOST_BLK_LIMIT_YIELDS)
		return false;
	for (i = 0; i < blk->num_queues; i++) {
		struct vhost_blk_queue *other = blk->queues + i;

		if (READ_ONCE(other->throttle.took_at) < q->throttle.took_at &&
		    READ_ONCE(other->throttle.closed_at) && vhost_blk_runs(other))
			return true;
	}
	return false;
}

/**
 * vhost_blk_limit_changed - make all queues look at the limits
 * @blk: the device; its dev.mutex is held
 *
 * A wait for the old limits may be long.
 */
void vhost_blk_limit_changed(struct vhost_blk *blk)
{
	const struct vhost_blk_limits *own = &blk->limit.own;
	unsigned int i;

	WRITE_ONCE(blk->limit.set, own->iops || own->bytes ||
		   rcu_access_pointer(blk->limit.member));
	for (i = 0; i < blk->num_queues; i++)
		if (vhost_blk_runs(blk->queues + i))
			vhost_poll_queue(&blk->queues[i].vq.poll);
}

/**
 * vhost_blk_limit_set - change the device's own limits
 * @blk: the device; its dev.mutex is held
 * @opt: the options with the new limits
 *
 * The debt of the old limits is forgiven, and replaced by that of the options. Nothing changes
 * without a change of the limits: a driver that switches the cache mode pays its debt.
 */
void vhost_blk_limit_set(struct vhost_blk *blk, const struct vhost_blk_options *opt)
{
	struct vhost_blk_limits *own = &blk->limit.own;
	u64 clock = ktime_get_ns() + (u64)opt->limit_debt_ms * NSEC_PER_MSEC;
	u64 burst_ms = opt->limit_burst_ms ?: VHOST_BLK_LIMIT_BURST;

	if (opt->limit_iops == blk->opt.limit_iops && opt->limit_bytes == blk->opt.limit_bytes &&
	    opt->limit_burst_ms == blk->opt.limit_burst_ms)
		return;
	WRITE_ONCE(own->burst_ns, max_t(u64, burst_ms, VHOST_BLK_LIMIT_BURST_MIN) * NSEC_PER_MSEC);
	WRITE_ONCE(own->iops, opt->limit_iops);
	WRITE_ONCE(own->iops_clock, clock);
	WRITE_ONCE(own->bytes, opt->limit_bytes);
	WRITE_ONCE(own->bytes_clock, clock);
	/* Pairs with vhost_blk_limit_version(). */
	smp_store_release(&own->version, own->version + 1);
	vhost_blk_limit_changed(blk);
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
	struct vhost_blk_member *member;

	rcu_read_lock();
	member = rcu_dereference(blk->limit.member);
	at = vhost_blk_limit_opens_at(vhost_blk_limits_of(blk, member));
	if (member && check_add_overflow(max(at, now), vhost_blk_member_debt(member), &at))
		at = U64_MAX;
	rcu_read_unlock();
	return at > now ? DIV64_U64_ROUND_UP(min(at - now, VHOST_BLK_LIMIT_COST_MAX * NSEC_PER_SEC),
					     NSEC_PER_MSEC) : 0;
}

/* The lower bound of an idle clock: the present time less the burst. */
static u64 vhost_blk_limit_earliest(const struct vhost_blk_limits *limits, u64 now)
{
	u64 burst = READ_ONCE(limits->burst_ns);

	return now > burst ? now - burst : 0;
}

/* The time at which the device may take a chain. If that is now and it has debt, it pays instead. */
static u64 vhost_blk_limit_turn(struct vhost_blk_limits *limits, struct vhost_blk_member *member,
				u64 now)
{
	u64 paid, at = vhost_blk_limit_opens_at(limits);

	if (!member)
		return at;
	at = vhost_blk_member_turn(member, at, now);
	if (at > now || !vhost_blk_member_debt(member))
		return at;
	paid = vhost_blk_member_pay(member, vhost_blk_limit_earliest(limits, now), now);
	at = vhost_blk_limit_opens_at(limits);
	vhost_blk_member_charge(member, paid, at, now);
	at = vhost_blk_member_turn(member, at, now);
	return vhost_blk_member_debt(member) ? max(at, now + 1) : at;
}

/* Charges a request to the clocks. Returns the cost for which they have advanced. */
static u64 vhost_blk_limit_charge(struct vhost_blk_limits *limits, struct vhost_blk_member *member,
				  u64 bytes, u64 now)
{
	u64 earliest = vhost_blk_limit_earliest(limits, now);
	/* The costs are those of this version, or of a later one. */
	u64 version = smp_load_acquire(&limits->version);
	struct vhost_blk_debt rest = {
		.iops_ns = vhost_blk_limit_cost(READ_ONCE(limits->iops), 1),
		.bytes_ns = vhost_blk_limit_cost(READ_ONCE(limits->bytes), bytes),
	};
	u64 latest = member ? now + VHOST_BLK_LIMITS_LEAD_NS : U64_MAX;
	u64 moved = vhost_blk_limit_advance(&limits->bytes_clock, rest.bytes_ns, earliest, latest);
	/* One request is the least part of a limit on requests. */
	u64 iops = vhost_blk_limit_advance(&limits->iops_clock, rest.iops_ns, earliest,
					   max(latest, now + rest.iops_ns));

	rest.iops_ns -= iops;
	rest.bytes_ns -= moved;
	if (member)
		vhost_blk_member_owe(member, version, &rest);
	return max(iops, moved);
}

/**
 * vhost_blk_limit_waited - the wait that ended right before the chains of this turn were taken
 * @q: the queue; its vq.mutex is held by the loop
 *
 * Return: nanoseconds; 0 if it did not wait.
 */
u64 vhost_blk_limit_waited(const struct vhost_blk_queue *q)
{
	return q->throttle.waited_turn == q->now_ns ? q->throttle.waited_ns : 0;
}

/**
 * vhost_blk_limit_look - ask whether the queue may take a chain
 * @q: the queue, which runs; its vq.mutex is held, and there may be a limit
 *
 * Return: true if it may; otherwise a timer runs the loop when it may.
 */
bool vhost_blk_limit_look(struct vhost_blk_queue *q)
{
	struct vhost_blk_limits *limits;
	struct vhost_blk_member *member;
	u64 version, at = 0, now = ktime_get_ns();
	u32 joins;

	rcu_read_lock();
	/* Pairs with vhost_blk_set_member(): a number is never newer than its member. */
	joins = smp_load_acquire(&q->blk->limit.joins);
	member = rcu_dereference(q->blk->limit.member);
	limits = vhost_blk_limits_of(q->blk, member);
	version = vhost_blk_limit_version(limits, joins);
	if (q->throttle.version != version) {
		q->throttle.version = version;
		q->throttle.closed_until = 0;
		WRITE_ONCE(q->throttle.closed_at, 0);
	}
	if (now >= q->throttle.closed_until)
		at = vhost_blk_limit_turn(limits, member, now);
	rcu_read_unlock();
	if (now < q->throttle.closed_until) {
		/* The timer may have ended in a pause. */
		vhost_blk_limit_close(q, q->throttle.closed_until, now);
		return false;
	}
	if (at <= now) {
		if (vhost_blk_limit_yields(q)) {
			q->throttle.yields++;
			vhost_blk_limit_close(q, now + VHOST_BLK_LIMIT_QUANTUM, now);
			return false;
		}
		vhost_blk_limit_open(q, now);
		return true;
	}
	q->stats.throttled++;
	vhost_blk_limit_close(q, max(at, now + VHOST_BLK_LIMIT_QUANTUM), now);
	return false;
}

/**
 * vhost_blk_limit_took - charge a request
 * @q: the queue, which runs; its vq.mutex is held, and there may be a limit
 * @bytes: bytes that the request moves
 */
void vhost_blk_limit_took(struct vhost_blk_queue *q, u64 bytes)
{
	struct vhost_blk_limits *limits;
	struct vhost_blk_member *member;
	u64 at, cost, now = ktime_get_ns();

	rcu_read_lock();
	member = rcu_dereference(q->blk->limit.member);
	limits = vhost_blk_limits_of(q->blk, member);
	cost = vhost_blk_limit_charge(limits, member, bytes, now);
	if (member)
		vhost_blk_member_charge(member, cost, vhost_blk_limit_opens_at(limits), now);
	at = vhost_blk_limit_turn(limits, member, now);
	rcu_read_unlock();
	WRITE_ONCE(q->throttle.took_at, now);
	q->throttle.yields = 0;
	if (at <= now)
		return;
	q->stats.throttled++;
	vhost_blk_limit_close(q, max(at, now + VHOST_BLK_LIMIT_QUANTUM), now);
}
