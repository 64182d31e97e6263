// SPDX-License-Identifier: GPL-2.0-only
/*
 * Adaptive polling of the ring, in place of a sleep.
 *
 * Polling pays if most polls find work, and only a trial shows that: the length of a sleep includes
 * the wake-up. So a poll replaces one sleep of many, as a trial; a few polls without work end the
 * polling. An idle queue costs nothing: every poll follows work.
 *
 * There is a trial for each of two waits, since one of them may pay and the other not: for the driver
 * alone, while no request is in flight, and for I/O as well. A driver that sleeps until its call comes
 * back after a wake-up; a device takes as long as it takes.
 */
#include <linux/sched/clock.h>

#include "stages.h"

/* Largest score of polling; a high score means that work comes soon after a batch. */
#define VHOST_BLK_SCORE_FIRST	2
#define VHOST_BLK_SCORE_MAX	8
/*
 * Longest time, in microseconds, for which the loop polls the device without letting others have the
 * queue.
 */
#define VHOST_BLK_DEVICE_POLL_US	50u
/* Sleeps between two trials: the first number, and the largest after failed trials. */
#define VHOST_BLK_TRIAL_MIN	16
#define VHOST_BLK_TRIAL_MAX	1024

static void vhost_blk_poll_learn(struct vhost_blk_queue *q, struct vhost_blk_polling *poll,
				 bool won)
{
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

/**
 * vhost_blk_spin - look for new chains and completions without a sleep; polls the device for those
 *	that have no interrupt
 * @q: the queue; its vq.mutex is held by its worker
 * @us: longest time in microseconds
 * @ns: the time up to the last look is added to it
 *
 * Return: true if there are some; false after that time, or if others need the CPU.
 */
bool vhost_blk_spin(struct vhost_blk_queue *q, unsigned int us, u64 *ns)
{
	u64 start = local_clock(), now = start, end = start + (u64)us * NSEC_PER_USEC;
	struct vhost_virtqueue *vq = &q->vq;
	bool found;

	do {
		if (!list_empty(&q->polled))
			vhost_blk_poll_bdev(q);
		found = !llist_empty(&q->done) || !vhost_vq_avail_empty(vq->dev, vq);
		if (found || need_resched() || signal_pending(current) || vhost_vq_has_work(vq) ||
		    atomic_read(&q->blk->lock_waiters))
			break;
		cpu_relax();
		now = local_clock();
	} while (now < end);
	*ns += now - start;
	return found;
}

/**
 * vhost_blk_poll_ring - poll for new chains and completions
 * @q: the queue, for which vhost_blk_poll_begin() was true; its vq.mutex is held by its worker
 *
 * Return: true if there are some; false after busyloop_timeout, or if others need the CPU.
 */
bool vhost_blk_poll_ring(struct vhost_blk_queue *q)
{
	struct vhost_blk_polling *poll = vhost_blk_polling(q);
	bool won = vhost_blk_spin(q, q->vq.busyloop_timeout, &q->stats.poll_ns);

	vhost_blk_poll_learn(q, poll, won);
	return won;
}

/**
 * vhost_blk_poll_device - poll for completions that have no interrupt, and for new chains
 * @q: the queue, with polled I/O in flight; its vq.mutex is held by its worker
 *
 * Return: true if there are some; false after a time, or if others need the CPU.
 */
bool vhost_blk_poll_device(struct vhost_blk_queue *q)
{
	u64 ns = 0;

	/* The device may take long. */
	vhost_blk_send_held_call(q);
	return vhost_blk_spin(q, VHOST_BLK_DEVICE_POLL_US, &ns);
}
