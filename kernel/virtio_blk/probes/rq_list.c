// SPDX-License-Identifier: GPL-2.0-only
/* Batches of requests are a struct rq_list, in order of submission. */
#include <linux/blk-mq.h>

void probe(struct rq_list *list, struct request *rq);

void probe(struct rq_list *list, struct request *rq)
{
	list->tail = rq;
}
