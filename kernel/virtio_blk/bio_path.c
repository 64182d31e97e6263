// SPDX-License-Identifier: GPL-2.0-only
/*
 * The bio path: bios go to the ring of this CPU's queue without requests, tags and scheduler.
 *
 * What does not fit waits in the queue's list, in order, and is put into the ring by completions.
 * Such a list could grow without end, and one writer could keep all readers waiting; so a submitter
 * sleeps while the list is longer than the ring, or is told to come again, if it may not sleep.
 *
 * Each bio in our hands holds a reference of the queue's usage counter, as requests do of blk-mq:
 * freezing the queue waits for all of them.
 */

#include "virtio_blk.h"

/* The queue that this CPU uses; it may be another CPU the next moment, which does no harm. */
struct virtblk_queue *virtblk_bio_queue(struct virtblk *blk, bool polled)
{
	const struct blk_mq_queue_map *map =
		&blk->maps[polled ? VIRTBLK_MAP_POLL : VIRTBLK_MAP_INTERRUPT];

	return &blk->queues[map->mq_map[raw_smp_processor_id()]];
}

/**
 * virtblk_bio_submit_list() - gives bios to the device, with one kick
 * @q: the queue
 * @bios: in our hands; empty afterwards
 *
 * Context: does not sleep; the caller holds a reference of the queue's usage counter.
 */
void virtblk_bio_submit_list(struct virtblk_queue *q, struct bio_list *bios)
{
	struct bio_list done = BIO_EMPTY_LIST;
	unsigned long flags;
	bool kick, waited, room;

	spin_lock_irqsave(&q->lock, flags);
	waited = q->waiting_count;
	kick = virtblk_bio_dispatch(q, bios, &done);
	room = waited && !virtblk_bio_is_crowded(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(q, kick);
	virtblk_start_watch(q->blk);
	/* What waited may have gone with this batch, and its completions would not know. */
	if (unlikely(room))
		virtblk_wake_throttled(q);
	if (unlikely(!bio_list_empty(&done)))
		virtblk_end_bios(q->blk, &done);
}

/* Nobody else may be polling, so we do. */
static void wait_polled(struct virtblk_queue *q)
{
	while (virtblk_bio_is_crowded(q))
		if (!virtblk_bio_reap(q, false)) {
			set_current_state(TASK_UNINTERRUPTIBLE);
			io_schedule_timeout(1);
		}
}

/* A submitter that sleeps. */
struct virtblk_turn {
	struct wait_queue_entry entry;
	bool granted;
};

/* The turn is that of who is woken, whoever comes and fills the list before it runs. */
static int grant_turn(struct wait_queue_entry *entry, unsigned int mode, int flags, void *key)
{
	/* Before it is woken: pairs with the barrier of set_current_state() in sleep_in_order(). */
	WRITE_ONCE(container_of(entry, struct virtblk_turn, entry)->granted, true);
	return autoremove_wake_function(entry, mode, flags, key);
}

static void sleep_in_order(struct virtblk_queue *q)
{
	struct virtblk_turn turn = {
		.entry = {
			.private = current,
			.func = grant_turn,
			.entry = LIST_HEAD_INIT(turn.entry.entry),
		},
	};

	prepare_to_wait_exclusive(&q->throttled, &turn.entry, TASK_UNINTERRUPTIBLE);
	/* If the list was emptied meanwhile, nobody else may look for sleepers any more. */
	if (!virtblk_bio_is_crowded(q))
		virtblk_wake_throttled(q);
	while (!READ_ONCE(turn.granted)) {
		io_schedule();
		set_current_state(TASK_UNINTERRUPTIBLE);
	}
	finish_wait(&q->throttled, &turn.entry);
}

/*
 * Waits until the list is short enough again. Those that sleep are let on in order of arrival. What
 * the caller has collected under a plug is submitted when it sleeps. Returns false if the bio was
 * told to come again.
 */
static bool wait_turn(struct virtblk_queue *q, struct bio *bio)
{
	if (likely(!virtblk_bio_is_crowded(q)))
		return true;
	if (bio->bi_opf & REQ_NOWAIT) {
		bio_wouldblock_error(bio);
		return false;
	}
	if (q->polled) {
		wait_polled(q);
		return true;
	}
	sleep_in_order(q);
	/* One of those that wait is woken at a time, and what this one sends may go elsewhere. */
	if (!virtblk_bio_is_crowded(q))
		virtblk_wake_throttled(q);
	return true;
}

/**
 * virtblk_submit_bio() - the block layer gives a bio
 * @bio: for the disk or a partition, already remapped
 *
 * Context: may sleep, unless the bio says REQ_NOWAIT.
 */
void virtblk_submit_bio(struct bio *bio)
{
	struct virtblk *blk = bio->bi_bdev->bd_disk->private_data;
	struct bio_list one = BIO_EMPTY_LIST;
	struct virtblk_queue *q;

	bio = bio_split_to_limits(bio);
	if (unlikely(!bio))
		return;
	q = virtblk_bio_queue(blk, bio->bi_opf & REQ_POLLED);
	if (!wait_turn(q, bio))
		return;
	if (bio->bi_opf & REQ_POLLED)
		WRITE_ONCE(bio->bi_cookie, q->index);
	percpu_ref_get(&blk->disk->queue->q_usage_counter);
	if (virtblk_bio_plug(q, bio))
		return;
	bio_list_add(&one, bio);
	virtblk_bio_submit_list(q, &one);
}

/* Nothing is in flight, and nothing gets into the rings until virtblk_bio_start(). */
void virtblk_bio_stop(struct virtblk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++) {
		spin_lock_irq(&blk->queues[i].lock);
		blk->queues[i].stopped = true;
		spin_unlock_irq(&blk->queues[i].lock);
	}
}

/* What came meanwhile is sent, or fails if the virtqueues did not come back. */
void virtblk_bio_start(struct virtblk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++) {
		spin_lock_irq(&blk->queues[i].lock);
		blk->queues[i].stopped = false;
		spin_unlock_irq(&blk->queues[i].lock);
		virtblk_bio_reap(&blk->queues[i], !blk->queues[i].polled);
	}
}
