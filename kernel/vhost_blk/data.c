// SPDX-License-Identifier: GPL-2.0-only
/*
 * The pages of a request's data, in one form for all backends: an array of bio_vec. They are
 *   - pinned for this request, or
 *   - looked up in the memory table that is pinned as a whole, or
 *   - the module's own, copied from or to the guest's ("bounced"), if a buffer is not aligned for
 *     the device.
 */
#include "backend.h"
#include "stages.h"

static void vhost_blk_unpin_vec(const struct bio_vec *vec, bool dirty)
{
	unsigned int pages = DIV_ROUND_UP(vec->bv_offset + vec->bv_len, PAGE_SIZE);

	unpin_user_page_range_dirty_lock(vec->bv_page, pages, dirty);
}

static void vhost_blk_free_bounce(struct vhost_blk_req *req)
{
	while (req->nr_vecs)
		__free_page(req->vecs[--req->nr_vecs].bv_page);
	vhost_blk_free(req, req->bounce_iov);
	req->bounce_iov = NULL;
	req->bounced = false;
}

static void vhost_blk_free_vecs(struct vhost_blk_req *req)
{
	if (req->vecs != req->inline_vecs)
		vhost_blk_free(req, req->vecs);
	req->vecs = req->inline_vecs;
	req->max_vecs = VHOST_BLK_INLINE_VECS;
	req->nr_vecs = 0;
	req->pinned = false;
}

static int vhost_blk_reserve_vecs(struct vhost_blk_req *req, unsigned int wanted)
{
	struct bio_vec *vecs;

	if (likely(wanted <= req->max_vecs))
		return 0;
	vecs = vhost_blk_alloc(req, wanted, sizeof(*vecs));
	if (!vecs)
		return -ENOMEM;
	req->vecs = vecs;
	req->max_vecs = wanted;
	return 0;
}

/* Adds part of a page; joins it to the part before if they are neighbours in one folio. */
static void vhost_blk_add_page(struct vhost_blk_req *req, struct page *page, unsigned int offset,
			       unsigned int len)
{
	struct bio_vec *last = req->vecs + req->nr_vecs - 1;

	if (req->nr_vecs) {
		unsigned int end = last->bv_offset + last->bv_len;

		if (!offset && !offset_in_page(end) &&
		    page == last->bv_page + (end >> PAGE_SHIFT) &&
		    page_folio(page) == page_folio(last->bv_page)) {
			last->bv_len += len;
			return;
		}
	}
	bvec_set_page(&req->vecs[req->nr_vecs++], page, len, offset);
}

/**
 * vhost_blk_fits_device - true if the device can use the buffers of an IN or OUT themselves
 * @req: the request
 * @data: its buffers
 * @pages: set to the number of pages they touch; a small segment counts as a whole page
 *
 * Return: true if they are aligned for the device. The page cache accepts any alignment.
 */
bool vhost_blk_fits_device(const struct vhost_blk_req *req, const struct iov_iter *data,
			   unsigned int *pages)
{
	const struct iovec *iov = iter_iov(data);
	size_t left = iov_iter_count(data);
	size_t skip = data->iov_offset;
	unsigned long bits = 0;

	for (*pages = 0; left; iov++, skip = 0) {
		unsigned long addr = (unsigned long)iov->iov_base + skip;
		size_t len = min(iov->iov_len - skip, left);

		*pages += DIV_ROUND_UP(offset_in_page(addr) + len, PAGE_SIZE);
		bits |= (addr & req->be->mem_mask) | (len & (req->be->lbs - 1));
		left -= len;
	}
	return !bits || (!req->be->bdev && !req->be->direct);
}

