// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests without an answer. The time-out of the request path and the watchdog look at the used ring
 * again, in case that only an interrupt was lost, and report requests that are overdue.
 *
 * A request is not ended before the device answers it or is reset: the device may still write to
 * its memory.
 */
#include <linux/delay.h>

#include "virtio_blk.h"

/* A completion that is later than this without an interrupt counts as a lost interrupt. */
#define VIRTBLK_LOST_AFTER	(2 * HZ)
/* An interrupt comes within this time, in milliseconds. */
#define VIRTBLK_LATE_MS		10

static void virtblk_report_lost_interrupt(struct virtblk_queue *q)
{
	dev_warn_ratelimited(&q->blk->vdev->dev,
			     "[%s] queue %u: requests were used, their interrupt is late or lost\n",
			     q->blk->disk->disk_name, q->index);
}

/* Reports an overdue request, once per VIRTBLK_TIMEOUT for a queue. */
static void virtblk_report_overdue(struct virtblk_queue *q, int tag, unsigned int age_s)
{
	struct virtblk *blk = q->blk;

	if (q->last_report && time_before(jiffies, q->last_report + VIRTBLK_TIMEOUT))
		return;
	q->last_report = jiffies ?: 1;
	dev_warn_ratelimited(&blk->vdev->dev,
			     "[%s] queue %u: no answer to request %d for %u s, %u in flight\n",
			     blk->disk->disk_name, q->index, tag, age_s, READ_ONCE(q->in_flight));
}

/* A request is overdue: reports it, and has the device given up if it is hopeless. */
static void virtblk_handle_overdue(struct virtblk_queue *q, int tag, unsigned int age_s)
{
	virtblk_report_overdue(q, tag, age_s);
	queue_work(virtblk_wq, &q->blk->abort_work);
}

static unsigned int virtblk_age_s(const struct request *rq)
{
	u64 start_ns = rq->io_start_time_ns;

	if (!start_ns)
		return rq->timeout / HZ;
	return div_u64(ktime_get_ns() - start_ns, NSEC_PER_SEC);
}

/**
 * virtblk_timeout() - a request of the request path was not answered in time
 * @rq: in flight; not freed before this returns
 *
 * Return: BLK_EH_DONE if only its interrupt was lost, else BLK_EH_RESET_TIMER.
 */
enum blk_eh_timer_return virtblk_timeout(struct request *rq)
{
	struct virtblk *blk = rq->q->queuedata;
	struct virtblk_queue *q = &blk->queues[rq->mq_hctx->queue_num];
	struct virtblk_request *request = blk_mq_rq_to_pdu(rq);
	unsigned int age = virtblk_age_s(rq);

	if (unlikely(READ_ONCE(request->fake_timeout))) {
		WRITE_ONCE(request->fake_timeout, false);
		blk_mq_complete_request(rq);
		return BLK_EH_DONE;
	}
	virtblk_rq_recheck(q);
	/* Completed, or about to be: on this CPU it is idle again by now. */
	if (blk_mq_rq_state(rq) != MQ_RQ_IN_FLIGHT) {
		if (!q->polled)
			virtblk_report_lost_interrupt(q);
		return BLK_EH_DONE;
	}
	virtblk_handle_overdue(q, rq->tag, age);
	return BLK_EH_RESET_TIMER;
}

/**
 * struct virtblk_oldest - the slot that the device has had for longest
 * @exists: the device has one
 * @slot: its index
 * @sent: jiffies when it was sent
 */
struct virtblk_oldest {
	bool exists;
	int slot;
	unsigned long sent;
};

static struct virtblk_oldest virtblk_find_oldest(struct virtblk_queue *q)
{
	struct virtblk_oldest oldest = { };
	struct virtblk_slot *slot;

	spin_lock_irq(&q->lock);
	slot = list_first_entry_or_null(&q->ring, struct virtblk_slot, node);
	if (slot)
		oldest = (struct virtblk_oldest){ true, slot->index, slot->sent };
	spin_unlock_irq(&q->lock);
	return oldest;
}

/* No online CPU uses the queue: where the kernel spreads interrupts, its interrupt is off. */
static bool virtblk_is_orphan(const struct virtblk_queue *q)
{
	const struct blk_mq_queue_map *map = &q->blk->maps[VIRTBLK_MAP_INTERRUPT];
	unsigned int cpu;

	for_each_online_cpu(cpu)
		if (map->mq_map[cpu] == q->index)
			return false;
	return !q->polled;
}

