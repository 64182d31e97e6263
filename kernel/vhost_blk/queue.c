// SPDX-License-Identifier: GPL-2.0-only
/*
 * The loop: vhost_blk_serve() is the whole life of a request. A kick or a completion runs it; the
 * functions around it decide when it continues and when it sleeps.
 */
#include <linux/blkdev.h>
#include <linux/sched/clock.h>

#include "stages.h"

/* Largest score of polling; a high score means that work comes soon after a batch. */
#define VHOST_BLK_SCORE_FIRST	2
#define VHOST_BLK_SCORE_MAX	8
/* Sleeps between two trials: the first number, and the largest after failed trials. */
#define VHOST_BLK_TRIAL_MIN	16
#define VHOST_BLK_TRIAL_MAX	1024

/* State of one run of the loop. */
struct vhost_blk_run {
	unsigned int chains;
	unsigned int bytes;
	unsigned int batch;	/* chains to start before completions are reaped */
	bool yield;	/* other work of this worker is due; the queue is queued again */
	bool stuck;	/* needs a completion or an IOTLB entry before the next chain */
	bool blind;	/* the rings cannot be reached until an IOTLB entry comes */
};

static u64 vhost_blk_now(void)
{
	return local_clock();
}

/*
 * A driver that waits for this CPU cannot work in parallel with the device: early answers to the
 * first of many requests would only add task switches.
 */
static unsigned int vhost_blk_first_batch(const struct vhost_blk_queue *q)
{
	return q->crowded ? VHOST_BLK_BATCH_CROWDED : VHOST_BLK_BATCH_FIRST;
}

static void vhost_blk_loop_begin(struct vhost_blk_queue *q, struct vhost_blk_run *run)
{
	WRITE_ONCE(q->looping, true);
	/* Asks for the missing entries; the core kicks the queue when they come. */
	run->blind = q->vq.iotlb && !vq_meta_prefetch(&q->vq);
	if (unlikely(run->blind))
		vhost_blk_settle(q);
	else if (unlikely(q->settled))
		vhost_blk_publish_settled(q);
}

/* From here on a completion runs the loop again. */
static void vhost_blk_loop_end(struct vhost_blk_queue *q, const struct vhost_blk_run *run)
{
	WRITE_ONCE(q->looping, false);
	/* Pairs with llist_add() in vhost_blk_end_io(). */
	smp_mb();
	/* Without the rings it would spin for polled I/O; a drain polls for it, too. */
	if (!llist_empty(&q->done) || (!run->blind && !list_empty(&q->polled)))
		vhost_blk_queue_done(q);
}

/*
 * Polling pays if most polls find work, and only a trial shows that: the length of a sleep includes
 * the wake-up. So a poll replaces one sleep of many, as a trial; a few polls without work end the
 * polling. An idle queue costs nothing: every poll follows work.
 */
static bool vhost_blk_poll_wanted(struct vhost_blk_queue *q)
{
	if (!q->vq.busyloop_timeout)
		return false;
	if (q->poll.score)
		return true;
	return !q->poll.until_trial--;
}

static void vhost_blk_poll_learn(struct vhost_blk_queue *q, bool won)
{
	struct vhost_blk_polling *poll = &q->poll;

	q->stats.polls++;
	q->stats.polls_won += won;
	if (won) {
		poll->score = poll->score ? min(poll->score + 1, VHOST_BLK_SCORE_MAX) :
					    VHOST_BLK_SCORE_FIRST;
		poll->interval = VHOST_BLK_TRIAL_MIN;
		return;
	}
	poll->score = max(poll->score - 2, 0);
	poll->interval = clamp(poll->interval * 2, VHOST_BLK_TRIAL_MIN, VHOST_BLK_TRIAL_MAX);
	poll->until_trial = poll->interval;
}

/* Polls for new chains and completions, if that paid recently. */
static bool vhost_blk_poll_ring(struct vhost_blk_queue *q)
{
	struct vhost_virtqueue *vq = &q->vq;
	bool won = false;
	u64 end;

	if (!vhost_blk_poll_wanted(q))
		return false;
	end = vhost_blk_now() + (u64)vq->busyloop_timeout * NSEC_PER_USEC;
	do {
		won = !llist_empty(&q->done) || !vhost_vq_avail_empty(vq->dev, vq);
		if (won || need_resched() || signal_pending(current) || vhost_vq_has_work(vq) ||
		    atomic_read(&q->blk->ioctls))	/* may need vq.mutex */
			break;
		cpu_relax();
	} while (vhost_blk_now() < end);
	vhost_blk_poll_learn(q, won);
	return won;
}