/* Looks the pages up in the pinned memory table. Returns false if some of them are not in it. */
static bool vhost_blk_look_up_pages(struct vhost_blk_req *req, struct iov_iter *data)
{
	struct vhost_blk_pinned *pinned = req->q->blk->pinned;
	struct iov_iter i = *data;

	while (iov_iter_count(&i)) {
		unsigned long addr = (unsigned long)iter_iov_addr(&i);
		size_t len = min(iter_iov_len(&i), iov_iter_count(&i));
		unsigned int offset = offset_in_page(addr), part;
		struct page *page;

		if (len) {
			page = vhost_blk_pinned_page(pinned, addr, req->type == VIRTIO_BLK_T_IN);
			if (!page) {
				req->nr_vecs = 0;
				return false;
			}
			part = min_t(size_t, len, PAGE_SIZE - offset);
			vhost_blk_add_page(req, page, offset, part);
			len = part;
		}
		iov_iter_advance(&i, len);
	}
	return true;
}

/*
 * The array of pages lies at the end of the unused vectors, as in bio_iov_iter_get_pages(): a vector
 * takes the place of pages that were read before. An array on the stack would be cleared each time.
 */
static int vhost_blk_pin_range(struct vhost_blk_req *req, unsigned long addr, size_t len)
{
	unsigned int flags = req->type == VIRTIO_BLK_T_IN ? FOLL_WRITE : 0;

	while (len) {
		unsigned int offset = offset_in_page(addr);
		unsigned int room = req->max_vecs - req->nr_vecs;
		struct page **pages = (struct page **)(req->vecs + req->nr_vecs) +
				      room * (sizeof(*req->vecs) / sizeof(*pages) - 1);
		unsigned int wanted = min3(DIV_ROUND_UP(offset + len, PAGE_SIZE), (size_t)room,
					   (size_t)VHOST_BLK_PAGES_CHUNK);
		int i, got = pin_user_pages_fast(addr, wanted, flags, pages);

		if (unlikely(got <= 0))
			return got ?: -EFAULT;
		for (i = 0; i < got; i++) {
			unsigned int part = min_t(size_t, len, PAGE_SIZE - offset);

			vhost_blk_add_page(req, pages[i], offset, part);
			addr += part;
			len -= part;
			offset = 0;
		}
	}
	return 0;
}

/* Pins by address: iov_iter_extract_pages() would end in the same call. */
static int vhost_blk_pin_pages(struct vhost_blk_req *req, const struct iov_iter *data)
{
	const struct iovec *iov = iter_iov(data);
	size_t left = iov_iter_count(data);
	size_t skip = data->iov_offset;
	int err = 0;

	req->pinned = true;
	for (; left && !err; iov++, skip = 0) {
		size_t len = min(iov->iov_len - skip, left);

		err = vhost_blk_pin_range(req, (unsigned long)iov->iov_base + skip, len);
		left -= len;
	}
	return err;
}

/* The reason why the copy at @data failed: lack of memory (try again), or a missing address. */
static int vhost_blk_unreachable_error(const struct iov_iter *data, bool write)
{
	struct page *page;
	int got;

	got = pin_user_pages_fast((unsigned long)iter_iov_addr(data), 1, write ? FOLL_WRITE : 0,
				  &page);
	if (got > 0)
		unpin_user_page(page);
	return got > 0 || got == -ENOMEM ? -ENOMEM : -EFAULT;
}

/**
 * vhost_blk_save_iter - copy buffers, because vq.iov is reused
 * @to: set to the copy
 * @iov: its memory: data->nr_segs elements
 * @data: the buffers
 */
void vhost_blk_save_iter(struct iov_iter *to, struct iovec *iov, const struct iov_iter *data)
{
	memcpy(iov, iter_iov(data), data->nr_segs * sizeof(*iov));
	iov_iter_init(to, data->data_source, iov, data->nr_segs,
		      data->iov_offset + iov_iter_count(data));
	iov_iter_advance(to, data->iov_offset);
}

