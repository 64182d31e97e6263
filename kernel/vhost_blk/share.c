// SPDX-License-Identifier: GPL-2.0-only
/*
 * Limits that several devices of an owner share: &struct vhost_blk_limits in a pinned page of its
 * memory, which the owner's own data plane uses, too.
 *
 * The owner changes any of it at any time. So the module reads each value once, and accepts every
 * value: a wrong one makes the owner's own devices too slow or too fast.
 *
 * Devices that always have requests get the same share. The tag of a device is the cost of its
 * requests so far. A device that waits tells its tag and the end of its wait, if its tag is the
 * lowest. A device with a higher tag then gives way: all its queues wait for the difference, but for
 * VHOST_BLK_LEAD_WAIT at most, and make up for it by the burst.
 */
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>

#include "vhost_blk.h"

/* Longest time that a device gives way to others, in nanoseconds: less than the least burst. */
#define VHOST_BLK_LEAD_WAIT	(6 * NSEC_PER_MSEC)
/* Time, in nanoseconds, after the end of its wait from which a device does not count as waiting. */
#define VHOST_BLK_BEHIND_AGE	(8 * NSEC_PER_MSEC)
/* Cost, in nanoseconds, that a device which returns may lag behind the others. */
#define VHOST_BLK_LAG_MAX	(100 * NSEC_PER_MSEC)
/* Set in all numbers of the module's members: the owner's own members have other numbers. */
#define VHOST_BLK_MEMBER_ID	(1ULL << 63)

/**
 * struct vhost_blk_member - a device's part in shared limits
 * @page: the pinned page
 * @limits: the limits, inside @page
 * @id: number of the member
 * @version: that of the limits of @tag and @gate
 * @tag: cost of its requests so far, in nanoseconds
 * @gate: no queue of the device takes a chain before
 *
 * Queues use it in an RCU read section. Two of them may change @tag or @gate at once, and lose a
 * change: the shares differ by the cost of that request.
 */
struct vhost_blk_member {
	struct page *page;
	struct vhost_blk_limits *limits;
	u64 id;
	u64 version;
	u64 tag;
	u64 gate;
};

static atomic64_t vhost_blk_members;

static void vhost_blk_free_member(struct vhost_blk_member *member)
{
	/* The module has written to it. */
	unpin_user_pages_dirty_lock(&member->page, 1, true);
	kfree(member);
}

static struct vhost_blk_member *vhost_blk_make_member(unsigned long user_addr)
{
	struct vhost_blk_member *member;
	int got;

	/* So they are in one page. */
	if (!IS_ALIGNED(user_addr, sizeof(struct vhost_blk_limits)))
		return ERR_PTR(-EINVAL);
	member = kzalloc(sizeof(*member), GFP_KERNEL_ACCOUNT);
	if (!member)
		return ERR_PTR(-ENOMEM);
	got = pin_user_pages_fast(user_addr & PAGE_MASK, 1, FOLL_WRITE | FOLL_LONGTERM,
				  &member->page);
	if (got != 1) {
		kfree(member);
		return ERR_PTR(got ?: -EFAULT);
	}
	if (PageHighMem(member->page)) {
		vhost_blk_free_member(member);
		return ERR_PTR(-EOPNOTSUPP);
	}
	member->limits = page_address(member->page) + offset_in_page(user_addr);
	member->id = atomic64_inc_return(&vhost_blk_members) | VHOST_BLK_MEMBER_ID;
	return member;
}

static void vhost_blk_set_member(struct vhost_blk *blk, struct vhost_blk_member *member)
{
	struct vhost_blk_member *old;

	old = rcu_replace_pointer(blk->limit.member, member, lockdep_is_held(&blk->dev.mutex));
	if (!old && !member)
		return;
	/* Pairs with vhost_blk_limit_look(). */
	smp_store_release(&blk->limit.joins, blk->limit.joins + 1);
	vhost_blk_limit_changed(blk);
	if (!old)
		return;
	synchronize_rcu_expedited();
	vhost_blk_free_member(old);
}

/**
 * vhost_blk_share_limits - VHOST_BLK_SHARE_LIMITS
 * @blk: the device; its dev.mutex is held
 * @user_addr: address of the limits in the owner, or 0: the device's own limits hold again
 *
 * Return: 0, or a negative errno; the limits are unchanged then.
 */
int vhost_blk_share_limits(struct vhost_blk *blk, unsigned long user_addr)
{
	struct vhost_blk_member *member = NULL;

	if (user_addr) {
		member = vhost_blk_make_member(user_addr);
		if (IS_ERR(member))
			return PTR_ERR(member);
	}
	vhost_blk_set_member(blk, member);
	return 0;
}

/**
 * vhost_blk_unshare_limits - share no limits any more
 * @blk: the device; its dev.mutex is held
 */
