// SPDX-License-Identifier: GPL-2.0-only
/*
 * The numbers of iostat for the bio path: bios from the ring to their end; flushes without data
 * apart, as blk-mq counts them.
 */
#include <linux/part_stat.h>

#include "virtio_blk.h"

/**
 * virtblk_account_start() - a slot's bios are in flight from now on
 * @q: its lock is held
 * @slot: just put into the ring for the first time
 */
void virtblk_account_start(struct virtblk_queue *q, struct virtblk_slot *slot)
{
	struct bio *bio;

	slot->start = jiffies;
	slot->accounted = blk_queue_io_stat(q->blk->disk->queue);
	if (!slot->accounted)
		return;
	for (bio = slot->bios; bio; bio = bio->bi_next)
		if (likely(bio_sectors(bio)))
			bio_start_io_acct(bio);
}

static void account_flush(struct block_device *part, unsigned long duration)
{
	part_stat_lock();
	part_stat_inc(part, ios[STAT_FLUSH]);
	part_stat_add(part, nsecs[STAT_FLUSH], jiffies_to_nsecs(duration));
	part_stat_unlock();
}

/* One of the bios has ended. */
void virtblk_account_end(const struct virtblk_slot *slot, struct bio *bio)
{
	if (!slot->accounted)
		return;
	if (likely(bio_sectors(bio)))
		bio_end_io_acct(bio, slot->start);
	else
		account_flush(bio->bi_bdev->bd_disk->part0, jiffies - slot->start);
}
