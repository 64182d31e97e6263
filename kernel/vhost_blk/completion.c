// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 4, completion: collects finished I/O and writes the status byte.
 */
#include "stages.h"
#include "trace.h"

/**
 * vhost_blk_end_io - the I/O of a request is finished
 * @req: the request; it belongs to the queue again when this returns
 * @error: 0, or a negative errno
 *
 * Any context. The queue's worker does the rest, if it is still there.
 */
void vhost_blk_end_io(struct vhost_blk_req *req, int error)
{
	struct vhost_blk_queue *q = req->q;

	req->error = error;
	vhost_blk_time_end(req);
	/*
	 * After llist_add() the worker may free @req, and other tasks may stop the queue and free
	 * the device. vhost_blk_stop() and vhost_blk_destroy_device() first wait for a grace period,
	 * and so for this section.
	 */
	rcu_read_lock();
	/*
	 * Only the first entry of the list queues the work, which handles the later ones too.
	 * llist_add() is a full barrier; it pairs with the one in vhost_blk_loop_end().
	 */
	if (llist_add(&req->done, &q->done) && !READ_ONCE(q->looping))
		vhost_blk_queue_done(q);
	rcu_read_unlock();
}

/**
 * vhost_blk_queue_done - queue the work that ends finished I/O
 * @q: the queue
 */
void vhost_blk_queue_done(struct vhost_blk_queue *q)
{
	/* The worker of a killed owner accepts no work. */
	if (!vhost_vq_work_queue(&q->vq, &q->done_work))
		queue_delayed_work(vhost_blk_system_wq, &q->orphan_work, 0);
}

static u8 vhost_blk_status(int error)
{
	switch (error) {
	case 0:
		return VIRTIO_BLK_S_OK;
	case -EOPNOTSUPP:
		return VIRTIO_BLK_S_UNSUPP;
	default:
		return VIRTIO_BLK_S_IOERR;
	}
}

static void vhost_blk_count_latency(struct vhost_blk_queue *q, const struct vhost_blk_req *req)
{
	struct vhost_blk_latency *latency;
	enum vhost_blk_op op;
	u64 us;

	switch (req->type) {
	case VIRTIO_BLK_T_IN:
		op = VHOST_BLK_OP_READ;
		break;
	case VIRTIO_BLK_T_OUT:
		op = VHOST_BLK_OP_WRITE;
		break;
	case VIRTIO_BLK_T_FLUSH:
		op = VHOST_BLK_OP_FLUSH;
		break;
	case VIRTIO_BLK_T_GET_ID:
		return;
	default:
		op = VHOST_BLK_OP_DISCARD;
	}
	latency = q->stats.latency + op;
	/* The clocks of two CPUs may differ slightly. */
	us = max_t(s64, q->now_ns - req->start_ns, 0) / NSEC_PER_USEC;
	latency->count[min_t(unsigned int, fls64(us), VHOST_BLK_LATENCY_BUCKETS - 1)]++;
	latency->sum_us += us;
}

static void vhost_blk_count_req(struct vhost_blk_queue *q, const struct vhost_blk_req *req)
{
	if (likely(!req->refused))
		vhost_blk_count_latency(q, req);
	q->stats.slow += req->deferred;
	if (unlikely(req->error)) {
		q->stats.failed += !req->refused;
		if (!req->refused)
			vhost_blk_request_failed(req);
	} else if (req->type == VIRTIO_BLK_T_IN) {
		q->stats.read_bytes += req->bytes;
	} else if (req->type == VIRTIO_BLK_T_OUT) {
		q->stats.write_bytes += req->bytes;
	} else if (req->type == VIRTIO_BLK_T_DISCARD) {
		q->stats.discards++;
		q->stats.discarded_bytes += vhost_blk_range_sectors(req) << SECTOR_SHIFT;
	}
}

/* Bytes from the start of the buffers that may have been written, also if the request failed. */
static u64 vhost_blk_dirty_bytes(const struct vhost_blk_req *req)
{
	switch (req->type) {
	case VIRTIO_BLK_T_IN:
		return req->bytes;
	case VIRTIO_BLK_T_GET_ID:
		return VHOST_BLK_SERIAL_BYTES;
	default:
		return 0;
	}
}

