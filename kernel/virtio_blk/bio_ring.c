// SPDX-License-Identifier: GPL-2.0-only
/*
 * The bio path between its lists and the ring. Requests of the bio path are called slots.
 *
 *	virtblk_bio_submit()	prepares bios without the queue's lock, dispatches, kicks
 *	virtblk_dispatch()	adds to the ring: slots in flight, then waiting bios, then new ones
 *	virtblk_bio_reap()	takes used requests: next stage, or end of bios; dispatches, kicks
 *
 * Adjacent bios share a slot, as a scheduler merges adjacent requests: on a slow disk the number of
 * requests is what counts.
 */
#include <linux/completion.h>
#include <linux/kref.h>
#include <linux/part_stat.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "virtio_blk.h"

/* Requests made of waiting bios in one dispatch, with interrupts off. */
#define VIRTBLK_WAITING_BATCH	16
/* Merged bios have these flags in common. */
#define VIRTBLK_SAME_FLAGS	(REQ_OP_MASK | REQ_POLLED)
/* Merged bios have none of these flags. */
#define VIRTBLK_ALONE_FLAGS	REQ_NOMERGE_FLAGS

/**
 * struct virtblk_batch - new bios on their way into the ring
 * @spare: slots reserved for @bios
 * @ready: prepared slots with the first bios
 * @bios: the other bios, in order
 */
struct virtblk_batch {
	struct list_head spare;
	struct list_head ready;
	struct bio_list *bios;
};

/**
 * struct virtblk_id_query - a query of the serial number, which is no bio
 * @slot: not from the queue's pool
 * @users: the task that asks, which may be killed meanwhile, and the device
 * @answered: the device has answered, or never will
 * @status: its answer
 * @blk: its queue's usage counter is held until the answer
 */
struct virtblk_id_query {
	struct virtblk_slot slot;
	struct kref users;
	struct completion answered;
	blk_status_t status;
	struct virtblk *blk;
};

/**
 * virtblk_can_merge() - checks whether a bio continues another one
 * @first: the lower one
 * @second: the higher one
 *
 * virtblk_gather() checks the limits of length.
 *
 * Return: true if both may share a request.
 */
bool virtblk_can_merge(const struct bio *first, const struct bio *second)
{
	if (bio_end_sector(first) != second->bi_iter.bi_sector)
		return false;
	if ((first->bi_opf ^ second->bi_opf) & VIRTBLK_SAME_FLAGS ||
	    (first->bi_opf | second->bi_opf) & VIRTBLK_ALONE_FLAGS)
		return false;
	return (bio_op(first) == REQ_OP_READ || bio_op(first) == REQ_OP_WRITE) &&
	       first->bi_ioprio == second->bi_ioprio;
}

/* Scatterlist entries that a bio's data needs at most. */
static unsigned int virtblk_bio_segments(const struct virtblk *blk, struct bio *bio)
{
	unsigned int segments = 0;
	struct bvec_iter iter;
	struct bio_vec vec;

	if (bio_op(bio) != REQ_OP_READ && bio_op(bio) != REQ_OP_WRITE)
		return 0;
	bio_for_each_bvec(vec, bio, iter)
		segments += likely(vec.bv_len <= blk->seg_bytes_max) ?
			    1 : DIV_ROUND_UP(vec.bv_len, blk->seg_bytes_max);
	return segments;
}

/*
 * Gives a free slot the first bio of a list and those that continue it. @taken gets their number.
 * Returns the scatterlist entries of all, at most.
 */
static unsigned int virtblk_gather(struct virtblk_queue *q, struct virtblk_slot *slot,
				   struct bio_list *bios, unsigned int *taken)
{
	struct virtblk *blk = q->blk;
	unsigned int sectors_max = queue_max_sectors(blk->disk->queue);
	struct bio *next, *last = bio_list_pop(bios);
	unsigned int segments = virtblk_bio_segments(blk, last);
	unsigned int sectors = bio_sectors(last);

	slot->bios = last;
	*taken = 1;
	while ((next = bio_list_peek(bios)) && virtblk_can_merge(last, next)) {
		unsigned int more = virtblk_bio_segments(blk, next);

		if (segments + more > blk->seg_max || sectors + bio_sectors(next) > sectors_max)
			break;
		segments += more;
		sectors += bio_sectors(next);
		bio_list_pop(bios);
		last->bi_next = next;
		last = next;
		(*taken)++;
	}
	return segments;
}

