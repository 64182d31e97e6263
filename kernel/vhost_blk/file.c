// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stage 3 for regular files: one kiocb a request. First with IOCB_NOWAIT on the queue's worker; I/O
 * that would block goes to the workqueue. A file in memory does not know IOCB_NOWAIT, but its I/O is
 * a copy, which takes less time than the way through the workqueue: the worker does it, and waits for
 * a page that was swapped out. The workqueue gets what this copy cannot do.
 */
#include <linux/cred.h>
#include <linux/fsnotify.h>
#include <linux/pagemap.h>

#include "backend.h"
#include "stages.h"

/* EINTR: a fatal signal to the worker's owner, not a fault of the request. */
static bool vhost_blk_must_defer(ssize_t result)
{
	return result == -EAGAIN || result == -EOPNOTSUPP || result == -EINTR || result == -ENOMEM;
}

/*
 * Immediately, or in a completion: a file system that meets a held lock after it has submitted the
 * first extents of a request reports it in the completion (iomap on XFS).
 */
static void vhost_blk_file_end(struct vhost_blk_req *req, ssize_t result)
{
	if (req->type == VIRTIO_BLK_T_OUT)
		kiocb_end_write(&req->iocb);
	/* A part may be done; the workqueue repeats the whole request. */
	if (result == req->bytes)
		vhost_blk_end_io(req, 0);
	else if (result >= 0 || vhost_blk_must_defer(result))
		vhost_blk_defer(req);
	else
		vhost_blk_end_io(req, result);
}

static void vhost_blk_file_complete(struct kiocb *iocb, long result)
{
	vhost_blk_file_end(container_of(iocb, struct vhost_blk_req, iocb), result);
}

static void vhost_blk_init_iocb(struct vhost_blk_req *req)
{
	req->iocb = (struct kiocb) {
		.ki_filp = req->be->file,
		.ki_pos = (loff_t)req->sector << SECTOR_SHIFT,
		.ki_flags = req->be->iocb_flags | (req->durable ? IOCB_DSYNC : 0) |
			    (req->type == VIRTIO_BLK_T_OUT ? IOCB_WRITE : 0),
		.ki_ioprio = get_current_ioprio(),
	};
}

/*
 * vfs_iocb_iter_write() without its kiocb_start_write(), which waits: see
 * vhost_blk_try_start_write().
 */
static ssize_t vhost_blk_iocb_write(struct vhost_blk_req *req, struct iov_iter *iter)
{
	struct file *file = req->be->file;
	ssize_t result;

	result = rw_verify_area(WRITE, file, &req->iocb.ki_pos, req->bytes);
	if (result < 0)
		return result;
	result = file->f_op->write_iter(&req->iocb, iter);
	if (result > 0)
		fsnotify_modify(file);
	return result;
}

static void vhost_blk_init_iter(struct vhost_blk_req *req, struct iov_iter *iter)
{
	iov_iter_bvec(iter, req->type == VIRTIO_BLK_T_OUT ? ITER_SOURCE : ITER_DEST, req->vecs,
		      req->nr_vecs, req->bytes);
}

/* Like kiocb_start_write(), but does not wait for a frozen file system. */
static bool vhost_blk_try_start_write(struct vhost_blk_req *req)
{
	struct super_block *sb = file_inode(req->be->file)->i_sb;

	if (!sb_start_write_trylock(sb))
		return false;
	/* The completion releases it, in another context. */
	__sb_writers_release(sb, SB_FREEZE_WRITE);
	return true;
}

/*
 * True if it would wait in spite of IOCB_NOWAIT: a file system may honour the flag until it has
 * copied the data, and then write it out and flush the disk (XFS).
 */
static bool vhost_blk_would_block(const struct vhost_blk_req *req)
{
	const struct vhost_blk_backend *be = req->be;

	if (!be->nowait)
		return true;
	if (req->type != VIRTIO_BLK_T_OUT)
		return false;
	/* A worker of the kernel's is not frozen for a hibernation, and the workqueue is. */
	if (current->flags & PF_KTHREAD)
		return true;
	if (!iocb_is_dsync(&req->iocb))
		return false;
	return !be->direct || IS_DAX(file_inode(be->file));
}

/* The owner's quotas and security labels apply, also on a worker that is the kernel's thread. */
static ssize_t vhost_blk_begin_rw(struct vhost_blk_req *req, struct iov_iter *iter)
{
	const struct cred *old_cred = override_creds(req->be->cred);
	ssize_t result;

	if (req->type == VIRTIO_BLK_T_OUT)
		result = vhost_blk_iocb_write(req, iter);
	else
		result = vfs_iocb_iter_read(req->be->file, &req->iocb, iter);
	revert_creds(old_cred);
	return result;
}

