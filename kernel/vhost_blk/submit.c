// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 3, submit: starts the I/O of a request. It may be finished when this returns.
 */
#include "backend.h"
#include "stages.h"
#include "trace.h"

/*
 * Counts bytes of @req as in flight. One request always passes, so that a limit below the size of a
 * request cannot stop the disk.
 */
static bool vhost_blk_charge(struct vhost_blk_req *req, atomic64_t *inflight, u64 bytes)
{
	struct vhost_blk *blk = req->q->blk;
	u64 total = atomic64_add_return(bytes, inflight);

	if (unlikely(total > READ_ONCE(vhost_blk_inflight_max) && total != bytes)) {
		/*
		 * A task that clears blk->any_starved also sees q->starved. Pairs with
		 * smp_store_mb() in vhost_blk_uncharge().
		 */
		smp_store_mb(req->q->starved, true);
		/*
		 * Store any_starved before the subtraction. Pairs with atomic64_sub_return() in
		 * vhost_blk_uncharge().
		 */
		smp_store_mb(blk->any_starved, true);
		if (atomic64_sub_return(bytes, inflight))
			return false;
		/* All other requests have finished: none would wake this queue. */
		WRITE_ONCE(req->q->starved, false);
		atomic64_add(bytes, inflight);
	}
	req->charged = bytes;
	return true;
}

static void vhost_blk_uncharge(struct vhost_blk_req *req, atomic64_t *inflight)
{
	struct vhost_blk *blk = req->q->blk;
	unsigned int i;

	/* A full barrier. Pairs with smp_store_mb() in vhost_blk_charge(). */
	atomic64_sub_return(req->charged, inflight);
	req->charged = 0;
	if (likely(!READ_ONCE(blk->any_starved)))
		return;
	/* A queue that starves after this sets it again. */
	smp_store_mb(blk->any_starved, false);
	/* A queue that stops now keeps its worker until this section ends: see vhost_blk_stop(). */
	rcu_read_lock();
	for (i = 0; i < blk->num_queues; i++) {
		struct vhost_blk_queue *q = blk->queues + i;

		if (READ_ONCE(q->starved)) {
			WRITE_ONCE(q->starved, false);
			vhost_poll_queue(&q->vq.poll);
		}
	}
	rcu_read_unlock();
}

/* Copies the dirty log's entries of the chain: vq.log is reused. */
static int vhost_blk_save_log(struct vhost_blk_req *req, const struct vhost_blk_chain *chain)
{
	struct vhost_virtqueue *vq = &req->q->vq;

	if (likely(!vhost_has_feature(vq, VHOST_F_LOG_ALL)))
		return 0;
	req->log = vhost_blk_alloc(req, chain->log_num, sizeof(*req->log));
	if (!req->log)
		return -ENOMEM;
	memcpy(req->log, vq->log, chain->log_num * sizeof(*req->log));
	req->log_num = chain->log_num;
	if (!vq->iotlb)
		return 0;
	req->log_iov = vhost_blk_alloc(req, chain->in, sizeof(*req->log_iov));
	if (!req->log_iov)
		return -ENOMEM;
	memcpy(req->log_iov, vq->iov + chain->out, chain->in * sizeof(*req->log_iov));
	req->log_iov_num = chain->in;
	return 0;
}

static int vhost_blk_submit_rw(struct vhost_blk_req *req, struct iov_iter *data)
{
	unsigned int pages;
	bool fits;
	u64 bytes;
	int err;

	if (unlikely(!req->bytes)) {
		vhost_blk_end_io(req, 0);
		return 0;
	}
	if (req->be->in_memory && req->bytes <= VHOST_BLK_PIECE_BYTES) {
		vhost_blk_time_submit(req);
		if (vhost_blk_copy_file(req, data)) {
			vhost_blk_end_io(req, 0);
			return 0;
		}
	}
	fits = vhost_blk_fits_device(req, data, &pages);
	/* A large request has one piece in flight. */
	bytes = (u64)min_t(unsigned int, pages, VHOST_BLK_PIECE_PAGES) * PAGE_SIZE;
	if (unlikely(!vhost_blk_charge(req, &req->q->blk->inflight_bytes, bytes)))
		return -EAGAIN;
	if (unlikely(req->bytes > VHOST_BLK_PIECE_BYTES)) {
		vhost_blk_time_submit(req);
		return vhost_blk_submit_large(req, data);
	}
	err = vhost_blk_map_data(req, data, fits, pages);
	if (unlikely(err))
		return err;
	vhost_blk_time_submit(req);
	if (req->be->bdev)
		vhost_blk_submit_bdev(req);
	else
		vhost_blk_submit_file(req);
	return 0;
}

/*
 * Bounds the bytes being zeroed, because a stop waits for them. They have their own counter, so that
 * a long command does not delay reads and writes.
 */
static int vhost_blk_submit_zeroes(struct vhost_blk_req *req)
{
	u64 bytes = vhost_blk_range_sectors(req) << SECTOR_SHIFT;

	if (!vhost_blk_charge(req, &req->q->blk->inflight_range_bytes, bytes))
		return -EAGAIN;
	vhost_blk_time_submit(req);
	vhost_blk_defer(req);
	return 0;
}

/* The serial number, cut to the driver's buffer. */
static int vhost_blk_copy_id(struct vhost_blk_req *req, struct iov_iter *data)
{
	struct vhost_blk *blk = req->q->blk;
	u8 id[VHOST_BLK_SERIAL_BYTES];
	size_t bytes = min(sizeof(id), iov_iter_count(data));

	spin_lock(&blk->serial_lock);
	memcpy(id, blk->serial, sizeof(id));
	spin_unlock(&blk->serial_lock);
	if (copy_to_iter(id, bytes, data) != bytes)
		return -EFAULT;
	req->written = bytes;
	return 0;
}

