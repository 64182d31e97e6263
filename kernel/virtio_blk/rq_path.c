// SPDX-License-Identifier: GPL-2.0-only
/*
 * The request path. blk-mq gives requests, alone or in batches; each batch is added to the ring
 * under one lock and with one kick. Completions come from the interrupt, from polling, or from the
 * time-out.
 */
#include "look.h"

static struct virtblk_queue *virtblk_queue_of(const struct blk_mq_hw_ctx *hctx)
{
	struct virtblk *blk = hctx->queue->queuedata;

	return &blk->queues[hctx->queue_num];
}

static blk_status_t virtblk_map_ranges(struct request *rq, struct virtblk_request *request)
{
	unsigned int count = blk_rq_nr_discard_segments(rq);

	/* Without multi-range discard a merged request is one range. */
	if (req_op(rq) != REQ_OP_DISCARD || queue_max_discard_segments(rq->q) == 1 || count == 1)
		virtblk_set_range(request, rq->cmd_flags, blk_rq_pos(rq), blk_rq_sectors(rq));
	else if (virtblk_set_ranges(request, rq, count))
		return BLK_STS_RESOURCE;
	return BLK_STS_OK;
}

static blk_status_t virtblk_map_data(struct request *rq, struct virtblk_request *request)
{
	unsigned int segments = blk_rq_nr_phys_segments(rq);

	if (!segments)
		return BLK_STS_OK;
	if (unlikely(virtblk_alloc_sg(request, segments)))
		return BLK_STS_RESOURCE;
	request->data.nents = virtblk_map_sg(rq, request->data.sgl);
	return BLK_STS_OK;
}

/* Does all that needs no lock. After a status other than OK there is nothing to undo. */
static blk_status_t virtblk_prepare_rq(struct request *rq)
{
	struct virtblk *blk = rq->q->queuedata;
	struct virtblk_request *request = blk_mq_rq_to_pdu(rq);
	blk_status_t status;

	if (req_op(rq) == REQ_OP_DRV_IN) {
		virtblk_set_get_id(blk->vdev, request);
		return BLK_STS_OK;
	}
	status = virtblk_set_command(blk->vdev, request, rq->cmd_flags, blk_rq_pos(rq),
				     req_get_ioprio(rq));
	if (unlikely(status))
		return status;
	switch (req_op(rq)) {
	case REQ_OP_READ:
	case REQ_OP_WRITE:
		return virtblk_map_data(rq, request);
	case REQ_OP_FLUSH:
		return BLK_STS_OK;
	default:
		return virtblk_map_ranges(rq, request);
	}
}

/*
 * Adds a request to the ring, and starts it only then, because blk-mq wants a refused request back
 * unstarted. It cannot be completed in between: that takes the same lock.
 */
static int virtblk_submit_rq(struct virtblk_queue *q, struct request *rq)
{
	struct virtblk_request *request = blk_mq_rq_to_pdu(rq);
	int err = virtblk_add(q, request);

	if (likely(!err))
		blk_mq_start_request(rq);
	else
		virtblk_free_data(request);
	return err;
}

/*
 * The next completion restarts a full queue. blk-mq itself tries again after a while if there is no
 * completion to come, or if memory was short. BLK_STS_RESOURCE lets it do so in any case, in case
 * it missed the completion; BLK_STS_DEV_RESOURCE would rely on it.
 */
static blk_status_t virtblk_refused(struct virtblk_queue *q, struct blk_mq_hw_ctx *hctx, int err)
{
	if (err == -ENOSPC && q->in_flight) {
		q->full = true;
		blk_mq_stop_hw_queue(hctx);
	}
	return err == -EIO ? BLK_STS_IOERR : BLK_STS_RESOURCE;
}

/**
 * virtblk_queue_rq() - submits a request
 * @hctx: its hardware queue
 * @bd: the request, and whether it is the last one of a batch
 *
 * Return: a status other than OK leaves the request with blk-mq.
 */
