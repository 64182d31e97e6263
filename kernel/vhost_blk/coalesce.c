// SPDX-License-Identifier: GPL-2.0-only
/*
 * Coalescing of calls: a driver that still gives chains is at work, and a call only interrupts it.
 * So the call waits while chains and completions follow each other closely, within bounds.
 *
 * That pays where the driver's CPU is the bottleneck, and costs time where the driver waits for the
 * device. Only a trial shows which (trial.c): windows of time with and without coalescing take turns,
 * and their rates decide; if these are close, the number of calls does.
 *
 * A driver that waits for each request has no trial: its queue is never deeper than one request.
 *
 * The trials of the size of batches (batch_size.c) use the same windows.
 */
#include "stages.h"

/* Longest time for which a call is held. */
#define VHOST_BLK_HOLD_NS	(100 * NSEC_PER_USEC)
/*
 * Time without a new chain or completion after which the driver is taken to wait; at most the
 * busy-loop timeout.
 */
#define VHOST_BLK_HOLD_IDLE_US	30u
/* Most requests that a held call answers. */
#define VHOST_BLK_HOLD_REQUESTS	16u

/*
 * Shortest window and its fewest requests. A longer window than the last says nothing: the driver
 * was idle.
 */
#define VHOST_BLK_WINDOW_NS	(4 * NSEC_PER_MSEC)
#define VHOST_BLK_WINDOW_REQUESTS	64
#define VHOST_BLK_WINDOW_NS_MAX	(100 * NSEC_PER_MSEC)
/* Depth below which a queue makes no trial of batch sizes, which hardly differ. */
#define VHOST_BLK_TRIAL_DEPTH	4u

/*
 * The requests that the driver waits for: in flight, or in the ring when the queue last read its index.
 * Those in flight alone are no more than the size of a batch, if the disk completes requests at once.
 */
static unsigned int vhost_blk_depth(const struct vhost_blk_queue *q)
{
	u16 waiting = q->vq.avail_idx - q->vq.last_avail_idx;

	return vhost_blk_inflight(q) + waiting;
}

/* True if calls of the present window are held, where trials decide. */
static bool vhost_blk_window_holds(const struct vhost_blk_coalesce *c)
{
	return c->chosen != vhost_blk_trial_differs(&c->trial);
}

/* True if the options hold calls, or leave it to trials, whose choice is @holds, and that is true. */
static bool vhost_blk_holds(const struct vhost_blk_queue *q, bool holds)
{
	u32 flags = READ_ONCE(q->blk->opt.flags);

	/* A held call is polled for: see vhost_blk_wait_before_call(). */
	if (!q->vq.busyloop_timeout)
		return false;
	if (flags & VHOST_BLK_OPT_COALESCE)
		return true;
	return flags & VHOST_BLK_OPT_COALESCE_AUTO && holds;
}

/* True if calls are held now. */
static bool vhost_blk_coalesces(const struct vhost_blk_queue *q)
{
	return vhost_blk_holds(q, vhost_blk_window_holds(&q->coalesce));
}

/**
 * vhost_blk_coalesce_chosen - true if calls are held, trials aside
 * @q: the queue; its vq.mutex is held
 *
 * Return: true if the options or the last trial have chosen that.
 */
bool vhost_blk_coalesce_chosen(const struct vhost_blk_queue *q)
{
	return vhost_blk_holds(q, q->coalesce.chosen);
}

/* Forgets a load: the driver waits for each request, or has few of them. */
static void vhost_blk_coalesce_reset(struct vhost_blk_coalesce *c)
{
	c->chosen = false;
	vhost_blk_trial_init(&c->trial, true);
}

/*
 * The gain that a change needs. If held calls save a third of the calls, they win, or stay, unless they lose
 * VHOST_BLK_TRIAL_GAIN; otherwise they have to gain it.
 */
static int vhost_blk_coalesce_wanted(const struct vhost_blk_coalesce *c)
{
	const struct vhost_blk_tally *without = c->tally + c->chosen;
	const struct vhost_blk_tally *with = c->tally + !c->chosen;
	bool saves_calls = with->calls * without->requests * 3 <=
			   without->calls * with->requests * 2;

	return saves_calls == c->chosen ? VHOST_BLK_TRIAL_GAIN : -VHOST_BLK_TRIAL_GAIN;
}

static void vhost_blk_try_coalescing(struct vhost_blk_coalesce *c,
				     const struct vhost_blk_tally *window)
{
	struct vhost_blk_tally *tally = c->tally + vhost_blk_trial_differs(&c->trial);

	tally->requests += window->requests;
	tally->calls += window->calls;
	switch (vhost_blk_trial_window(&c->trial, window, vhost_blk_coalesce_wanted(c))) {
	case VHOST_BLK_TRIAL_BEGINS:
		memset(c->tally, 0, sizeof(c->tally));
		break;
	case VHOST_BLK_TRIAL_CHANGES:
		c->chosen = !c->chosen;
		break;
	default:
		break;
	}
}

