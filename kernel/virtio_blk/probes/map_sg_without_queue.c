// SPDX-License-Identifier: GPL-2.0-only
/* blk_rq_map_sg() takes the queue from the request. */
#include <linux/blk-mq.h>

int probe(struct request *rq, struct scatterlist *sg);

int probe(struct request *rq, struct scatterlist *sg)
{
	return blk_rq_map_sg(rq, sg);
}
