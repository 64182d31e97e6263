// SPDX-License-Identifier: GPL-2.0-only
/* getgeo() takes a disk, no longer a block device. */
#include <linux/blkdev.h>
#include <linux/hdreg.h>

static_assert(__same_type(((const struct block_device_operations *)NULL)->getgeo,
			  (int (*)(struct gendisk *, struct hd_geometry *))NULL));