/* Counts the scatterlist entries of a slot's data again, as virtblk_gather() did. */
static unsigned int virtblk_slot_segments(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	unsigned int segments = 0;
	struct bio *bio;

	for (bio = slot->bios; bio; bio = bio->bi_next)
		segments += virtblk_bio_segments(q->blk, bio);
	return segments;
}

/* Adds bytes that are contiguous in memory. Returns the entry that was written last. */
static struct scatterlist *virtblk_add_vec(struct virtblk_request *request, struct scatterlist *sg,
					   const struct bio_vec *vec, unsigned int bytes_max)
{
	phys_addr_t at = page_to_phys(vec->bv_page) + vec->bv_offset;
	unsigned int left = vec->bv_len;

	while (left) {
		unsigned int bytes = min(left, bytes_max);

		if (sg && sg_phys(sg) + sg->length == at && sg->length <= bytes_max - bytes) {
			sg->length += bytes;
		} else {
			sg = sg ? sg_next(sg) : request->data.sgl;
			sg_set_page(sg, pfn_to_page(PHYS_PFN(at)), bytes, offset_in_page(at));
			request->data.nents++;
		}
		at += bytes;
		left -= bytes;
	}
	return sg;
}

static int virtblk_slot_alloc_sg(struct virtblk_queue *q, struct virtblk_slot *slot,
				 unsigned int segments, bool locked)
{
	if (likely(!virtblk_alloc_sg(&slot->request, segments)))
		return 0;
	if (!locked || q->reserve_busy)
		return -ENOMEM;
	/* It becomes free again: its user is about to be in flight. */
	q->reserve_busy = true;
	slot->uses_reserve = true;
	sg_init_table(q->reserve_sg, segments);
	slot->request.data.sgl = q->reserve_sg;
	return 0;
}

/* Describes the data of a slot's bios. */
static int virtblk_map_bios(struct virtblk_queue *q, struct virtblk_slot *slot,
			    unsigned int segments, bool locked)
{
	struct virtblk_request *request = &slot->request;
	struct scatterlist *sg = NULL;
	struct bvec_iter iter;
	struct bio_vec vec;
	struct bio *bio;

	if (virtblk_slot_alloc_sg(q, slot, segments, locked))
		return -ENOMEM;
	request->data.nents = 0;
	for (bio = slot->bios; bio; bio = bio->bi_next)
		bio_for_each_bvec(vec, bio, iter)
			sg = virtblk_add_vec(request, sg, &vec, q->blk->seg_bytes_max);
	sg_mark_end(sg);
	return 0;
}

/*
 * Makes the device's request for a slot's stage. With @locked the queue's lock is held, and its
 * reserve may be used. Returns 0; -ENOMEM if the caller has to try again, under the lock or after a
 * completion; -EOPNOTSUPP for operations that virtio-blk does not have.
 */
static int virtblk_prepare_stage(struct virtblk_queue *q, struct virtblk_slot *slot,
				 unsigned int segments, bool locked)
{
	struct virtblk_request *request = &slot->request;
	/* Stays while a bio or a query of the serial number holds the queue's usage counter. */
	struct virtio_device *vdev = q->blk->vdev;
	struct bio *bio = slot->bios;

	if (slot->stage != VIRTBLK_DATA) {
		virtblk_set_command(vdev, request, REQ_OP_FLUSH, 0, bio->bi_ioprio);
		return 0;
	}
	if (virtblk_set_command(vdev, request, bio->bi_opf, bio->bi_iter.bi_sector,
				bio->bi_ioprio))
		return -EOPNOTSUPP;
	if (segments)
		return virtblk_map_bios(q, slot, segments, locked);
	virtblk_set_range(request, bio->bi_opf, bio->bi_iter.bi_sector, bio_sectors(bio));
	return 0;
}

/* Frees the memory of a slot's stage, which the device does not have. Its bios stay. */
static void virtblk_unprepare(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	if (unlikely(slot->uses_reserve)) {
		slot->uses_reserve = false;
		q->reserve_busy = false;
	}
	virtblk_free_data(&slot->request);
}

