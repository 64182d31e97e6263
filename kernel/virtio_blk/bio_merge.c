// SPDX-License-Identifier: GPL-2.0-only
/*
 * Adjacent bios become one request of the device, as adjacent requests would be merged by the
 * scheduler: on a slow disk the number of requests is what counts.
 */
#include "virtio_blk.h"

/* What must be equal, or be missing. */
#define SAME_FLAGS	(REQ_OP_MASK | REQ_POLLED)
#define ALONE_FLAGS	REQ_NOMERGE_FLAGS

/**
 * virtblk_may_join() - whether a bio goes on where another one ends
 * @first: the lower one
 * @second: the higher one
 *
 * Limits of length are looked at later.
 */
bool virtblk_may_join(const struct bio *first, const struct bio *second)
{
	if (bio_end_sector(first) != second->bi_iter.bi_sector)
		return false;
	if ((first->bi_opf ^ second->bi_opf) & SAME_FLAGS ||
	    (first->bi_opf | second->bi_opf) & ALONE_FLAGS)
		return false;
	return (bio_op(first) == REQ_OP_READ || bio_op(first) == REQ_OP_WRITE) &&
	       first->bi_ioprio == second->bi_ioprio;
}

/**
 * virtblk_bio_segments() - scatterlist entries of a bio's data, at most
 * @blk: the disk, whose segments have a limit of length
 * @bio: within the disk's limits
 */
unsigned int virtblk_bio_segments(const struct virtblk *blk, struct bio *bio)
{
	unsigned int segments = 0;
	struct bvec_iter iter;
	struct bio_vec vec;

	if (bio_op(bio) != REQ_OP_READ && bio_op(bio) != REQ_OP_WRITE)
		return 0;
	bio_for_each_bvec(vec, bio, iter)
		segments += likely(vec.bv_len <= blk->seg_bytes_max) ?
			    1 : DIV_ROUND_UP(vec.bv_len, blk->seg_bytes_max);
	return segments;
}

/**
 * virtblk_gather() - gives a slot the first bio of a list, and the following ones that join it
 * @q: its lock is held
 * @slot: free
 * @bios: not empty
 * @taken: how many it got
 *
 * Return: the segments of all.
 */
unsigned int virtblk_gather(struct virtblk_queue *q, struct virtblk_slot *slot,
			    struct bio_list *bios, unsigned int *taken)
{
	struct virtblk *blk = q->blk;
	unsigned int sectors_max = queue_max_sectors(blk->disk->queue);
	struct bio *next, *last = bio_list_pop(bios);
	unsigned int segments = virtblk_bio_segments(blk, last);
	unsigned int sectors = bio_sectors(last);

	slot->bios = last;
	*taken = 1;
	while ((next = bio_list_peek(bios)) && virtblk_may_join(last, next)) {
		unsigned int more = virtblk_bio_segments(blk, next);

		if (segments + more > blk->seg_max || sectors + bio_sectors(next) > sectors_max)
			break;
		segments += more;
		sectors += bio_sectors(next);
		bio_list_pop(bios);
		last->bi_next = next;
		last = next;
		(*taken)++;
	}
	return segments;
}

/* Adds bytes that are contiguous in memory. Returns the entry that was written last. */
static struct scatterlist *add_vec(struct virtblk_request *request, struct scatterlist *sg,
				   const struct bio_vec *vec, unsigned int bytes_max)
{
	phys_addr_t at = page_to_phys(vec->bv_page) + vec->bv_offset;
	unsigned int left = vec->bv_len;

	while (left) {
		unsigned int bytes = min(left, bytes_max);

		if (sg && sg_phys(sg) + sg->length == at && sg->length <= bytes_max - bytes) {
			sg->length += bytes;
		} else {
			sg = sg ? sg_next(sg) : request->data.sgl;
			sg_set_page(sg, pfn_to_page(PHYS_PFN(at)), bytes, offset_in_page(at));
			request->data.nents++;
		}
		at += bytes;
		left -= bytes;
	}
	return sg;
}

static int alloc_sg(struct virtblk_queue *q, struct virtblk_slot *slot, unsigned int segments)
{
	if (likely(!virtblk_alloc_sg(&slot->request, segments)))
		return 0;
	if (q->reserve_busy)
		return -ENOMEM;
	/* Who has it is in flight, so it comes back. */
	q->reserve_busy = true;
	slot->uses_reserve = true;
	sg_init_table(q->reserve_sg, segments);
	slot->request.data.sgl = q->reserve_sg;
	return 0;
}

/**
 * virtblk_map_bios() - describes the data of a slot's bios
 * @q: its lock is held
 * @slot: with bios
 * @segments: what virtblk_gather() returned, or 0 for no data
 *
 * Return: -ENOMEM, to be tried again after a completion.
 */
int virtblk_map_bios(struct virtblk_queue *q, struct virtblk_slot *slot, unsigned int segments)
{
	struct virtblk_request *request = &slot->request;
	struct scatterlist *sg = NULL;
	struct bvec_iter iter;
	struct bio_vec vec;
	struct bio *bio;

	if (!segments)
		return 0;
	if (alloc_sg(q, slot, segments))
		return -ENOMEM;
	request->data.nents = 0;
	for (bio = slot->bios; bio; bio = bio->bi_next)
		bio_for_each_bvec(vec, bio, iter)
			sg = add_vec(request, sg, &vec, q->blk->seg_bytes_max);
	sg_mark_end(sg);
	return 0;
}
