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
		virtblk_withhold(rq);
	else if (!blk_mq_complete_request_remote(rq) &&
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
	struct request *rq, *next;
	unsigned int count = virtblk_rq_take(q, false, &next);

	while ((rq = next)) {
		next = rq->rq_next;
		rq->rq_next = NULL;
		complete_polled(rq, iob);
	}
	return count;
}

/**
 * virtblk_poll_bio() - completes what the device has used of a polled queue of the bio path
 * @bio: tells the queue by its cookie
 * @iob: not used, it is for requests
 * @flags: not used: one look, however long the caller wants to spin
 *
 * The bio may have ended and be in use for something else by now, on any disk; memory that RCU
 * keeps there is all that can be relied on. A disk whose queue can be entered is not freed.
 *
 * Return: how many requests of the device were used.
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
