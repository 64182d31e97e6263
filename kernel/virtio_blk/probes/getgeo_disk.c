// SPDX-License-Identifier: GPL-2.0-only
/* The geometry is asked for a disk, no longer for a block device. */
#include <linux/blkdev.h>
#include <linux/hdreg.h>

static_assert(__same_type(((const struct block_device_operations *)NULL)->getgeo,
			  (int (*)(struct gendisk *, struct hd_geometry *))NULL));
