// SPDX-License-Identifier: GPL-2.0-only
/*
 * The virtqueues of a disk: their number, those that are polled, the queue of each CPU, interrupts.
 */
#include <linux/interrupt.h>
#include <linux/moduleparam.h>
#include <linux/slab.h>
#include <uapi/linux/virtio_ring.h>

#include "virtio_blk.h"

static unsigned int num_request_queues;
module_param(num_request_queues, uint, 0644);
MODULE_PARM_DESC(num_request_queues,
		 "At most so many queues for a disk; never more than CPUs. 0: no limit. Default: 0.");

static unsigned int poll_queues;
module_param(poll_queues, uint, 0644);
MODULE_PARM_DESC(poll_queues,
		 "So many of a disk's queues are polled, without interrupts; not all. Default: 0.");

static unsigned int queue_depth;
module_param(queue_depth, uint, 0444);
MODULE_PARM_DESC(queue_depth,
		 "Requests of a queue at once; 0: as many as its ring holds. Default: 0.");

static int virtblk_count_queues(struct virtblk *blk)
{
	struct virtio_device *vdev = blk->vdev;
	unsigned int most = min_not_zero(READ_ONCE(num_request_queues), nr_cpu_ids);
	unsigned int wanted = READ_ONCE(poll_queues);
	u16 offered = 1;

	/* Leaves 1 if the device has no such field. */
	virtio_cread_feature(vdev, VIRTIO_BLK_F_MQ, struct virtio_blk_config, num_queues, &offered);
	if (!offered) {
		dev_err(&vdev->dev, "the device offers several queues and then has none\n");
		return -EINVAL;
	}
	blk->queue_count = min_t(unsigned int, offered, most);
	blk->poll_count = min(wanted, blk->queue_count - 1);
	/* The probe does not fail because of it: this may be the root disk. */
	if (blk->poll_count < wanted)
		dev_warn(&vdev->dev,
			 "poll_queues=%u: %u are polled, because one of %u queues needs interrupts\n",
			 wanted, blk->poll_count, blk->queue_count);
	return 0;
}

static void virtblk_init_queue(struct virtblk *blk, unsigned int index)
{
	struct virtblk_queue *q = &blk->queues[index];

	spin_lock_init(&q->lock);
	q->blk = blk;
	q->index = index;
	q->polled = index >= blk->queue_count - blk->poll_count;
	snprintf(q->name, sizeof(q->name), q->polled ? "req_poll.%u" : "req.%u", index);
	INIT_LIST_HEAD(&q->free);
	INIT_LIST_HEAD(&q->ring);
	INIT_LIST_HEAD(&q->requeued);
	INIT_LIST_HEAD(&q->flush_joined);
	INIT_LIST_HEAD(&q->flush_waiting);
	bio_list_init(&q->waiting);
	init_waitqueue_head(&q->throttled);
	q->last_reap = jiffies;
	q->last_used = jiffies;
}

/**
 * virtblk_del_queues() - deletes the virtqueues
 * @blk: nothing is in flight, and no kick is to come
 * @vdev: its device, reset
 *
 * Later I/O finds no virtqueue, and fails. Does nothing if the virtqueues are gone already.
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

/* Descriptors of the smallest ring; usually all have the same size. */
static unsigned int virtblk_ring_size(struct virtblk *blk)
{
	unsigned int i, size = VIRTBLK_RING_MAX;

	for (i = 0; i < blk->queue_count; i++)
		size = min(size, virtqueue_get_vring_size(blk->queues[i].vq));
	return size;
}

/* The device has used requests. Context: interrupt. */
static void virtblk_interrupt(struct virtqueue *vq)
{
	struct virtblk *blk = vq->vdev->priv;
	struct virtblk_queue *q = &blk->queues[vq->index];

	/* The disk is not set up yet. Pairs with virtblk_alloc_disk(). */
	if (unlikely(!smp_load_acquire(&blk->disk)))
		return;
	if (blk->use_bio)
		virtblk_bio_reap(q, true);
	else
		virtblk_rq_reap(q, true);
}

/**
 * virtblk_find_queues() - gets the virtqueues from the device
 * @blk: its queues have no virtqueues: at probe, or after a reset
 *
 * Return: 0, or a negative errno; then there are no virtqueues.
 */
