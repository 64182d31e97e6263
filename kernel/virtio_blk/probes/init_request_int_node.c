// SPDX-License-Identifier: GPL-2.0-only
/* The memory node of init_request() is signed. */
#include <linux/blk-mq.h>

static_assert(__same_type(((struct blk_mq_ops *)NULL)->init_request,
			  (int (*)(struct blk_mq_tag_set *, struct request *, unsigned int,
				   int))NULL));
