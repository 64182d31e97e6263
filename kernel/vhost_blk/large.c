// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 3 of requests that are larger than a piece. They are firmware's, which reads whole files with
 * one descriptor. The workqueue moves them piece by piece: they need no more memory than other
 * requests, and the queue serves its other requests meanwhile.
 */
#include <linux/kthread.h>

#include "backend.h"
#include "stages.h"

/* Time between two tries to map a piece without memory. */
#define VHOST_BLK_LARGE_INTERVAL	msecs_to_jiffies(10)

/**
 * struct vhost_blk_large - the buffers of a large request, because vq.iov is reused meanwhile
 * @data: what was not moved yet
 * @iov: its memory
 */
struct vhost_blk_large {
	struct iov_iter data;
	struct iovec iov[];
};

static_assert(sizeof(struct vhost_blk_large) <= VHOST_BLK_LARGE_BYTES &&
	      !(sizeof(struct vhost_blk_large) % 8));

/**
 * vhost_blk_submit_large - start an IN or OUT that is larger than a piece
 * @req: the request
 * @data: its buffers
 *
 * Return: 0; -ENOMEM to try again.
 */
int vhost_blk_submit_large(struct vhost_blk_req *req, const struct iov_iter *data)
{
	struct vhost_blk_large *large;

	large = vhost_blk_alloc(req, 1, struct_size(large, iov, data->nr_segs));
	if (!large)
		return -ENOMEM;
	vhost_blk_save_iter(&large->data, large->iov, data);
	req->large = large;
	vhost_blk_defer(req);
	return 0;
}

/* Until vhost_blk_leave_queue() this task may use the queue's reserve and the owner's memory. */
static void vhost_blk_enter_queue(struct vhost_blk_queue *q)
{
	vhost_blk_stop_polling(q->blk);
	/* The owner's memory stays while requests are in flight. */
	kthread_use_mm(q->blk->dev.mm);
	mutex_lock(&q->vq.mutex);
}

static void vhost_blk_leave_queue(struct vhost_blk_queue *q)
{
	mutex_unlock(&q->vq.mutex);
	kthread_unuse_mm(q->blk->dev.mm);
	vhost_blk_allow_polling(q->blk);
}

static int vhost_blk_try_map_piece(struct vhost_blk_req *req)
{
	struct iov_iter piece = req->large->data;
	unsigned int pages;
	bool fits;
	int err;

	vhost_blk_enter_queue(req->q);
	/* vhost_blk_submit() reads req->bytes before it releases vq.mutex. */
	req->bytes = min_t(size_t, iov_iter_count(&piece), VHOST_BLK_PIECE_BYTES);
	iov_iter_truncate(&piece, req->bytes);
	fits = vhost_blk_fits_device(req, &piece, &pages);
	err = vhost_blk_map_data(req, &piece, fits, pages);
	if (err && err != -ENOMEM) {
		req->refused = true;
		req->q->stats.refused++;
	}
	vhost_blk_leave_queue(req->q);
	return err;
}

static int vhost_blk_map_piece(struct vhost_blk_req *req)
{
	int err;

	while ((err = vhost_blk_try_map_piece(req)) == -ENOMEM) {
		if (vhost_blk_should_abort(req))
			return vhost_blk_abort_error(req);
		schedule_timeout_uninterruptible(VHOST_BLK_LARGE_INTERVAL);
	}
	return err;
}

static int vhost_blk_unmap_piece(struct vhost_blk_req *req, int err)
{
	vhost_blk_enter_queue(req->q);
	req->error = err;
	if (req->bounced)
		vhost_blk_copy_back(req);
	vhost_blk_unmap_data(req);
	vhost_blk_leave_queue(req->q);
	return req->error;
}

/* Moves the next piece to or from req->sector. */
static int vhost_blk_move_piece(struct vhost_blk_req *req)
{
	int err;

	if (vhost_blk_should_abort(req))
		return vhost_blk_abort_error(req);
	err = vhost_blk_map_piece(req);
	if (err)
		return err;
	do
		err = req->be->bdev ? vhost_blk_bdev_rw(req) : vhost_blk_file_rw(req);
	while (err == -ENOMEM && vhost_blk_wait_to_retry(req));
	return vhost_blk_unmap_piece(req, err);
}

/**
 * vhost_blk_do_large - do an IN or OUT that is larger than a piece; may sleep
 * @req: the request
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_do_large(struct vhost_blk_req *req)
{
	u64 first_sector = req->sector;
	u32 total = req->bytes;
	int err = 0;

	while (iov_iter_count(&req->large->data) && !err) {
		err = vhost_blk_move_piece(req);
		iov_iter_advance(&req->large->data, req->bytes);
		req->sector += req->bytes >> SECTOR_SHIFT;
		cond_resched();
	}
	vhost_blk_enter_queue(req->q);
	req->sector = first_sector;
	req->bytes = total;
	vhost_blk_free(req, req->large);
	vhost_blk_leave_queue(req->q);
	return err;
}