/*
 * Counts a slot's bios as in flight for iostat. As with blk-mq they are one I/O of the first one's
 * partition, the others are merges, and flushes without data are counted apart.
 */
static void virtblk_account_start(struct virtblk_queue *q, struct virtblk_slot *slot)
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

/* Returns a free slot or NULL. The last one used, with warm caches, comes first. */
static struct virtblk_slot *virtblk_get_slot(struct virtblk_queue *q)
{
	struct virtblk_slot *slot;

	lockdep_assert_held(&q->lock);
	slot = list_first_entry_or_null(&q->free, struct virtblk_slot, node);
	if (likely(slot))
		list_del_init(&slot->node);
	return slot;
}

/* Frees a slot, which may be in another list still. */
static void virtblk_put_slot(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	lockdep_assert_held(&q->lock);
	slot->stage = VIRTBLK_FREE;
	slot->bios = NULL;
	list_move(&slot->node, &q->free);
}

static void virtblk_free_query(struct kref *users)
{
	kfree(container_of(users, struct virtblk_id_query, users));
}

static void virtblk_end_query(struct virtblk_slot *slot, blk_status_t status)
{
	struct virtblk_id_query *query = container_of(slot, struct virtblk_id_query, slot);
	struct virtblk *blk = query->blk;

	list_del_init(&slot->node);
	query->status = status;
	complete(&query->answered);
	kref_put(&query->users, virtblk_free_query);
	percpu_ref_put(&blk->disk->queue->q_usage_counter);
}

/* All stages of a slot have ended, or one has failed: moves its bios to @done. */
static void virtblk_end_slot(struct virtblk_queue *q, struct virtblk_slot *slot,
			     blk_status_t status, struct bio_list *done)
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

/*
 * Gives bios back to their owners. The disk may be freed as soon as the last one has ended. Without
 * the queue's lock.
 */
static void virtblk_end_bios(struct virtblk *blk, struct bio_list *done)
{
	struct percpu_ref *usage = &blk->disk->queue->q_usage_counter;
	struct bio *bio;

	while ((bio = bio_list_pop(done))) {
		bio_endio(bio);
		percpu_ref_put(usage);
	}
}

/*
 * Flushes. blk-mq splits a request with PREFLUSH or FUA in parts; here a slot goes through the
 * stages T_FLUSH, data, T_FLUSH, and each begins when the one before it has succeeded. Requests
 * with other data need not be waited for: PREFLUSH is about writes that completed before.
 *
 * A queue has at most one T_FLUSH in flight, as with blk-mq. It does not cover writes that complete
 * after it was sent, so slots that come meanwhile wait, and the next T_FLUSH serves all of them.
 *
 * The driver does not check whether the disk has a cache. submit_bio() drops the flags if it has
 * none, and a flush that was on its way when that changed does no harm.
 */

