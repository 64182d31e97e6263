// SPDX-License-Identifier: GPL-2.0-only
/*
 * The storage behind a device: attaching, swapping and detaching it, and its removal.
 */
#include <linux/cred.h>
#include <linux/magic.h>
#include <linux/memcontrol.h>
#include <linux/pagemap.h>
#include <linux/stat.h>

#include "backend.h"
#include "queue.h"

/* Most sleeping operations at once. */
#define VHOST_BLK_DEFERRED_MAX	64

/**
 * vhost_blk_backend_bytes - size of the storage, as of now
 * @be: the backend, which is not dead
 *
 * Return: bytes.
 */
u64 vhost_blk_backend_bytes(const struct vhost_blk_backend *be)
{
	return be->bdev ? bdev_nr_bytes(be->bdev) : i_size_read(file_inode(be->file));
}

/* Drains the requests of a dead backend and releases it, so that its driver can be unbound. */
static void vhost_blk_dead_work(struct work_struct *work)
{
	struct vhost_blk_backend *be = container_of(work, struct vhost_blk_backend, dead_work);
	struct file *bdev_file, *file;
	unsigned int i;

	vhost_blk_stop_polling(be->blk);
	for (i = 0; i < be->blk->num_queues; i++) {
		struct vhost_blk_queue *q = be->blk->queues + i;

		/* The next holder of vq.mutex sees that it is dead. */
		mutex_lock(&q->vq.mutex);
		mutex_unlock(&q->vq.mutex);
		/* A stopped queue, or one with a new backend, has no request of this one. */
		wait_event(q->drained,
			   (vhost_blk_gen_empty(q, 0) && vhost_blk_gen_empty(q, 1)) ||
			   READ_ONCE(q->vq.private_data) != be);
	}
	vhost_blk_allow_polling(be->blk);
	mutex_lock(&be->lock);
	bdev_file = be->bdev_file;
	be->bdev_file = NULL;
	file = be->file;
	be->file = NULL;
	mutex_unlock(&be->lock);
	if (bdev_file)
		bdev_fput(bdev_file);
	if (file)
		fput(file);
}

/* Called with bd_holder_lock held, which it must release: the block layer's rule. */
static void vhost_blk_mark_dead(struct block_device *bdev, bool surprise)
{
	struct vhost_blk_backend *be = bdev->bd_holder;

	WRITE_ONCE(be->dead, true);
	vhost_blk_note_failure(be->blk, VHOST_BLK_FAILURE_REMOVED, -ENODEV, NULL);
	queue_work(vhost_blk_wait_wq, &be->dead_work);
	mutex_unlock(&bdev->bd_holder_lock);
}

static const struct blk_holder_ops vhost_blk_holder_ops = {
	.mark_dead = vhost_blk_mark_dead,
};

/* With be->lock held: vhost_blk_mark_dead() may run as soon as the device is open. */
static int vhost_blk_open_bdev(struct vhost_blk_backend *be)
{
	struct block_device *bdev = I_BDEV(be->file->f_mapping->host);
	blk_mode_t mode = BLK_OPEN_READ | (be->read_only ? 0 : BLK_OPEN_WRITE);
	struct file *file;
	int err;

	file = bdev_file_open_by_dev(bdev->bd_dev, mode, be, &vhost_blk_holder_ops);
	if (IS_ERR(file))
		return PTR_ERR(file);
	be->bdev_file = file;
	be->bdev = file_bdev(file);
	/* A driver that does not know zones would write to forbidden sectors. */
	if (bdev_is_zoned(be->bdev))
		return -EOPNOTSUPP;
	/* The disk is gone, and another one has its number. */
	if (be->bdev != bdev)
		return -ENODEV;
	be->read_only |= bdev_read_only(be->bdev);
	be->lbs = bdev_logical_block_size(be->bdev);
	/*
	 * Stricter than the device's own limit: some drivers rely on blocks that do not cross a
	 * page (null_blk writes past the end of one). Linux guests align buffers like this
	 * anyway.
	 */
	be->mem_mask = bdev_dma_alignment(be->bdev) | (be->lbs - 1);
	be->polls = bdev_get_queue(be->bdev)->limits.features & BLK_FEAT_POLL &&
		    bdev_nowait(be->bdev);
	/* vhost_blk_dead_work() takes be->lock. */
	if (READ_ONCE(be->dead))
		return -ENODEV;
	/*
	 * The page cache of the device is not used from here on. An error reports earlier writes
	 * that it has lost, once.
	 */
	err = sync_blockdev(be->bdev);
	if (err)
		return err;
	invalidate_bdev(be->bdev);
	return 0;
}

