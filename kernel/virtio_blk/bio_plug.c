// SPDX-License-Identifier: GPL-2.0-only
/*
 * Bios that a task submits under one plug are collected, so that they share a kick and adjacent
 * ones a request. The plug is undone when the task says so, and when it sleeps.
 */
#include <linux/slab.h>

#include "virtio_blk.h"

/* So many bios are submitted without waiting for more. */
#define PLUG_BIOS_MAX	64
/* As blk-mq does: who submits so much at once does not gain by waiting. */
#define PLUG_BYTES_MAX	(128 << 10)
/* Sequential streams that are told apart within a plug. */
#define PLUG_STREAMS	4

/**
 * struct virtblk_plug - what a task has collected for one disk
 * @cb: the block layer's part; its data is the disk
 * @bios: those for interrupts, and those to be polled for
 * @ends: the last bio of the latest streams: where a bio that goes on is put in
 * @next_end: the oldest of them
 * @count: of all bios
 * @holds_queue: has a reference of the queue's usage counter
 * @poll_queue: where those in the second list go, as their cookies say
 */
struct virtblk_plug {
	struct blk_plug_cb cb;
	struct bio_list bios[2];
	struct bio *ends[PLUG_STREAMS];
	unsigned int next_end;
	unsigned int count;
	bool holds_queue;
	struct virtblk_queue *poll_queue;
};

static void submit_collected(struct virtblk_plug *plug)
{
	struct virtblk *blk = plug->cb.data;

	if (!bio_list_empty(&plug->bios[0]))
		virtblk_bio_submit_list(virtblk_bio_queue(blk, false), &plug->bios[0]);
	if (!bio_list_empty(&plug->bios[1]))
		virtblk_bio_submit_list(plug->poll_queue, &plug->bios[1]);
	memset(plug->ends, 0, sizeof(plug->ends));
	plug->count = 0;
}

/* May run while the task goes to sleep, so must not sleep itself. */
static void unplug(struct blk_plug_cb *cb, bool from_schedule)
{
	struct virtblk_plug *plug = container_of(cb, struct virtblk_plug, cb);
	struct virtblk *blk = cb->data;

	submit_collected(plug);
	kfree(plug);
	/* Kept the virtqueues there until the kick. */
	percpu_ref_put(&blk->disk->queue->q_usage_counter);
}

/* After the bio that it goes on from, if that is one of the latest. */
static void insert(struct virtblk_plug *plug, struct bio_list *bios, struct bio *bio)
{
	unsigned int i;

	for (i = 0; i < PLUG_STREAMS; i++) {
		struct bio *end = plug->ends[i];

		if (!end || !virtblk_may_join(end, bio))
			continue;
		bio->bi_next = end->bi_next;
		end->bi_next = bio;
		if (bios->tail == end)
			bios->tail = bio;
		plug->ends[i] = bio;
		return;
	}
	bio_list_add(bios, bio);
	plug->ends[plug->next_end++ % PLUG_STREAMS] = bio;
}

/**
 * virtblk_bio_plug() - collects a bio under the task's plug
 * @q: where it would go now
 * @bio: in our hands
 *
 * Where the task has no plug of its own the block layer's around this one bio serves, which costs
 * an allocation: nothing tells the two apart.
 *
 * Return: false if there is no plug (some kernels), or no memory for its callback.
 */
bool virtblk_bio_plug(struct virtblk_queue *q, struct bio *bio)
{
	struct virtblk *blk = q->blk;
	struct blk_plug_cb *cb = blk_check_plugged(unplug, blk, sizeof(struct virtblk_plug));
	struct virtblk_plug *plug;

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
		/* Whoever polls unplugs first. */
		WRITE_ONCE(bio->bi_cookie, plug->poll_queue->index);
		insert(plug, &plug->bios[1], bio);
	} else {
		insert(plug, &plug->bios[0], bio);
	}
	if (++plug->count >= PLUG_BIOS_MAX || bio->bi_iter.bi_size >= PLUG_BYTES_MAX)
		submit_collected(plug);
	return true;
}
