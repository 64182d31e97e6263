// SPDX-License-Identifier: GPL-2.0-only
/*
 * The bio path: bios go to the ring of this CPU's queue without requests, tags and scheduler. They
 * are throttled and collected under the task's plug here; bio_dispatch.c sends them, bio_reap.c
 * completes them.
 *
 * Bios without room in the ring wait in the queue's list, in order, and completions send them. The
 * list is bounded: a submitter sleeps while it is longer than the ring, or gets EAGAIN if it may
 * not sleep. So one writer cannot keep all readers waiting.
 *
 * Each bio in the driver holds a reference of the queue's usage counter, as blk-mq's requests do:
 * freezing the queue waits for all of them.
 */
#include <linux/slab.h>

#include "virtio_blk.h"

/* A plug submits when it holds so many bios. */
#define VIRTBLK_PLUG_BIOS_MAX	64
/* A bio of this size submits its plug at once, as with blk-mq: it does not gain by waiting. */
#define VIRTBLK_PLUG_BYTES_MAX	(128 << 10)
/* Sequential streams that a plug tells apart. */
#define VIRTBLK_PLUG_STREAMS	4

/**
 * struct virtblk_plug - the bios that a task has collected for one disk
 * @cb: the block layer's part; its data is the disk
 * @bios: bios for queues with interrupts, and bios for polled queues
 * @tails: the last bio of the latest streams; a bio that continues one is inserted after it
 * @next_tail: the oldest of them
 * @count: of all bios
 * @holds_queue: has a reference of the queue's usage counter
 * @poll_queue: the queue of the polled bios, as their cookies say
 */
struct virtblk_plug {
	struct blk_plug_cb cb;
	struct bio_list bios[2];
	struct bio *tails[VIRTBLK_PLUG_STREAMS];
	unsigned int next_tail;
	unsigned int count;
	bool holds_queue;
	struct virtblk_queue *poll_queue;
};

/**
 * struct virtblk_sleeper - a throttled submitter
 * @entry: in the queue's list of sleepers
 * @woken: it may go on, even if the list of waiting bios is long again
 */
struct virtblk_sleeper {
	struct wait_queue_entry entry;
	bool woken;
};

/* The queue that this CPU uses. If the task moves to another CPU meanwhile, it still works. */
static struct virtblk_queue *virtblk_current_queue(struct virtblk *blk, bool polled)
{
	const struct blk_mq_queue_map *map =
		&blk->maps[polled ? VIRTBLK_MAP_POLL : VIRTBLK_MAP_INTERRUPT];

	return &blk->queues[map->mq_map[raw_smp_processor_id()]];
}

/*
 * Plugging. Bios that a task submits under one plug are collected, so that they share a kick, and
 * adjacent ones a request. The block layer ends the plug when the task says so, and when it sleeps.
 */

static void virtblk_submit_plug(struct virtblk_plug *plug)
{
	struct virtblk *blk = plug->cb.data;

	if (!bio_list_empty(&plug->bios[0]))
		virtblk_bio_submit(virtblk_current_queue(blk, false), &plug->bios[0]);
	if (!bio_list_empty(&plug->bios[1]))
		virtblk_bio_submit(plug->poll_queue, &plug->bios[1]);
	memset(plug->tails, 0, sizeof(plug->tails));
	plug->count = 0;
}

/* May run while the task goes to sleep, so it must not sleep itself. */
static void virtblk_unplug(struct blk_plug_cb *cb, bool from_schedule)
{
	struct virtblk_plug *plug = container_of(cb, struct virtblk_plug, cb);
	struct virtblk *blk = cb->data;

	virtblk_submit_plug(plug);
	kfree(plug);
	/* Kept the virtqueues until after the kick. */
	percpu_ref_put(&blk->disk->queue->q_usage_counter);
}

