/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Differences between kernels, found by compiling probes/ at build time (see Kbuild), not by
 * version numbers: distributions and stable series backport changes.
 */
#ifndef _VIRTBLK_COMPAT_H
#define _VIRTBLK_COMPAT_H

/* Otherwise a compiler option that breaks all probes would look like a very old kernel. */
#ifndef VIRTBLK_PROBES_WORK
#error "probes/baseline.c does not compile: the probes say nothing about this kernel"
#endif

#include <linux/blk-mq.h>
#include <linux/virtio.h>
#ifdef VIRTBLK_HAS_VIRTIO_MAP_QUEUES
#include <linux/blk-mq-virtio.h>
#endif

#ifdef VIRTBLK_HAS_SHOULD_MERGE
#define VIRTBLK_TAG_SET_FLAGS	BLK_MQ_F_SHOULD_MERGE
#else
#define VIRTBLK_TAG_SET_FLAGS	0
#endif

/* The smallest limit of a segment's length, in bytes, that the block layer takes. */
#ifdef VIRTBLK_HAS_MIN_SEGMENT_SIZE
#define VIRTBLK_SEG_BYTES_MIN	4096UL
#else
#define VIRTBLK_SEG_BYTES_MIN	PAGE_SIZE
#endif

#ifdef VIRTBLK_INIT_REQUEST_INT_NODE
#define virtblk_node_t	int
#else
#define virtblk_node_t	unsigned int
#endif

static inline unsigned int virtblk_freeze_queue(struct request_queue *queue)
{
#ifdef VIRTBLK_FREEZE_HAS_MEMFLAGS
	return blk_mq_freeze_queue(queue);
#else
	blk_mq_freeze_queue(queue);
	return 0;
#endif
}

static inline void virtblk_unfreeze_queue(struct request_queue *queue, unsigned int memflags)
{
#ifdef VIRTBLK_FREEZE_HAS_MEMFLAGS
	blk_mq_unfreeze_queue(queue, memflags);
#else
	blk_mq_unfreeze_queue(queue);
#endif
}

static inline int virtblk_map_sg(struct request *rq, struct scatterlist *sg)
{
#ifdef VIRTBLK_MAP_SG_WITHOUT_QUEUE
	return blk_rq_map_sg(rq, sg);
#else
	return blk_rq_map_sg(rq->q, rq, sg);
#endif
}

/* Maps CPUs to queues as the interrupts of the queues are spread. */
static inline void virtblk_map_by_affinity(struct blk_mq_queue_map *map, struct virtio_device *vdev)
{
#ifdef VIRTBLK_HAS_VIRTIO_MAP_QUEUES
	blk_mq_virtio_map_queues(map, vdev, 0);
#else
	blk_mq_map_hw_queues(map, &vdev->dev, 0);
#endif
}

#endif /* _VIRTBLK_COMPAT_H */