static enum virtblk_stage virtblk_first_stage(const struct bio *bio)
{
	if (bio->bi_opf & REQ_PREFLUSH || !bio_sectors(bio))
		return VIRTBLK_PREFLUSH;
	return VIRTBLK_DATA;
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

/* A slot has come to a stage that is a T_FLUSH. */
static void virtblk_queue_flush(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	lockdep_assert_held(&q->lock);
	list_move_tail(&slot->node, &q->flush_waiting);
}

/* Starts the next T_FLUSH, for all slots that wait for one, unless another is in flight. */
static void virtblk_start_flush(struct virtblk_queue *q)
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

/*
 * A stage has ended: the slot goes on to its next one, or its bios to @done. The status of a
 * T_FLUSH is that of all slots that it serves.
 */
static void virtblk_end_stage(struct virtblk_queue *q, struct virtblk_slot *slot,
			      blk_status_t status, struct bio_list *done)
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

/*
 * Dispatch. A submitter prepares its bios without the queue's lock. Waiting bios are prepared under
 * the lock, by submitters and completions alike, a bounded number at a time.
 */

/* Adds a slot's stage to the ring. After an error nothing but the slot itself is left. */
static int virtblk_send_slot(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	int err = virtblk_add(q, &slot->request);

	if (unlikely(err)) {
		virtblk_unprepare(q, slot);
		return err;
	}
	slot->sent = jiffies;
	list_move_tail(&slot->node, &q->ring);
	return 0;
}

static bool virtblk_is_temporary(int err)
{
	return err == -ENOSPC || err == -ENOMEM;
}

static bool virtblk_has_requeued(const struct virtblk_queue *q)
{
	return !list_empty(&q->requeued) || !list_empty(&q->flush_waiting);
}

/* Sends the next stages of slots in flight. They go first: they hold slots that bios wait for. */
static bool virtblk_send_requeued(struct virtblk_queue *q, struct bio_list *done)
{
	struct virtblk_slot *slot;
	int err;

	for (;;) {
		virtblk_start_flush(q);
		slot = list_first_entry_or_null(&q->requeued, struct virtblk_slot, node);
		if (!slot)
			return true;
		err = 0;
		if (slot->stage == VIRTBLK_GET_ID)
			virtblk_set_get_id(q->blk->vdev, &slot->request);
		else
			err = virtblk_prepare_stage(q, slot, virtblk_slot_segments(q, slot), true);
		if (!err)
			err = virtblk_send_slot(q, slot);
		if (virtblk_is_temporary(err))
			return false;
		if (err)
			virtblk_end_stage(q, slot, BLK_STS_IOERR, done);
	}
}

/* Puts the bios of a slot that was not sent back at the head of a list. */
static void virtblk_put_back(struct virtblk_slot *slot, struct bio_list *bios)
{
	struct bio_list taken;

	bio_list_init(&taken);
	taken.head = slot->bios;
	for (taken.tail = taken.head; taken.tail->bi_next;)
		taken.tail = taken.tail->bi_next;
	bio_list_merge_head(bios, &taken);
	slot->bios = NULL;
}

/* Gives a slot the first bios of a list, and prepares their data if they begin with that stage. */
static int virtblk_prepare_next(struct virtblk_queue *q, struct virtblk_slot *slot,
				struct bio_list *bios, bool locked, unsigned int *taken)
{
	unsigned int segments = virtblk_gather(q, slot, bios, taken);

	slot->stage = virtblk_first_stage(slot->bios);
	slot->accounted = false;
	if (unlikely(slot->stage != VIRTBLK_DATA))
		return 0;
	return virtblk_prepare_stage(q, slot, segments, locked);
}

/* Begins the first stage of a prepared slot. Fails as virtblk_send_slot() does. */
static int virtblk_start_slot(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	int err = 0;

	if (likely(slot->stage == VIRTBLK_DATA))
		err = virtblk_send_slot(q, slot);
	else
		virtblk_queue_flush(q, slot);
	if (likely(!err))
		virtblk_account_start(q, slot);
	return err;
}

/* Sends the next request of a list. Returns the number of its bios, 0 if they have to wait. */
static unsigned int virtblk_send_next(struct virtblk_queue *q, struct bio_list *bios,
				      struct bio_list *done)
{
	struct virtblk_slot *slot = virtblk_get_slot(q);
	unsigned int taken;
	int err;

	if (unlikely(!slot))
		return 0;
	err = virtblk_prepare_next(q, slot, bios, true, &taken);
	if (likely(!err))
		err = virtblk_start_slot(q, slot);
	if (likely(!err))
		return taken;
	if (virtblk_is_temporary(err)) {
		virtblk_put_back(slot, bios);
		virtblk_put_slot(q, slot);
		return 0;
	}
	virtblk_end_slot(q, slot, err == -EOPNOTSUPP ? BLK_STS_NOTSUPP : BLK_STS_IOERR, done);
	return taken;
}

/* Sends waiting bios. Returns false if the others have to wait for room. */
static bool virtblk_send_waiting(struct virtblk_queue *q, struct bio_list *done)
{
	unsigned int taken, count;

	for (count = 0; !bio_list_empty(&q->waiting); count++) {
		/* This may be an interrupt. */
		if (count == VIRTBLK_WAITING_BATCH) {
			virtblk_dispatch_soon(q->blk);
			return true;
		}
		taken = virtblk_send_next(q, &q->waiting, done);
		if (!taken)
			return false;
		q->waiting_count -= taken;
	}
	return true;
}

/* Sends new bios. Returns false if the others have to wait for room. */
static bool virtblk_send_batch(struct virtblk_queue *q, struct virtblk_batch *batch,
			       struct bio_list *done)
{
	struct virtblk_slot *slot;
	int err;

