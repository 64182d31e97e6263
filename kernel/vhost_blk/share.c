// SPDX-License-Identifier: GPL-2.0-only
/*
 * Limits that several devices of an owner share: &struct vhost_blk_limits in a pinned page of its
 * memory, which the owner's own data plane uses, too. The debt of a device is in such a page, too.
 *
 * The owner changes any of it at any time. So the module reads each value once, and accepts every
 * value: a wrong one makes the owner's own devices too slow or too fast.
 *
 * A request advances the clocks to VHOST_BLK_LIMITS_LEAD_NS after the present time at most, or by the
 * cost of one request with a limit on requests. The rest of its cost is debt of its device, which
 * takes no chain meanwhile. Whenever the clocks let it take one, it pays a part of the debt instead,
 * again up to that time. So the others wait for a large request no longer than for a small one, and
 * all costs reach the clocks.
 *
 * Devices that always have requests get the same share. The tag of a device is the cost of its
 * requests so far. A device that waits publishes its tag and the end of its wait, if its tag is the
 * lowest. A device with a higher tag then gives way: all its queues wait for the difference, but for
 * VHOST_BLK_LIMITS_GIVE_WAY_NS at most, and make up for it by the burst.
 */
#include <linux/mm.h>
#include <linux/overflow.h>
#include <linux/rcupdate.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>

#include "vhost_blk.h"

/* Pinned pages of a member. */
#define VHOST_BLK_MEMBER_PAGES	2
/* Attempts to add to a debt: the owner may change it all the time. */
#define VHOST_BLK_OWE_TRIES	16
/* Set in all numbers of the module's members: the owner's own members have other numbers. */
#define VHOST_BLK_MEMBER_ID	(1ULL << 63)

/**
 * struct vhost_blk_member - a device's part in shared limits
 * @mm: the owner's, whose limit of locked memory is charged
 * @pages: the pinned pages
 * @nr_pages: number of pinned pages
 * @limits: the limits, inside the first page
 * @debt: the debt of the device, inside the second one
 * @id: number of the member
 * @version: that of the limits of @tag and @gate
 * @tag: cost of its requests so far, in nanoseconds
 * @gate: no queue of the device takes a chain before
 *
 * Queues use it in an RCU read section. Two of them may change @tag or @gate at once, and lose a
 * change: the shares differ by the cost of that request.
 */
struct vhost_blk_member {
	struct mm_struct *mm;
	struct page *pages[VHOST_BLK_MEMBER_PAGES];
	unsigned int nr_pages;
	struct vhost_blk_limits *limits;
	struct vhost_blk_debt *debt;
	u64 id;
	u64 version;
	u64 tag;
	u64 gate;
};

static atomic64_t vhost_blk_members;

static void vhost_blk_free_member(struct vhost_blk_member *member)
{
	/* The module has written to them. */
	unpin_user_pages_dirty_lock(member->pages, member->nr_pages, true);
	account_locked_vm(member->mm, VHOST_BLK_MEMBER_PAGES, false);
	mmdrop(member->mm);
	kfree(member);
}

/* Pins @bytes bytes of the owner, aligned to their number: so they are in one page. */
static void *vhost_blk_pin_part(struct vhost_blk_member *member, u64 user_addr, size_t bytes)
{
	struct page **page = member->pages + member->nr_pages;
	int got;

	if (user_addr != (unsigned long)user_addr || !IS_ALIGNED(user_addr, bytes))
		return ERR_PTR(-EINVAL);
	got = pin_user_pages_fast(user_addr & PAGE_MASK, 1, FOLL_WRITE | FOLL_LONGTERM, page);
	if (got != 1)
		return ERR_PTR(got ?: -EFAULT);
	member->nr_pages++;
	return page_address(*page) + offset_in_page(user_addr);
}

