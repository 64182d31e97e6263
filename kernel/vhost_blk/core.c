// SPDX-License-Identifier: GPL-2.0-only
/*
 * The vhost core's ioctls, and the pauses and drains that its changes need.
 */
#include <linux/virtio_blk.h>

#include "backend.h"
#include "queue.h"

/* Features of the device and of the vhost core. */
const u64 vhost_blk_features =
	BIT_ULL(VIRTIO_F_VERSION_1) | BIT_ULL(VIRTIO_F_ANY_LAYOUT) |
	BIT_ULL(VIRTIO_RING_F_INDIRECT_DESC) | BIT_ULL(VIRTIO_RING_F_EVENT_IDX) |
	BIT_ULL(VIRTIO_F_ACCESS_PLATFORM) | BIT_ULL(VHOST_F_LOG_ALL) |
	BIT_ULL(VIRTIO_BLK_F_SEG_MAX) | BIT_ULL(VIRTIO_BLK_F_RO) | BIT_ULL(VIRTIO_BLK_F_BLK_SIZE) |
	BIT_ULL(VIRTIO_BLK_F_FLUSH) | BIT_ULL(VIRTIO_BLK_F_TOPOLOGY) |
	BIT_ULL(VIRTIO_BLK_F_CONFIG_WCE) | BIT_ULL(VIRTIO_BLK_F_MQ) |
	BIT_ULL(VIRTIO_BLK_F_DISCARD) | BIT_ULL(VIRTIO_BLK_F_WRITE_ZEROES) |
	BIT_ULL(VIRTIO_BLK_F_SECURE_ERASE);

/**
 * vhost_blk_cancel_orphans - end the works that end requests without a worker
 * @blk: the device, which has nothing in flight any more
 */
void vhost_blk_cancel_orphans(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->num_queues; i++)
		cancel_delayed_work_sync(&blk->queues[i].orphan_work);
}

/* Drains the requests that were taken before the change. */
static int vhost_blk_set_features(struct vhost_blk *blk, u64 features)
{
	bool iotlb = features & BIT_ULL(VIRTIO_F_ACCESS_PLATFORM);
	unsigned int i;
	int err;

	if (features & ~vhost_blk_features)
		return -EOPNOTSUPP;
	if (features & BIT_ULL(VHOST_F_LOG_ALL) && !vhost_log_access_ok(&blk->dev))
		return -EFAULT;
	if (iotlb != !!blk->dev.iotlb) {
		/* The addresses of the rings would change their meaning without a check. */
		if (vhost_blk_any_runs(blk))
			return -EBUSY;
		err = iotlb ? vhost_init_device_iotlb(&blk->dev) : 0;
		if (err)
			return err;
		if (!iotlb)
			vhost_clear_device_iotlb(&blk->dev);
	}
	for (i = 0; i < blk->num_queues; i++) {
		if (mutex_lock_killable(&blk->queues[i].vq.mutex))
			return -EINTR;
		vhost_blk_set_acked_features(&blk->queues[i].vq, features);
		mutex_unlock(&blk->queues[i].vq.mutex);
	}
	return vhost_blk_drain_all(blk);
}

/* The old table translated the addresses of requests in flight: drains them. */
static long vhost_blk_set_mem_table(struct vhost_blk *blk, void __user *argp)
{
	bool pin = blk->opt.flags & VHOST_BLK_OPT_PIN_MEMORY;
	long err;
	int pin_err = 0;

	err = vhost_blk_pause_all(blk);
	if (err)
		return err;
	vhost_blk_unpin_memory(blk);
	err = vhost_dev_ioctl(&blk->dev, VHOST_SET_MEM_TABLE, argp);
	if (pin)
		pin_err = vhost_blk_pin_memory(blk);
	vhost_blk_resume_all(blk);
	return err ?: pin_err;
}

