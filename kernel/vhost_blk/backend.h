/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_BACKEND_H
#define _VHOST_BLK_BACKEND_H

#include <linux/blkdev.h>
#include <linux/cgroup.h>
#include <linux/fs.h>
#include <linux/workqueue.h>

#include "vhost_blk.h"

/**
 * struct vhost_blk_backend - the storage behind a device
 * @blk: the device
 * @file: file or device that the owner attached
 * @bdev_file: the module's own, exclusive open of a block device; NULL: regular file, or removed
 * @bdev: the block device, or NULL
 * @wq: runs operations that may sleep for long
 * @mem_mask: bits that must be zero in a buffer's address, else it is bounced
 * @lbs: logical block size in bytes
 * @sectors: size when it was attached, in 512-byte sectors: the driver knows no larger one unless
 *	the storage has grown
 * @read_only: refuses requests that write
 * @direct: a regular file opened with O_DIRECT
 * @nowait: a regular file that honours IOCB_NOWAIT
 * @in_memory: a regular file whose I/O is a copy, and whose sync has no effect (tmpfs, ramfs)
 * @polls: a block device with poll queues
 * @dead: the block device was removed; set once. vhost_blk_dead_work() takes each vq.mutex after
 *	that, so a run of the loop that begins later sees it
 * @iocb_flags: of @file when it was attached; the owner may change them later
 * @wb_err: write-back errors of @file that an earlier backend has reported
 * @sync_error: errno of the first failed sync of @file; every later FLUSH fails with it
 * @dead_work: releases a removed block device
 * @lock: serialises its release with its open and its readers
 * @cred: credentials of the owner that attached it; the workqueue uses them
 * @blkcg_css: cgroup charged for I/O that the workqueue does
 * @memcg_css: cgroup charged for page cache that the workqueue makes
 */
struct vhost_blk_backend {
	struct vhost_blk *blk;
	struct file *file;
	struct file *bdev_file;
	struct block_device *bdev;
	struct workqueue_struct *wq;
	unsigned int mem_mask;
	unsigned int lbs;
	u64 sectors;
	bool read_only;
	bool direct;
	bool nowait;
	bool in_memory;
	bool polls;
	bool dead;
	int iocb_flags;
	errseq_t wb_err;
	int sync_error;
	struct work_struct dead_work;
	struct mutex lock;
	const struct cred *cred;
	struct cgroup_subsys_state *blkcg_css;
	struct cgroup_subsys_state *memcg_css;
};

long vhost_blk_set_backend(struct vhost_blk *blk, const struct vhost_vring_file *file);
void vhost_blk_put_backend(struct vhost_blk_backend *be);
u64 vhost_blk_backend_bytes(const struct vhost_blk_backend *be);

/* For a backend that was attached for writing: true if its device cannot be written any more. */
static inline bool vhost_blk_became_read_only(const struct vhost_blk_backend *be)
{
	return be->bdev && bdev_read_only(be->bdev);
}

#endif /* _VHOST_BLK_BACKEND_H */
