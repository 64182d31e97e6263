// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests of the bio path that the device has used: on to their next stage, or the end of their
 * bios. Whoever takes them from the ring also fills it with what waits.
 */
#include "virtio_blk.h"

/**
 * virtblk_slot_end() - all stages are through, or one has failed
 * @q: its lock is held
 * @slot: not in the ring
 * @status: of all its bios
 * @done: gets the bios
 */
void virtblk_slot_end(struct virtblk_queue *q, struct virtblk_slot *slot, blk_status_t status,
		      struct bio_list *done)
{
	struct bio *bio, *next;

	if (unlikely(slot->stage == VIRTBLK_GET_ID)) {
		virtblk_id_done(slot, status);
		return;
	}
	for (bio = slot->bios; bio; bio = next) {
		next = bio->bi_next;
		/* A part that was split off may have failed already. */
		if (unlikely(status))
			bio->bi_status = status;
		virtblk_account_end(slot, bio);
		bio_list_add(done, bio);
	}
	virtblk_put_slot(q, slot);
}

static void stage_done(struct virtblk_queue *q, struct virtblk_slot *slot, struct bio_list *done)
{
	blk_status_t status = virtblk_status(&slot->request);
	enum virtblk_stage next = VIRTBLK_FREE;

	virtblk_slot_back(q, slot);
	if (likely(!status) && slot->stage != VIRTBLK_GET_ID)
		next = virtblk_next_stage(slot);
	if (likely(next == VIRTBLK_FREE)) {
		virtblk_slot_end(q, slot, status, done);
		return;
	}
	slot->stage = next;
	list_add_tail(&slot->node, &q->resumed);
}

static unsigned int take_used(struct virtblk_queue *q, struct bio_list *done)
{
	struct virtblk_request *request;
	unsigned int count = 0;

	while ((request = virtblk_get_used(q))) {
		count++;
		stage_done(q, container_of(request, struct virtblk_slot, request), done);
	}
	return count;
}

/**
 * virtblk_wake_throttled() - lets the next submitter that sleeps on
 * @q: its list was short enough when the caller looked; its lock is not held
 */
void virtblk_wake_throttled(struct virtblk_queue *q)
{
	/* Pairs with the barrier of prepare_to_wait(): who sleeps is seen, or sees the count. */
	if (wq_has_sleeper(&q->throttled))
		wake_up(&q->throttled);
}

/**
 * virtblk_bio_reap() - takes all that the device has used, and sends what waits
 * @q: of the bio path
 * @interrupt: arm the interrupt again when the ring is empty
 *
 * Return: how many requests of the device were used.
 */
unsigned int virtblk_bio_reap(struct virtblk_queue *q, bool interrupt)
{
	struct bio_list done = BIO_EMPTY_LIST;
	unsigned int count = 0;
	unsigned long flags;
	bool kick, waited, room;

	/* Whoever deletes the virtqueue waits for the kick. */
	rcu_read_lock();
	spin_lock_irqsave(&q->lock, flags);
	if (likely(q->vq)) {
		do {
			if (interrupt)
				virtqueue_disable_cb(q->vq);
			count += take_used(q, &done);
		} while (interrupt && !virtqueue_enable_cb(q->vq));
		q->last_reap = jiffies;
		if (count)
			q->last_used = jiffies;
		virtblk_check_broken(q);
	}
	waited = q->waiting_count;
	kick = virtblk_bio_dispatch(q, NULL, &done);
	room = waited && !virtblk_bio_is_crowded(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(q, kick);
	if (unlikely(room))
		virtblk_wake_throttled(q);
	rcu_read_unlock();
	virtblk_end_bios(q->blk, &done);
	return count;
}

/**
 * virtblk_end_bios() - the bios go back to their owners
 * @blk: the disk, which may be freed as soon as the last one is
 * @done: with their status set
 *
 * Context: any, but without the queue's lock.
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

/**
 * virtblk_bio_fail_all() - ends everything of a queue with an error
 * @q: its device was reset, its ring takes nothing any more
 */
void virtblk_bio_fail_all(struct virtblk_queue *q)
{
	struct bio_list done = BIO_EMPTY_LIST;
	struct virtblk_request *request;

	spin_lock_irq(&q->lock);
	while ((request = virtblk_take_back(q))) {
		struct virtblk_slot *slot = container_of(request, struct virtblk_slot, request);

		virtblk_slot_back(q, slot);
		virtblk_slot_end(q, slot, BLK_STS_IOERR, &done);
	}
	/* What waits finds a broken ring, and fails. */
	virtblk_bio_dispatch(q, NULL, &done);
	spin_unlock_irq(&q->lock);
	virtblk_wake_throttled(q);
	virtblk_end_bios(q->blk, &done);
}