/* Cuts host addresses down to @bytes; returns how many remain. */
static unsigned int vhost_blk_cut_iovs(struct iovec *iov, unsigned int n, u64 bytes)
{
	unsigned int i;

	for (i = 0; i < n && bytes; i++) {
		iov[i].iov_len = min_t(u64, iov[i].iov_len, bytes);
		bytes -= iov[i].iov_len;
	}
	return i;
}

/*
 * Marks the pages of the data that may have been written, and that of the status byte: the last one
 * of the buffers. The buffers as a whole may have terabytes, if descriptors name the same memory,
 * and the core marks them page by page.
 */
static void vhost_blk_log_dirty(struct vhost_blk_req *req)
{
	struct vhost_virtqueue *vq = &req->q->vq;
	struct vhost_log status = {};
	struct iovec status_iov = {};
	u64 total = 0, bytes;
	unsigned int i, iovs;
	int err = 0;

	/* The log may be off by now. */
	if (!vhost_has_feature(vq, VHOST_F_LOG_ALL))
		return;
	for (i = 0; i < req->log_num; i++) {
		total += req->log[i].len;
		if (req->log[i].len)
			status.addr = req->log[i].addr + req->log[i].len - 1;
	}
	if (!total || (vq->iotlb && !req->log_iov))
		return;
	status.len = 1;
	for (i = 0; i < req->log_iov_num; i++) {
		if (!req->log_iov[i].iov_len)
			continue;
		status_iov.iov_base = req->log_iov[i].iov_base + req->log_iov[i].iov_len - 1;
		status_iov.iov_len = 1;
	}
	/* vhost_log_write() hits a BUG() if the length exceeds that of the log entries. */
	bytes = min(vhost_blk_dirty_bytes(req), total - 1);
	iovs = vhost_blk_cut_iovs(req->log_iov, req->log_iov_num, bytes);
	if (bytes)
		err = vhost_log_write(vq, req->log, req->log_num, bytes, req->log_iov, iovs);
	if (err >= 0)
		err = vhost_log_write(vq, &status, 1, 1, &status_iov, 1);
	if (err < 0)
		vq_err(vq, "vhost-blk: the dirty log cannot be written: pages may be missing in it\n");
	cond_resched();
}

/*
 * Ends one request. Returns true, and the length of its used entry, if it may be published. It may
 * not if a fatal signal to its owner prevented a write; the next daemon replays it.
 */
static bool vhost_blk_finish(struct vhost_blk_req *req, u32 *written)
{
	bool reached = true;

	*written = 0;
	if (unlikely(req->bounced))
		reached = vhost_blk_copy_back(req);
	if (req->status_addr) {
		*written = 1;
		if (!req->error)
			*written += req->type == VIRTIO_BLK_T_IN ? req->bytes : req->written;
		if (put_user(vhost_blk_status(req->error), req->status_addr)) {
			vq_err(&req->q->vq, "vhost-blk: the status byte cannot be written\n");
			reached = false;
		}
	}
	if (unlikely(!reached && fatal_signal_pending(current)))
		return false;
	if (unlikely(req->log))
		vhost_blk_log_dirty(req);
	trace_vhost_blk_completion(req, *written);
	vhost_blk_count_req(req->q, req);
	return true;
}

static struct llist_node *vhost_blk_take_done(struct vhost_blk_queue *q)
{
	struct llist_node *list = llist_del_all(&q->done);

	/* In the order in which they finished. */
	return list && list->next ? llist_reverse_order(list) : list;
}

/* Releases the resources of finished requests, after the call: the driver need not wait. */
static unsigned int vhost_blk_put_all(struct llist_node *list)
{
	struct vhost_blk_req *req, *next;
	unsigned int n = 0;

	llist_for_each_entry_safe(req, next, list, done) {
		if (unlikely(!list_empty(&req->polled)))
			list_del_init(&req->polled);
		vhost_blk_unmap_data(req);
		vhost_blk_release(req);
		vhost_blk_put_req(req);
		n++;
	}
	return n;
}

