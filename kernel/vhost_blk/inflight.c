// SPDX-License-Identifier: GPL-2.0-only
/*
 * The in-flight region: a structure of the vhost-user protocol ("inflight split") in the owner's
 * memory. It tells the next daemon which chains were taken and not used when this owner died. A
 * write to it that fails harms only the owner.
 *
 * A batch of completions is recorded in four steps, so that the used chains are known at any
 * moment: link the batch and point last_batch_head at it; publish used.idx; clear the marks; copy
 * used.idx to the region.
 *
 * The barriers order stores for the next daemon. It reads the region after this owner has ended, and
 * so needs no barrier.
 */
#include "stages.h"

struct vhost_blk_region_desc {
	u8 inflight;
	u8 padding[5];
	u16 next;
	u64 counter;
};

struct vhost_blk_region_split {
	u64 features;
	u16 version;
	u16 desc_num;
	u16 last_batch_head;
	u16 used_idx;
	struct vhost_blk_region_desc desc[];
};

/**
 * vhost_blk_region_take - mark a chain as taken
 * @q: the queue
 * @head: the chain
 */
void vhost_blk_region_take(struct vhost_blk_queue *q, unsigned int head)
{
	struct vhost_blk_region_split __user *region = q->region.user;

	if (likely(!region))
		return;
	put_user(++q->region.counter, &region->desc[head].counter);
	/* The number is visible before the mark. */
	smp_wmb();
	put_user(1, &region->desc[head].inflight);
}

/**
 * vhost_blk_region_untake - the chain is back in the avail ring
 * @q: the queue
 * @head: the chain
 */
void vhost_blk_region_untake(struct vhost_blk_queue *q, unsigned int head)
{
	if (unlikely(q->region.user))
		put_user(0, &q->region.user->desc[head].inflight);
}

static u16 vhost_blk_head_of(struct vhost_blk_queue *q, unsigned int n)
{
	return vhost32_to_cpu(&q->vq, q->vq.heads[n].id);
}

/**
 * vhost_blk_region_batch - before used.idx moves
 * @q: the queue
 * @count: entries of vq.heads that are about to be published
 */
void vhost_blk_region_batch(struct vhost_blk_queue *q, unsigned int count)
{
	struct vhost_blk_region_split __user *region = q->region.user;
	unsigned int n;
	u16 last;

	if (likely(!region))
		return;
	if (get_user(last, &region->last_batch_head))
		return;
	for (n = 0; n < count; n++) {
		put_user(last, &region->desc[vhost_blk_head_of(q, n)].next);
		last = vhost_blk_head_of(q, n);
	}
	put_user(last, &region->last_batch_head);
	/* The batch is visible before used.idx. */
	smp_wmb();
}

/**
 * vhost_blk_region_used - after used.idx moved
 * @q: the queue
 * @count: entries of vq.heads that were published
 */
void vhost_blk_region_used(struct vhost_blk_queue *q, unsigned int count)
{
	struct vhost_blk_region_split __user *region = q->region.user;
	unsigned int n;

	if (likely(!region))
		return;
	/* used.idx is visible before a mark is cleared. */
	smp_wmb();
	for (n = 0; n < count; n++)
		put_user(0, &region->desc[vhost_blk_head_of(q, n)].inflight);
	/* The marks are clear before the indices agree. */
	smp_wmb();
	put_user(q->vq.last_used_idx, &region->used_idx);
}

/**
 * vhost_blk_set_region - VHOST_BLK_SET_INFLIGHT
 * @blk: the device; its dev.mutex is held
 * @inflight: the argument
 *
 * Return: 0, or a negative errno.
 */
int vhost_blk_set_region(struct vhost_blk *blk, const struct vhost_blk_inflight *inflight)
{
	struct vhost_blk_queue *q = vhost_blk_queue_at(blk, inflight->index);
	int err = 0;

	if (!q)
		return -ENOBUFS;
	if (inflight->user_addr & 7 || inflight->user_addr != (unsigned long)inflight->user_addr)
		return -EINVAL;

	if (mutex_lock_killable(&q->vq.mutex))
		return -EINTR;
	if (q->state != VHOST_BLK_STOPPED) {
		err = -EBUSY;
	} else {
		q->region.user = (void __user *)(unsigned long)inflight->user_addr;
		q->region.desc_num = inflight->desc_num;
		q->region.counter = 0;
	}
	mutex_unlock(&q->vq.mutex);
	return err;
}

/**
 * vhost_blk_forget_regions - forget all regions: their addresses are those of the old owner
 * @blk: the device, whose queues are stopped
 */
void vhost_blk_forget_regions(struct vhost_blk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->num_queues; i++) {
		struct vhost_blk_queue *q = blk->queues + i;

		mutex_lock(&q->vq.mutex);
		q->region = (struct vhost_blk_region) {};
		mutex_unlock(&q->vq.mutex);
	}
}

/**
 * vhost_blk_region_ready - check the region when its queue starts
 * @q: the queue; its vq.mutex is held, its ring is set up
 *
 * Return: 0; -EINVAL if it has fewer entries than the ring; -EFAULT if it cannot be written.
 */
int vhost_blk_region_ready(struct vhost_blk_queue *q)
{
	struct vhost_blk_region_split __user *region = q->region.user;

	if (!region)
		return 0;
	if (q->region.desc_num < q->vq.num)
		return -EINVAL;
	if (!access_ok(region, struct_size(region, desc, q->region.desc_num)) ||
	    put_user(q->vq.last_used_idx, &region->used_idx))
		return -EFAULT;
	return 0;
}
