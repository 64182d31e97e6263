// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 3 for block devices: one bio a request, inside the request, over the request's own vectors.
 * The block layer splits it to the device's limits. Nothing is allocated.
 */
#include "backend.h"
#include "stages.h"

static void vhost_blk_end_bio(struct bio *bio)
{
	struct vhost_blk_req *req = container_of(bio, struct vhost_blk_req, bio);
	int error = blk_status_to_errno(bio->bi_status);

	/*
	 * vhost_blk_poll_bdev() skips it from now on: its poll queue may go, and bio_poll() does not
	 * check that for a cookie.
	 */
	WRITE_ONCE(bio->bi_cookie, BLK_QC_T_NONE);
	bio_uninit(bio);
	/*
	 * No tag, a bio to split, or a lost poll queue: see vhost_blk_submit_bdev(). The bio's own
	 * flags are no test, because stacked drivers clear them. Or no memory: see
	 * vhost_blk_wait_to_retry().
	 */
	if (unlikely(error == -ENOMEM ||
		     (req->nowait && (error == -EAGAIN || error == -EOPNOTSUPP)))) {
		vhost_blk_defer(req);
		return;
	}
	vhost_blk_end_io(req, error);
}

/**
 * vhost_blk_polls - true if a request's I/O completes only by polling
 * @req: the request
 *
 * Return: true if the queue has to poll.
 */
bool vhost_blk_polls(const struct vhost_blk_req *req)
{
	return req->be->polls && READ_ONCE(req->q->blk->opt.flags) & VHOST_BLK_OPT_IOPOLL;
}

static blk_opf_t vhost_blk_opf(const struct vhost_blk_req *req)
{
	if (req->type == VIRTIO_BLK_T_OUT)
		return REQ_OP_WRITE | REQ_SYNC | REQ_IDLE | (req->durable ? REQ_FUA : 0);
	return REQ_OP_READ;
}

static void vhost_blk_init_bio(struct vhost_blk_req *req, blk_opf_t opf)
{
	bio_init(&req->bio, req->be->bdev, req->vecs, req->nr_vecs, opf);
	req->bio.bi_vcnt = req->nr_vecs;
	req->bio.bi_iter.bi_size = req->bytes;
	req->bio.bi_iter.bi_sector = req->sector;
}

/**
 * vhost_blk_submit_bdev - start an IN or OUT
 * @req: the request, its pages mapped
 */
void vhost_blk_submit_bdev(struct vhost_blk_req *req)
{
	blk_opf_t opf = vhost_blk_opf(req);

	if (vhost_blk_polls(req)) {
		/*
		 * It must not wait for a tag: only polling, which is this thread's next step,
		 * completes the requests that hold the tags.
		 */
		opf |= REQ_POLLED | REQ_NOWAIT;
		req->nowait = true;
		list_add_tail(&req->polled, &req->q->polled);
	}
	vhost_blk_init_bio(req, opf);
	req->bio.bi_end_io = vhost_blk_end_bio;
	submit_bio(&req->bio);
}

/**
 * vhost_blk_bdev_rw - do an IN or OUT of a block device; may sleep
 * @req: the request, its pages mapped
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_bdev_rw(struct vhost_blk_req *req)
{
	int err;

	vhost_blk_init_bio(req, vhost_blk_opf(req));
	err = submit_bio_wait(&req->bio);
	bio_uninit(&req->bio);
	return err;
}

/**
 * vhost_blk_submit_flush - start a FLUSH
 * @req: the request
 *
 * Submits an empty write with a preflush; only the block layer itself makes REQ_OP_FLUSH bios.
 */
void vhost_blk_submit_flush(struct vhost_blk_req *req)
{
	bio_init(&req->bio, req->be->bdev, NULL, 0, REQ_OP_WRITE | REQ_PREFLUSH);
	req->bio.bi_end_io = vhost_blk_end_bio;
	submit_bio(&req->bio);
}

/*
 * A multipath driver sets bi_bdev to a path, which may be removed when the bio has ended: RCU keeps
 * it until bio_poll() has its queue. The open file keeps the disk itself, whose poll function may
 * sleep (null_blk).
 */
static void vhost_blk_poll_bio(struct vhost_blk_req *req, struct io_comp_batch *iob)
{
	bool is_path;

	rcu_read_lock();
	is_path = READ_ONCE(req->bio.bi_bdev) != req->be->bdev;
	if (is_path)
		bio_poll(&req->bio, iob, BLK_POLL_ONESHOT);
	rcu_read_unlock();
	if (!is_path)
		bio_poll(&req->bio, iob, BLK_POLL_ONESHOT);
}

/**
 * vhost_blk_poll_bdev - reap completions that have no interrupt
 * @q: the queue; its vq.mutex is held
 */
void vhost_blk_poll_bdev(struct vhost_blk_queue *q)
{
	struct vhost_blk_req *req, *next;
	DEFINE_IO_COMP_BATCH(iob);

	list_for_each_entry_safe(req, next, &q->polled, polled) {
		/* The workqueue has it now, and reports its completion. */
		if (READ_ONCE(req->deferred)) {
			list_del_init(&req->polled);
			continue;
		}
		/* A bio that was merged into another one, or split, has no cookie. */
		if (READ_ONCE(req->bio.bi_cookie) == BLK_QC_T_NONE)
			continue;
		vhost_blk_poll_bio(req, &iob);
		/* Set by the first completion that waits in the batch. */
		if (iob.complete)
			iob.complete(&iob);
		return;
	}
}
