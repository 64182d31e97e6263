// SPDX-License-Identifier: GPL-2.0-only
/*
 * Flushes of the bio path. blk-mq would take a bio with PREFLUSH or FUA apart; here a slot goes
 * through the stages T_FLUSH, data, T_FLUSH, each begun when the one before it has ended well.
 * Requests with other data are not waited for: PREFLUSH is about what was completed before.
 *
 * Whether the disk has a cache is not asked here. submit_bio() drops the flags if it has none, and
 * a flush that was still on its way when that changed does no harm.
 */
#include "virtio_blk.h"

/* How a bio begins. */
enum virtblk_stage virtblk_first_stage(const struct bio *bio)
{
	if (bio->bi_opf & REQ_PREFLUSH || !bio_sectors(bio))
		return VIRTBLK_PREFLUSH;
	return VIRTBLK_DATA;
}

/* What comes after a stage that went well; VIRTBLK_FREE: nothing, the bios are done. */
enum virtblk_stage virtblk_next_stage(const struct virtblk_slot *slot)
{
	const struct bio *bio = slot->bios;

	if (slot->stage == VIRTBLK_PREFLUSH && bio_sectors(bio))
		return VIRTBLK_DATA;
	/* Joined bios have no such flags. */
	if (slot->stage == VIRTBLK_DATA && unlikely(bio->bi_opf & REQ_FUA))
		return VIRTBLK_POSTFLUSH;
	return VIRTBLK_FREE;
}

/**
 * virtblk_prepare_stage() - makes the device's request for a slot's stage
 * @q: its lock is held
 * @slot: with its stage and bios set
 * @segments: of the bios' data
 *
 * Return: -ENOMEM, to be tried again; -EOPNOTSUPP for operations that virtio-blk does not have.
 */
int virtblk_prepare_stage(struct virtblk_queue *q, struct virtblk_slot *slot,
			  unsigned int segments)
{
	struct virtblk_request *request = &slot->request;
	struct virtio_device *vdev = q->vq->vdev;
	struct bio *bio = slot->bios;

	if (slot->stage != VIRTBLK_DATA) {
		virtblk_set_command(vdev, request, REQ_OP_FLUSH, 0, bio->bi_ioprio);
		return 0;
	}
	if (virtblk_set_command(vdev, request, bio->bi_opf, bio->bi_iter.bi_sector,
				bio->bi_ioprio))
		return -EOPNOTSUPP;
	if (segments)
		return virtblk_map_bios(q, slot, segments);
	virtblk_set_range(request, bio->bi_opf, bio->bi_iter.bi_sector, bio_sectors(bio));
	return 0;
}