void vhost_blk_unshare_limits(struct vhost_blk *blk)
{
	vhost_blk_set_member(blk, NULL);
}

/**
 * vhost_blk_member_limits - the shared limits
 * @member: the device's part
 *
 * Return: the limits, which the owner changes at any time.
 */
struct vhost_blk_limits *vhost_blk_member_limits(struct vhost_blk_member *member)
{
	return member->limits;
}

/* New limits forgive leads, too. */
static void vhost_blk_member_refresh(struct vhost_blk_member *member)
{
	u64 version = READ_ONCE(member->limits->version);

	if (READ_ONCE(member->version) == version)
		return;
	WRITE_ONCE(member->version, version);
	WRITE_ONCE(member->tag, 0);
	WRITE_ONCE(member->gate, 0);
}

/* The latest end of a wait for the limits. A later one is that of limits that were replaced. */
static u64 vhost_blk_latest(u64 at, u64 now)
{
	return clamp(at, now, U64_MAX - VHOST_BLK_LEAD_WAIT) + VHOST_BLK_LEAD_WAIT;
}

/* True if another device waits, and has told its tag. */
static bool vhost_blk_member_other_waits(const struct vhost_blk_member *member, u64 at, u64 now)
{
	const struct vhost_blk_limits *limits = member->limits;
	u64 until = READ_ONCE(limits->behind_ns);

	/* Its wait usually ends later than @now. */
	return READ_ONCE(limits->behind_by) != member->id && until <= vhost_blk_latest(at, now) &&
	       (s64)(now - until) < VHOST_BLK_BEHIND_AGE;
}

/* The time for which the device gives way. */
static u64 vhost_blk_member_lead(const struct vhost_blk_member *member, u64 at, u64 now)
{
	u64 tag = READ_ONCE(member->tag), behind = READ_ONCE(member->limits->behind);

	if (tag <= behind || !vhost_blk_member_other_waits(member, at, now))
		return 0;
	return min_t(u64, tag - behind, VHOST_BLK_LEAD_WAIT);
}

static void vhost_blk_member_give_way(struct vhost_blk_member *member, u64 at, u64 now)
{
	u64 lead = vhost_blk_member_lead(member, at, now);

	at = clamp(at, now, U64_MAX - VHOST_BLK_LEAD_WAIT);
	if (lead)
		WRITE_ONCE(member->gate, max(READ_ONCE(member->gate), at + lead));
}

/* The device waits: tells its tag if it is the lowest one. */
static void vhost_blk_member_tell(struct vhost_blk_member *member, u64 at, u64 now)
{
	struct vhost_blk_limits *limits = member->limits;
	u64 tag = READ_ONCE(member->tag), top = READ_ONCE(limits->top);

	/* A device that returns has saved up little. */
	if (top > VHOST_BLK_LAG_MAX && tag < top - VHOST_BLK_LAG_MAX) {
		tag = top - VHOST_BLK_LAG_MAX;
		WRITE_ONCE(member->tag, tag);
	}
	if (vhost_blk_member_other_waits(member, at, now) && tag >= READ_ONCE(limits->behind))
		return;
	WRITE_ONCE(limits->behind, tag);
	WRITE_ONCE(limits->behind_by, member->id);
	WRITE_ONCE(limits->behind_ns, at);
}

/**
 * vhost_blk_member_charge - note the cost of a request
 * @member: the device's part
 * @cost: the cost in nanoseconds
 * @at: the time at which the limits let the next request pass
 * @now: the present time
 */
void vhost_blk_member_charge(struct vhost_blk_member *member, u64 cost, u64 at, u64 now)
{
	struct vhost_blk_limits *limits = member->limits;
	u64 tag;

	vhost_blk_member_refresh(member);
	tag = READ_ONCE(member->tag);
	tag += min(cost, U64_MAX - tag);
	WRITE_ONCE(member->tag, tag);
	if (tag > READ_ONCE(limits->top))
		WRITE_ONCE(limits->top, tag);
	vhost_blk_member_give_way(member, at, now);
}

/**
 * vhost_blk_member_turn - the time at which the device may take a chain
 * @member: the device's part
 * @at: the time at which the limits let a request pass
 * @now: the present time
 *
 * Return: nanoseconds; @now or earlier: it may take one.
 */
u64 vhost_blk_member_turn(struct vhost_blk_member *member, u64 at, u64 now)
{
	struct vhost_blk_limits *limits = member->limits;
	u64 gate;

	vhost_blk_member_refresh(member);
	if (at > now) {
		vhost_blk_member_tell(member, at, now);
		vhost_blk_member_give_way(member, at, now);
	}
	gate = min(READ_ONCE(member->gate), vhost_blk_latest(at, now));
	/* It waits no more. */
	if (max(at, gate) <= now && READ_ONCE(limits->behind_by) == member->id)
		WRITE_ONCE(limits->behind_ns, 0);
	return max(at, gate);
}