static void vhost_blk_start_flush(struct vhost_blk_req *req)
{
	/* A polled device's would wait for a tag: see vhost_blk_submit_bdev(). */
	if (req->be->bdev && !vhost_blk_polls(req))
		vhost_blk_submit_flush(req);
	else if (req->be->in_memory)
		vhost_blk_end_io(req, vhost_blk_flush_file(req->be));
	else
		vhost_blk_defer(req);
}

static int vhost_blk_start(struct vhost_blk_req *req, struct iov_iter *data)
{
	int err;

	trace_vhost_blk_submit(req, req->bytes);
	switch (req->type) {
	case VIRTIO_BLK_T_IN:
	case VIRTIO_BLK_T_OUT:
		return vhost_blk_submit_rw(req, data);
	case VIRTIO_BLK_T_GET_ID:
		err = vhost_blk_copy_id(req, data);
		if (!err)
			vhost_blk_end_io(req, 0);
		return err;
	case VIRTIO_BLK_T_FLUSH:
		vhost_blk_time_submit(req);
		vhost_blk_start_flush(req);
		return 0;
	case VIRTIO_BLK_T_DISCARD:
		vhost_blk_time_submit(req);
		/* A stop skips the rest of it. */
		vhost_blk_defer(req);
		return 0;
	default:
		return vhost_blk_submit_zeroes(req);
	}
}

static void vhost_blk_init_req(struct vhost_blk_req *req, const struct vhost_blk_chain *chain)
{
	struct vhost_blk_queue *q = req->q;

	req->be = vhost_vq_get_backend(&q->vq);
	req->status_addr = NULL;
	req->type = VIRTIO_BLK_T_IN;
	req->sector = 0;
	req->head = chain->head;
	req->bytes = 0;
	req->written = 0;
	req->error = 0;
	req->durable = false;
	req->nowait = false;
	req->deferred = false;
	req->refused = false;
	req->kept = false;
	req->cut_off = false;
	WRITE_ONCE(req->start_ns, q->now_ns);
	req->submit_ns = 0;
}

static void vhost_blk_release_ranges(struct vhost_blk_req *req)
{
	if (req->ranges != &req->inline_range)
		vhost_blk_free(req, req->ranges);
	req->ranges = NULL;
	req->nr_ranges = 0;
	if (req->charged)
		vhost_blk_uncharge(req, &req->q->blk->inflight_range_bytes);
}

/**
 * vhost_blk_release - release the resources of a request except its pages
 * @req: the request, whose pages are unmapped
 */
void vhost_blk_release(struct vhost_blk_req *req)
{
	if (req->log || req->log_iov) {
		vhost_blk_free(req, req->log);
		vhost_blk_free(req, req->log_iov);
		req->log = NULL;
		req->log_iov = NULL;
	}
	if (unlikely(req->ranges))
		vhost_blk_release_ranges(req);
	if (req->charged)
		vhost_blk_uncharge(req, &req->q->blk->inflight_bytes);
}

/* Bytes that the limits count. Storage discards faster than it writes. */
static u64 vhost_blk_moved_bytes(const struct vhost_blk_req *req)
{
	u64 bytes;

	if (likely(!req->nr_ranges))
		return req->bytes;
	bytes = vhost_blk_range_sectors(req) << SECTOR_SHIFT;
	return req->type == VIRTIO_BLK_T_DISCARD ? bytes / VHOST_BLK_DISCARDED_PER_WRITTEN : bytes;
}

/**
 * vhost_blk_submit - make a request of a chain and start it
 * @q: the queue; its vq.mutex is held and a request is free
 * @chain: the chain
 * @bytes: increased by the data bytes
 *
 * Return: 1; -EAGAIN if the chain was put back for lack of memory or of bytes in flight. A
 * completion or a timer then runs the loop again.
 */
int vhost_blk_submit(struct vhost_blk_queue *q, const struct vhost_blk_chain *chain,
		      unsigned int *bytes)
{
	struct vhost_blk_req *req = vhost_blk_get_req(q);
	struct iov_iter data;
	u64 moved;
	int err;

	vhost_blk_init_req(req, chain);
	vhost_blk_region_take(q, chain->head);
	err = vhost_blk_parse(req, chain, &data);
	moved = err ? 0 : vhost_blk_moved_bytes(req);
	/* The status byte of a refused request is logged, too, or a migration would lose it. */
	if (unlikely(vhost_blk_save_log(req, chain)))
		err = -ENOMEM;
	if (likely(!err))
		err = vhost_blk_start(req, &data);
	if (likely(!err)) {
		*bytes += req->bytes;
		if (unlikely(READ_ONCE(q->blk->limit.set)))
			vhost_blk_limit_took(q, moved);
		return 1;
	}
	/* After a fatal signal to the owner the next daemon replays it. */
	if (err == -ENOMEM || fatal_signal_pending(current)) {
		vhost_blk_try_later(q);
		err = -EAGAIN;
	}
	if (err == -EAGAIN) {
		vhost_blk_region_untake(q, chain->head);
		vhost_blk_release(req);
		vhost_blk_put_back_chain(q, req);
		return -EAGAIN;
	}
	/* Report a failure to the owner. If it halts the device, the request gets no status. */
	req->refused = !vhost_blk_storage_failed(req, err);
	q->stats.refused += req->refused;
	vhost_blk_end_io(req, err);
	if (unlikely(READ_ONCE(q->blk->limit.set)))
		vhost_blk_limit_took(q, 0);
	return 1;
}
