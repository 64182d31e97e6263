// SPDX-License-Identifier: GPL-2.0-only
/*
 * The virtqueues of a disk: how many, which of them are polled, which CPU uses which.
 */
#include <linux/interrupt.h>
#include <linux/slab.h>
#include <uapi/linux/virtio_ring.h>

#include "virtio_blk.h"

static int count_queues(struct virtblk *blk)
{
	struct virtio_device *vdev = blk->vdev;
	unsigned int wanted = virtblk_param_poll_queues();
	u16 offered = 1;

	/* Leaves 1 if the device has no such field. */
	virtio_cread_feature(vdev, VIRTIO_BLK_F_MQ, struct virtio_blk_config, num_queues, &offered);
	if (!offered) {
		dev_err(&vdev->dev, "the device offers several queues and then has none\n");
		return -EINVAL;
	}
	blk->queue_count = min_t(unsigned int, offered, virtblk_param_queues());
	blk->poll_count = min(wanted, blk->queue_count - 1);
	if (blk->poll_count < wanted)
		dev_warn(&vdev->dev,
			 "only %u of %u polled queues: of %u queues one needs interrupts\n",
			 blk->poll_count, wanted, blk->queue_count);
	return 0;
}

static void init_queue(struct virtblk *blk, unsigned int index)
{
	struct virtblk_queue *q = &blk->queues[index];

	spin_lock_init(&q->lock);
	q->blk = blk;
	q->index = index;
	q->polled = index >= blk->queue_count - blk->poll_count;
	snprintf(q->name, sizeof(q->name), q->polled ? "req_poll.%u" : "req.%u", index);
	INIT_LIST_HEAD(&q->free);
	INIT_LIST_HEAD(&q->resumed);
	INIT_LIST_HEAD(&q->asked);
	bio_list_init(&q->waiting);
	init_waitqueue_head(&q->throttled);
	q->last_reap = jiffies;
	q->last_used = jiffies;
}

/**
 * virtblk_del_queues() - gives the virtqueues back
 * @blk: nothing is in flight, nobody is about to kick
 * @vdev: its device, reset
 *
 * What comes later finds no virtqueue, and fails. A device whose virtqueues are gone is left alone.
 */
void virtblk_del_queues(struct virtblk *blk, struct virtio_device *vdev)
{
	unsigned int i;

	if (!blk->queues[0].vq)
		return;
	for (i = 0; i < blk->queue_count; i++) {
		spin_lock_irq(&blk->queues[i].lock);
		blk->queues[i].vq = NULL;
		spin_unlock_irq(&blk->queues[i].lock);
	}
	vdev->config->del_vqs(vdev);
}

/* The smallest ring of all; they are usually equal. */
static unsigned int ring_size(struct virtblk *blk)
{
	unsigned int i, size = VIRTBLK_RING_MAX;

	for (i = 0; i < blk->queue_count; i++)
		size = min(size, virtqueue_get_vring_size(blk->queues[i].vq));
	return size;
}

/**
 * virtblk_find_queues() - gets the virtqueues from the device
 * @blk: its queues are without virtqueues: at probe, or after a reset
 *
 * Return: a negative errno; then there are no virtqueues.
 */
int virtblk_find_queues(struct virtblk *blk)
{
	struct irq_affinity affinity = { };
	struct virtqueue_info *infos;
	struct virtqueue **vqs;
	unsigned int i;
	int err = -ENOMEM;

	infos = kcalloc(blk->queue_count, sizeof(*infos), GFP_KERNEL);
	vqs = kcalloc(blk->queue_count, sizeof(*vqs), GFP_KERNEL);
	if (!infos || !vqs)
		goto out;
	for (i = 0; i < blk->queue_count; i++) {
		infos[i].name = blk->queues[i].name;
		/* No callback: no interrupt. */
		infos[i].callback = blk->queues[i].polled ? NULL : virtblk_interrupt;
	}
	err = virtio_find_vqs(blk->vdev, blk->queue_count, vqs, infos, &affinity);
	if (err)
		goto out;
	for (i = 0; i < blk->queue_count; i++) {
		spin_lock_irq(&blk->queues[i].lock);
		blk->queues[i].vq = vqs[i];
		blk->queues[i].in_flight = 0;
		spin_unlock_irq(&blk->queues[i].lock);
	}
	/* Requests were made to fit. */
	if (ring_size(blk) < blk->ring_size) {
		dev_err(&blk->vdev->dev, "rings of %u descriptors; they had %u before\n",
			ring_size(blk), blk->ring_size);
		virtblk_del_queues(blk, blk->vdev);
		err = -EINVAL;
	}
out:
	kfree(vqs);
	kfree(infos);
	return err;
}