static bool virtblk_is_same(const struct virtblk_oldest *one, const struct virtblk_oldest *other)
{
	return one->exists && other->exists && one->slot == other->slot &&
	       one->sent == other->sent;
}

/* The used ring has a request now. The interrupt is armed, if it was not. */
static bool virtblk_has_used(struct virtblk_queue *q)
{
	bool has_used = false;

	spin_lock_irq(&q->lock);
	if (q->vq)
		has_used = virtqueue_poll(q->vq, virtqueue_enable_cb_prepare(q->vq));
	spin_unlock_irq(&q->lock);
	return has_used;
}

/*
 * Returns true if the used ring has requests for which no interrupt has come for a moment. Only
 * while the oldest one is old: a busy queue has some each time.
 */
static bool virtblk_awaits_interrupt(struct virtblk_queue *q, const struct virtblk_oldest *oldest)
{
	struct virtblk_oldest now;

	if (q->polled || !oldest->exists ||
	    time_before(jiffies, oldest->sent + VIRTBLK_LOST_AFTER) || !virtblk_has_used(q))
		return false;
	msleep(VIRTBLK_LATE_MS);
	now = virtblk_find_oldest(q);
	return virtblk_is_same(oldest, &now) && virtblk_has_used(q);
}

/* Returns whether interrupts are missing, so that the next look should be soon. */
static bool virtblk_watch_bio_queue(struct virtblk_queue *q)
{
	struct virtblk_oldest before = virtblk_find_oldest(q), after;
	bool late = virtblk_awaits_interrupt(q, &before);

	/* Completes polled requests without a poller, and sends bios that wait for memory. */
	virtblk_bio_recheck(q);
	after = virtblk_find_oldest(q);
	if (after.exists && time_after(jiffies, after.sent + VIRTBLK_TIMEOUT))
		virtblk_handle_overdue(q, after.slot, (jiffies - after.sent) / HZ);
	if (virtblk_is_orphan(q))
		return after.exists;
	if (!late || virtblk_is_same(&before, &after))
		return false;
	virtblk_report_lost_interrupt(q);
	return true;
}

/* Completes polled requests without a poller, and in a drain those whose interrupt was lost. */
static void virtblk_watch_rq_queue(struct virtblk_queue *q, bool draining)
{
	if (draining ||
	    (q->polled && time_after_eq(jiffies, q->last_reap + VIRTBLK_WATCH_POLLED)))
		virtblk_rq_recheck(q);
}

static bool virtblk_is_watched(const struct virtblk_queue *q, bool draining)
{
	return q->blk->use_bio || q->polled || draining;
}

static bool virtblk_is_busy(struct virtblk_queue *q)
{
	bool busy;

	spin_lock_irq(&q->lock);
	busy = q->in_flight || !bio_list_empty(&q->waiting) || !list_empty(&q->requeued);
	spin_unlock_irq(&q->lock);
	return busy;
}

/**
 * virtblk_watchdog() - looks for requests that neither an interrupt nor a poller completes
 * @work: &virtblk.watchdog
 *
 * Runs while requests are in flight: an idle disk costs nothing. It runs until the end of a drain, and
 * has a silent device given up, because the time-out of requests is the administrator's to set.
 */
void virtblk_watchdog(struct work_struct *work)
{
	struct virtblk *blk = container_of(to_delayed_work(work), struct virtblk, watchdog);
	bool draining = READ_ONCE(blk->state) == VIRTBLK_DRAINING;
	bool busy = false, lost = false;
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++) {
		if (blk->use_bio)
			lost |= virtblk_watch_bio_queue(&blk->queues[i]);
		else
			virtblk_watch_rq_queue(&blk->queues[i], draining);
	}
	/* A request that is added after the next look at its queue starts the watchdog again. */
	for (i = 0; i < blk->queue_count; i++)
		busy |= virtblk_is_watched(&blk->queues[i], draining) &&
			virtblk_is_busy(&blk->queues[i]);
	if (busy && draining)
		queue_work(virtblk_wq, &blk->abort_work);
	if (busy && lost)
		virtblk_retry_soon(blk);
	else if (busy || draining)
		virtblk_start_watchdog(blk);
}

/**
 * virtblk_cpu_dead() - a CPU is offline, and with it perhaps the interrupt of its queue
 * @cpu: the CPU
 * @node: of a disk of the bio path
 *
 * The interrupt is off only if no other CPU uses the queue; the watchdog finds that out.
 *
 * Return: 0.
 */
int virtblk_cpu_dead(unsigned int cpu, struct hlist_node *node)
{
	virtblk_retry_soon(hlist_entry(node, struct virtblk, cpu_node));
	return 0;
}
