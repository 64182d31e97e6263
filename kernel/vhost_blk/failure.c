// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reports failures of the backend to its owner: an eventfd that is signalled once, and a record
 * that grows until the owner fetches it.
 */
#include <linux/eventfd.h>
#include <linux/log2.h>

#include "arg.h"
#include "backend.h"
#include "stages.h"

/**
 * vhost_blk_note_failure - add a failure to the record; the first one wakes the owner
 * @blk: the device
 * @kind: VHOST_BLK_FAILURE_*
 * @error: a negative errno
 * @req: the request that failed, or NULL
 */
void vhost_blk_note_failure(struct vhost_blk *blk, u32 kind, int error,
			    const struct vhost_blk_req *req)
{
	struct vhost_blk_failure *failure = &blk->failure;

	spin_lock(&blk->failure_lock);
	if (!failure->kinds && blk->failure_event)
		eventfd_signal(blk->failure_event);
	/* The reason of a halt is noted before its failure. */
	if (!(failure->kinds & ~VHOST_BLK_FAILURE_HALTED)) {
		failure->error = -error;
		failure->sector = req ? vhost_blk_first_sector(req) : U64_MAX;
	}
	failure->kinds |= kind;
	failure->count += !!req;
	spin_unlock(&blk->failure_lock);
}

/*
 * True if a durable write to a file failed in its sync, which may have lost earlier writes. A write
 * that fails for the other reasons sent nothing to the storage, or met a write-back error, which
 * be->wb_err keeps for the next FLUSH. Flushes, also those after range commands, are
 * vhost_blk_flush_file()'s, which keeps their errors.
 */
static bool vhost_blk_lost_sync(const struct vhost_blk_req *req)
{
	if (req->be->bdev || req->type != VIRTIO_BLK_T_OUT || !req->durable)
		return false;
	switch (req->error) {
	case -ENOSPC:
	case -EDQUOT:
	case -EFBIG:
	case -EROFS:
	case -EINVAL:
	case -ENOMEM:
	case -EPERM:
		return false;
	default:
		return true;
	}
}

static_assert(VHOST_BLK_FAILURE_READ_ONLY == 1u << (VHOST_BLK_FAILURE_KINDS - 1));

/**
 * vhost_blk_request_failed - note that the I/O of a request failed
 * @req: the request; its queue's vq.mutex is held
 */
void vhost_blk_request_failed(const struct vhost_blk_req *req)
{
	u32 kind = VHOST_BLK_FAILURE_IO;

	switch (req->error) {
	case -EOPNOTSUPP:
	case -EFAULT: /* memory that the guest lacks */
		return;
	case -ENODEV:
	case -ENXIO:
		kind = VHOST_BLK_FAILURE_REMOVED;
		break;
	case -ENOSPC:
	case -EDQUOT:
		kind = VHOST_BLK_FAILURE_NO_SPACE;
		break;
	case -ETIMEDOUT:
		kind = VHOST_BLK_FAILURE_TIMEOUT;
		break;
	case -EROFS:
		kind = VHOST_BLK_FAILURE_READ_ONLY;
		break;
	}
	req->q->stats.failures[ilog2(kind)]++;
	if (vhost_blk_lost_sync(req))
		WRITE_ONCE(req->be->sync_error, req->error);
	if (READ_ONCE(req->be->sync_error) && (req->type == VIRTIO_BLK_T_FLUSH || req->durable))
		kind |= VHOST_BLK_FAILURE_SYNC;
	vhost_blk_note_failure(req->q->blk, kind, req->error, req);
}

/**
 * vhost_blk_set_failure_event - VHOST_BLK_SET_FAILURE_EVENT
 * @blk: the device
 * @fd: an eventfd, or VHOST_FILE_UNBIND
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_set_failure_event(struct vhost_blk *blk, int fd)
{
	struct eventfd_ctx *event = vhost_blk_get_event(fd);

	if (IS_ERR(event))
		return PTR_ERR(event);
	spin_lock(&blk->failure_lock);
	swap(event, blk->failure_event);
	if (blk->failure.kinds && blk->failure_event)
		eventfd_signal(blk->failure_event);
	spin_unlock(&blk->failure_lock);
	vhost_blk_put_event(event);
	return 0;
}

/**
 * vhost_blk_get_failure - VHOST_BLK_GET_FAILURE
 * @blk: the device
 * @argp: the argument
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_get_failure(struct vhost_blk *blk, void __user *argp)
{
	struct vhost_blk_failure failure;
	int room = vhost_blk_room(argp, sizeof(failure),
				  offsetofend(struct vhost_blk_failure, kinds));

	if (room < 0)
		return room;
	spin_lock(&blk->failure_lock);
	failure = blk->failure;
	blk->failure = (struct vhost_blk_failure) {};
	spin_unlock(&blk->failure_lock);
	failure.size = sizeof(failure);
	return copy_to_user(argp, &failure, room) ? -EFAULT : 0;
}
