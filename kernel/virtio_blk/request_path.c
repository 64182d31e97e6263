// SPDX-License-Identifier: GPL-2.0-only
/*
 * The request path: blk-mq gives requests, alone or in batches; each batch is put into the ring
 * under one lock and with one kick.
 */
#include "virtio_blk.h"

static struct virtblk_queue *queue_of(const struct blk_mq_hw_ctx *hctx)
{
	struct virtblk *blk = hctx->queue->queuedata;

	return &blk->queues[hctx->queue_num];
}

static blk_status_t map_ranges(struct request *rq, struct virtblk_request *request)
{
	unsigned int count = blk_rq_nr_discard_segments(rq);

	/* Without multi-range discard a merged request is one range. */
	if (req_op(rq) != REQ_OP_DISCARD || queue_max_discard_segments(rq->q) == 1 || count == 1)
		virtblk_set_range(request, rq->cmd_flags, blk_rq_pos(rq), blk_rq_sectors(rq));
	else if (virtblk_set_ranges(request, rq, count))
		return BLK_STS_RESOURCE;
	return BLK_STS_OK;
}

static blk_status_t map_data(struct request *rq, struct virtblk_request *request)
{
	unsigned int segments = blk_rq_nr_phys_segments(rq);

	if (!segments)
		return BLK_STS_OK;
	if (unlikely(virtblk_alloc_sg(request, segments)))
		return BLK_STS_RESOURCE;
	request->data.nents = virtblk_map_sg(rq, request->data.sgl);
	return BLK_STS_OK;
}

/* All that needs no lock. A status other than OK leaves nothing behind. */
static blk_status_t prepare(struct request *rq)
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
		return map_data(rq, request);
	case REQ_OP_FLUSH:
		return BLK_STS_OK;
	default:
		return map_ranges(rq, request);
	}
}

/*
 * Puts a request into the ring; it is started only then, because what is refused has to be as it
 * was. Nobody can complete it in between: that takes our lock.
 */
static int submit(struct virtblk_queue *q, struct request *rq)
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
 * The next completion starts the queue again. If there is none to come, or memory is what is
 * short, blk-mq tries again after a while. It does so, too, with BLK_STS_RESOURCE, if it missed
 * the completion: BLK_STS_DEV_RESOURCE would rely on it.
 */
static blk_status_t refused(struct virtblk_queue *q, struct blk_mq_hw_ctx *hctx, int err)
{
	if (err == -ENOSPC && q->in_flight) {
		q->full = true;
		blk_mq_stop_hw_queue(hctx);
	}
	return err == -EIO ? BLK_STS_IOERR : BLK_STS_RESOURCE;
}

static blk_status_t virtblk_queue_rq(struct blk_mq_hw_ctx *hctx, const struct blk_mq_queue_data *bd)
{
	struct virtblk_queue *q = queue_of(hctx);
	bool kick = false;
	unsigned long flags;
	blk_status_t status;
	int err;

	status = prepare(bd->rq);
	if (unlikely(status))
		return status;
	spin_lock_irqsave(&q->lock, flags);
	err = submit(q, bd->rq);
	if (unlikely(err))
		status = refused(q, hctx, err);
	if (bd->last || err)
		kick = virtblk_kick_prepare(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(q, kick);
	if (q->polled && !err)
		virtblk_start_watch(q->blk);
	return status;
}

static void virtblk_commit_rqs(struct blk_mq_hw_ctx *hctx)
{
	struct virtblk_queue *q = queue_of(hctx);
	unsigned long flags;
	bool kick;

	spin_lock_irqsave(&q->lock, flags);
	kick = virtblk_kick_prepare(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(q, kick);
}

#ifdef VIRTBLK_HAS_RQ_LIST
/* What does not fit is left for queue_rq(), in order. */
static void submit_batch(struct virtblk_queue *q, struct rq_list *batch, struct rq_list *rest)
{
	struct request *rq;
	unsigned long flags;
	bool kick, fits = true;

	spin_lock_irqsave(&q->lock, flags);
	while ((rq = rq_list_pop(batch))) {
		if (fits && !submit(q, rq))
			continue;
		if (fits)
			fits = false;
		else
			virtblk_free_data(blk_mq_rq_to_pdu(rq));
		rq_list_add_tail(rest, rq);
	}
	kick = virtblk_kick_prepare(q);
	spin_unlock_irqrestore(&q->lock, flags);
	virtblk_kick(q, kick);
	if (q->polled)
		virtblk_start_watch(q->blk);
}

static void virtblk_queue_rqs(struct rq_list *list)
{
	struct rq_list batch = { }, rest = { };
	struct virtblk_queue *q = NULL;
	struct request *rq;

	while ((rq = rq_list_pop(list))) {
		struct virtblk_queue *next = queue_of(rq->mq_hctx);

		if (q && q != next)
			submit_batch(q, &batch, &rest);
		q = next;
		rq_list_add_tail(prepare(rq) == BLK_STS_OK ? &batch : &rest, rq);
	}
	if (!rq_list_empty(&batch))
		submit_batch(q, &batch, &rest);
	*list = rest;
}
#endif

static void virtblk_rq_map_queues(struct blk_mq_tag_set *set)
{
	struct virtblk *blk = set->driver_data;

	virtblk_map_queues(blk, &set->map[HCTX_TYPE_DEFAULT], false);
	if (set->nr_maps <= HCTX_TYPE_POLL)
		return;
	set->map[HCTX_TYPE_READ].nr_queues = 0;
	virtblk_map_queues(blk, &set->map[HCTX_TYPE_POLL], true);
}

static int virtblk_init_rq(struct blk_mq_tag_set *set, struct request *rq, unsigned int hctx,
			   virtblk_node_t node)
{
	virtblk_init_request(blk_mq_rq_to_pdu(rq));
	return 0;
}

const struct blk_mq_ops virtblk_mq_ops = {
	.queue_rq = virtblk_queue_rq,
#ifdef VIRTBLK_HAS_RQ_LIST
	.queue_rqs = virtblk_queue_rqs,
#endif
	.commit_rqs = virtblk_commit_rqs,
	.init_request = virtblk_init_rq,
	.complete = virtblk_complete_rq,
	.timeout = virtblk_timeout,
	.map_queues = virtblk_rq_map_queues,
	.poll = virtblk_poll,
};