blk_status_t virtblk_queue_rq(struct blk_mq_hw_ctx *hctx, const struct blk_mq_queue_data *bd)
{
	struct virtblk_queue *q = virtblk_queue_of(hctx);
	struct virtqueue *kick = NULL;
	unsigned long flags;
	blk_status_t status;
	int err;

	status = virtblk_prepare_rq(bd->rq);
	if (unlikely(status))
		return status;
	spin_lock_irqsave(&q->lock, flags);
	err = virtblk_submit_rq(q, bd->rq);
	if (unlikely(err))
		status = virtblk_refused(q, hctx, err);
	if (bd->last || err)
		kick = virtblk_kick_prepare(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(kick);
	if (q->polled && !err)
		virtblk_start_watchdog(q->blk);
	return status;
}

/**
 * virtblk_commit_rqs() - kicks for a batch whose last request was not submitted
 * @hctx: the hardware queue
 */
void virtblk_commit_rqs(struct blk_mq_hw_ctx *hctx)
{
	struct virtblk_queue *q = virtblk_queue_of(hctx);
	struct virtqueue *kick;
	unsigned long flags;

	spin_lock_irqsave(&q->lock, flags);
	kick = virtblk_kick_prepare(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(kick);
}

#ifdef VIRTBLK_HAS_RQ_LIST
/* Requests without room in the ring are left for queue_rq(), in order. */
static void virtblk_submit_batch(struct virtblk_queue *q, struct rq_list *batch,
				 struct rq_list *rest)
{
	struct virtqueue *kick;
	struct request *rq;
	unsigned long flags;
	bool fits = true;

	spin_lock_irqsave(&q->lock, flags);
	while ((rq = rq_list_pop(batch))) {
		if (fits && !virtblk_submit_rq(q, rq))
			continue;
		if (fits)
			fits = false;
		else
			virtblk_free_data(blk_mq_rq_to_pdu(rq));
		rq_list_add_tail(rest, rq);
	}
	kick = virtblk_kick_prepare(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(kick);
	if (q->polled)
		virtblk_start_watchdog(q->blk);
}

/**
 * virtblk_queue_rqs() - submits requests in batches, one for each queue
 * @list: keeps the requests that have to go through queue_rq()
 */
void virtblk_queue_rqs(struct rq_list *list)
{
	struct rq_list batch = { }, rest = { };
	struct virtblk_queue *q = NULL;
	struct request *rq;

	while ((rq = rq_list_pop(list))) {
		struct virtblk_queue *next = virtblk_queue_of(rq->mq_hctx);

		if (q && q != next)
			virtblk_submit_batch(q, &batch, &rest);
		q = next;
		rq_list_add_tail(virtblk_prepare_rq(rq) == BLK_STS_OK ? &batch : &rest, rq);
	}
	if (!rq_list_empty(&batch))
		virtblk_submit_batch(q, &batch, &rest);
	*list = rest;
}
#endif

/**
 * virtblk_init_rq() - sets up a request once, for all its uses
 * @set: of the disk
 * @rq: new
 * @hctx: not used
 * @node: not used
 *
 * Return: 0.
 */
int virtblk_init_rq(struct blk_mq_tag_set *set, struct request *rq, unsigned int hctx,
		    virtblk_node_t node)
{
	virtblk_init_request(blk_mq_rq_to_pdu(rq));
	return 0;
}

/**
 * virtblk_complete_rq() - ends a request
 * @rq: taken from the used ring
 *
 * Context: on the CPU that blk-mq chose for it.
 */
void virtblk_complete_rq(struct request *rq)
{
	struct virtblk_request *request = blk_mq_rq_to_pdu(rq);
	blk_status_t status = virtblk_status(request);

	virtblk_free_data(request);
	blk_mq_end_request(rq, status);
}

/* There is room in the ring: restarts the hardware queue. Under the queue's lock. */
static void virtblk_restart(struct virtblk_queue *q)
{
	if (likely(!q->full))
		return;
	q->full = false;
	blk_mq_start_stopped_hw_queues(q->blk->disk->queue, true);
}

/*
 * Takes all requests from the used ring. Their completions, which may submit others, are run by the
 * caller without the lock. @first gets them, linked by rq_next, in the device's order. @again is
 * set if the caller has to complete the requests and to take again. Returns their number.
 */
static unsigned int virtblk_rq_take_used(struct virtblk_queue *q, enum virtblk_look look,
					 bool *again, struct request **first)
{
	struct virtblk_request *request;
	unsigned int count = 0;
	unsigned long flags;
	struct request *rq;

	*again = false;
	spin_lock_irqsave(&q->lock, flags);
	if (unlikely(!q->vq))
		goto out;
	if (look != VIRTBLK_LOOK_ONCE)
		virtqueue_disable_cb(q->vq);
	do {
		while ((request = virtblk_get_used(q))) {
			rq = blk_mq_rq_from_pdu(request);
			count++;
			*first = rq;
			first = &rq->rq_next;
		}
		*again = !virtblk_arm(q, count, look);
	} while (unlikely(*again) && look == VIRTBLK_LOOK_LAST);
	q->last_reap = jiffies;
	if (count) {
		q->last_used = jiffies;
		virtblk_restart(q);
	}
	virtblk_check_broken(q);
out:
	spin_unlock_irqrestore(&q->lock, flags);
	*first = NULL;
	return count;
}

/* Fault injection (io-timeout-fail): holds a completion back until virtblk_timeout(). */
static void virtblk_fake_timeout(struct request *rq)
{
	struct virtblk_request *request = blk_mq_rq_to_pdu(rq);

	WRITE_ONCE(request->fake_timeout, true);
}

static unsigned int virtblk_rq_reap_once(struct virtblk_queue *q, enum virtblk_look look,
					 bool *again)
{
	struct request *rq, *next;
	unsigned int count = virtblk_rq_take_used(q, look, again, &next);

	while ((rq = next)) {
		next = rq->rq_next;
		rq->rq_next = NULL;
		if (unlikely(blk_should_fake_timeout(rq->q)))
			virtblk_fake_timeout(rq);
		else
			blk_mq_complete_request(rq);
	}
	return count;
}

/**
 * virtblk_rq_reap() - takes all requests from the used ring and completes them
 * @q: of the request path
 * @interrupt: arm the interrupt again when the ring is empty
 *
 * Return: their number.
 */
unsigned int virtblk_rq_reap(struct virtblk_queue *q, bool interrupt)
{
	unsigned int count = 0, looks = 0;
	bool again;

	do
		count += virtblk_rq_reap_once(q, virtblk_next_look(interrupt, looks++), &again);
	while (again);
	return count;
}

/**
 * virtblk_rq_recheck() - takes all requests from the used ring and completes them, without an
 *	interrupt as the reason
 * @q: of the request path
 *
 * Arms the interrupt before it completes the requests: the task may lose its CPU meanwhile.
 */
void virtblk_rq_recheck(struct virtblk_queue *q)
{
	bool again;

	virtblk_rq_reap_once(q, virtblk_recheck_look(q), &again);
}

static void virtblk_complete_batch(struct io_comp_batch *iob)
{
	struct request *rq;

	rq_list_for_each(&iob->req_list, rq)
		virtblk_free_data(blk_mq_rq_to_pdu(rq));
	blk_mq_end_request_batch(iob);
}

/* Completes a request at once or with the batch, which cannot hold errors. */
static void virtblk_complete_polled(struct request *rq, struct io_comp_batch *iob)
{
	/* Negative: kernels differ in the type of this argument, int or bool. */
	int error = virtblk_status(blk_mq_rq_to_pdu(rq)) ? -EIO : 0;

	if (unlikely(blk_should_fake_timeout(rq->q)))
		virtblk_fake_timeout(rq);
	else if (!blk_mq_complete_request_remote(rq) &&
		 !blk_mq_add_to_batch(rq, iob, error, virtblk_complete_batch))
		virtblk_complete_rq(rq);
}

/**
 * virtblk_poll() - completes the used requests of a polled queue
 * @hctx: the hardware queue
 * @iob: collects requests that can be ended together; may be NULL
 *
 * Return: their number.
 */
int virtblk_poll(struct blk_mq_hw_ctx *hctx, struct io_comp_batch *iob)
{
	struct virtblk_queue *q = virtblk_queue_of(hctx);
	struct request *rq, *next;
	unsigned int count;
	bool again;

	count = virtblk_rq_take_used(q, VIRTBLK_LOOK_ONCE, &again, &next);
	while ((rq = next)) {
		next = rq->rq_next;
		rq->rq_next = NULL;
		virtblk_complete_polled(rq, iob);
	}
	return count;
}

/**
 * virtblk_rq_fail_all() - ends all requests in flight with an error
 * @q: its device was reset, its ring is broken
 */
void virtblk_rq_fail_all(struct virtblk_queue *q)
{
	struct request *rq, *requests = NULL;
	struct virtblk_request *request;

	spin_lock_irq(&q->lock);
	while ((request = virtblk_detach(q))) {
		request->status = VIRTBLK_S_UNWRITTEN;
		rq = blk_mq_rq_from_pdu(request);
		rq->rq_next = requests;
		requests = rq;
	}
	q->full = false;
	spin_unlock_irq(&q->lock);
	while ((rq = requests)) {
		requests = rq->rq_next;
		rq->rq_next = NULL;
		blk_mq_complete_request(rq);
	}
}

/**
 * virtblk_rq_get_id() - asks the device for its serial number
 * @blk: its disk was added
 * @id: gets VIRTIO_BLK_ID_BYTES bytes
 *
 * Return: 0, or a negative errno.
 */
int virtblk_rq_get_id(struct virtblk *blk, char *id)
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