/* O_DIRECT's alignment of offset and memory. */
static int vhost_blk_direct_limits(struct vhost_blk_backend *be)
{
	struct kstat stat;
	int err;

	err = vfs_getattr(&be->file->f_path, &stat, STATX_DIOALIGN, 0);
	if (err)
		return err;
	be->lbs = SECTOR_SIZE;
	be->mem_mask = SECTOR_SIZE - 1;
	if (stat.result_mask & STATX_DIOALIGN && stat.dio_offset_align) {
		be->lbs = max_t(unsigned int, stat.dio_offset_align, SECTOR_SIZE);
		/* Each page's part of a buffer gets its own vector, so it must be whole blocks. */
		be->mem_mask = (max(stat.dio_mem_align, 1u) - 1) | (be->lbs - 1);
	}
	return be->lbs > PAGE_SIZE ? -EINVAL : 0;
}

static int vhost_blk_open_regular(struct vhost_blk_backend *be)
{
	struct file *file = be->file;
	unsigned long magic = file_inode(file)->i_sb->s_magic;

	if (!(file->f_mode & FMODE_CAN_READ) || !file->f_op->read_iter ||
	    (!be->read_only && !file->f_op->write_iter) || file->f_flags & O_APPEND)
		return -EINVAL;
	be->lbs = SECTOR_SIZE;
	be->iocb_flags = file->f_iocb_flags;
	be->direct = file->f_flags & O_DIRECT;
	be->nowait = file->f_mode & FMODE_NOWAIT;
	be->in_memory = magic == TMPFS_MAGIC || magic == RAMFS_MAGIC;
	be->wb_err = filemap_sample_wb_err(file->f_mapping);
	return be->direct ? vhost_blk_direct_limits(be) : 0;
}

/* The owner's credentials and cgroups, which the workqueue uses. */
static void vhost_blk_charge_to_current(struct vhost_blk_backend *be)
{
	be->cred = get_current_cred();
#ifdef CONFIG_BLK_CGROUP
	be->blkcg_css = task_get_css(current, io_cgrp_id);
#ifdef CONFIG_MEMCG
	be->memcg_css = cgroup_get_e_css(be->blkcg_css->cgroup, &memory_cgrp_subsys);
#endif
#endif
}

/**
 * vhost_blk_put_backend - release a backend that no queue uses
 * @be: the backend, or NULL
 */
void vhost_blk_put_backend(struct vhost_blk_backend *be)
{
	if (!be)
		return;
	/* Closed first: no removal is announced after this. */
	mutex_lock(&be->lock);
	if (be->bdev_file) {
		/* Other readers may have filled it with data that is stale now. */
		invalidate_bdev(be->bdev);
		bdev_fput(be->bdev_file);
	}
	be->bdev_file = NULL;
	mutex_unlock(&be->lock);
	cancel_work_sync(&be->dead_work);
	if (be->wq)
		destroy_workqueue(be->wq);
	if (be->file)
		fput(be->file);
	if (be->cred)
		put_cred(be->cred);
#ifdef CONFIG_BLK_CGROUP
	if (be->blkcg_css)
		css_put(be->blkcg_css);
	if (be->memcg_css)
		css_put(be->memcg_css);
#endif
	kfree(be);
}

static struct vhost_blk_backend *vhost_blk_open_backend(struct vhost_blk *blk, int fd)
{
	struct vhost_blk_backend *be;
	umode_t mode;
	int err;

	be = kzalloc(sizeof(*be), GFP_KERNEL_ACCOUNT);
	if (!be)
		return ERR_PTR(-ENOMEM);
	be->blk = blk;
	INIT_WORK(&be->dead_work, vhost_blk_dead_work);
	mutex_init(&be->lock);
	err = -EBADF;
	be->file = fget(fd);
	if (!be->file || !(be->file->f_mode & FMODE_READ))
		goto fail;
	be->read_only = !(be->file->f_mode & FMODE_WRITE);
	err = -ENOMEM;
	/* Frozen: a write after the image of a hibernation would corrupt the host's file system. */
	be->wq = alloc_workqueue("vhost_blk", WQ_UNBOUND | WQ_MEM_RECLAIM | WQ_FREEZABLE,
				 VHOST_BLK_DEFERRED_MAX);
	if (!be->wq)
		goto fail;
	mode = file_inode(be->file)->i_mode;
	mutex_lock(&be->lock);
	if (S_ISBLK(mode))
		err = vhost_blk_open_bdev(be);
	else
		err = S_ISREG(mode) ? vhost_blk_open_regular(be) : -EINVAL;
	if (!err)
		be->sectors = vhost_blk_backend_bytes(be) >> SECTOR_SHIFT;
	mutex_unlock(&be->lock);
	if (err)
		goto fail;
	vhost_blk_charge_to_current(be);
	return be;
fail:
	vhost_blk_put_backend(be);
	return ERR_PTR(err);
}