/**
 * vhost_blk_copy_file - do an IN or OUT of a file in memory by the guest's own addresses
 * @req: the request
 * @data: its buffers; the caller runs in the owner's address space
 *
 * The I/O is one copy, so that its pages need no pins.
 *
 * Return: true if it is done. Otherwise the caller maps the pages and starts the request: that finds
 * the reason. A part may be copied.
 */
bool vhost_blk_copy_file(struct vhost_blk_req *req, const struct iov_iter *data)
{
	struct iov_iter iter = *data;
	ssize_t result;

	vhost_blk_init_iocb(req);
	if (req->type != VIRTIO_BLK_T_OUT)
		return vhost_blk_begin_rw(req, &iter) == req->bytes;
	if (!vhost_blk_try_start_write(req))
		return false;
	result = vhost_blk_begin_rw(req, &iter);
	kiocb_end_write(&req->iocb);
	return result == req->bytes;
}

/**
 * vhost_blk_submit_file - start an IN or OUT
 * @req: the request, its pages mapped
 */
void vhost_blk_submit_file(struct vhost_blk_req *req)
{
	struct iov_iter iter;
	ssize_t result;

	vhost_blk_init_iocb(req);
	if (vhost_blk_would_block(req) ||
	    (req->type == VIRTIO_BLK_T_OUT && !vhost_blk_try_start_write(req))) {
		vhost_blk_defer(req);
		return;
	}
	vhost_blk_init_iter(req, &iter);
	req->iocb.ki_flags |= IOCB_NOWAIT;
	req->iocb.ki_complete = vhost_blk_file_complete;
	result = vhost_blk_begin_rw(req, &iter);
	if (result != -EIOCBQUEUED)
		vhost_blk_file_end(req, result);
}

/**
 * vhost_blk_file_rw - do an IN or OUT of a file; may sleep
 * @req: the request, its pages mapped
 *
 * Return: 0, or a negative errno; -EIO if the file ends inside the range.
 */
int vhost_blk_file_rw(struct vhost_blk_req *req)
{
	struct iov_iter iter;
	ssize_t result;

	vhost_blk_init_iocb(req);
	vhost_blk_init_iter(req, &iter);
	do {
		if (req->type == VIRTIO_BLK_T_OUT)
			result = vfs_iocb_iter_write(req->be->file, &req->iocb, &iter);
		else
			result = vfs_iocb_iter_read(req->be->file, &req->iocb, &iter);
	} while (result > 0 && iov_iter_count(&iter));
	if (result < 0)
		return result;
	return iov_iter_count(&iter) ? -EIO : 0;
}

/**
 * vhost_blk_file_zero - write zeroes for a file system without a better way
 * @req: the request
 * @pos: first byte
 * @len: number of bytes
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_file_zero(struct vhost_blk_req *req, loff_t pos, loff_t len)
{
	struct file *file = req->be->file;
	struct bio_vec vecs[VHOST_BLK_INLINE_VECS];
	struct iov_iter iter;
	ssize_t result = 0;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(vecs); i++)
		bvec_set_page(&vecs[i], ZERO_PAGE(0), PAGE_SIZE, 0);
	while (len && !vhost_blk_should_abort(req)) {
		struct kiocb iocb = {
			.ki_filp = file,
			.ki_pos = pos,
			.ki_flags = req->be->iocb_flags | IOCB_WRITE,
		};

		iov_iter_bvec(&iter, ITER_SOURCE, vecs, ARRAY_SIZE(vecs),
			      min_t(loff_t, len, sizeof(vecs) / sizeof(*vecs) * PAGE_SIZE));
		result = vfs_iocb_iter_write(file, &iocb, &iter);
		if (result <= 0)
			break;
		pos += result;
		len -= result;
		cond_resched();
	}
	return result < 0 ? result : len ? -EIO : 0;
}

/**
 * vhost_blk_flush_file - sync a file; may sleep
 * @be: the backend, a regular file
 *
 * fsync() reports a lost write once for each open file, and the page counts as clean from then on.
 * So a file whose sync failed has no successful FLUSH any more. be->wb_err also finds failures that
 * another caller got: a durable write, or another program's fsync().
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_flush_file(struct vhost_blk_backend *be)
{
	int err = READ_ONCE(be->sync_error);

	if (!err)
		err = vfs_fsync(be->file, 1);
	if (!err)
		err = filemap_check_wb_err(be->file->f_mapping, be->wb_err);
	if (err)
		WRITE_ONCE(be->sync_error, err);
	return err;
}