/* Keeps the destination of a bounced read. */
static int vhost_blk_save_buffers(struct vhost_blk_req *req, const struct iov_iter *data)
{
	struct iov_iter at = *data;
	struct iovec *iov;
	size_t missing;

	/* The chain cannot return to the ring after this. */
	missing = fault_in_iov_iter_writeable(&at, iov_iter_count(&at));
	if (missing) {
		iov_iter_advance(&at, iov_iter_count(&at) - missing);
		return vhost_blk_unreachable_error(&at, true);
	}
	iov = vhost_blk_alloc(req, data->nr_segs, sizeof(*iov));
	if (!iov)
		return -ENOMEM;
	vhost_blk_save_iter(&req->bounce_to, iov, data);
	req->bounce_iov = iov;
	return 0;
}

static int vhost_blk_bounce(struct vhost_blk_req *req, struct iov_iter *data)
{
	size_t left = iov_iter_count(data);
	int err;

	req->bounced = true;
	err = req->type == VIRTIO_BLK_T_IN ? vhost_blk_save_buffers(req, data) : 0;
	if (err)
		return err;
	while (left) {
		unsigned int part = min_t(size_t, left, PAGE_SIZE);
		struct page *page = vhost_blk_alloc_page(req->q);

		if (!page)
			return -ENOMEM;
		bvec_set_page(&req->vecs[req->nr_vecs++], page, part, 0);
		if (req->type == VIRTIO_BLK_T_OUT &&
		    copy_page_from_iter(page, 0, part, data) != part)
			return vhost_blk_unreachable_error(data, false);
		left -= part;
	}
	vhost_blk_drop_pages(req->q);
	req->q->stats.bounced++;
	return 0;
}

/**
 * vhost_blk_map_data - find the pages of an IN or OUT
 * @req: the request; its bytes are not 0
 * @data: its buffers
 * @fits: the result of vhost_blk_fits_device()
 * @pages: the number of pages by the same function
 *
 * Return: 0; -ENOMEM to try again; -EFAULT if a buffer is missing. On failure it holds nothing.
 */
int vhost_blk_map_data(struct vhost_blk_req *req, struct iov_iter *data, bool fits,
		       unsigned int pages)
{
	int err;

	err = vhost_blk_reserve_vecs(req, fits ? pages : DIV_ROUND_UP(req->bytes, PAGE_SIZE));
	if (unlikely(err))
		return err;
	if (unlikely(!fits))
		err = vhost_blk_bounce(req, data);
	else if (!req->q->blk->pinned || !vhost_blk_look_up_pages(req, data))
		err = vhost_blk_pin_pages(req, data);
	if (unlikely(err)) {
		if (req->bounced && err == -ENOMEM)
			vhost_blk_keep_pages(req);
		vhost_blk_unmap_data(req);
	}
	return err;
}

/**
 * vhost_blk_copy_back - copy a bounced read to the guest
 * @req: the request, which is finished; the caller runs in the owner's memory
 *
 * Return: false if a buffer cannot be written; the request's error says so, too.
 */
bool vhost_blk_copy_back(struct vhost_blk_req *req)
{
	unsigned int i;

	if (req->type != VIRTIO_BLK_T_IN || req->error)
		return true;
	for (i = 0; i < req->nr_vecs; i++) {
		const struct bio_vec *vec = req->vecs + i;

		if (copy_page_to_iter(vec->bv_page, 0, vec->bv_len, &req->bounce_to) !=
		    vec->bv_len) {
			req->error = -EFAULT;
			return false;
		}
	}
	return true;
}

/**
 * vhost_blk_unmap_data - release the pages of a request
 * @req: the request, which is finished
 *
 * May sleep.
 */
void vhost_blk_unmap_data(struct vhost_blk_req *req)
{
	bool dirty = req->type == VIRTIO_BLK_T_IN;
	unsigned int i;

	if (req->bounced)
		vhost_blk_free_bounce(req);
	else if (req->pinned)
		for (i = 0; i < req->nr_vecs; i++)
			vhost_blk_unpin_vec(req->vecs + i, dirty);
	vhost_blk_free_vecs(req);
}