/**
 * virtblk_depth() - how many requests a queue can have at once
 * @blk: has its virtqueues
 */
unsigned int virtblk_depth(struct virtblk *blk)
{
	unsigned int depth = virtblk_param_depth();

	if (depth)
		return depth;
	depth = ring_size(blk);
	/* A request takes at least two descriptors, if they are not in a table of their own. */
	if (!virtio_has_feature(blk->vdev, VIRTIO_RING_F_INDIRECT_DESC))
		depth /= 2;
	return clamp(depth, 1u, (unsigned int)BLK_MQ_MAX_DEPTH);
}

/**
 * virtblk_map_queues() - which queue each CPU uses
 * @blk: has its virtqueues
 * @map: its mq_map has an entry for each possible CPU
 * @polled: the map is that of the polled queues
 */
void virtblk_map_queues(struct virtblk *blk, struct blk_mq_queue_map *map, bool polled)
{
	unsigned int with_interrupts = blk->queue_count - blk->poll_count;

	map->nr_queues = polled ? blk->poll_count : with_interrupts;
	map->queue_offset = polled ? with_interrupts : 0;
	if (!map->nr_queues)
		return;
	if (polled)
		blk_mq_map_queues(map);
	else
		virtblk_map_by_affinity(map, blk->vdev);
}

static int alloc_maps(struct virtblk *blk)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(blk->maps); i++) {
		blk->maps[i].mq_map = kcalloc(nr_cpu_ids, sizeof(unsigned int), GFP_KERNEL);
		if (!blk->maps[i].mq_map)
			return -ENOMEM;
		virtblk_map_queues(blk, &blk->maps[i], i == VIRTBLK_MAP_POLL);
	}
	return 0;
}

/* Sets the limit of data descriptors that rings of this size can always take. */
static int fit_to_ring(struct virtblk *blk)
{
	bool indirect = virtio_has_feature(blk->vdev, VIRTIO_RING_F_INDIRECT_DESC);
	unsigned int size = ring_size(blk);

	blk->ring_size = size;
	if (size > VIRTBLK_OVERHEAD)
		blk->seg_max = size - VIRTBLK_OVERHEAD;
	else if (indirect)
		blk->seg_max = 1;
	else {
		dev_err(&blk->vdev->dev, "a ring of %u descriptors cannot take a request\n", size);
		return -EINVAL;
	}
	/* The request path may ask for more if there are tables; see virtblk_read_limits(). */
	if (indirect && !blk->use_bio)
		blk->seg_max = VIRTBLK_RING_MAX - VIRTBLK_OVERHEAD;
	return 0;
}

/**
 * virtblk_alloc_queues() - all that a disk needs to do I/O, but for its limits
 * @blk: new
 *
 * Return: a negative errno; then there is nothing to be freed.
 */
int virtblk_alloc_queues(struct virtblk *blk)
{
	unsigned int i;
	int err;

	err = count_queues(blk);
	if (err)
		return err;
	blk->queues = kcalloc(blk->queue_count, sizeof(*blk->queues), GFP_KERNEL);
	if (!blk->queues)
		return -ENOMEM;
	for (i = 0; i < blk->queue_count; i++)
		init_queue(blk, i);
	err = virtblk_find_queues(blk);
	if (err)
		goto no_virtqueues;
	err = fit_to_ring(blk);
	if (!err && blk->use_bio)
		err = alloc_maps(blk);
	if (err) {
		virtblk_del_queues(blk, blk->vdev);
		goto no_virtqueues;
	}
	return 0;

no_virtqueues:
	virtblk_free_queues(blk);
	return err;
}

/**
 * virtblk_free_queues() - frees the memory of the queues
 * @blk: has no virtqueues any more
 */
void virtblk_free_queues(struct virtblk *blk)
{
	unsigned int i;

	for (i = 0; i < blk->queue_count; i++)
		virtblk_free_slots(&blk->queues[i]);
	for (i = 0; i < ARRAY_SIZE(blk->maps); i++) {
		kfree(blk->maps[i].mq_map);
		blk->maps[i].mq_map = NULL;
	}
	kfree(blk->queues);
	blk->queues = NULL;
}
