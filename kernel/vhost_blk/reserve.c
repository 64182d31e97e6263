// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory of requests that do not fit into struct vhost_blk_req. No request fails for lack of
 * memory.
 *
 * Arrays come from the allocator, or else from the queue's reserve, which has room for all arrays
 * of one request. Pages of bounce buffers are too many to reserve: the pages that a failed request
 * got stay with the queue for its next try. A request without memory returns to the ring. The
 * completion of another request makes the queue try again, or a timer if there is none.
 *
 * vq.mutex protects all of it.
 */
#include "queue.h"

/* Between two tries of a queue that has nothing in flight. */
#define VHOST_BLK_RESERVE_INTERVAL	msecs_to_jiffies(10)

/*
 * Arrays of one request: pages, dirty log, the log as addresses, the buffers of a large request, and
 * those of a bounced read.
 */
#define VHOST_BLK_RESERVE_BYTES	(VHOST_BLK_PIECE_PAGES * sizeof(struct bio_vec) + \
				 UIO_MAXIOV * (sizeof(struct vhost_log) + 3 * sizeof(struct iovec)) + \
				 VHOST_BLK_LARGE_BYTES)

static_assert(VHOST_BLK_RANGES_MAX * sizeof(struct vhost_blk_range) <= VHOST_BLK_RESERVE_BYTES);

static void vhost_blk_retry_work(struct work_struct *work)
{
	struct vhost_blk_reserve *reserve =
		container_of(to_delayed_work(work), struct vhost_blk_reserve, retry_work);

	vhost_poll_queue(&container_of(reserve, struct vhost_blk_queue, reserve)->vq.poll);
}

/**
 * vhost_blk_init_reserve - prepare a queue's reserve, once
 * @q: the queue
 */
void vhost_blk_init_reserve(struct vhost_blk_queue *q)
{
	INIT_LIST_HEAD(&q->reserve.pages);
	INIT_DELAYED_WORK(&q->reserve.retry_work, vhost_blk_retry_work);
}

/**
 * vhost_blk_fill_reserve - allocate the reserve of a queue that starts
 * @q: the queue
 *
 * Return: 0 or -ENOMEM.
 */
int vhost_blk_fill_reserve(struct vhost_blk_queue *q)
{
	q->reserve.memory = kvmalloc(VHOST_BLK_RESERVE_BYTES, GFP_KERNEL_ACCOUNT);
	return q->reserve.memory ? 0 : -ENOMEM;
}

static void vhost_blk_free_kept_pages(struct vhost_blk_queue *q)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, &q->reserve.pages, lru)
		__free_page(page);
	INIT_LIST_HEAD(&q->reserve.pages);
}

/**
 * vhost_blk_empty_reserve - free the reserve of a stopped queue, and stop its timer
 * @q: the queue, which has nothing in flight
 */
void vhost_blk_empty_reserve(struct vhost_blk_queue *q)
{
	cancel_delayed_work_sync(&q->reserve.retry_work);
	vhost_blk_free_kept_pages(q);
	kvfree(q->reserve.memory);
	q->reserve.memory = NULL;
}

/**
 * vhost_blk_alloc - memory of a request in flight
 * @req: the request
 * @n: elements
 * @size: of one, a multiple of 8
 *
 * Return: the memory; NULL if there is none and another request has the reserve.
 */
void *vhost_blk_alloc(struct vhost_blk_req *req, size_t n, size_t size)
{
	struct vhost_blk_reserve *reserve = &req->q->reserve;
	void *memory = kvmalloc_array(n, size, GFP_KERNEL_ACCOUNT | __GFP_NOWARN);

	if (likely(memory))
		return memory;
	if (reserve->parts && reserve->req != req)
		return NULL;
	if (WARN_ON_ONCE(array_size(n, size) > VHOST_BLK_RESERVE_BYTES - reserve->used))
		return NULL;
	memory = reserve->memory + reserve->used;
	reserve->used += n * size;
	reserve->parts++;
	reserve->req = req;
	return memory;
}

/**
 * vhost_blk_free - the reverse of vhost_blk_alloc()
 * @req: the request
 * @memory: what it had, or NULL
 */
void vhost_blk_free(struct vhost_blk_req *req, const void *memory)
{
	struct vhost_blk_reserve *reserve = &req->q->reserve;

	if (likely(memory < reserve->memory ||
		   memory >= reserve->memory + VHOST_BLK_RESERVE_BYTES)) {
		kvfree(memory);
		return;
	}
	/*
	 * A piece of a large request frees its arrays in the reverse order of their allocation;
	 * nothing is allocated while a request that has ended frees all the others.
	 */
	reserve->parts--;
	reserve->used = reserve->parts ? memory - reserve->memory : 0;
}

/**
 * vhost_blk_alloc_page - a page for a bounce buffer
 * @q: the queue
 *
 * Return: one that an earlier try left, or a new one, or NULL.
 */
struct page *vhost_blk_alloc_page(struct vhost_blk_queue *q)
{
	struct page *page = list_first_entry_or_null(&q->reserve.pages, struct page, lru);

	if (likely(!page))
		return alloc_page(GFP_KERNEL_ACCOUNT | __GFP_NOWARN);
	list_del(&page->lru);
	return page;
}

/**
 * vhost_blk_keep_pages - keep the pages of a failed try for the next one
 * @req: the request, which is bounced
 */
void vhost_blk_keep_pages(struct vhost_blk_req *req)
{
	while (req->nr_vecs)
		list_add(&req->vecs[--req->nr_vecs].bv_page->lru, &req->q->reserve.pages);
}

/**
 * vhost_blk_drop_pages - free the pages that earlier tries left
 * @q: the queue, whose next request may be another one
 */
void vhost_blk_drop_pages(struct vhost_blk_queue *q)
{
	if (unlikely(!list_empty(&q->reserve.pages)))
		vhost_blk_free_kept_pages(q);
}

/**
 * vhost_blk_try_later - make the queue try again
 * @q: the queue
 */
void vhost_blk_try_later(struct vhost_blk_queue *q)
{
	/* Also beside others in flight: one of them may take minutes. */
	queue_delayed_work(vhost_blk_system_wq, &q->reserve.retry_work, VHOST_BLK_RESERVE_INTERVAL);
}
