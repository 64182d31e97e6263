// SPDX-License-Identifier: GPL-2.0-only
/*
 * The query of the serial number on the bio path: a slot without bios, from a task that may be
 * killed before the device answers.
 */
#include <linux/completion.h>
#include <linux/kref.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "virtio_blk.h"

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

static void virtblk_free_query(struct kref *users)
{
	kfree(container_of(users, struct virtblk_id_query, users));
}

/**
 * virtblk_end_query() - gives the answer to the task that asked
 * @slot: in stage VIRTBLK_GET_ID
 * @status: its answer
 *
 * Context: under the queue's lock.
 */
void virtblk_end_query(struct virtblk_slot *slot, blk_status_t status)
{
	struct virtblk_id_query *query = container_of(slot, struct virtblk_id_query, slot);
	struct virtblk *blk = query->blk;

	list_del_init(&slot->node);
	query->status = status;
	complete(&query->answered);
	kref_put(&query->users, virtblk_free_query);
	percpu_ref_put(&blk->disk->queue->q_usage_counter);
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
	/* A worker sends it, because files call only those below them. */
	virtblk_dispatch_soon(blk);
	err = wait_for_completion_killable(&query->answered);
	if (!err)
		err = blk_status_to_errno(query->status);
	if (!err)
		memcpy(id, query->slot.request.id, VIRTIO_BLK_ID_BYTES);
out:
	kref_put(&query->users, virtblk_free_query);
	return err;
}