	while ((slot = list_first_entry_or_null(&batch->ready, struct virtblk_slot, node))) {
		err = virtblk_start_slot(q, slot);
		if (virtblk_is_temporary(err))
			return false;
		if (unlikely(err))
			virtblk_end_slot(q, slot, BLK_STS_IOERR, done);
	}
	while (unlikely(!bio_list_empty(batch->bios)))
		if (!virtblk_send_next(q, batch->bios, done))
			return false;
	return true;
}

/* Makes bios of prepared slots that were not sent, in order. */
static void virtblk_undo_batch(struct virtblk_queue *q, struct virtblk_batch *batch)
{
	struct virtblk_slot *slot, *before;

	list_for_each_entry_safe_reverse(slot, before, &batch->ready, node) {
		virtblk_unprepare(q, slot);
		virtblk_put_back(slot, batch->bios);
		virtblk_put_slot(q, slot);
	}
}

static void virtblk_put_spare(struct virtblk_queue *q, struct virtblk_batch *batch)
{
	struct virtblk_slot *slot, *next;

	list_for_each_entry_safe(slot, next, &batch->spare, node)
		virtblk_put_slot(q, slot);
}

static void virtblk_add_waiting(struct virtblk_queue *q, struct bio_list *bios)
{
	struct bio *bio;

	bio_list_for_each(bio, bios)
		q->waiting_count++;
	bio_list_merge_init(&q->waiting, bios);
}

static void virtblk_fail_bios(struct bio_list *bios, struct bio_list *done)
{
	struct bio *bio;

	while ((bio = bio_list_pop(bios))) {
		bio->bi_status = BLK_STS_IOERR;
		bio_list_add(done, bio);
	}
}

/*
 * Fails all bios: there is no ring, and there will be none. New bios are not counted as waiting
 * even for a moment, because a submitter that saw the count might sleep, and no completion would
 * wake it.
 */
static void virtblk_fail_without_ring(struct virtblk_queue *q, struct bio_list *bios,
				      struct bio_list *done)
{
	struct virtblk_slot *slot;

	for (;;) {
		virtblk_start_flush(q);
		slot = list_first_entry_or_null(&q->requeued, struct virtblk_slot, node);
		if (!slot)
			break;
		virtblk_end_stage(q, slot, BLK_STS_IOERR, done);
	}
	virtblk_fail_bios(&q->waiting, done);
	q->waiting_count = 0;
	if (bios)
		virtblk_fail_bios(bios, done);
}

/*
 * Adds bios to the ring: slots in flight first, then bios that wait, then the @batch of new ones,
 * which may be NULL and has no bios afterwards. @done gets bios that failed; the caller ends them
 * without the lock. Returns the virtqueue to be kicked, or NULL.
 */
static struct virtqueue *virtblk_dispatch(struct virtblk_queue *q, struct virtblk_batch *batch,
					  struct bio_list *done)
{
	unsigned int before = q->in_flight;
	bool has_ring = !q->stopped && q->vq, may_send = true;

