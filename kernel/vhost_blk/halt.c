// SPDX-License-Identifier: GPL-2.0-only
/*
 * Halts a device whose storage fails, if the owner asks for it: no queue takes a further chain, and
 * the driver does not see the requests that failed. The owner fetches their chains from a queue that
 * has stopped, and serves them itself.
 *
 * blk->halted and the reason in blk->failure change under failure_lock; a halt by the owner has no
 * reason there. The chains of a queue change under its vq.mutex.
 */
#include <linux/eventfd.h>

#include "arg.h"
#include "stages.h"

static_assert(sizeof_field(struct vhost_blk_kept, heads) ==
	      sizeof_field(struct vhost_blk_queue, kept));

/* True if the error of a request is one that the owner wants to halt it. @flags: VHOST_BLK_OPT_* */
static bool vhost_blk_error_halts(const struct vhost_blk_req *req, u32 flags)
{
	bool apart = req->type == VIRTIO_BLK_T_IN && flags & VHOST_BLK_OPT_READS_APART;
	u32 all = apart ? VHOST_BLK_OPT_READS_KEEP_FAILED : VHOST_BLK_OPT_KEEP_FAILED;
	u32 no_space = apart ? VHOST_BLK_OPT_READS_KEEP_NO_SPACE : VHOST_BLK_OPT_KEEP_NO_SPACE;

	/* Memory that the guest lacks is no error of the storage. */
	if (req->error == -EOPNOTSUPP || req->error == -EFAULT)
		return false;
	if (flags & no_space && (req->error == -ENOSPC || req->error == -EDQUOT))
		return true;
	return flags & all;
}

/* Halts the device. The first failure is the reason that the owner gets. */
static void vhost_blk_halt_by(const struct vhost_blk_req *req)
{
	struct vhost_blk *blk = req->q->blk;
	struct vhost_blk_failure *failure = &blk->failure;

	spin_lock(&blk->failure_lock);
	if (!blk->halted) {
		WRITE_ONCE(blk->halted, true);
		if (!failure->kinds && blk->failure_event)
			eventfd_signal(blk->failure_event);
		failure->kinds |= VHOST_BLK_FAILURE_HALTED;
		failure->halt_type = req->type;
		failure->halt_error = -req->error;
		failure->halt_sector = vhost_blk_first_sector(req);
		failure->halt_bytes = req->nr_ranges ?
			vhost_blk_range_sectors(req) << SECTOR_SHIFT : req->bytes;
	}
	spin_unlock(&blk->failure_lock);
}

/**
 * vhost_blk_handle_failure - keep a request that has ended with an error, or halt the device, if the
 *	owner wants that
 * @req: the request; its queue's vq.mutex is held
 *
 * A failed flush is never kept: another one would not write the lost data, and succeed.
 *
 * Return: true if the driver must not see it, because its queue keeps it, or because the device is
 * being closed: the next daemon replays it then.
 */
bool vhost_blk_handle_failure(struct vhost_blk_req *req)
{
	struct vhost_blk_queue *q = req->q;
	u32 flags = READ_ONCE(q->blk->opt.flags);

	if (READ_ONCE(q->blk->closing))
		return true;
	if (req->refused || !vhost_blk_error_halts(req, flags))
		return false;
	if (req->type == VIRTIO_BLK_T_FLUSH) {
		if (flags & VHOST_BLK_OPT_HALT_AT_FLUSH)
			vhost_blk_halt_by(req);
		return false;
	}
	/* A queue takes no chain after the first one, so they are as many as its ring at most. */
	if (WARN_ON_ONCE(q->nr_kept == ARRAY_SIZE(q->kept)))
		return false;
	vhost_blk_halt_by(req);
	vhost_blk_request_failed(req);
	req->kept = true;
	q->kept[q->nr_kept++] = req->head;
	q->stats.chains--; /* the owner adds nr_kept */
	return true;
}

/**
 * vhost_blk_halt - halt the device for a reason that the owner knows
 * @blk: the device; its dev.mutex is held
 */
void vhost_blk_halt(struct vhost_blk *blk)
{
	spin_lock(&blk->failure_lock);
	WRITE_ONCE(blk->halted, true);
	spin_unlock(&blk->failure_lock);
}

/**
 * vhost_blk_end_halt - end a halt, unless the owner's options halt the device
 * @blk: the device, whose queues are stopped; its dev.mutex is held
 *
 * A worker sees it: its queue starts after this, under vq.mutex.
 */
void vhost_blk_end_halt(struct vhost_blk *blk)
{
	spin_lock(&blk->failure_lock);
	WRITE_ONCE(blk->halted, !!(blk->opt.flags & VHOST_BLK_OPT_HALT));
	if (!blk->halted)
		blk->failure.kinds &= ~VHOST_BLK_FAILURE_HALTED;
	spin_unlock(&blk->failure_lock);
}

/* Fills in @kept, of which the caller has set the index and the fields that stay. */
static int vhost_blk_copy_kept(struct vhost_blk *blk, struct vhost_blk_kept *kept)
{
	struct vhost_blk_queue *q = vhost_blk_queue_at(blk, kept->index);

	if (!q)
		return -ENOBUFS;
	if (mutex_lock_killable(&q->vq.mutex))
		return -EINTR;
	kept->size = sizeof(*kept);
	kept->count = q->nr_kept;
	memcpy(kept->heads, q->kept, q->nr_kept * sizeof(*q->kept));
	mutex_unlock(&q->vq.mutex);
	return 0;
}

/**
 * vhost_blk_get_kept - VHOST_BLK_GET_KEPT
 * @blk: the device; its dev.mutex is held
 * @argp: the argument
 *
 * The owner's memory is written without vq.mutex: it may be a file of the owner's own FUSE server, or
 * have a userfaultfd, and the owner then decides when the write ends.
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_get_kept(struct vhost_blk *blk, void __user *argp)
{
	const size_t first = offsetof(struct vhost_blk_kept, heads);
	int room = vhost_blk_room(argp, sizeof(struct vhost_blk_kept), first);
	struct vhost_blk_kept *kept;
	size_t bytes;
	int err;

	if (room < 0)
		return room;
	kept = kzalloc(sizeof(*kept), GFP_KERNEL_ACCOUNT);
	if (!kept)
		return -ENOMEM;
	err = copy_from_user(kept, argp, first) ? -EFAULT : vhost_blk_copy_kept(blk, kept);
	if (!err) {
		bytes = min_t(size_t, room, first + kept->count * sizeof(*kept->heads));
		err = copy_to_user(argp, kept, bytes) ? -EFAULT : 0;
	}
	kfree(kept);
	return err;
}

/**
 * vhost_blk_forget_halt - end a halt, and forget the kept chains: they are those of the old owner
 * @blk: the device, whose queues are stopped and whose options are reset; its dev.mutex is held
 */
void vhost_blk_forget_halt(struct vhost_blk *blk)
{
	unsigned int i;

	vhost_blk_end_halt(blk);
	spin_lock(&blk->failure_lock);
	blk->failure = (struct vhost_blk_failure) {};
	spin_unlock(&blk->failure_lock);
	for (i = 0; i < blk->num_queues; i++) {
		struct vhost_blk_queue *q = blk->queues + i;

		mutex_lock(&q->vq.mutex);
		q->nr_kept = 0;
		mutex_unlock(&q->vq.mutex);
	}
}
