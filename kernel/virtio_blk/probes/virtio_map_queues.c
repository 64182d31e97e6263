// SPDX-License-Identifier: GPL-2.0-only
/* Virtio tells the interrupts' affinity; in later kernels the bus does. */
#include <linux/blk-mq-virtio.h>

void probe(struct blk_mq_queue_map *map, struct virtio_device *vdev);

void probe(struct blk_mq_queue_map *map, struct virtio_device *vdev)
{
	blk_mq_virtio_map_queues(map, vdev, 0);
}