	lockdep_assert_held(&q->lock);
	if (batch && unlikely(!list_empty(&batch->spare)))
		virtblk_put_spare(q, batch);
	if (likely(has_ring)) {
		if (unlikely(virtblk_has_requeued(q)))
			may_send = virtblk_send_requeued(q, done);
		if (unlikely(!bio_list_empty(&q->waiting)) && may_send)
			may_send = virtblk_send_waiting(q, done);
		if (batch && may_send && bio_list_empty(&q->waiting))
			may_send = virtblk_send_batch(q, batch, done);
		/* Flushes of the batch: other bios may wait for their slots. */
		if (unlikely(virtblk_has_requeued(q)))
			virtblk_send_requeued(q, done);
	}
	if (batch && unlikely(!list_empty(&batch->ready)))
		virtblk_undo_batch(q, batch);
	if (unlikely(!q->vq) && !q->stopped)
		virtblk_fail_without_ring(q, batch ? batch->bios : NULL, done);
	else if (batch && unlikely(!bio_list_empty(batch->bios)))
		virtblk_add_waiting(q, batch->bios);
	/* No completion will come to send the others. */
	if (unlikely(!q->in_flight && (q->waiting_count || virtblk_has_requeued(q))) && !q->stopped)
		virtblk_retry_soon(q->blk);
	return q->in_flight != before ? virtblk_kick_prepare(q) : NULL;
}

/* Reserves slots for all bios, as far as there are any, and none if other bios wait. */
static void virtblk_reserve_slots(struct virtblk_queue *q, struct virtblk_batch *batch)
{
	struct virtblk_slot *slot;
	struct bio *bio;

	if (unlikely(q->stopped || !q->vq || !bio_list_empty(&q->waiting)))
		return;
	bio_list_for_each(bio, batch->bios) {
		slot = list_first_entry_or_null(&q->free, struct virtblk_slot, node);
		if (unlikely(!slot))
			return;
		list_move_tail(&slot->node, &batch->spare);
	}
}

/*
 * Makes requests of new bios as far as possible without the lock. virtblk_dispatch() prepares the
 * others, and frees slots that are not needed.
 */
static void virtblk_prepare_batch(struct virtblk_queue *q, struct virtblk_batch *batch)
{
	struct virtblk_slot *slot;
	unsigned long flags;
	unsigned int taken;

	spin_lock_irqsave(&q->lock, flags);
	virtblk_reserve_slots(q, batch);
	spin_unlock_irqrestore(&q->lock, flags);
	while (!bio_list_empty(batch->bios)) {
		slot = list_first_entry_or_null(&batch->spare, struct virtblk_slot, node);
		if (unlikely(!slot))
			return;
		if (unlikely(virtblk_prepare_next(q, slot, batch->bios, false, &taken))) {
			virtblk_put_back(slot, batch->bios);
			return;
		}
		list_move_tail(&slot->node, &batch->ready);
	}
}

/**
 * virtblk_wake_throttled() - wakes the next throttled submitter, if there is one
 * @q: its list was short enough at the caller's last look; its lock is not held
 */
void virtblk_wake_throttled(struct virtblk_queue *q)
{
	/*
	 * Pairs with the barrier of prepare_to_wait_exclusive(): either the sleeper is seen here,
	 * or it sees the shorter list.
	 */
	if (wq_has_sleeper(&q->throttled))
		wake_up(&q->throttled);
}

/**
 * virtblk_bio_submit() - gives bios to the device, with one kick
 * @q: the queue
 * @bios: each with its reference of the queue's usage counter; empty afterwards
 *
 * Context: does not sleep; the caller holds a reference of the queue's usage counter.
 */
void virtblk_bio_submit(struct virtblk_queue *q, struct bio_list *bios)
{
	struct virtblk_batch batch = {
		.spare = LIST_HEAD_INIT(batch.spare),
		.ready = LIST_HEAD_INIT(batch.ready),
		.bios = bios,
	};
	struct bio_list done = BIO_EMPTY_LIST;
	struct virtqueue *kick;
	unsigned long flags;
	bool waited, room;

	virtblk_prepare_batch(q, &batch);
	spin_lock_irqsave(&q->lock, flags);
	waited = q->waiting_count;
	kick = virtblk_dispatch(q, &batch, &done);
	room = waited && !virtblk_bio_is_congested(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(kick);
	virtblk_start_watchdog(q->blk);
	/* This dispatch may have sent the waiting bios; then no completion wakes others. */
	if (unlikely(room))
		virtblk_wake_throttled(q);
	if (unlikely(!bio_list_empty(&done)))
		virtblk_end_bios(q->blk, &done);
}

static unsigned int virtblk_bio_take_used(struct virtblk_queue *q, struct bio_list *done)
{
	struct virtblk_request *request;
	struct virtblk_slot *slot;
	unsigned int count = 0;

	while ((request = virtblk_get_used(q))) {
		count++;
		slot = container_of(request, struct virtblk_slot, request);
		virtblk_unprepare(q, slot);
		virtblk_end_stage(q, slot, virtblk_status(request), done);
	}
	return count;
}

/* Looks into the used ring once. Returns whether another look is due: the interrupt is off then. */
static bool virtblk_bio_reap_once(struct virtblk_queue *q, bool interrupt, unsigned int *total)
{
	struct bio_list done = BIO_EMPTY_LIST;
	bool waited, room, again = false;
	struct virtqueue *kick;
	unsigned long flags;
	unsigned int count;

	/* The virtqueue is not deleted before the kick. */
	rcu_read_lock();
	spin_lock_irqsave(&q->lock, flags);
	if (likely(q->vq)) {
		if (interrupt)
			virtqueue_disable_cb(q->vq);
		count = virtblk_bio_take_used(q, &done);
		*total += count;
		if (interrupt)
			again = !virtblk_arm(q, count);
		q->last_reap = jiffies;
		if (count)
			q->last_used = jiffies;
		virtblk_check_broken(q);
	}
	waited = q->waiting_count;
	kick = virtblk_dispatch(q, NULL, &done);
	room = waited && !virtblk_bio_is_congested(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(kick);
	if (unlikely(room))
		virtblk_wake_throttled(q);
	rcu_read_unlock();
	virtblk_end_bios(q->blk, &done);
	return again;
}

/**
 * virtblk_bio_reap() - takes all requests from the used ring, and sends bios that wait
 * @q: of the bio path
 * @interrupt: arm the interrupt again when the ring is empty
 *
 * Return: the number of used requests.
 */
unsigned int virtblk_bio_reap(struct virtblk_queue *q, bool interrupt)
{
	unsigned int count = 0;

	while (virtblk_bio_reap_once(q, interrupt, &count))
		;
	return count;
}

/**
 * virtblk_bio_fail_all() - ends all requests in flight, and all bios that wait, with an error
 * @q: its device was reset, its ring is broken
 */
void virtblk_bio_fail_all(struct virtblk_queue *q)
{
	struct bio_list done = BIO_EMPTY_LIST;
	struct virtblk_request *request;

	spin_lock_irq(&q->lock);
	while ((request = virtblk_detach(q))) {
		struct virtblk_slot *slot = container_of(request, struct virtblk_slot, request);

		virtblk_unprepare(q, slot);
		virtblk_end_stage(q, slot, BLK_STS_IOERR, &done);
	}
	/* Bios that wait find a broken ring, and fail. */
	virtblk_dispatch(q, NULL, &done);
	spin_unlock_irq(&q->lock);
	virtblk_wake_throttled(q);
	virtblk_end_bios(q->blk, &done);
}

/* Enters the queue as a bio does: waits while it is frozen. */
static int virtblk_enter_queue(struct virtblk *blk)
{
	struct request_queue *queue = blk->disk->queue;

	while (!percpu_ref_tryget_live(&queue->q_usage_counter)) {
		if (blk_queue_dying(queue))
			return -ENODEV;
		if (fatal_signal_pending(current))
			return -EINTR;
		schedule_timeout_killable(max(1, HZ / 100));
	}
	return 0;
}

static struct virtblk_id_query *virtblk_alloc_query(struct virtblk *blk)
{
	struct virtblk_id_query *query = kzalloc(sizeof(*query), GFP_KERNEL);

	if (!query)
		return NULL;
	INIT_LIST_HEAD(&query->slot.node);
	kref_init(&query->users);
	init_completion(&query->answered);
	query->blk = blk;
	query->slot.stage = VIRTBLK_GET_ID;
	query->slot.index = blk->queues[0].slot_count;
	virtblk_init_request(&query->slot.request);
	return query;
}

/**
 * virtblk_bio_get_id() - asks the device for its serial number
 * @blk: its disk was added
 * @id: gets VIRTIO_BLK_ID_BYTES bytes
 *
 * Return: 0, or a negative errno.
 */
int virtblk_bio_get_id(struct virtblk *blk, char *id)
{
	struct virtblk_queue *q = &blk->queues[0];
	struct virtblk_id_query *query = virtblk_alloc_query(blk);
	int err;

	if (!query)
		return -ENOMEM;
	err = virtblk_enter_queue(blk);
	if (err)
		goto out;
	kref_get(&query->users);
	spin_lock_irq(&q->lock);
	list_add_tail(&query->slot.node, &q->requeued);
	spin_unlock_irq(&q->lock);
	/* Sends it, or leaves it for a completion. */
	virtblk_bio_reap(q, !q->polled);
	virtblk_start_watchdog(blk);
	err = wait_for_completion_killable(&query->answered);
	if (!err)
		err = blk_status_to_errno(query->status);
	if (!err)
		memcpy(id, query->slot.request.id, VIRTIO_BLK_ID_BYTES);
out:
	kref_put(&query->users, virtblk_free_query);
	return err;
}
