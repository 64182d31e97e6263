// SPDX-License-Identifier: GPL-2.0-only
/*
 * Dispatch: bios and the next stages of slots go to the ring. A submitter prepares its bios without
 * the queue's lock. Waiting bios are prepared under the lock, by submitters and completions alike,
 * a bounded number at a time.
 */
#include "virtio_blk.h"

/* Requests made of waiting bios in one dispatch, with interrupts off. */
#define VIRTBLK_WAITING_BATCH	16

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
		err = virtblk_prepare_requeued(q, slot);
		if (!err)
			err = virtblk_send_slot(q, slot);
		if (virtblk_is_temporary(err))
			return false;
		if (err)
			virtblk_end_stage(q, slot, BLK_STS_IOERR, done);
	}
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

/**
 * virtblk_dispatch() - adds to the ring: slots in flight, then bios that wait, then new ones
 * @q: its lock is held
 * @batch: of new bios, has none afterwards; or NULL
 * @done: gets bios that failed; the caller ends them without the lock
 *
 * Return: the virtqueue to be kicked, or NULL.
 */
struct virtqueue *virtblk_dispatch(struct virtblk_queue *q, struct virtblk_batch *batch,
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
		if (unlikely(!bio_list_empty(&q->waiting)) && may_send) {
			/* Those bios are older, and may need the slots of the batch. */
			if (batch)
				virtblk_undo_batch(q, batch);
			may_send = virtblk_send_waiting(q, done);
		}
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
