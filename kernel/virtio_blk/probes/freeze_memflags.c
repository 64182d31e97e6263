// SPDX-License-Identifier: GPL-2.0-only
/* Freezing a queue returns flags for unfreezing it. */
#include <linux/blk-mq.h>

void probe(struct request_queue *queue);

void probe(struct request_queue *queue)
{
	blk_mq_unfreeze_queue(queue, blk_mq_freeze_queue(queue));
}
