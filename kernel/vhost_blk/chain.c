// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 1, chain: takes a chain from the avail ring. The vhost core reads and checks the
 * descriptors and translates them into vq.iov: device-readable elements first, then
 * device-writable ones.
 */
#include "stages.h"
#include "trace.h"

/**
 * vhost_blk_take_chain - take the next chain
 * @q: the queue, which runs; its vq.mutex is held, and its notifications are disabled: only
 *	vhost_blk_submit_batch() may call this
 * @chain: filled in
 *
 * Return: 1; 0 if there is none, or the ring is faulty; -EAGAIN if a completion or an IOTLB update
 * has to come first. Both run the loop again.
 */
int vhost_blk_take_chain(struct vhost_blk_queue *q, struct vhost_blk_chain *chain)
{
	struct vhost_virtqueue *vq = &q->vq;
	bool log = vhost_has_feature(vq, VHOST_F_LOG_ALL);
	int head;

	if (unlikely(!q->free || q->chain_miss_sent))
		return -EAGAIN;

	chain->log_num = 0;
	head = vhost_get_vq_desc(vq, vq->iov, ARRAY_SIZE(vq->iov), &chain->out, &chain->in,
				 log ? vq->log : NULL, &chain->log_num);
	if (unlikely(head < 0)) {
		q->chain_miss_sent = head == -EAGAIN;
		if (q->chain_miss_sent)
			return -EAGAIN;
		vhost_blk_fault(q);
		vq_err(vq, "vhost-blk: queue %u stops: malformed chain or ring (%d)\n",
		       vhost_blk_queue_index(q), head);
		return 0;
	}
	if (head == vq->num)
		return 0;

	chain->head = head;
	q->stats.chains++;
	trace_vhost_blk_chain(q, chain);
	return 1;
}

/**
 * vhost_blk_put_back_chain - undo vhost_blk_take_chain() and vhost_blk_get_req()
 * @q: the queue; its vq.mutex is held
 * @req: the request made for the last chain that was taken
 */
void vhost_blk_put_back_chain(struct vhost_blk_queue *q, struct vhost_blk_req *req)
{
	vhost_blk_discard_desc(&q->vq);
	q->stats.chains--;
	vhost_blk_put_req(req);
}
