// SPDX-License-Identifier: GPL-2.0-only
/* Segments may be limited to less than a page, where pages are larger than 4096 bytes. */
#include <linux/blkdev.h>

unsigned int probe(const struct queue_limits *lim);

unsigned int probe(const struct queue_limits *lim)
{
	return lim->min_segment_size;
}
