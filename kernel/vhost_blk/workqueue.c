// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 3 of operations that may sleep for long: range commands, flushes of files that are not in
 * memory, file I/O that would block, large requests. They run on the backend's workqueue, charged to
 * the owner's cgroup, so that neither the queue nor its completions wait for them.
 */
#include <linux/fs.h>
#include <linux/cred.h>
#include <linux/falloc.h>
#include <linux/kthread.h>
#include <linux/memcontrol.h>
#include <linux/sched/mm.h>

#include "backend.h"
#include "stages.h"

/* Sectors of a range between two checks of the device. */
#define VHOST_BLK_RANGE_PIECE_SECTORS	(1u << 21)
/* Time between two tries of I/O without memory. */
#define VHOST_BLK_RETRY_INTERVAL	msecs_to_jiffies(10)

/**
 * vhost_blk_defer - pass a request to the workqueue
 * @req: the request
 */
void vhost_blk_defer(struct vhost_blk_req *req)
{
	WRITE_ONCE(req->deferred, true);
	INIT_WORK(&req->work, vhost_blk_deferred_work);
	queue_work(req->be->wq, &req->work);
}

static int vhost_blk_flush(struct vhost_blk_backend *be)
{
	return be->bdev ? blkdev_issue_flush(be->bdev) : vhost_blk_flush_file(be);
}

static int vhost_blk_bdev_range(struct vhost_blk_req *req, u64 sector, u32 sectors, bool unmap)
{
	struct block_device *bdev = req->be->bdev;

	switch (req->type) {
	case VIRTIO_BLK_T_DISCARD:
		/* The block layer treats "not supported" as success. */
		if (!bdev_max_discard_sectors(bdev))
			return -EOPNOTSUPP;
		return blkdev_issue_discard(bdev, sector, sectors, GFP_KERNEL);
	case VIRTIO_BLK_T_WRITE_ZEROES:
		return blkdev_issue_zeroout(bdev, sector, sectors, GFP_KERNEL,
					    unmap ? 0 : BLKDEV_ZERO_NOUNMAP);
	default:
		return blkdev_issue_secure_erase(bdev, sector, sectors, GFP_KERNEL);
	}
}

static int vhost_blk_file_range(struct vhost_blk_req *req, u64 sector, u32 sectors, bool unmap)
{
	loff_t pos = (loff_t)sector << SECTOR_SHIFT;
	loff_t len = (loff_t)sectors << SECTOR_SHIFT;
	int mode = FALLOC_FL_PUNCH_HOLE, err;

	if (req->type == VIRTIO_BLK_T_SECURE_ERASE)
		return -EOPNOTSUPP;
	if (req->type == VIRTIO_BLK_T_WRITE_ZEROES && !unmap)
		mode = FALLOC_FL_ZERO_RANGE;
	err = vfs_fallocate(req->be->file, mode | FALLOC_FL_KEEP_SIZE, pos, len);
	if (err == -EOPNOTSUPP && req->type == VIRTIO_BLK_T_WRITE_ZEROES)
		err = vhost_blk_file_zero(req, pos, len);
	return err;
}

/**
 * vhost_blk_should_abort - true if a long request has lost its purpose
 * @req: the request
 *
 * Return: true if the device is being closed, or the storage was removed.
 */
bool vhost_blk_should_abort(const struct vhost_blk_req *req)
{
	return READ_ONCE(req->q->blk->closing) || READ_ONCE(req->be->dead);
}

/**
 * vhost_blk_abort_error - the error of a request that is aborted
 * @req: the request
 *
 * Return: -ENODEV if the storage was removed; -EIO otherwise.
 */
int vhost_blk_abort_error(const struct vhost_blk_req *req)
{
	return READ_ONCE(req->be->dead) ? -ENODEV : -EIO;
}

/**
 * vhost_blk_wait_to_retry - wait before a repetition of I/O that failed for lack of memory
 * @req: the request
 *
 * I/O with an fsync cannot be repeated: fsync reports lost writes only once, and lack of memory may
 * have lost them.
 *
 * Return: true after the wait; false without a wait if the I/O has failed.
 */
