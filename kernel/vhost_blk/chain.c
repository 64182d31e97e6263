// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 1, chain: takes a chain from the avail ring. The vhost core reads and checks the
 * descriptors and translates them into vq.iov: device-readable elements first, then
 * device-writable ones.
 */
#include "stages.h"
#include "trace.h"

/**
 * vhost_blk_fault - stop taking from a faulty ring; requests in flight still complete
 * @q: the queue; its vq.mutex is held
 */
void vhost_blk_fault(struct vhost_blk_queue *q)
{
	if (q->state == VHOST_BLK_RUNNING || q->state == VHOST_BLK_PAUSED)
		vhost_blk_set_state(q, VHOST_BLK_FAULTED);
}

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

	if (unlikely(!q->free))
		return -EAGAIN;

	chain->log_num = 0;
	head = vhost_get_vq_desc(vq, vq->iov, ARRAY_SIZE(vq->iov), &chain->out, &chain->in,
				 log ? vq->log : NULL, &chain->log_num);
	if (unlikely(head < 0)) {
		if (head == -EAGAIN)
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
 * vhost_blk_get_req - take a request from the free list, which is not empty
 * @q: the queue; its vq.mutex is held
 *
 * Return: the request, counted as in flight.
 */
struct vhost_blk_req *vhost_blk_get_req(struct vhost_blk_queue *q)
{
	struct vhost_blk_req *req = q->free;

	q->free = req->next_free;
	req->gen = q->gen;
	WRITE_ONCE(q->inflight[req->gen], q->inflight[req->gen] + 1);
	return req;
}

/**
 * vhost_blk_put_req - return a request to the free list; the last one wakes the drain
 * @req: the request, which holds no resources; its queue's vq.mutex is held
 */
void vhost_blk_put_req(struct vhost_blk_req *req)
{
	struct vhost_blk_queue *q = req->q;
	unsigned int left = q->inflight[req->gen] - 1;

	req->next_free = q->free;
	q->free = req;
	/* Last use of the request. Pairs with vhost_blk_gen_empty(). */
	smp_store_release(&q->inflight[req->gen], left);
	if (!left)
		wake_up_all(&q->drained);
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
