// SPDX-License-Identifier: GPL-2.0-only
/*
 * The mode with guest memory pinned once: the pages of the whole memory table are looked up and
 * charged to RLIMIT_MEMLOCK when it is set, so that a request only looks its pages up.
 *
 * Do not use it with ballooning: a page that the guest gave back stays pinned here, and I/O would
 * go to it instead of its replacement.
 */
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/vmalloc.h>

#include "vhost_blk.h"

/* Pages pinned with mmap_lock held. */
#define VHOST_BLK_PIN_CHUNK	512

/**
 * struct vhost_blk_pinned_region - one region of the memory table
 * @start: its first address in the owner
 * @nr_pages: its size
 * @done: pages that are pinned
 * @writable: the device may write there
 * @pages: the pages
 */
struct vhost_blk_pinned_region {
	unsigned long start;
	unsigned long nr_pages;
	unsigned long done;
	bool writable;
	struct page **pages;
};

/**
 * struct vhost_blk_pinned - a pinned memory table
 * @mm: owner of the charged limit
 * @charged: pages charged
 * @nr: number of regions
 * @regions: the regions
 */
struct vhost_blk_pinned {
	struct mm_struct *mm;
	unsigned long charged;
	unsigned int nr;
	struct vhost_blk_pinned_region regions[];
};

static void vhost_blk_free_pinned(struct vhost_blk_pinned *pinned)
{
	unsigned int i;

	for (i = 0; i < pinned->nr; i++) {
		struct vhost_blk_pinned_region *region = pinned->regions + i;
		unsigned long at, pages;

		for (at = 0; at < region->done; at += pages) {
			pages = min_t(unsigned long, region->done - at, VHOST_BLK_PIN_CHUNK);
			unpin_user_pages_dirty_lock(region->pages + at, pages, region->writable);
			cond_resched();
		}
		vfree(region->pages);
	}
	account_locked_vm(pinned->mm, pinned->charged, false);
	mmdrop(pinned->mm);
	kvfree(pinned);
}

static int vhost_blk_pin_region(struct vhost_blk_pinned_region *region)
{
	unsigned int flags = FOLL_LONGTERM | (region->writable ? FOLL_WRITE : 0);

	/* The owner has not mapped that much: a table that lies must not cost its array. */
	if (region->nr_pages > READ_ONCE(current->mm->total_vm))
		return -EFAULT;
	/*
	 * kvmalloc() refuses more than INT_MAX, which is a terabyte's array. An owner whose limit
	 * permits an array for which there is no memory must not bring the OOM killer.
	 */
	region->pages = __vmalloc(array_size(region->nr_pages, sizeof(*region->pages)),
				  GFP_KERNEL_ACCOUNT | __GFP_NOWARN | __GFP_RETRY_MAYFAIL);
	if (!region->pages)
		return -ENOMEM;
	while (region->done < region->nr_pages) {
		unsigned long want = min_t(unsigned long, region->nr_pages - region->done,
					   VHOST_BLK_PIN_CHUNK);
		int got;

		if (fatal_signal_pending(current))
			return -EINTR;
		got = pin_user_pages_fast(region->start + (region->done << PAGE_SHIFT), want,
					  flags, region->pages + region->done);
		if (got <= 0)
			return got ?: -EFAULT;
		region->done += got;
		cond_resched();
	}
	return 0;
}

static unsigned int vhost_blk_count_regions(struct vhost_iotlb *table)
{
	struct vhost_iotlb_map *map;
	unsigned int n = 0;

	for (map = vhost_iotlb_itree_first(table, 0, U64_MAX); map;
	     map = vhost_iotlb_itree_next(map, 0, U64_MAX))
		n++;
	return n;
}

/* Whole pages of each region; requests pin a part of a page at an end themselves. */
static void vhost_blk_describe_regions(struct vhost_blk_pinned *pinned, struct vhost_iotlb *table)
{
	struct vhost_iotlb_map *map;

	for (map = vhost_iotlb_itree_first(table, 0, U64_MAX); map;
	     map = vhost_iotlb_itree_next(map, 0, U64_MAX)) {
		struct vhost_blk_pinned_region *region = pinned->regions + pinned->nr++;
		unsigned long end = (map->addr + map->size) & PAGE_MASK;

		region->start = PAGE_ALIGN(map->addr);
		region->nr_pages = end > region->start ? (end - region->start) >> PAGE_SHIFT : 0;
		region->writable = map->perm & VHOST_ACCESS_WO;
		pinned->charged += region->nr_pages;
	}
}

/**
 * vhost_blk_pin_memory - pin the memory table
 * @blk: the device, all queues paused; its dev.mutex is held
 *
 * Return: 0; -EPERM for a process other than the owner; -ENOMEM above RLIMIT_MEMLOCK; or the
 * error of pinning.
 */
int vhost_blk_pin_memory(struct vhost_blk *blk)
{
	struct vhost_iotlb *table = blk->dev.umem;
	struct vhost_blk_pinned *pinned;
	unsigned int i, nr;
	int err;

	if (!table || blk->pinned)
		return 0;
	if (current->mm != blk->dev.mm)
		return -EPERM;
	nr = vhost_blk_count_regions(table);
	pinned = kvzalloc(struct_size(pinned, regions, nr), GFP_KERNEL_ACCOUNT);
	if (!pinned)
		return -ENOMEM;
	vhost_blk_describe_regions(pinned, table);
	err = account_locked_vm(current->mm, pinned->charged, true);
	if (err) {
		kvfree(pinned);
		return err;
	}
	pinned->mm = current->mm;
	mmgrab(pinned->mm);
	for (i = 0; i < nr && !err; i++)
		err = pinned->regions[i].nr_pages ? vhost_blk_pin_region(pinned->regions + i) : 0;
	if (err) {
		vhost_blk_free_pinned(pinned);
		return err;
	}
	blk->pinned = pinned;
	return 0;
}

/**
 * vhost_blk_unpin_memory - unpin the memory table
 * @blk: the device, all queues paused or stopped; its dev.mutex is held
 */
void vhost_blk_unpin_memory(struct vhost_blk *blk)
{
	struct vhost_blk_pinned *pinned = blk->pinned;

	blk->pinned = NULL;
	if (pinned)
		vhost_blk_free_pinned(pinned);
}

/**
 * vhost_blk_pinned_page - find a page of the pinned memory table
 * @pinned: the table
 * @addr: address in the owner
 * @write: it will be written to
 *
 * Return: the page, or NULL.
 */
struct page *vhost_blk_pinned_page(struct vhost_blk_pinned *pinned, unsigned long addr, bool write)
{
	unsigned int i;

	for (i = 0; i < pinned->nr; i++) {
		struct vhost_blk_pinned_region *region = pinned->regions + i;
		unsigned long page = (addr - region->start) >> PAGE_SHIFT;

		if (addr >= region->start && page < region->nr_pages)
			return !write || region->writable ? region->pages[page] : NULL;
	}
	return NULL;
}
