// SPDX-License-Identifier: GPL-2.0-only
/*
 * The serial number: the device is asked for it (VIRTIO_BLK_T_GET_ID, section 5.2.6 of virtio 1.3).
 */
#include <linux/completion.h>
#include <linux/kref.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>

#include "virtio_blk.h"

/**
 * struct virtblk_id_wait - a question of the bio path, which is no bio
 * @slot: not of the queue's pool
 * @users: who asks, and the device; who asks may be killed meanwhile
 * @answered: the device has
 * @status: what it said
 * @blk: whose queue's usage counter is held until then
 */
struct virtblk_id_wait {
	struct virtblk_slot slot;
	struct kref users;
	struct completion answered;
	blk_status_t status;
	struct virtblk *blk;
};

static void free_wait(struct kref *users)
{
	kfree(container_of(users, struct virtblk_id_wait, users));
}

/* The device has answered, or never will. Under the queue's lock. */
void virtblk_id_done(struct virtblk_slot *slot, blk_status_t status)
{
	struct virtblk_id_wait *wait = container_of(slot, struct virtblk_id_wait, slot);
	struct virtblk *blk = wait->blk;

	list_del_init(&slot->node);
	wait->status = status;
	complete(&wait->answered);
	kref_put(&wait->users, free_wait);
	percpu_ref_put(&blk->disk->queue->q_usage_counter);
}

/* As a bio enters the queue: a moment for which it is frozen is waited for. */
static int enter_queue(struct virtblk *blk)
{
	struct request_queue *queue = blk->disk->queue;

	while (!percpu_ref_tryget_live(&queue->q_usage_counter)) {
		if (READ_ONCE(blk->removing) || blk_queue_dying(queue))
			return -ENODEV;
		if (fatal_signal_pending(current))
			return -EINTR;
		schedule_timeout_killable(max(1, HZ / 100));
	}
	return 0;
}

static int ask_by_slot(struct virtblk *blk, char *id)
{
	struct virtblk_queue *q = &blk->queues[0];
	struct virtblk_id_wait *wait;
	int err;

	wait = kzalloc(sizeof(*wait), GFP_KERNEL);
	if (!wait)
		return -ENOMEM;
	err = enter_queue(blk);
	if (err) {
		kfree(wait);
		return err;
	}
	INIT_LIST_HEAD(&wait->slot.node);
	kref_init(&wait->users);
	kref_get(&wait->users);
	init_completion(&wait->answered);
	wait->blk = blk;
	wait->slot.stage = VIRTBLK_GET_ID;
	wait->slot.start = jiffies;
	virtblk_init_request(&wait->slot.request);
	spin_lock_irq(&q->lock);
	list_add_tail(&wait->slot.node, &q->resumed);
	spin_unlock_irq(&q->lock);
	/* Sends it, or leaves it for a completion. */
	virtblk_bio_reap(q, !q->polled);
	virtblk_start_watch(blk);
	err = wait_for_completion_killable(&wait->answered);
	if (!err)
		err = blk_status_to_errno(wait->status);
	if (!err)
		memcpy(id, wait->slot.request.id, VIRTIO_BLK_ID_BYTES);
	kref_put(&wait->users, free_wait);
	return err;
}

static int ask_by_request(struct virtblk *blk, char *id)
{
	struct virtblk_request *request;
	struct request *rq;
	int err;

	rq = blk_mq_alloc_request(blk->disk->queue, REQ_OP_DRV_IN, 0);
	if (IS_ERR(rq))
		return PTR_ERR(rq);
	request = blk_mq_rq_to_pdu(rq);
	err = blk_status_to_errno(blk_execute_rq(rq, false));
	if (!err)
		memcpy(id, request->id, VIRTIO_BLK_ID_BYTES);
	blk_mq_free_request(rq);
	return err;
}

/**
 * virtblk_get_id() - asks the device for its serial number
 * @blk: its disk is there
 * @id: gets it; ends with a 0
 *
 * Return: a negative errno.
 */
int virtblk_get_id(struct virtblk *blk, char id[VIRTIO_BLK_ID_BYTES + 1])
{
	id[VIRTIO_BLK_ID_BYTES] = '\0';
	return blk->use_bio ? ask_by_slot(blk, id) : ask_by_request(blk, id);
}