/* True if the loop takes another turn; otherwise enables kicks, if a kick can help. */
static bool vhost_blk_go_on(struct vhost_blk_queue *q, struct vhost_blk_run *run)
{
	struct vhost_virtqueue *vq = &q->vq;

	if (run->yield || run->blind)
		return false;
	if (!list_empty(&q->polled))
		vhost_blk_poll_bdev(q);
	if (!llist_empty(&q->done))
		return true;
	if (run->stuck || q->state != VHOST_BLK_RUNNING || !list_empty(&q->polled))
		return false;
	if (!vhost_vq_avail_empty(vq->dev, vq))
		return true;
	if (vhost_blk_poll_ring(q)) {
		run->batch = vhost_blk_first_batch(q);
		return true;
	}
	/* Chains may have come between the last check and the enabling. */
	return vhost_enable_notify(vq->dev, vq);
}

/*
 * Hands the plugged bios to the disk's driver. A driver with immediate completion uses a softirq,
 * and a softirq that a task raises is left to ksoftirqd: the loop would stop polling and sleep to
 * let it run. It runs here instead; ksoftirqd, already woken, then runs and finds no work.
 */
static void vhost_blk_unplug(struct blk_plug *plug)
{
	blk_finish_plug(plug);
	local_bh_disable();
	local_bh_enable();
	cond_resched();
}

/*
 * Takes a batch of chains and starts their requests. No other function takes chains: here the queue
 * is RUNNING until vq.mutex is released, and notifications are disabled. With notifications enabled
 * vhost_get_vq_desc() stops the machine.
 */
static void vhost_blk_submit_batch(struct vhost_blk_queue *q, struct vhost_blk_run *run)
{
	struct vhost_blk_chain chain;
	struct blk_plug plug;
	unsigned int left = run->batch;
	unsigned long sleeps = current->nvcsw;
	int taken;

	if (q->state != VHOST_BLK_RUNNING)
		return;
	vhost_disable_notify(q->vq.dev, &q->vq);
	blk_start_plug(&plug);
	while (left-- && !run->yield) {
		taken = vhost_blk_take_chain(q, &chain);		/* 1 chain */
		if (taken > 0)
			taken = vhost_blk_submit(q, &chain, &run->bytes);	/* 2, 3 */
		if (taken <= 0) {
			run->stuck = taken < 0;
			break;
		}
		/* Queues the kick handler again if it returns true. */
		run->yield = vhost_exceeds_weight(&q->vq, ++run->chains, run->bytes);
		/* It slept for a tag, and the next one may, too: waiters of vq.mutex go first. */
		if (unlikely(current->nvcsw != sleeps) && !run->yield) {
			vhost_poll_queue(&q->vq.poll);
			run->yield = true;
		}
	}
	vhost_blk_unplug(&plug);
	run->batch = max(run->batch, min(run->batch * 2, VHOST_BLK_BATCH_MAX));
}

/**
 * vhost_blk_serve - the life of all requests of a queue
 * @q: the queue
 * @kicked: run by a kick of the driver
 *
 * Runs on the queue's worker, in the owner's memory. Repeats until no work is left, or until other
 * queues of the worker are due.
 */
static void vhost_blk_serve(struct vhost_blk_queue *q, bool kicked)
{
	struct vhost_blk_run run = { .batch = vhost_blk_first_batch(q) };

	mutex_lock(&q->vq.mutex);
	q->stats.kicks += kicked;
	vhost_blk_loop_begin(q, &run);
	do {
		if (unlikely(run.blind))
			break;
		q->stats.turns++;
		q->now_ns = vhost_blk_now();
		run.stuck = false;
		vhost_blk_submit_batch(q, &run);		/* 1 chain, 2 request, 3 submit */
		if (vhost_blk_complete(q))		/* 4 completion, 5 used, 6 notify */
			run.stuck = false;	/* its resources may be the missing ones */
	} while (vhost_blk_go_on(q, &run));
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
	vhost_blk_init_reserve(q);
	INIT_LIST_HEAD(&q->polled);
}