static int vhost_blk_pin_parts(struct vhost_blk_member *member, const struct vhost_blk_share *share)
{
	static_assert(!(PAGE_SIZE % sizeof(*member->limits)) && !(PAGE_SIZE % sizeof(*member->debt)));
	member->limits = vhost_blk_pin_part(member, share->limits_addr, sizeof(*member->limits));
	if (IS_ERR(member->limits))
		return PTR_ERR(member->limits);
	member->debt = vhost_blk_pin_part(member, share->debt_addr, sizeof(*member->debt));
	return PTR_ERR_OR_ZERO(member->debt);
}

static struct vhost_blk_member *vhost_blk_make_member(const struct vhost_blk_share *share)
{
	struct vhost_blk_member *member = kzalloc(sizeof(*member), GFP_KERNEL_ACCOUNT);
	int err;

	if (!member)
		return ERR_PTR(-ENOMEM);
	err = account_locked_vm(current->mm, VHOST_BLK_MEMBER_PAGES, true);
	if (err) {
		kfree(member);
		return ERR_PTR(err);
	}
	member->mm = current->mm;
	mmgrab(member->mm);
	err = vhost_blk_pin_parts(member, share);
	if (err) {
		vhost_blk_free_member(member);
		return ERR_PTR(err);
	}
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
 * @share: addresses in the owner, or zeroes: the device's own limits hold again
 *
 * Return: 0, or a negative errno; the limits are unchanged then.
 */
int vhost_blk_share_limits(struct vhost_blk *blk, const struct vhost_blk_share *share)
{
	struct vhost_blk_member *member = NULL;

	if (!share->limits_addr != !share->debt_addr)
		return -EINVAL;
	if (share->limits_addr) {
		member = vhost_blk_make_member(share);
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
	return clamp(at, now, U64_MAX - VHOST_BLK_LIMITS_GIVE_WAY_NS) + VHOST_BLK_LIMITS_GIVE_WAY_NS;
}

/* True if another device waits, and has published its tag. */
static bool vhost_blk_member_other_waits(const struct vhost_blk_member *member, u64 at, u64 now)
{
	const struct vhost_blk_limits *limits = member->limits;
	u64 until = READ_ONCE(limits->behind_ns);

	/* Its wait usually ends later than @now. */
	return READ_ONCE(limits->behind_by) != member->id && until <= vhost_blk_latest(at, now) &&
	       (s64)(now - until) < VHOST_BLK_LIMITS_BEHIND_AGE_NS;
}

/* The time for which the device gives way. */
static u64 vhost_blk_member_lead(const struct vhost_blk_member *member, u64 at, u64 now)
{
	u64 tag = READ_ONCE(member->tag), behind = READ_ONCE(member->limits->behind);

	if (tag <= behind || !vhost_blk_member_other_waits(member, at, now))
		return 0;
	return min_t(u64, tag - behind, VHOST_BLK_LIMITS_GIVE_WAY_NS);
}

static void vhost_blk_member_give_way(struct vhost_blk_member *member, u64 at, u64 now)
{
	u64 lead = vhost_blk_member_lead(member, at, now);

	at = clamp(at, now, U64_MAX - VHOST_BLK_LIMITS_GIVE_WAY_NS);
	if (lead)
		WRITE_ONCE(member->gate, max(READ_ONCE(member->gate), at + lead));
}

/* The device waits: publishes its tag if it is the lowest one. */
static void vhost_blk_member_tell(struct vhost_blk_member *member, u64 at, u64 now)
{
	struct vhost_blk_limits *limits = member->limits;
	u64 tag = READ_ONCE(member->tag), top = READ_ONCE(limits->top);

	/* A device that returns has saved up little. */
	if (top > VHOST_BLK_LIMITS_TAG_LEAD_NS && tag < top - VHOST_BLK_LIMITS_TAG_LEAD_NS) {
		tag = top - VHOST_BLK_LIMITS_TAG_LEAD_NS;
		WRITE_ONCE(member->tag, tag);
	}
	if (vhost_blk_member_other_waits(member, at, now) && tag >= READ_ONCE(limits->behind))
		return;
	WRITE_ONCE(limits->behind, tag);
	WRITE_ONCE(limits->behind_by, member->id);
	WRITE_ONCE(limits->behind_ns, at);
}

/* Adds to a debt. */
static void vhost_blk_member_add(u64 *debt, u64 more)
{
	unsigned int tries = VHOST_BLK_OWE_TRIES;
	u64 next, old = READ_ONCE(*debt);

	if (!more)
		return;
	do {
		if (check_add_overflow(old, more, &next))
			next = U64_MAX;
	} while (!try_cmpxchg64(debt, &old, next) && --tries);
}

/*
 * Forgives debt that was added for limits of @version, if they were replaced. The owner forgives the
 * debts after a new version: an addition that comes later sees it. The additions are full barriers;
 * they pair with the owner's release of the debts.
 */
static void vhost_blk_member_forgive_old(struct vhost_blk_member *member, u64 version)
{
	if (READ_ONCE(member->limits->version) == version)
		return;
	WRITE_ONCE(member->debt->iops_ns, 0);
	WRITE_ONCE(member->debt->bytes_ns, 0);
}

/**
 * vhost_blk_member_owe - add the rest of the cost of a request to the device's debt
 * @member: the device's part
 * @version: that of the limits of @rest
 * @rest: the cost for which the clocks have not advanced
 */
void vhost_blk_member_owe(struct vhost_blk_member *member, u64 version,
			  const struct vhost_blk_debt *rest)
{
	if (likely(!rest->iops_ns && !rest->bytes_ns))
		return;
	vhost_blk_member_add(&member->debt->iops_ns, rest->iops_ns);
	vhost_blk_member_add(&member->debt->bytes_ns, rest->bytes_ns);
	vhost_blk_member_forgive_old(member, version);
}

/**
 * vhost_blk_member_debt - the debt of the device
 * @member: the device's part
 *
 * Return: nanoseconds that the limits need for it.
 */
u64 vhost_blk_member_debt(const struct vhost_blk_member *member)
{
	return max(READ_ONCE(member->debt->iops_ns), READ_ONCE(member->debt->bytes_ns));
}

static u64 vhost_blk_member_pay_one(u64 *debt, u64 *clock, u64 earliest, u64 latest)
{
	u64 old = READ_ONCE(*debt), from = max(READ_ONCE(*clock), earliest);
	u64 part = latest > from ? min(old, latest - from) : 0, paid;

	/* Taken off first: two queues never pay the same debt. */
	if (!part || !try_cmpxchg64(debt, &old, old - part))
		return 0;
	paid = vhost_blk_limit_advance(clock, part, earliest, latest);
	vhost_blk_member_add(debt, part - paid);
	return paid;
}

/**
 * vhost_blk_member_pay - pay a part of the debt
 * @member: the device's part
 * @earliest: time from which the clocks advance at the earliest
 * @now: the present time
 *
 * Return: the cost for which the clocks have advanced.
 */
u64 vhost_blk_member_pay(struct vhost_blk_member *member, u64 earliest, u64 now)
{
	struct vhost_blk_limits *limits = member->limits;
	struct vhost_blk_debt *debt = member->debt;
	u64 latest = now + VHOST_BLK_LIMITS_LEAD_NS;
	/* Pairs with the owner's release, as vhost_blk_limit_charge(). */
	u64 version = smp_load_acquire(&limits->version);
	u64 iops, bytes;

	iops = vhost_blk_member_pay_one(&debt->iops_ns, &limits->iops_clock, earliest, latest);
	bytes = vhost_blk_member_pay_one(&debt->bytes_ns, &limits->bytes_clock, earliest, latest);
	vhost_blk_member_forgive_old(member, version);
	return max(iops, bytes);
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
