// SPDX-License-Identifier: GPL-2.0-only
/*
 * The slots of the bio path: their pool, the bios that share one, and the request that the device
 * sees.
 *
 * Adjacent bios share a slot, as a scheduler merges adjacent requests: on a slow disk the number of
 * requests is what counts.
 */
#include <linux/slab.h>

#include "virtio_blk.h"

/* Merged bios have these flags in common. */
#define VIRTBLK_SAME_FLAGS	(REQ_OP_MASK | REQ_POLLED)
/* Merged bios have none of these flags. */
#define VIRTBLK_ALONE_FLAGS	REQ_NOMERGE_FLAGS

/*
 * Slots are allocated with the disk, so that I/O needs no memory to make progress: swap, and disks
 * below device-mapper, must not need any.
 */

/* The memory node of the CPUs that use the queue. */
static int virtblk_queue_node(const struct virtblk_queue *q)
{
	const struct blk_mq_queue_map *map = &q->blk->maps[q->polled];
	unsigned int cpu;

	for_each_possible_cpu(cpu)
		if (map->mq_map[cpu] == q->index)
			return cpu_to_node(cpu);
	return NUMA_NO_NODE;
}

static struct virtblk_slot *virtblk_alloc_slot(struct virtblk_queue *q, int node)
{
	struct virtblk_slot *slot = kzalloc_node(sizeof(*slot), GFP_KERNEL, node);

	if (!slot)
		return NULL;
	virtblk_init_request(&slot->request);
	slot->index = q->slot_count;
	list_add_tail(&slot->node, &q->free);
	return slot;
}

/**
 * virtblk_alloc_slots() - allocates the slots of a queue
 * @q: new; the disk's limits are known
 *
 * Each is allocated on its own: the device writes to them, so they must not be in vmalloc's memory.
 *
 * Return: 0, or -ENOMEM; virtblk_free_slots() cleans up in any case.
 */
int virtblk_alloc_slots(struct virtblk_queue *q)
{
	unsigned int count = q->blk->depth;
	int node = virtblk_queue_node(q);

	q->slots = kvcalloc(count, sizeof(*q->slots), GFP_KERNEL);
	q->reserve_sg = kvcalloc(q->blk->seg_max, sizeof(*q->reserve_sg), GFP_KERNEL);
	if (!q->slots || !q->reserve_sg)
		return -ENOMEM;
	while (q->slot_count < count) {
		q->slots[q->slot_count] = virtblk_alloc_slot(q, node);
		if (!q->slots[q->slot_count])
			return -ENOMEM;
		q->slot_count++;
	}
	return 0;
}

/**
 * virtblk_free_slots() - frees the slots of a queue
 * @q: nothing is in flight
 */
void virtblk_free_slots(struct virtblk_queue *q)
{
	while (q->slot_count)
		kfree(q->slots[--q->slot_count]);
	kvfree(q->slots);
	kvfree(q->reserve_sg);
	q->slots = NULL;
	q->reserve_sg = NULL;
}

/**
 * virtblk_get_slot() - takes a slot from the pool
 * @q: its lock is held
 *
 * Return: the last one used, with warm caches, or NULL.
 */
struct virtblk_slot *virtblk_get_slot(struct virtblk_queue *q)
{
	struct virtblk_slot *slot;

	lockdep_assert_held(&q->lock);
	slot = list_first_entry_or_null(&q->free, struct virtblk_slot, node);
	if (likely(slot))
		list_del_init(&slot->node);
	return slot;
}

/**
 * virtblk_put_slot() - gives a slot back to the pool
 * @q: its lock is held
 * @slot: may be in another list still
 */
void virtblk_put_slot(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	lockdep_assert_held(&q->lock);
	slot->stage = VIRTBLK_FREE;
	slot->bios = NULL;
	list_move(&slot->node, &q->free);
}

/**
 * virtblk_can_merge() - checks whether a bio continues another one
 * @first: the lower one
 * @second: the higher one
 *
 * virtblk_gather() checks the limits of length.
 *
 * Return: true if both may share a request.
 */
bool virtblk_can_merge(const struct bio *first, const struct bio *second)
{
	if (bio_end_sector(first) != second->bi_iter.bi_sector ||
	    blk_queue_nomerges(bdev_get_queue(first->bi_bdev)))
		return false;
	if ((first->bi_opf ^ second->bi_opf) & VIRTBLK_SAME_FLAGS ||
	    (first->bi_opf | second->bi_opf) & VIRTBLK_ALONE_FLAGS)
		return false;
	return (bio_op(first) == REQ_OP_READ || bio_op(first) == REQ_OP_WRITE) &&
	       first->bi_ioprio == second->bi_ioprio;
}

/* Scatterlist entries that a bio's data needs at most. */
static unsigned int virtblk_bio_segments(const struct virtblk *blk, struct bio *bio)
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

/*
 * Gives a free slot the first bio of a list and those that continue it. @taken gets their number.
 * Returns the scatterlist entries of all, at most.
 */
static unsigned int virtblk_gather(struct virtblk_queue *q, struct virtblk_slot *slot,
				   struct bio_list *bios, unsigned int *taken)
{
	struct virtblk *blk = q->blk;
	unsigned int sectors_max = queue_max_sectors(blk->disk->queue);
	struct bio *next, *last = bio_list_pop(bios);
	unsigned int segments = virtblk_bio_segments(blk, last);
	unsigned int sectors = bio_sectors(last);