bool vhost_blk_wait_to_retry(const struct vhost_blk_req *req)
{
	if (!req->be->bdev && (req->durable || req->type == VIRTIO_BLK_T_FLUSH))
		return false;
	if (vhost_blk_should_abort(req))
		return false;
	schedule_timeout_uninterruptible(VHOST_BLK_RETRY_INTERVAL);
	return true;
}

/* A DISCARD is a hint: a stop or a pause need not wait for the rest of it. */
static bool vhost_blk_skips_rest(const struct vhost_blk_req *req)
{
	return req->type == VIRTIO_BLK_T_DISCARD &&
	       READ_ONCE(req->q->state) != VHOST_BLK_RUNNING;
}

/* In pieces, so that closing the device need not wait for terabytes. */
static int vhost_blk_do_range(struct vhost_blk_req *req, const struct vhost_blk_range *range)
{
	u64 sector = range->sector;
	u32 left = range->sectors;
	int err = 0;

	while (left && !err) {
		u32 part = min_t(u32, left, VHOST_BLK_RANGE_PIECE_SECTORS);

		if (vhost_blk_should_abort(req))
			return vhost_blk_abort_error(req);
		/* The owner's option is for requests taken after it. */
		if (vhost_blk_became_read_only(req->be))
			return -EROFS;
		if (vhost_blk_skips_rest(req))
			return 0;
		err = req->be->bdev ? vhost_blk_bdev_range(req, sector, part, range->unmap) :
				      vhost_blk_file_range(req, sector, part, range->unmap);
		if (err == -ENOMEM && vhost_blk_wait_to_retry(req)) {
			err = 0;
			continue;
		}
		sector += part;
		left -= part;
		cond_resched();
	}
	return err;
}

static int vhost_blk_do_ranges(struct vhost_blk_req *req)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < req->nr_ranges && !err; i++)
		err = vhost_blk_do_range(req, &req->ranges[i]);
	if (!err && req->durable)
		err = vhost_blk_flush(req->be);
	return err;
}

static int vhost_blk_do_once(struct vhost_blk_req *req)
{
	switch (req->type) {
	case VIRTIO_BLK_T_IN:
	case VIRTIO_BLK_T_OUT:
		return req->be->bdev ? vhost_blk_bdev_rw(req) : vhost_blk_file_rw(req);
	case VIRTIO_BLK_T_FLUSH:
		return vhost_blk_flush(req->be);
	default:
		return vhost_blk_do_ranges(req);
	}
}

static int vhost_blk_do_deferred(struct vhost_blk_req *req)
{
	int err;

	if (req->bytes > VHOST_BLK_PIECE_BYTES)
		return vhost_blk_do_large(req);
	do
		err = vhost_blk_do_once(req);
	while (err == -ENOMEM && vhost_blk_wait_to_retry(req));
	return err;
}

static struct mem_cgroup *vhost_blk_owner_memcg(const struct vhost_blk_backend *be)
{
	return be->memcg_css ? mem_cgroup_from_css(be->memcg_css) : NULL;
}

/**
 * vhost_blk_deferred_work - do a request; may sleep
 * @work: the request's
 */
void vhost_blk_deferred_work(struct work_struct *work)
{
	struct vhost_blk_req *req = container_of(work, struct vhost_blk_req, work);
	const struct cred *old_cred;
	struct mem_cgroup *old;
	int err;

	/* The owner's limits apply: quotas and reserved blocks. */
	old_cred = override_creds(req->be->cred);
	if (req->be->blkcg_css)
		kthread_associate_blkcg(req->be->blkcg_css);
	old = set_active_memcg(vhost_blk_owner_memcg(req->be));
	err = vhost_blk_do_deferred(req);
	set_active_memcg(old);
	if (req->be->blkcg_css)
		kthread_associate_blkcg(NULL);
	revert_creds(old_cred);
	vhost_blk_end_io(req, err);
}
