// SPDX-License-Identifier: GPL-2.0-only
/* Every kernel has these: if this does not compile, the other probes say nothing. */
#include <linux/blk-mq.h>
#include <linux/hdreg.h>
#include <linux/virtio.h>

unsigned int probe(struct request *rq, struct virtio_device *vdev);

unsigned int probe(struct request *rq, struct virtio_device *vdev)
{
	return blk_rq_sectors(rq) + vdev->index;
}