int virtblk_find_queues(struct virtblk *blk)
{
	struct irq_affinity affinity = { };
	struct virtqueue_info *infos;
	struct virtqueue **vqs;
	unsigned int i, size;
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
		blk->queues[i].broken = false;
		spin_unlock_irq(&blk->queues[i].lock);
	}
	/*
	 * The disk's limits are those of the rings at probe. The virtio core halves a ring for
	 * which it finds no memory, which is likely in a resume. A request with an indirect table
	 * takes one descriptor. The bio path must do without a table if there is no memory.
	 */
	size = virtblk_ring_size(blk);
	if (size < blk->ring_size) {
		dev_warn(&blk->vdev->dev, "rings of %u descriptors; they had %u before\n", size,
			 blk->ring_size);
		if (blk->use_bio ||
		    !virtio_has_feature(blk->vdev, VIRTIO_RING_F_INDIRECT_DESC)) {
			virtblk_del_queues(blk, blk->vdev);
			err = -EINVAL;
		}
	}
out:
	kfree(vqs);
	kfree(infos);
	return err;
}

/* Sets the number of requests that a queue can have at once. */
static void virtblk_set_depth(struct virtblk *blk)
{
	unsigned int most = blk->use_bio ? VIRTBLK_SLOTS_MAX : BLK_MQ_MAX_DEPTH;
	unsigned int wanted = queue_depth;
	unsigned int depth = wanted ?: virtblk_ring_size(blk);

	/* Without indirect tables a request takes at least two descriptors of the ring. */
	if (!wanted && !virtio_has_feature(blk->vdev, VIRTIO_RING_F_INDIRECT_DESC))
		depth /= 2;
	blk->depth = clamp(depth, 1u, most);
	if (blk->depth < wanted)
		dev_warn(&blk->vdev->dev, "queue_depth=%u: taken as %u, the most that is possible\n",
			 wanted, blk->depth);
}

/* Maps each CPU to the queue that it uses. */
static void virtblk_map_queues(struct virtblk *blk, struct blk_mq_queue_map *map, bool polled)
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

/**
 * virtblk_rq_map_queues() - maps each CPU to the queues that it uses
 * @set: of a disk of the request path
 */
void virtblk_rq_map_queues(struct blk_mq_tag_set *set)
{
	struct virtblk *blk = set->driver_data;

	virtblk_map_queues(blk, &set->map[HCTX_TYPE_DEFAULT], false);
	if (set->nr_maps <= HCTX_TYPE_POLL)
		return;
	set->map[HCTX_TYPE_READ].nr_queues = 0;
	virtblk_map_queues(blk, &set->map[HCTX_TYPE_POLL], true);
}

static int virtblk_alloc_maps(struct virtblk *blk)
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

/* Limits the data descriptors of a request to those that fit into each ring. */
static int virtblk_fit_to_ring(struct virtblk *blk)
{
	bool indirect = virtio_has_feature(blk->vdev, VIRTIO_RING_F_INDIRECT_DESC);
	unsigned int size = virtblk_ring_size(blk);

	blk->ring_size = size;
	if (size > VIRTBLK_OVERHEAD)
		blk->seg_max = size - VIRTBLK_OVERHEAD;
	else if (indirect)
		blk->seg_max = 1;
	else {
		dev_err(&blk->vdev->dev, "a ring of %u descriptors cannot take a request\n", size);
		return -EINVAL;
	}
	/* With indirect tables the device's own limit counts; see virtblk_read_limits(). */
	if (indirect && !blk->use_bio)
		blk->seg_max = VIRTBLK_RING_MAX - VIRTBLK_OVERHEAD;
	return 0;
}

/**
 * virtblk_alloc_queues() - sets up queues, virtqueues and the maps of CPUs
 * @blk: new
 *
 * Return: 0, or a negative errno; then there is nothing to free.
 */
int virtblk_alloc_queues(struct virtblk *blk)
{
	unsigned int i;
	int err;

	err = virtblk_count_queues(blk);
	if (err)
		return err;
	blk->queues = kcalloc(blk->queue_count, sizeof(*blk->queues), GFP_KERNEL);
	if (!blk->queues)
		return -ENOMEM;
	for (i = 0; i < blk->queue_count; i++)
		virtblk_init_queue(blk, i);
	err = virtblk_find_queues(blk);
	if (err)
		goto no_virtqueues;
	virtblk_set_depth(blk);
	err = virtblk_fit_to_ring(blk);
	if (!err && blk->use_bio)
		err = virtblk_alloc_maps(blk);
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
