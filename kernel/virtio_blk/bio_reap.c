// SPDX-License-Identifier: GPL-2.0-only
/*
 * Completion on the bio path: takes requests from the used ring, advances their slots, and
 * dispatches what waits.
 */
#include "look.h"

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
static bool virtblk_bio_reap_once(struct virtblk_queue *q, enum virtblk_look look,
				  unsigned int *total)
{
	struct bio_list done = BIO_EMPTY_LIST;
	bool waited, room, again = false;
	struct virtqueue *kick;
	unsigned long flags;
	unsigned int count = 0;

	/* The virtqueue is not deleted before the kick. */
	rcu_read_lock();
	spin_lock_irqsave(&q->lock, flags);
	if (likely(q->vq)) {
		if (look != VIRTBLK_LOOK_ONCE)
			virtqueue_disable_cb(q->vq);
		do {
			count += virtblk_bio_take_used(q, &done);
			again = !virtblk_arm(q, count, look);
		} while (unlikely(again) && look == VIRTBLK_LOOK_LAST);
		*total += count;
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
	unsigned int count = 0, looks = 0;

	while (virtblk_bio_reap_once(q, virtblk_next_look(interrupt, looks++), &count))
		;
	return count;
}

/**
 * virtblk_bio_recheck() - takes all requests from the used ring, and sends bios that wait, without an
 *	interrupt as the reason
 * @q: of the bio path
 *
 * Arms the interrupt before it completes the requests: the task may lose its CPU meanwhile.
 */
void virtblk_bio_recheck(struct virtblk_queue *q)
{
	unsigned int count = 0;

	virtblk_bio_reap_once(q, virtblk_recheck_look(q), &count);
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
