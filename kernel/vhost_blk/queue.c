// SPDX-License-Identifier: GPL-2.0-only
/*
 * The loop: vhost_blk_serve() is the whole life of a request. Around it: when the loop runs (a
 * kick, a completion), when it goes on, and when it sleeps.
 */
#include <linux/sched/clock.h>

#include "vhost_blk.h"
#include "trace.h"

/* Score of polling: how sure it is that work comes soon after a batch. */
#define SCORE_FIRST	2
#define SCORE_MAX	8
/* Sleeps between two trials: at first, and when trials fail again and again. */
#define TRIAL_MIN	16
#define TRIAL_MAX	1024

/* What one run of the loop did. */
struct run {
	unsigned int chains;
	unsigned int bytes;
	unsigned int batch;	/* chains to start before finished ones are looked at */
	bool yield;	/* other work of this worker is due; the queue is queued again */
	bool stuck;	/* no chain can be taken until a completion, or an IOTLB entry */
	bool blind;	/* the rings cannot be reached until an IOTLB entry comes */
};

static u64 now(void)
{
	return local_clock();
}

static bool may_take(struct vhost_blk_queue *q)
{
	return vhost_vq_get_backend(&q->vq) && !q->broken && !READ_ONCE(q->paused) && !q->stopping;
}

/*
 * A driver that waits for this very CPU cannot work while the device does: to answer the first of
 * many requests early would only make the CPU go there and back more often.
 */
static unsigned int first_batch(const struct vhost_blk_queue *q)
{
	return q->crowded ? VHOST_BLK_BATCH_CROWDED : VHOST_BLK_BATCH_FIRST;
}

static void loop_begin(struct vhost_blk_queue *q, struct run *run)
{
	/* Asks for the missing entries; the core kicks the queue when they come. */
	run->blind = q->vq.iotlb && !vq_meta_prefetch(&q->vq);
	WRITE_ONCE(q->blind, run->blind);
	if (unlikely(run->blind))
		vhost_blk_drop_if_closing(q);
	WRITE_ONCE(q->looping, true);
	if (may_take(q) && !run->blind)
		vhost_disable_notify(q->vq.dev, &q->vq);
}

/* From here on a completion runs the loop again. */
static void loop_end(struct vhost_blk_queue *q, const struct run *run)
{
	bool more;

	WRITE_ONCE(q->looping, false);
	/* Pairs with llist_add() in vhost_blk_end_io(). */
	smp_mb();
	more = !llist_empty(&q->done) || !list_empty(&q->polled);
	/* Nobody gives IOTLB entries to a device that is being closed. */
	if (more && (!run->blind || READ_ONCE(q->blk->closing)))
		vhost_blk_queue_done(q);
}

/*
 * Polling pays when most polls find work, which only polling can tell: a sleep takes as long as the
 * wake-up does, too. So one sleep of many is replaced by a poll, as a trial; a few polls in vain
 * end the polling. A queue that sleeps costs nothing: every poll follows work.
 */
static bool poll_wanted(struct vhost_blk_queue *q)
{
	if (!q->vq.busyloop_timeout)
		return false;
	if (q->poll.score)
		return true;
	return !q->poll.until_trial--;
}

static void poll_learn(struct vhost_blk_queue *q, bool won)
{
	struct vhost_blk_polling *poll = &q->poll;

	q->stats.polls++;
	q->stats.polls_won += won;
	if (won) {
		poll->score = poll->score ? min(poll->score + 1, SCORE_MAX) : SCORE_FIRST;
		poll->interval = TRIAL_MIN;
		return;
	}
	poll->score = max(poll->score - 2, 0);
	poll->interval = clamp(poll->interval * 2, TRIAL_MIN, TRIAL_MAX);
	poll->until_trial = poll->interval;
}

/* Polls for new chains and completions, if that paid lately. */
static bool poll_ring(struct vhost_blk_queue *q)
{
	struct vhost_virtqueue *vq = &q->vq;
	bool won = false;
	u64 end;

	if (!poll_wanted(q))
		return false;
	end = now() + (u64)vq->busyloop_timeout * NSEC_PER_USEC;
	do {
		won = !llist_empty(&q->done) || !vhost_vq_avail_empty(vq->dev, vq);
		if (won || need_resched() || signal_pending(current) || vhost_vq_has_work(vq))
			break;
		cpu_relax();
	} while (now() < end);
	poll_learn(q, won);
	return won;
}