/* Return: 0 if the descriptor is the attached file or device, opened in the same mode; -EBADF, -EINVAL. */
static int vhost_blk_check_same_storage(struct vhost_blk_backend *be, int fd)
{
	struct file *file = fget(fd);
	bool same, can_write;

	if (!file)
		return -EBADF;
	can_write = file->f_mode & FMODE_WRITE;
	mutex_lock(&be->lock);
	same = be->file && file->f_mapping->host == be->file->f_mapping->host &&
	       can_write == !!(be->file->f_mode & FMODE_WRITE);
	mutex_unlock(&be->lock);
	fput(file);
	return same ? 0 : -EINVAL;
}

/* Starts the queues that are set up; dev.mutex protects their set-up. */
static int vhost_blk_start_ready(struct vhost_blk *blk)
{
	unsigned int i;
	int err;

	for (i = 0; i < blk->num_queues; i++) {
		struct vhost_blk_queue *q = blk->queues + i;

		if (!q->vq.num || !q->vq.desc || !q->vq.avail || !q->vq.used)
			continue;
		err = vhost_blk_start_queue(q, blk->backend);
		if (err)
			return err;
	}
	return 0;
}

/* Readers under backend_mutex see the new backend from here on. */
static void vhost_blk_publish_backend(struct vhost_blk *blk, struct vhost_blk_backend *be)
{
	mutex_lock(&blk->backend_mutex);
	blk->backend = be;
	mutex_unlock(&blk->backend_mutex);
}

/* A file that is attached over itself keeps its lost writes. Nothing is in flight. */
static void vhost_blk_inherit_sync_error(struct vhost_blk_backend *be,
					 const struct vhost_blk_backend *old)
{
	if (!old || old->bdev || be->bdev || file_inode(old->file) != file_inode(be->file))
		return;
	be->wb_err = old->wb_err;
	be->sync_error = old->sync_error;
}

/* Moves all running queues to @be. No request is in flight during the change. */
static int vhost_blk_swap_backend(struct vhost_blk *blk, struct vhost_blk_backend *be)
{
	struct vhost_blk_backend *old = blk->backend;
	unsigned int i;
	int err;

	err = vhost_blk_pause_all(blk);
	if (err)
		return err;
	vhost_blk_inherit_sync_error(be, old);
	for (i = 0; i < blk->num_queues; i++) {
		struct vhost_virtqueue *vq = &blk->queues[i].vq;

		mutex_lock(&vq->mutex);
		if (vhost_vq_get_backend(vq))
			vhost_vq_set_backend(vq, be);
		mutex_unlock(&vq->mutex);
	}
	vhost_blk_publish_backend(blk, be);
	vhost_blk_resume_all(blk);
	vhost_blk_put_backend(old);
	return 0;
}

static int vhost_blk_detach(struct vhost_blk *blk)
{
	struct vhost_blk_backend *old;
	int err = vhost_blk_stop_all(blk);

	if (err)
		return err;
	old = blk->backend;
	vhost_blk_publish_backend(blk, NULL);
	vhost_blk_put_backend(old);
	return 0;
}

static int vhost_blk_attach(struct vhost_blk *blk, int fd)
{
	bool first = !blk->backend;
	struct vhost_blk_backend *be;
	int err;

	/* The attached block device cannot be claimed twice, and need not be. */
	if (blk->backend && !READ_ONCE(blk->backend->dead) &&
	    blk->backend->bdev && !vhost_blk_check_same_storage(blk->backend, fd))
		return vhost_blk_start_ready(blk);
	be = vhost_blk_open_backend(blk, fd);
	if (IS_ERR(be))
		return PTR_ERR(be);
	err = vhost_blk_swap_backend(blk, be);
	if (err) {
		vhost_blk_put_backend(be);
		return err;
	}
	err = vhost_blk_start_ready(blk);
	/*
	 * After a swap the new backend stays; a failed first attach is undone. Only SIGKILL prevents
	 * that, until the close: no IOTLB message unmaps a ring while this holds dev.mutex.
	 */
	if (err && first)
		vhost_blk_detach(blk);
	return err;
}

/**
 * vhost_blk_set_backend - VHOST_BLK_SET_BACKEND
 * @blk: the device; its dev.mutex is held
 * @file: the argument
 *
 * Return: 0, or a negative errno.
 */
long vhost_blk_set_backend(struct vhost_blk *blk, const struct vhost_vring_file *file)
{
	struct vhost_blk_queue *q = vhost_blk_queue_at(blk, file->index);
	int err;

	if (!q)
		return -ENOBUFS;
	if (!file->index)
		return file->fd == VHOST_FILE_UNBIND ? vhost_blk_detach(blk) :
						       vhost_blk_attach(blk, file->fd);

	if (file->fd == VHOST_FILE_UNBIND)
		return vhost_blk_stop_queue(q);
	if (!blk->backend || READ_ONCE(blk->backend->dead))
		return -ENODEV;
	err = vhost_blk_check_same_storage(blk->backend, file->fd);
	return err ?: vhost_blk_start_queue(q, blk->backend);
}
