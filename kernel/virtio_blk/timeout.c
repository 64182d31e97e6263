// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests that are not answered. They are reported and waited for: to end a request whose memory
 * the device may still write to would be worse. Before that the used ring is looked into, in case
 * that only the interrupt was lost.
 */
#include "virtio_blk.h"

/* How often the watch looks, if a polled queue is busy, or only others are. */
#define WATCH_POLLED	(HZ / 2)
#define WATCH_OTHERS	(2 * HZ)
/* Interrupts that are later than this are taken as lost. */
#define LOST_AFTER	(2 * HZ)

static void report_lost(struct virtblk_queue *q)
{
	dev_warn_ratelimited(&q->blk->vdev->dev,
			     "[%s] queue %u: requests were used, their interrupt is late or lost\n",
			     q->blk->disk->disk_name, q->index);
}

/*
 * Whether the device has used nothing at all for long, of all that its driver waits for in order to
 * go. One old request does not say so: a flush may take its time.
 */
static bool may_give_up(struct virtblk *blk)
{
	unsigned long quiet = jiffies - blk->removing_since;
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++)
		quiet = min(quiet, jiffies - READ_ONCE(blk->queues[i].last_used));
	return quiet >= VIRTBLK_GIVE_UP;
}

static void report_silent(struct virtblk_queue *q, int tag, unsigned int age_s)
{
	struct virtblk *blk = q->blk;
	/* Pairs with virtblk_remove(), which stores removing_since first. */
	bool removing = smp_load_acquire(&blk->removing);

	/* The bus cannot say that the device is gone while it waits for the probe. */
	if (virtblk_pulled_out(blk->vdev) || (removing && may_give_up(blk))) {
		queue_work(virtblk_wq, &blk->abort_work);
		return;
	}
	if (q->last_report && time_before(jiffies, q->last_report + VIRTBLK_TIMEOUT))
		return;
	q->last_report = jiffies ?: 1;
	dev_warn_ratelimited(&blk->vdev->dev,
			     "[%s] queue %u: no answer to request %d for %u s, %u in flight\n",
			     blk->disk->disk_name, q->index, tag, age_s, READ_ONCE(q->in_flight));
}

/**
 * virtblk_timeout() - a request of the request path was not answered in time
 * @rq: in flight; cannot be freed before this returns
 *
 * Return: BLK_EH_DONE if its completion had only been missed.
 */
enum blk_eh_timer_return virtblk_timeout(struct request *rq)
{
	struct virtblk *blk = rq->q->queuedata;
	struct virtblk_queue *q = &blk->queues[rq->mq_hctx->queue_num];
	struct virtblk_request *request = blk_mq_rq_to_pdu(rq);
	u64 start_ns = rq->io_start_time_ns;
	unsigned int age_s = rq->timeout / HZ;

	if (unlikely(READ_ONCE(request->withheld))) {
		WRITE_ONCE(request->withheld, false);
		blk_mq_complete_request(rq);
		return BLK_EH_DONE;
	}
	virtblk_rq_reap(q, !q->polled);
	/* Ended, or about to: on this CPU it is idle again by now. */
	if (blk_mq_rq_state(rq) != MQ_RQ_IN_FLIGHT) {
		if (!q->polled)
			report_lost(q);
		return BLK_EH_DONE;
	}
	if (start_ns)
		age_s = div_u64(ktime_get_ns() - start_ns, NSEC_PER_SEC);
	report_silent(q, rq->tag, age_s);
	return BLK_EH_RESET_TIMER;
}

/*
 * Since when a queue's oldest request is under way, in jiffies, and which one it is, or -1; those
 * for the serial number have numbers after all others. Bio path.
 */