/* Whether the loop goes round once more; otherwise kicks are enabled, where one can help. */
static bool go_on(struct vhost_blk_queue *q, struct run *run)
{
	struct vhost_virtqueue *vq = &q->vq;

	if (run->yield || run->blind)
		return false;
	if (!list_empty(&q->polled))
		vhost_blk_poll_bdev(q);
	if (!llist_empty(&q->done))
		return true;
	if (run->stuck || !may_take(q) || !list_empty(&q->polled))
		return false;
	if (!vhost_vq_avail_empty(vq->dev, vq))
		return true;
	if (poll_ring(q)) {
		run->batch = first_batch(q);
		return true;
	}
	/* Chains may have come between the last look and the enabling. */
	if (!vhost_enable_notify(vq->dev, vq))
		return false;
	vhost_disable_notify(vq->dev, vq);
	return true;
}

/*
 * Hands what was plugged to the disk's driver. One that is done at once completes by a softirq, and
 * a softirq that a task raises is left to ksoftirqd: the loop would stop polling and sleep to make
 * room for it. It runs here instead; ksoftirqd, which was woken for it, gets its turn and finds
 * nothing.
 */
static void unplug(struct blk_plug *plug)
{
	blk_finish_plug(plug);
	local_bh_disable();
	local_bh_enable();
	cond_resched();
}

/* Takes chains and starts their requests, as many as make a batch. */
static void submit_batch(struct vhost_blk_queue *q, struct run *run)
{
	struct vhost_blk_chain chain;
	struct blk_plug plug;
	unsigned int left = run->batch;
	unsigned long sleeps = current->nvcsw;
	int taken;

	blk_start_plug(&plug);
	while (left-- && !run->yield) {
		taken = vhost_blk_take_chain(q, &chain);		/* 1 chain */
		if (taken > 0)
			taken = vhost_blk_submit(q, &chain, &run->bytes);	/* 2, 3 */
		if (taken <= 0) {
			run->stuck = taken < 0;
			break;
		}
		/* Queues the kick handler again when it says yes. */
		run->yield = vhost_exceeds_weight(&q->vq, ++run->chains, run->bytes);
		/* For want of a tag. The next may, too: first, who waits for vq.mutex gets it. */
		if (unlikely(current->nvcsw != sleeps) && !run->yield) {
			vhost_poll_queue(&q->vq.poll);
			run->yield = true;
		}
	}
	unplug(&plug);
	run->batch = max(run->batch, min(run->batch * 2, VHOST_BLK_BATCH_MAX));
}

/**
 * vhost_blk_serve - the life of all requests of a queue
 * @q: the queue
 * @kicked: the driver asked for it
 *
 * Runs on the queue's worker, in the owner's memory. Goes round until nothing is left to do, or
 * until other queues of the worker are due.
 */
static void vhost_blk_serve(struct vhost_blk_queue *q, bool kicked)
{
	struct run run = { .batch = first_batch(q) };

	mutex_lock(&q->vq.mutex);
	q->stats.kicks += kicked;
	loop_begin(q, &run);
	do {
		if (unlikely(run.blind))
			break;
		q->stats.turns++;
		q->now_ns = now();
		run.stuck = false;
		if (may_take(q))
			submit_batch(q, &run);		/* 1 chain, 2 request, 3 submit */
		if (vhost_blk_complete(q))		/* 4 completion, 5 used, 6 notify */
			run.stuck = false;	/* this may be the one that was waited for */
	} while (go_on(q, &run));
	loop_end(q, &run);
	mutex_unlock(&q->vq.mutex);
}

static void handle_kick(struct vhost_work *work)
{
	struct vhost_virtqueue *vq = container_of(work, struct vhost_virtqueue, poll.work);

	vhost_blk_serve(vhost_blk_queue_of(vq), true);
}

static void handle_done(struct vhost_work *work)
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
	q->vq.handle_kick = handle_kick;
	init_llist_head(&q->done);
	vhost_work_init(&q->done_work, handle_done);
	INIT_DELAYED_WORK(&q->orphan_work, vhost_blk_orphan_work);
	init_waitqueue_head(&q->drained);
	INIT_LIST_HEAD(&q->polled);
}
