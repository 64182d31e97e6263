// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests that the device has used: the interrupt, and the end of a request of the request path.
 */
#include "virtio_blk.h"

/**
 * virtblk_finish_rq() - gives back what a request needed on its way
 * @rq: given back by the device
 */
void virtblk_finish_rq(struct request *rq)
{
	virtblk_free_data(blk_mq_rq_to_pdu(rq));
}

/* blk-mq's completion: on the CPU that is to run it. */
void virtblk_complete_rq(struct request *rq)
{
	blk_status_t status = virtblk_status(blk_mq_rq_to_pdu(rq));

	virtblk_finish_rq(rq);
	blk_mq_end_request(rq, status);
}

/* There is room: lets requests come again that found the ring full. Under the queue's lock. */
static void restart(struct virtblk_queue *q)
{
	if (likely(!q->full))
		return;
	q->full = false;
	blk_mq_start_stopped_hw_queues(q->blk->disk->queue, true);
}

/**
 * virtblk_rq_take() - takes all that the device has used
 * @q: of the request path
 * @interrupt: arm the interrupt again when the ring is empty
 * @first: gets the requests, linked by rq_next, in the device's order
 *
 * They are completed without the lock: what a completion starts may want it.
 *
 * Return: how many.
 */
unsigned int virtblk_rq_take(struct virtblk_queue *q, bool interrupt, struct request **first)
{
	struct virtblk_request *request;
	unsigned int count = 0;
	unsigned long flags;
	struct request *rq;

	spin_lock_irqsave(&q->lock, flags);
	if (unlikely(!q->vq))
		goto out;
	do {
		if (interrupt)
			virtqueue_disable_cb(q->vq);
		while ((request = virtblk_get_used(q))) {
			rq = blk_mq_rq_from_pdu(request);
			count++;
			*first = rq;
			first = &rq->rq_next;
		}
	} while (interrupt && !virtqueue_enable_cb(q->vq));
	q->last_reap = jiffies;
	if (count) {
		q->last_used = jiffies;
		restart(q);
	}
	virtblk_check_broken(q);
out:
	spin_unlock_irqrestore(&q->lock, flags);
	*first = NULL;
	return count;
}

/* Fault injection (io-timeout-fail): as if the device had not answered, until the timeout. */
void virtblk_withhold(struct request *rq)
{
	struct virtblk_request *request = blk_mq_rq_to_pdu(rq);

	WRITE_ONCE(request->withheld, true);
}

/**
 * virtblk_rq_reap() - takes all that the device has used, and completes it
 * @q: of the request path
 * @interrupt: arm the interrupt again when the ring is empty
 *
 * Return: how many.
 */
unsigned int virtblk_rq_reap(struct virtblk_queue *q, bool interrupt)
{
	struct request *rq, *next;
	unsigned int count = virtblk_rq_take(q, interrupt, &next);

	while ((rq = next)) {
		next = rq->rq_next;
		rq->rq_next = NULL;
		if (unlikely(blk_should_fake_timeout(rq->q)))
			virtblk_withhold(rq);
		else
			blk_mq_complete_request(rq);
	}
	return count;
}

/**
 * virtblk_interrupt() - the device says that it has used requests
 * @vq: of a queue that is not polled
 *
 * Context: interrupt.
 */
void virtblk_interrupt(struct virtqueue *vq)
{
	struct virtblk *blk = vq->vdev->priv;
	struct virtblk_queue *q = &blk->queues[vq->index];

	/* A device that is not to be in use yet. */
	if (unlikely(!READ_ONCE(blk->disk)))
		return;
	if (blk->use_bio)
		virtblk_bio_reap(q, true);
	else
		virtblk_rq_reap(q, true);
}
