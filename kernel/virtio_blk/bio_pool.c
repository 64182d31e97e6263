// SPDX-License-Identifier: GPL-2.0-only
/*
 * The bio path's own requests, allocated with the disk: I/O needs no memory to make progress, as
 * swap and what lies below device-mapper must not.
 */
#include <linux/slab.h>

#include "virtio_blk.h"

static struct virtblk_slot *alloc_slot(struct virtblk_queue *q)
{
	struct virtblk_slot *slot = kzalloc(sizeof(*slot), GFP_KERNEL);

	if (!slot)
		return NULL;
	virtblk_init_request(&slot->request);
	list_add_tail(&slot->node, &q->free);
	return slot;
}

/**
 * virtblk_alloc_slots() - the requests of a queue
 * @q: new; the disk's limits are known
 *
 * Each on its own: the device writes to them, so they must not be virtually mapped.
 *
 * Return: -ENOMEM; virtblk_free_slots() cleans up in any case.
 */
int virtblk_alloc_slots(struct virtblk_queue *q)
{
	unsigned int count = min(virtblk_depth(q->blk), VIRTBLK_SLOTS_MAX);

	q->slots = kvcalloc(count, sizeof(*q->slots), GFP_KERNEL);
	q->reserve_sg = kvcalloc(q->blk->seg_max, sizeof(*q->reserve_sg), GFP_KERNEL);
	if (!q->slots || !q->reserve_sg)
		return -ENOMEM;
	while (q->slot_count < count) {
		q->slots[q->slot_count] = alloc_slot(q);
		if (!q->slots[q->slot_count])
			return -ENOMEM;
		q->slot_count++;
	}
	return 0;
}

/* Nothing is in flight any more. */
void virtblk_free_slots(struct virtblk_queue *q)
{
	while (q->slot_count)
		kfree(q->slots[--q->slot_count]);
	kvfree(q->slots);
	kvfree(q->reserve_sg);
	q->slots = NULL;
	q->reserve_sg = NULL;
}

/* A slot of one's own, or NULL; under the queue's lock. The last one used, warm, comes first. */
struct virtblk_slot *virtblk_get_slot(struct virtblk_queue *q)
{
	struct virtblk_slot *slot;

	lockdep_assert_held(&q->lock);
	slot = list_first_entry_or_null(&q->free, struct virtblk_slot, node);
	if (likely(slot))
		list_del_init(&slot->node);
	return slot;
}

/* Under the queue's lock. */
void virtblk_put_slot(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	lockdep_assert_held(&q->lock);
	slot->stage = VIRTBLK_FREE;
	slot->bios = NULL;
	list_add(&slot->node, &q->free);
}
