/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _VHOST_BLK_RESERVE_H
#define _VHOST_BLK_RESERVE_H

#include <linux/list.h>
#include <linux/types.h>
#include <linux/workqueue.h>

/* Room for struct vhost_blk_large without its memory. */
#define VHOST_BLK_LARGE_BYTES	64

struct page;
struct vhost_blk_queue;
struct vhost_blk_req;

/**
 * struct vhost_blk_reserve - memory for one request if the allocator has none; see reserve.c
 * @memory: room for the arrays of one request
 * @used: bytes of it in use
 * @parts: arrays in it; 0: it is free
 * @req: their owner
 * @pages: bounce pages of a request that did not get all of them
 * @retry_work: runs the loop again if no completion will
 */
struct vhost_blk_reserve {
	void *memory;
	size_t used;
	unsigned int parts;
	const struct vhost_blk_req *req;
	struct list_head pages;
	struct delayed_work retry_work;
};

void vhost_blk_init_reserve(struct vhost_blk_queue *q);
int vhost_blk_fill_reserve(struct vhost_blk_queue *q);
void vhost_blk_empty_reserve(struct vhost_blk_queue *q);
void *vhost_blk_alloc(struct vhost_blk_req *req, size_t n, size_t size);
void vhost_blk_free(struct vhost_blk_req *req, const void *memory);
struct page *vhost_blk_alloc_page(struct vhost_blk_queue *q);
void vhost_blk_keep_pages(struct vhost_blk_req *req);
void vhost_blk_drop_pages(struct vhost_blk_queue *q);
void vhost_blk_try_later(struct vhost_blk_queue *q);

#endif /* _VHOST_BLK_RESERVE_H */