/* The window of a trial of held calls, or of a pause between two. */
static void vhost_blk_coalesce_window(struct vhost_blk_queue *q,
				      const struct vhost_blk_tally *window, bool idle)
{
	struct vhost_blk_coalesce *c = &q->coalesce;

	if (!(READ_ONCE(q->blk->opt.flags) & VHOST_BLK_OPT_COALESCE_AUTO))
		vhost_blk_trial_abandon(&c->trial);
	else if (c->deepest <= 1 || (idle && c->was_idle))
		vhost_blk_coalesce_reset(c);
	else if (idle)
		/* One such window is a gap between two loads, which may be alike. */
		vhost_blk_trial_abandon(&c->trial);
	else
		vhost_blk_try_coalescing(c, window);
}

/* The same for batches. A gap, and a load that cannot tell sizes apart, leave the size as it is. */
static void vhost_blk_size_window(struct vhost_blk_queue *q, const struct vhost_blk_tally *window,
				  bool idle)
{
	if (idle || q->crowded || READ_ONCE(q->blk->opt.batch) ||
	    q->coalesce.deepest < VHOST_BLK_TRIAL_DEPTH)
		vhost_blk_trial_abandon(&q->batch_size.trial);
	else
		q->stats.batch_trials += vhost_blk_batch_size_window(&q->batch_size, window);
}

/* Ends the window, if it is long enough. One trial at a time: each would disturb the other. */
static void vhost_blk_look_at_window(struct vhost_blk_queue *q)
{
	struct vhost_blk_coalesce *c = &q->coalesce;
	u64 ns = max_t(s64, q->now_ns - c->window.ns, 0);
	struct vhost_blk_tally window;
	bool idle;

	if (likely(ns < VHOST_BLK_WINDOW_NS) ||
	    (c->window.requests < VHOST_BLK_WINDOW_REQUESTS && ns < VHOST_BLK_WINDOW_NS_MAX))
		return;
	idle = ns >= VHOST_BLK_WINDOW_NS_MAX;
	window = c->window;
	window.ns = ns;
	if (!q->batch_size.trial.windows)
		vhost_blk_coalesce_window(q, &window, idle);
	if (!c->trial.windows)
		vhost_blk_size_window(q, &window, idle);
	c->was_idle = idle;
	c->window = (struct vhost_blk_tally) { .ns = q->now_ns };
	c->deepest = 0;
}

/**
 * vhost_blk_coalesce_init - begin without coalescing
 * @q: the queue; its vq.mutex is held, or no other thread can reach it yet
 */
void vhost_blk_coalesce_init(struct vhost_blk_queue *q)
{
	q->coalesce = (struct vhost_blk_coalesce) {};
	vhost_blk_coalesce_reset(&q->coalesce);
}

/**
 * vhost_blk_call_or_hold - call the driver, or hold the call
 * @q: the queue, whose rings can be reached; its vq.mutex is held by its worker
 * @n: requests that have been published
 *
 * A held call comes with a later one, at the latest when the loop ends: see
 * vhost_blk_send_held_call().
 */
void vhost_blk_call_or_hold(struct vhost_blk_queue *q, unsigned int n)
{
	struct vhost_blk_coalesce *c = &q->coalesce;

	c->window.requests += n;
	c->deepest = max(c->deepest, vhost_blk_depth(q));
	if (!c->held)
		c->held_since = q->now_ns;
	else
		q->stats.coalesced++;
	c->held += n;
	if (!q->looping || !vhost_blk_coalesces(q))
		vhost_blk_send_held_call(q);
}

/**
 * vhost_blk_send_held_call - call the driver, if a call is held
 * @q: the queue; its vq.mutex is held by its worker
 */
void vhost_blk_send_held_call(struct vhost_blk_queue *q)
{
	struct vhost_blk_coalesce *c = &q->coalesce;

	if (!c->held)
		return;
	vhost_blk_notify(q, c->held);
	c->held = 0;
	c->window.calls++;
	vhost_blk_look_at_window(q);
}

/**
 * vhost_blk_send_due_call - call the driver, if a call has been held for long enough
 * @q: the queue; its vq.mutex is held by its worker
 */
void vhost_blk_send_due_call(struct vhost_blk_queue *q)
{
	const struct vhost_blk_coalesce *c = &q->coalesce;

	if (c->held && (c->held >= VHOST_BLK_HOLD_REQUESTS ||
			local_clock() - c->held_since >= VHOST_BLK_HOLD_NS))
		vhost_blk_send_held_call(q);
}

/**
 * vhost_blk_wait_before_call - wait a moment for more chains of the driver
 * @q: the queue; its vq.mutex is held by its worker
 *
 * Return: true if there is work; false: no call is held any more.
 */
bool vhost_blk_wait_before_call(struct vhost_blk_queue *q)
{
	u64 ns = 0;	/* is no poll */

	if (!q->coalesce.held)
		return false;
	if (vhost_blk_spin(q, min(VHOST_BLK_HOLD_IDLE_US, q->vq.busyloop_timeout), &ns))
		return true;
	vhost_blk_send_held_call(q);
	return false;
}