/* Ends requests; their used entries go to vq.heads from @n on. Returns their end. */
static unsigned int vhost_blk_finish_all(struct vhost_blk_queue *q, struct llist_node *list,
					 unsigned int n)
{
	struct vhost_virtqueue *vq = &q->vq;
	struct vhost_blk_req *req;
	u32 written;

	q->now_ns = local_clock();
	llist_for_each_entry(req, list, done) {
		if (unlikely(req->error) && vhost_blk_handle_failure(req))
			continue;
		if (unlikely(!vhost_blk_finish(req, &written)))
			continue;
		vq->heads[n].id = cpu_to_vhost32(vq, req->head);
		vq->heads[n].len = cpu_to_vhost32(vq, written);
		n++;
	}
	return n;
}

/*
 * Ends the requests of a list, and returns their number. Their used entries are published together, or follow the
 * unpublished ones, if the rings cannot be reached.
 */
static unsigned int vhost_blk_complete_list(struct vhost_blk_queue *q, struct llist_node *list,
					    bool publish)
{
	unsigned int before = q->unpublished, kept = q->nr_kept, n, ended;

	n = vhost_blk_finish_all(q, list, before) - before;
	if (!publish)
		q->unpublished += n;
	else if (likely(n))
		vhost_blk_publish(q, n);
	vhost_blk_time_used(q, list);
	ended = vhost_blk_put_all(list);
	q->stats.dropped += ended - n - (q->nr_kept - kept);
	return ended;
}

/* Cuts a list after @n requests, at least one. Returns the rest. */
static struct llist_node *vhost_blk_cut(struct llist_node *list, unsigned int n)
{
	struct llist_node *rest;

	while (--n && list->next)
		list = list->next;
	rest = list->next;
	list->next = NULL;
	return rest;
}

/**
 * vhost_blk_complete - end finished requests and tell the driver
 * @q: the queue, with no unpublished entries; its vq.mutex is held by its worker
 * @run: the run of the loop; gets the requests that exceed the size of a batch, which come next
 *
 * Return: how many there were.
 */
unsigned int vhost_blk_complete(struct vhost_blk_queue *q, struct vhost_blk_run *run)
{
	struct llist_node *list = run->ended ?: vhost_blk_take_done(q);

	run->ended = NULL;
	if (!list)
		return 0;
	if (run->batch_size)
		run->ended = vhost_blk_cut(list, run->batch_size);
	return vhost_blk_complete_list(q, list, true);
}

/**
 * vhost_blk_complete_unpublished - end all finished requests while the rings cannot be reached
 * @q: the queue; its vq.mutex is held by its worker
 *
 * The addresses of a request were translated when it was taken, so all steps are possible except
 * the used entry, which stays in vq.heads. So a drain, and with it an IOTLB invalidation, waits
 * only for the storage.
 */
void vhost_blk_complete_unpublished(struct vhost_blk_queue *q)
{
	struct llist_node *list = vhost_blk_take_done(q);

	if (list)
		vhost_blk_complete_list(q, list, false);
}

/**
 * vhost_blk_orphan_work - end requests whose worker is gone
 * @work: the queue's
 *
 * The owner was killed. No driver is there to call, and its memory may be gone, so this only
 * releases the pages.
 */
void vhost_blk_orphan_work(struct work_struct *work)
{
	struct vhost_blk_queue *q =
		container_of(to_delayed_work(work), struct vhost_blk_queue, orphan_work);
	bool again = true;

	/* Its holder may wait for the owner's memory, and the workqueue is that of the system. */
	if (mutex_trylock(&q->vq.mutex)) {
		q->stats.dropped += vhost_blk_put_all(vhost_blk_take_done(q));
		vhost_blk_poll_bdev(q);
		again = !list_empty(&q->polled);
		mutex_unlock(&q->vq.mutex);
	}
	/* Only this work finishes it: the descriptor may still be open elsewhere. */
	if (again)
		queue_delayed_work(vhost_blk_system_wq, &q->orphan_work, VHOST_BLK_POLL_INTERVAL);
}
