// SPDX-License-Identifier: GPL-2.0-only
/*
 * The stages of a slot of the bio path, and its end: flushes, accounting, its bios.
 *
 * blk-mq splits a request with PREFLUSH or FUA in parts; here a slot goes through the stages
 * T_FLUSH, data, T_FLUSH, and each begins when the one before it has succeeded. Requests with other
 * data need not be waited for: PREFLUSH is about writes that completed before.
 *
 * A queue has at most one T_FLUSH in flight, as with blk-mq. It does not cover writes that complete
 * after it was sent, so slots that come meanwhile wait, and the next T_FLUSH serves all of them.
 *
 * The driver does not check whether the disk has a cache. submit_bio() drops the flags if it has
 * none, and a flush that was on its way when that changed does no harm.
 */
#include <linux/part_stat.h>

#include "virtio_blk.h"

/**
 * virtblk_account_start() - counts a slot's bios as in flight for iostat
 * @q: its lock is held
 * @slot: begins its first stage
 *
 * As with blk-mq the bios are one I/O of the first one's partition, the others are merges, and
 * flushes without data are counted apart.
 */
void virtblk_account_start(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	struct bio *first = slot->bios, *bio;

	slot->start = jiffies;
	slot->accounted = blk_queue_io_stat(q->blk->disk->queue);
	if (!slot->accounted || unlikely(!bio_sectors(first)))
		return;
	bio_start_io_acct(first);
	if (!first->bi_next)
		return;
	part_stat_lock();
	for (bio = first->bi_next; bio; bio = bio->bi_next)
		part_stat_inc(first->bi_bdev, merges[op_stat_group(bio_op(first))]);
	part_stat_unlock();
}

static void virtblk_account_flush(struct block_device *part, unsigned long duration)
{
	part_stat_lock();
	part_stat_inc(part, ios[STAT_FLUSH]);
	part_stat_add(part, nsecs[STAT_FLUSH], jiffies_to_nsecs(duration));
	part_stat_unlock();
}

/* Counts a slot's bios as ended for iostat. */
static void virtblk_account_end(const struct virtblk_slot *slot)
{
	struct bio *first = slot->bios, *bio;
	unsigned int sectors = 0;

	if (!slot->accounted)
		return;
	for (bio = first; bio; bio = bio->bi_next)
		sectors += bio_sectors(bio);
	if (likely(sectors))
		bdev_end_io_acct(first->bi_bdev, bio_op(first), sectors, slot->start);
	else
		virtblk_account_flush(first->bi_bdev->bd_disk->part0, jiffies - slot->start);
}

/**
 * virtblk_end_slot() - frees a slot
 * @q: its lock is held
 * @slot: all its stages have ended, or one has failed
 * @status: of its bios
 * @done: gets its bios
 */
void virtblk_end_slot(struct virtblk_queue *q, struct virtblk_slot *slot, blk_status_t status,
		      struct bio_list *done)
{
	struct bio *bio, *next;

	if (unlikely(slot->stage == VIRTBLK_GET_ID)) {
		virtblk_end_query(slot, status);
		return;
	}
	virtblk_account_end(slot);
	for (bio = slot->bios; bio; bio = next) {
		next = bio->bi_next;
		/* A part that was split off may have failed already. */
		if (unlikely(status))
			bio->bi_status = status;
		bio_list_add(done, bio);
	}
	virtblk_put_slot(q, slot);
}

/**
 * virtblk_end_bios() - gives bios back to their owners
 * @blk: may be freed as soon as the last bio has ended
 * @done: their status is set; empty afterwards
 *
 * Context: without the queue's lock.
 */
void virtblk_end_bios(struct virtblk *blk, struct bio_list *done)
{
	struct percpu_ref *usage = &blk->disk->queue->q_usage_counter;
	struct bio *bio;

	while ((bio = bio_list_pop(done))) {
		bio_endio(bio);
		percpu_ref_put(usage);
	}
}

/* The stage after one that has succeeded; VIRTBLK_FREE if that was the last one. */
static enum virtblk_stage virtblk_next_stage(const struct virtblk_slot *slot)
{
	const struct bio *bio = slot->bios;

	if (slot->stage == VIRTBLK_PREFLUSH && bio_sectors(bio))
		return VIRTBLK_DATA;
	/* Merged bios have no such flags. */
	if (slot->stage == VIRTBLK_DATA && unlikely(bio->bi_opf & REQ_FUA))
		return VIRTBLK_POSTFLUSH;
	return VIRTBLK_FREE;
}

/**
 * virtblk_queue_flush() - has a slot wait for the next T_FLUSH
 * @q: its lock is held
 * @slot: has come to a stage that is a T_FLUSH
 */
void virtblk_queue_flush(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	lockdep_assert_held(&q->lock);
	list_move_tail(&slot->node, &q->flush_waiting);
}

/**
 * virtblk_start_flush() - starts the next T_FLUSH, for all slots that wait for one
 * @q: its lock is held
 *
 * Does nothing while another T_FLUSH is in flight.
 */
void virtblk_start_flush(struct virtblk_queue *q)
{
	if (q->flush || list_empty(&q->flush_waiting))
		return;
	q->flush = list_first_entry(&q->flush_waiting, struct virtblk_slot, node);
	list_move_tail(&q->flush->node, &q->requeued);
	list_splice_init(&q->flush_waiting, &q->flush_joined);
}

static void virtblk_advance(struct virtblk_queue *q, struct virtblk_slot *slot, blk_status_t status,
			    struct bio_list *done)
{
	enum virtblk_stage next = VIRTBLK_FREE;

	if (likely(!status) && slot->stage != VIRTBLK_GET_ID)
		next = virtblk_next_stage(slot);
	if (likely(next == VIRTBLK_FREE)) {
		virtblk_end_slot(q, slot, status, done);
		return;
	}
	slot->stage = next;
	if (next == VIRTBLK_DATA)
		list_move_tail(&slot->node, &q->requeued);
	else
		virtblk_queue_flush(q, slot);
}

/**
 * virtblk_end_stage() - advances a slot to its next stage, or ends it
 * @q: its lock is held
 * @slot: one of its stages has ended
 * @status: of that stage; that of a T_FLUSH is the status of all slots that it serves
 * @done: gets the bios of slots that end
 */
void virtblk_end_stage(struct virtblk_queue *q, struct virtblk_slot *slot, blk_status_t status,
		       struct bio_list *done)
{
	struct virtblk_slot *joined, *next;
	LIST_HEAD(served);

	if (unlikely(slot == q->flush)) {
		q->flush = NULL;
		list_splice_init(&q->flush_joined, &served);
	}
	virtblk_advance(q, slot, status, done);
	list_for_each_entry_safe(joined, next, &served, node)
		virtblk_advance(q, joined, status, done);
}
