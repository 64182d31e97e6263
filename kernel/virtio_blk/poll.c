// SPDX-License-Identifier: GPL-2.0-only
/*
 * Polled queues have no interrupt: who waits for a request looks into the used ring.
 */
#include "virtio_blk.h"

static void complete_batch(struct io_comp_batch *iob)
{
	struct request *rq;

	rq_list_for_each(&iob->req_list, rq)
		virtblk_finish_rq(rq);
	blk_mq_end_request_batch(iob);
}

/* Completed at once or with the batch; errors cannot be in a batch. */
static void complete_polled(struct request *rq, struct io_comp_batch *iob)
{
	/* Negative: kernels differ in whether an int or a bool says that there was an error. */
	int error = virtblk_status(blk_mq_rq_to_pdu(rq)) ? -EIO : 0;

	if (unlikely(blk_should_fake_timeout(rq->q)))
		return;
	if (!blk_mq_complete_request_remote(rq) &&
	    !blk_mq_add_to_batch(rq, iob, error, complete_batch))
		virtblk_complete_rq(rq);
}

/**
 * virtblk_poll() - completes what the device has used of a polled queue of the request path
 * @hctx: the queue
 * @iob: collects what can be ended together; may be NULL
 *
 * Return: how many requests.
 */
int virtblk_poll(struct blk_mq_hw_ctx *hctx, struct io_comp_batch *iob)
{
	struct virtblk *blk = hctx->queue->queuedata;
	struct virtblk_queue *q = &blk->queues[hctx->queue_num];
	struct virtblk_request *request;
	unsigned int len;
	unsigned long flags;
	int found = 0;

	spin_lock_irqsave(&q->lock, flags);
	if (unlikely(!q->vq))
		goto out;
	while ((request = virtqueue_get_buf(q->vq, &len))) {
		q->in_flight--;
		found++;
		complete_polled(blk_mq_rq_from_pdu(request), iob);
	}
	q->last_reap = jiffies;
	if (found)
		virtblk_restart(q);
	else
		virtblk_check_broken(q);
out:
	spin_unlock_irqrestore(&q->lock, flags);
	return found;
}

/**
 * virtblk_poll_bio() - the same for the bio path
 * @bio: somebody's; its cookie is the queue's index
 * @iob: not used, it is for requests
 * @flags: not used: one look, however long the caller wants to spin
 *
 * The bio may be in use for something else by now, so its cookie may be anything.
 *
 * Return: how many requests of the device were used.
 */
int virtblk_poll_bio(struct bio *bio, struct io_comp_batch *iob, unsigned int flags)
{
	struct virtblk *blk = bio->bi_bdev->bd_disk->private_data;
	unsigned int index = READ_ONCE(bio->bi_cookie);

	if (index >= blk->queue_count || !blk->queues[index].polled)
		return 0;
	return virtblk_bio_reap(&blk->queues[index], false);
}