	slot->bios = last;
	*taken = 1;
	while ((next = bio_list_peek(bios)) && virtblk_can_merge(last, next)) {
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
static struct scatterlist *virtblk_add_vec(struct virtblk_request *request, struct scatterlist *sg,
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

static int virtblk_slot_alloc_sg(struct virtblk_queue *q, struct virtblk_slot *slot,
				 unsigned int segments, bool locked)
{
	if (likely(!virtblk_alloc_sg(&slot->request, segments)))
		return 0;
	if (!locked || q->reserve_busy)
		return -ENOMEM;
	/* The reserve is free again soon: its user goes into the ring, and its completion frees it. */
	q->reserve_busy = true;
	slot->uses_reserve = true;
	sg_init_table(q->reserve_sg, segments);
	slot->request.data.sgl = q->reserve_sg;
	return 0;
}

/* Describes the data of a slot's bios. */
static int virtblk_map_bios(struct virtblk_queue *q, struct virtblk_slot *slot,
			    unsigned int segments, bool locked)
{
	struct virtblk_request *request = &slot->request;
	struct scatterlist *sg = NULL;
	struct bvec_iter iter;
	struct bio_vec vec;
	struct bio *bio;

	if (virtblk_slot_alloc_sg(q, slot, segments, locked))
		return -ENOMEM;
	request->data.nents = 0;
	for (bio = slot->bios; bio; bio = bio->bi_next)
		bio_for_each_bvec(vec, bio, iter)
			sg = virtblk_add_vec(request, sg, &vec, q->blk->seg_bytes_max);
	sg_mark_end(sg);
	return 0;
}

/*
 * Makes the device's request for a slot's stage. With @locked the queue's lock is held, and its
 * reserve may be used. Returns 0; -ENOMEM if the caller has to try again, under the lock or after a
 * completion; -EOPNOTSUPP for operations that virtio-blk does not have.
 */
static int virtblk_prepare_stage(struct virtblk_queue *q, struct virtblk_slot *slot,
				 unsigned int segments, bool locked)
{
	struct virtblk_request *request = &slot->request;
	/* Stays while a bio or a query of the serial number holds the queue's usage counter. */
	struct virtio_device *vdev = q->blk->vdev;
	struct bio *bio = slot->bios;

	if (slot->stage != VIRTBLK_DATA) {
		virtblk_set_command(vdev, request, REQ_OP_FLUSH, 0, bio->bi_ioprio);
		return 0;
	}
	if (virtblk_set_command(vdev, request, bio->bi_opf, bio->bi_iter.bi_sector,
				bio->bi_ioprio))
		return -EOPNOTSUPP;
	if (segments)
		return virtblk_map_bios(q, slot, segments, locked);
	virtblk_set_range(request, bio->bi_opf, bio->bi_iter.bi_sector, bio_sectors(bio));
	return 0;
}

static enum virtblk_stage virtblk_first_stage(const struct bio *bio)
{
	if (bio->bi_opf & REQ_PREFLUSH || !bio_sectors(bio))
		return VIRTBLK_PREFLUSH;
	return VIRTBLK_DATA;
}

/**
 * virtblk_prepare_next() - gives a slot the first bios of a list, and prepares their data
 * @q: the queue
 * @slot: free
 * @bios: not empty
 * @locked: the queue's lock is held
 * @taken: gets the number of bios
 *
 * The data is prepared only if the bios begin with that stage.
 *
 * Return: as virtblk_prepare_stage() does, or -EINVAL if the device cannot carry the bio out.
 */
int virtblk_prepare_next(struct virtblk_queue *q, struct virtblk_slot *slot, struct bio_list *bios,
			 bool locked, unsigned int *taken)
{
	unsigned int segments = virtblk_gather(q, slot, bios, taken);

	slot->stage = virtblk_first_stage(slot->bios);
	slot->accounted = false;
	/* A bio that the block layer has not split, although it is too long for the device. */
	if (unlikely(segments > q->blk->seg_max))
		return -EINVAL;
	if (unlikely(slot->stage != VIRTBLK_DATA))
		return 0;
	return virtblk_prepare_stage(q, slot, segments, locked);
}

/* Counts the scatterlist entries of a slot's data again, as virtblk_gather() did. */
static unsigned int virtblk_slot_segments(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	unsigned int segments = 0;
	struct bio *bio;

	for (bio = slot->bios; bio; bio = bio->bi_next)
		segments += virtblk_bio_segments(q->blk, bio);
	return segments;
}

/**
 * virtblk_prepare_requeued() - makes the request of a slot's next stage
 * @q: its lock is held
 * @slot: in flight
 *
 * Return: as virtblk_prepare_stage() does.
 */
int virtblk_prepare_requeued(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	if (slot->stage == VIRTBLK_GET_ID) {
		virtblk_set_get_id(q->blk->vdev, &slot->request);
		return 0;
	}
	return virtblk_prepare_stage(q, slot, virtblk_slot_segments(q, slot), true);
}

/**
 * virtblk_unprepare() - frees the memory of a slot's stage
 * @q: its lock is held
 * @slot: the device does not have it; keeps its bios
 */
void virtblk_unprepare(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	if (unlikely(slot->uses_reserve)) {
		slot->uses_reserve = false;
		q->reserve_busy = false;
	}
	virtblk_free_data(&slot->request);
}

/**
 * virtblk_put_back() - puts the bios of a slot back at the head of a list
 * @slot: was not sent
 * @bios: the list
 */
void virtblk_put_back(struct virtblk_slot *slot, struct bio_list *bios)
{
	struct bio_list taken;

	bio_list_init(&taken);
	taken.head = slot->bios;
	for (taken.tail = taken.head; taken.tail->bi_next;)
		taken.tail = taken.tail->bi_next;
	bio_list_merge_head(bios, &taken);
	slot->bios = NULL;
}