/* Inserts a bio after the one that it continues, if that is the last one of a stream. */
static void virtblk_plug_bio(struct virtblk_plug *plug, struct bio_list *bios, struct bio *bio)
{
	unsigned int i;

	for (i = 0; i < VIRTBLK_PLUG_STREAMS; i++) {
		struct bio *tail = plug->tails[i];

		if (!tail || !virtblk_can_merge(tail, bio))
			continue;
		bio->bi_next = tail->bi_next;
		tail->bi_next = bio;
		if (bios->tail == tail)
			bios->tail = bio;
		plug->tails[i] = bio;
		return;
	}
	bio_list_add(bios, bio);
	plug->tails[plug->next_tail++ % VIRTBLK_PLUG_STREAMS] = bio;
}

/*
 * Collects a bio under the task's plug. A task without a plug has the block layer's own one around
 * this single bio; nothing tells the two apart, so such a bio costs an allocation. Returns false if
 * there is no plug (some kernels), or no memory for its callback.
 */
static bool virtblk_collect(struct virtblk_queue *q, struct bio *bio)
{
	struct virtblk *blk = q->blk;
	struct virtblk_plug *plug;
	struct blk_plug_cb *cb;

	cb = blk_check_plugged(virtblk_unplug, blk, sizeof(*plug));
	if (unlikely(!cb))
		return false;
	plug = container_of(cb, struct virtblk_plug, cb);
	if (!plug->holds_queue) {
		plug->holds_queue = true;
		percpu_ref_get(&blk->disk->queue->q_usage_counter);
	}
	if (bio->bi_opf & REQ_POLLED) {
		if (!plug->poll_queue)
			plug->poll_queue = q;
		/* A task unplugs before it polls. */
		WRITE_ONCE(bio->bi_cookie, plug->poll_queue->index);
		virtblk_plug_bio(plug, &plug->bios[1], bio);
	} else {
		virtblk_plug_bio(plug, &plug->bios[0], bio);
	}
	if (++plug->count >= VIRTBLK_PLUG_BIOS_MAX ||
	    bio->bi_iter.bi_size >= VIRTBLK_PLUG_BYTES_MAX)
		virtblk_submit_plug(plug);
	return true;
}

/* Polls until the list is shorter: perhaps no other task does. */
static void virtblk_poll_until_room(struct virtblk_queue *q)
{
	while (virtblk_bio_is_congested(q))
		if (!virtblk_bio_reap(q, false)) {
			set_current_state(TASK_UNINTERRUPTIBLE);
			io_schedule_timeout(1);
		}
}

/* A woken submitter goes on even if others fill the list before it runs. */
static int virtblk_wake_sleeper(struct wait_queue_entry *entry, unsigned int mode, int flags,
				void *key)
{
	/*
	 * Before the wake-up: pairs with the barrier of set_current_state() in
	 * virtblk_sleep_in_order().
	 */
	WRITE_ONCE(container_of(entry, struct virtblk_sleeper, entry)->woken, true);
	return autoremove_wake_function(entry, mode, flags, key);
}

/* Sleeps until a completion has made room. Sleepers are woken in order of arrival. */
static void virtblk_sleep_in_order(struct virtblk_queue *q)
{
	struct virtblk_sleeper sleeper = {
		.entry = {
			.private = current,
			.func = virtblk_wake_sleeper,
			.entry = LIST_HEAD_INIT(sleeper.entry.entry),
		},
	};

	prepare_to_wait_exclusive(&q->throttled, &sleeper.entry, TASK_UNINTERRUPTIBLE);
	/* If the list was emptied meanwhile, no completion is left to wake sleepers. */
	if (!virtblk_bio_is_congested(q))
		virtblk_wake_throttled(q);
	while (!READ_ONCE(sleeper.woken)) {
		io_schedule();
		set_current_state(TASK_UNINTERRUPTIBLE);
	}
	finish_wait(&q->throttled, &sleeper.entry);
}

/*
 * Waits while too many bios wait. Sleeping submits the bios that the task has collected under a
 * plug. Returns false if the bio ended with EAGAIN instead.
 */