static int oldest_slot(struct virtblk_queue *q, unsigned long *start)
{
	struct virtblk_slot *slot;
	int oldest = -1;
	unsigned int i;

	spin_lock_irq(&q->lock);
	for (i = 0; q->in_flight && i < q->slot_count; i++) {
		slot = q->slots[i];
		if (!slot->on_ring || (oldest >= 0 && time_after_eq(slot->start, *start)))
			continue;
		oldest = i;
		*start = slot->start;
	}
	/* In the order in which they were asked. */
	slot = list_first_entry_or_null(&q->asked, struct virtblk_slot, node);
	if (slot && (oldest < 0 || time_before(slot->start, *start))) {
		oldest = q->slot_count;
		*start = slot->start;
	}
	spin_unlock_irq(&q->lock);
	return oldest;
}

/* Whether the device still has what it had then in a slot. */
static bool on_ring_since(struct virtblk_queue *q, int slot, unsigned long start)
{
	bool same = true;

	spin_lock_irq(&q->lock);
	if (slot < q->slot_count)
		same = q->slots[slot]->on_ring && q->slots[slot]->start == start;
	spin_unlock_irq(&q->lock);
	return same;
}

/* Returns whether interrupts are missing and it is better to look again soon. */
static bool watch_bio_queue(struct virtblk_queue *q)
{
	unsigned long start;
	int slot = oldest_slot(q, &start);
	bool lost = slot >= 0 && !q->polled && time_after(jiffies, start + LOST_AFTER);

	/* Also puts bios into the ring that wait for memory. */
	virtblk_bio_reap(q, !q->polled);
	/* It was there, and nobody had said so; others may have come this very moment. */
	lost = lost && !on_ring_since(q, slot, start);
	if (lost)
		report_lost(q);
	slot = oldest_slot(q, &start);
	if (slot >= 0 && time_after(jiffies, start + VIRTBLK_TIMEOUT))
		report_silent(q, slot, (jiffies - start) / HZ);
	return lost;
}

static bool watch_queue(struct virtblk_queue *q)
{
	if (q->blk->use_bio)
		return watch_bio_queue(q);
	if (q->polled && time_after_eq(jiffies, q->last_reap + WATCH_POLLED))
		virtblk_rq_reap(q, false);
	return false;
}

static bool watched(const struct virtblk_queue *q)
{
	return q->blk->use_bio || q->polled;
}

static bool is_busy(struct virtblk_queue *q)
{
	bool busy;

	spin_lock_irq(&q->lock);
	busy = q->in_flight || !bio_list_empty(&q->waiting) || !list_empty(&q->resumed);
	spin_unlock_irq(&q->lock);
	return busy;
}

static unsigned long interval(const struct virtblk *blk)
{
	return blk->poll_count ? WATCH_POLLED : WATCH_OTHERS;
}

/**
 * virtblk_watch() - looks after requests that nobody else looks after
 * @work: &virtblk.watch
 *
 * Runs while there are any: an idle disk costs nothing.
 */
void virtblk_watch(struct work_struct *work)
{
	struct virtblk *blk = container_of(to_delayed_work(work), struct virtblk, watch);
	bool busy = false, lost = false;
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++)
		if (watched(&blk->queues[i]))
			lost |= watch_queue(&blk->queues[i]);
	/* Whoever adds a request after the next look at its queue finds the watch stopped. */
	WRITE_ONCE(blk->watching, false);
	for (i = 0; i < blk->queue_count; i++)
		busy |= watched(&blk->queues[i]) && is_busy(&blk->queues[i]);
	if (busy && lost)
		virtblk_retry_soon(blk);
	else if (busy)
		virtblk_start_watch(blk);
}

/* To be called after a request was added, outside of the queue's lock. */
void virtblk_start_watch(struct virtblk *blk)
{
	if (likely(READ_ONCE(blk->watching)))
		return;
	WRITE_ONCE(blk->watching, true);
	queue_delayed_work(virtblk_wq, &blk->watch, interval(blk));
}

/* Memory was short and no completion is to come: try again in a moment. */
void virtblk_retry_soon(struct virtblk *blk)
{
	WRITE_ONCE(blk->watching, true);
	mod_delayed_work(virtblk_wq, &blk->watch, max(1, HZ / 100));
}
