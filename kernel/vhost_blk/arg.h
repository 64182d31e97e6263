/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Arguments of ioctls: structures that grow from version to version, and eventfds.
 */
#ifndef _VHOST_BLK_ARG_H
#define _VHOST_BLK_ARG_H

#include <linux/eventfd.h>
#include <linux/pagemap.h>
#include <linux/uaccess.h>
#include <linux/vhost.h>

/**
 * vhost_blk_copy_arg - copy a structure that may be shorter or longer than the module's own
 * @to: gets it; missing bytes are zero, unknown bytes must be zero
 * @known: the size of the module's own
 * @first: the first published size
 * @argp: the argument
 * @given: the caller's size
 *
 * Return: 0, -EINVAL, -E2BIG, or -EFAULT.
 */
static inline int vhost_blk_copy_arg(void *to, size_t known, size_t first, void __user *argp,
				     size_t given)
{
	if (given < first || given > PAGE_SIZE)
		return -EINVAL;
	return copy_struct_from_user(to, known, argp, given);
}

/**
 * vhost_blk_copy_sized - the same for a structure that begins with the caller's size
 * @to: gets it
 * @known: the size of the module's own
 * @first: the first published size
 * @argp: the argument
 *
 * Return: as vhost_blk_copy_arg().
 */
static inline int vhost_blk_copy_sized(void *to, size_t known, size_t first, void __user *argp)
{
	u32 given;

	if (get_user(given, (u32 __user *)argp))
		return -EFAULT;
	return vhost_blk_copy_arg(to, known, first, argp, given);
}

/**
 * vhost_blk_room - the room for an answer that begins with the caller's size
 * @argp: the argument, which is made present: an answer that is taken now is not lost
 * @known: the size of the module's own
 * @first: the first published size
 *
 * Return: bytes to write, -EINVAL, or -EFAULT.
 */
static inline int vhost_blk_room(void __user *argp, size_t known, size_t first)
{
	u32 size;

	if (get_user(size, (u32 __user *)argp))
		return -EFAULT;
	if (size < first)
		return -EINVAL;
	size = min_t(u32, size, known);
	return fault_in_writeable(argp, size) ? -EFAULT : size;
}

/**
 * vhost_blk_get_event - get an eventfd of the caller
 * @fd: its descriptor, or VHOST_FILE_UNBIND
 *
 * Return: the eventfd, NULL for VHOST_FILE_UNBIND, or an ERR_PTR().
 */
static inline struct eventfd_ctx *vhost_blk_get_event(int fd)
{
	return fd == VHOST_FILE_UNBIND ? NULL : eventfd_ctx_fdget(fd);
}

/**
 * vhost_blk_put_event - put an eventfd
 * @event: it, or NULL
 */
static inline void vhost_blk_put_event(struct eventfd_ctx *event)
{
	if (event)
		eventfd_ctx_put(event);
}

#endif /* _VHOST_BLK_ARG_H */