static long vhost_blk_reset_owner(struct vhost_blk *blk)
{
	const struct vhost_vring_file detach = { .index = 0, .fd = VHOST_FILE_UNBIND };
	const struct vhost_blk_options none = {};
	struct vhost_iotlb *umem;
	long err;

	umem = vhost_dev_reset_owner_prepare();
	if (!umem)
		return -ENOMEM;
	err = vhost_blk_set_backend(blk, &detach);
	if (err) {
		vhost_iotlb_free(umem);
		return err;
	}
	vhost_blk_unpin_memory(blk);
	vhost_blk_unshare_limits(blk);
	vhost_blk_limit_set(blk, &none);
	blk->opt = none;
	vhost_blk_forget_regions(blk);
	vhost_blk_forget_halt(blk);
	vhost_blk_set_failure_event(blk, VHOST_FILE_UNBIND);
	vhost_blk_timing_forget(blk);
	vhost_dev_stop(&blk->dev);
	vhost_blk_cancel_orphans(blk);
	vhost_dev_flush(&blk->dev);
	vhost_dev_reset_owner(&blk->dev, umem);
	return 0;
}

static bool vhost_blk_has_left_work(struct vhost_blk_queue *q)
{
	return !vhost_blk_runs(q) && !q->vq.kick && vhost_vq_has_work(&q->vq);
}

/*
 * The core expects no work of a queue without backend and kick. Some is left if the queue was
 * started and stopped before its worker ran. All queues are looked at: the core reads the number of
 * the queue itself, and the owner may have changed it by then.
 */
static long vhost_blk_attach_worker(struct vhost_blk *blk, void __user *argp)
{
	unsigned int i;

	for (i = 0; i < blk->num_queues; i++) {
		if (vhost_blk_has_left_work(blk->queues + i)) {
			vhost_dev_flush(&blk->dev);
			break;
		}
	}
	return vhost_worker_ioctl(&blk->dev, VHOST_ATTACH_VRING_WORKER, argp);
}

/* The core accepts any time. */
static long vhost_blk_set_busyloop_timeout(struct vhost_blk *blk, void __user *argp)
{
	long err = vhost_dev_check_owner(&blk->dev);
	struct vhost_vring_state state;
	struct vhost_blk_queue *q;

	if (err)
		return err;
	if (copy_from_user(&state, argp, sizeof(state)))
		return -EFAULT;
	q = vhost_blk_queue_at(blk, state.index);
	if (!q)
		return -ENOBUFS;
	if (state.num > VHOST_BLK_BUSYLOOP_US_MAX)
		return -EINVAL;
	if (mutex_lock_killable(&q->vq.mutex))
		return -EINTR;
	q->vq.busyloop_timeout = state.num;
	mutex_unlock(&q->vq.mutex);
	return 0;
}

/**
 * vhost_blk_core_ioctl - an ioctl of the vhost core
 * @blk: the device; its dev.mutex is held
 * @cmd: the ioctl
 * @argp: the argument
 *
 * Return: 0, or a negative errno; -ENOIOCTLCMD if the core does not know it.
 */
long vhost_blk_core_ioctl(struct vhost_blk *blk, unsigned int cmd, void __user *argp)
{
	u64 features;
	long err;

	switch (cmd) {
	case VHOST_SET_FEATURES:
		if (copy_from_user(&features, argp, sizeof(features)))
			return -EFAULT;
		return vhost_blk_set_features(blk, features);
	case VHOST_SET_VRING_BUSYLOOP_TIMEOUT:
		return vhost_blk_set_busyloop_timeout(blk, argp);
	case VHOST_RESET_OWNER:
		err = vhost_dev_check_owner(&blk->dev);
		return err ?: vhost_blk_reset_owner(blk);
	case VHOST_SET_MEM_TABLE:
		err = vhost_dev_check_owner(&blk->dev);
		return err ?: vhost_blk_set_mem_table(blk, argp);
	case VHOST_ATTACH_VRING_WORKER:
		return vhost_blk_attach_worker(blk, argp);
	case VHOST_NEW_WORKER:
	case VHOST_FREE_WORKER:
	case VHOST_GET_VRING_WORKER:
		return vhost_worker_ioctl(&blk->dev, cmd, argp);
	}
	err = vhost_dev_ioctl(&blk->dev, cmd, argp);
	if (err == -ENOIOCTLCMD)
		err = vhost_vring_ioctl(&blk->dev, cmd, argp);
	return err;
}
