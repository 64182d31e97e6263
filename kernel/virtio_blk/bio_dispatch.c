// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bios into the ring: slots that are under way first, then the bios that wait, then new ones. Under
 * the queue's lock, by submitters and completions alike.
 */
#include "virtio_blk.h"

/* Memory goes back, the slot is still its owner's. */
static void unprepare(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	if (unlikely(slot->uses_reserve)) {
		slot->uses_reserve = false;
		q->reserve_busy = false;
	}
	virtblk_free_data(&slot->request);
}

/* Puts a slot's stage into the ring. After an error nothing is left but the slot itself. */
static int slot_send(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	int err = virtblk_add(q, &slot->request);

	if (likely(!err))
		slot->on_ring = true;
	else
		unprepare(q, slot);
	return err;
}

/**
 * virtblk_slot_back() - the device has given a slot back
 * @q: its lock is held
 * @slot: still has its bios
 */
void virtblk_slot_back(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	slot->on_ring = false;
	unprepare(q, slot);
}

static unsigned int slot_segments(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	unsigned int segments = 0;
	struct bio *bio;

	for (bio = slot->bios; bio; bio = bio->bi_next)
		segments += virtblk_bio_segments(q->blk, bio);
	return segments;
}

/* Slots that are under way come first: others may wait for what they hold. */
static bool send_resumed(struct virtblk_queue *q, struct bio_list *done)
{
	struct virtblk_slot *slot;
	int err;

	while ((slot = list_first_entry_or_null(&q->resumed, struct virtblk_slot, node))) {
		err = 0;
		if (slot->stage == VIRTBLK_GET_ID)
			virtblk_set_get_id(q->vq->vdev, &slot->request);
		else
			err = virtblk_prepare_stage(q, slot, slot_segments(q, slot));
		if (!err)
			err = slot_send(q, slot);
		if (err == -ENOSPC || err == -ENOMEM)
			return false;
		list_del_init(&slot->node);
		if (err)
			virtblk_slot_end(q, slot, BLK_STS_IOERR, done);
		else if (slot->stage == VIRTBLK_GET_ID)
			list_add_tail(&slot->node, &q->asked);
	}
	return true;
}

static void put_back(struct virtblk_slot *slot, struct bio_list *bios)
{
	struct bio_list taken;

	bio_list_init(&taken);
	taken.head = slot->bios;
	for (taken.tail = taken.head; taken.tail->bi_next;)
		taken.tail = taken.tail->bi_next;
	bio_list_merge_head(bios, &taken);
}

/* The next request of a list. Returns how many bios it took, 0 if it has to wait. */
static unsigned int send_next(struct virtblk_queue *q, struct bio_list *bios, struct bio_list *done)
{
	struct virtblk_slot *slot = virtblk_get_slot(q);
	unsigned int segments, taken;
	int err;

	if (unlikely(!slot))
		return 0;
	segments = virtblk_gather(q, slot, bios, &taken);
	slot->stage = virtblk_first_stage(slot->bios);
	slot->accounted = false;
	err = virtblk_prepare_stage(q, slot, segments);
	if (likely(!err))
		err = slot_send(q, slot);
	if (likely(!err)) {
		virtblk_account_start(q, slot);
		return taken;
	}
	if (err == -ENOSPC || err == -ENOMEM) {
		put_back(slot, bios);
		virtblk_put_slot(q, slot);
		return 0;
	}
	virtblk_slot_end(q, slot, err == -EOPNOTSUPP ? BLK_STS_NOTSUPP : BLK_STS_IOERR, done);
	return taken;
}

static void wait_in_list(struct virtblk_queue *q, struct bio_list *bios)
{
	struct bio *bio;

	bio_list_for_each(bio, bios)
		q->waiting_count++;
	bio_list_merge_init(&q->waiting, bios);
}

static void fail_bios(struct bio_list *bios, struct bio_list *done)
{
	struct bio *bio;

	while ((bio = bio_list_pop(bios))) {
		bio->bi_status = BLK_STS_IOERR;
		bio_list_add(done, bio);
	}
}

/*
 * There is no ring, and there will not be one. New bios are not counted among those that wait, not
 * even for a moment: whoever saw that count might sleep, and nobody would know.
 */
static void fail_all(struct virtblk_queue *q, struct bio_list *bios, struct bio_list *done)
{
	struct virtblk_slot *slot;

	while ((slot = list_first_entry_or_null(&q->resumed, struct virtblk_slot, node))) {
		list_del_init(&slot->node);
		virtblk_slot_end(q, slot, BLK_STS_IOERR, done);
	}
	fail_bios(&q->waiting, done);
	q->waiting_count = 0;
	if (bios)
		fail_bios(bios, done);
}

static void send_waiting(struct virtblk_queue *q, struct bio_list *done)
{
	unsigned int taken;

	while (!bio_list_empty(&q->waiting)) {
		taken = send_next(q, &q->waiting, done);
		if (!taken)
			break;
		q->waiting_count -= taken;
	}
}

/**
 * virtblk_bio_dispatch() - puts bios into the ring, after those that wait already
 * @q: its lock is held
 * @bios: new ones, empty afterwards; or NULL
 * @done: gets bios that failed, to be ended without the lock
 *
 * Return: whether the device is to be kicked.
 */
bool virtblk_bio_dispatch(struct virtblk_queue *q, struct bio_list *bios, struct bio_list *done)
{
	unsigned int before = q->in_flight;
	bool may_send = true;

	lockdep_assert_held(&q->lock);
	if (unlikely(q->stopped)) {
		if (bios)
			wait_in_list(q, bios);
		return false;
	}
	if (unlikely(!q->vq)) {
		fail_all(q, bios, done);
		return false;
	}
	if (unlikely(!list_empty(&q->resumed)))
		may_send = send_resumed(q, done);
	if (unlikely(!bio_list_empty(&q->waiting)) && may_send)
		send_waiting(q, done);
	if (bios) {
		while (may_send && bio_list_empty(&q->waiting) && !bio_list_empty(bios))
			may_send = send_next(q, bios, done);
		if (unlikely(!bio_list_empty(bios)))
			wait_in_list(q, bios);
	}
	/* No completion would come to send the rest. */
	if (unlikely(!q->in_flight && (q->waiting_count || !list_empty(&q->resumed))))
		virtblk_retry_soon(q->blk);
	return q->in_flight != before && virtblk_kick_prepare(q);
}