static bool virtblk_throttle(struct virtblk_queue *q, struct bio *bio)
{
	if (likely(!virtblk_bio_is_congested(q)))
		return true;
	if (bio->bi_opf & REQ_NOWAIT) {
		bio_wouldblock_error(bio);
		return false;
	}
	if (q->polled) {
		virtblk_poll_until_room(q);
		return true;
	}
	virtblk_sleep_in_order(q);
	/* One sleeper is woken at a time, and this one may submit to another queue. */
	if (!virtblk_bio_is_congested(q))
		virtblk_wake_throttled(q);
	return true;
}

/* A part of a block, which blk-mq refuses, too. */
static bool virtblk_is_unaligned(const struct bio *bio)
{
	unsigned int mask = bdev_logical_block_size(bio->bi_bdev) - 1;

	return (bio->bi_iter.bi_size | bio->bi_iter.bi_sector << SECTOR_SHIFT) & mask;
}

/**
 * virtblk_submit_bio() - submits a bio
 * @bio: for the disk or a partition, already remapped
 *
 * Context: may sleep, unless the bio says REQ_NOWAIT.
 */
void virtblk_submit_bio(struct bio *bio)
{
	struct virtblk *blk = bio->bi_bdev->bd_disk->private_data;
	struct bio_list one = BIO_EMPTY_LIST;
	struct virtblk_queue *q;

	if (unlikely(virtblk_is_unaligned(bio))) {
		bio_io_error(bio);
		return;
	}
	bio = bio_split_to_limits(bio);
	if (unlikely(!bio))
		return;
	q = virtblk_current_queue(blk, bio->bi_opf & REQ_POLLED);
	if (!virtblk_throttle(q, bio))
		return;
	if (bio->bi_opf & REQ_POLLED)
		WRITE_ONCE(bio->bi_cookie, q->index);
	percpu_ref_get(&blk->disk->queue->q_usage_counter);
	if (virtblk_collect(q, bio))
		return;
	bio_list_add(&one, bio);
	virtblk_bio_submit(q, &one);
}

/**
 * virtblk_poll_bio() - completes the used requests of a polled queue
 * @bio: its cookie tells the queue
 * @iob: not used, it is for requests
 * @flags: not used: this looks once, however long the caller wants to spin
 *
 * The bio may have ended, and may be in use for any disk by now; only its memory is sure to exist,
 * by RCU. Another disk's operations are not read: their module may be gone. A disk of ours is not
 * freed while its queue can be entered.
 *
 * Return: the number of used requests.
 */
int virtblk_poll_bio(struct bio *bio, struct io_comp_batch *iob, unsigned int flags)
{
	struct block_device *bdev = READ_ONCE(bio->bi_bdev);
	unsigned int index = READ_ONCE(bio->bi_cookie);
	struct percpu_ref *usage;
	struct virtblk *blk;
	int found = 0;

	if (!bdev || bdev->bd_disk->fops != &virtblk_bio_fops)
		return 0;
	usage = &bdev->bd_disk->queue->q_usage_counter;
	if (!percpu_ref_tryget(usage))
		return 0;
	blk = bdev->bd_disk->private_data;
	if (index < blk->queue_count && blk->queues[index].polled)
		found = virtblk_bio_reap(&blk->queues[index], false);
	percpu_ref_put(usage);
	return found;
}

/**
 * virtblk_bio_stop() - keeps bios out of the rings until virtblk_bio_start()
 * @blk: its queue is frozen, nothing is in flight
 */
void virtblk_bio_stop(struct virtblk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++) {
		spin_lock_irq(&blk->queues[i].lock);
		blk->queues[i].stopped = true;
		spin_unlock_irq(&blk->queues[i].lock);
	}
}

/**
 * virtblk_bio_start() - sends the bios that were held back
 * @blk: if it has no virtqueues, the bios fail
 */
void virtblk_bio_start(struct virtblk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++) {
		spin_lock_irq(&blk->queues[i].lock);
		blk->queues[i].stopped = false;
		spin_unlock_irq(&blk->queues[i].lock);
		virtblk_bio_recheck(&blk->queues[i]);
	}
}
