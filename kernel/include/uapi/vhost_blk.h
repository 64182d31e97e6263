/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
#ifndef _UAPI_VHOST_BLK_H
#define _UAPI_VHOST_BLK_H

#include <linux/types.h>
#include <linux/ioctl.h>
#include <linux/vhost.h>

#include "vhost_blk_limits.h"

/*
 * The user interface of /dev/vhost-blk: the vhost core's ioctls (owner, features, memory table,
 * dirty log, vrings, workers, busy-loop timeout, IOTLB messages), and the ones below.
 *
 * Order: VHOST_BLK_SET_NUM_QUEUES; VHOST_SET_OWNER; VHOST_SET_FEATURES; VHOST_SET_MEM_TABLE; for
 * each queue VHOST_SET_VRING_NUM, _ADDR, _BASE, _KICK, _CALL; then VHOST_BLK_SET_BACKEND, or that
 * one first and VHOST_BLK_SET_QUEUE for each queue as it gets ready.
 *
 * VHOST_RESET_OWNER detaches and forgets options, shared limits, in-flight regions, the failure
 * eventfd and the trace; the serial number and the number of queues stay.
 *
 * Numbers count down from 0xff, far from the core's: of type VHOST_VIRTIO, 0xf0 to 0xff are the
 * module's. The first two are those of the series of 2022, so that a VMM which carries the device of
 * that series works.
 *
 * Structures may grow at their end. The module tells its ioctls apart by type and number alone,
 * whatever size is encoded in the code (ENOTTY: it does not know the number). The size of the
 * argument is that of its field "size" where it has one, otherwise the encoded one. A structure
 * that is longer than the module's is taken if the rest is zero (E2BIG), one that is shorter as if
 * the rest was zero; EINVAL: shorter than when it was published, or longer than a page.
 */

/** VHOST_BLK_QUEUES_MAX - most virtqueues of a device */
#define VHOST_BLK_QUEUES_MAX		64
/** VHOST_BLK_QUEUE_SIZE_MAX - most descriptors of a virtqueue that runs */
#define VHOST_BLK_QUEUE_SIZE_MAX	1024
/** VHOST_BLK_SERIAL_BYTES - size of the GET_ID answer */
#define VHOST_BLK_SERIAL_BYTES		20
/** VHOST_BLK_BUSYLOOP_US_MAX - most microseconds of VHOST_SET_VRING_BUSYLOOP_TIMEOUT (EINVAL) */
#define VHOST_BLK_BUSYLOOP_US_MAX	1000000
/** VHOST_BLK_LIMIT_BURST_MS_MAX - most milliseconds of vhost_blk_options.limit_burst_ms */
#define VHOST_BLK_LIMIT_BURST_MS_MAX	3600000
/** VHOST_BLK_RANGES_MAX - most ranges of a DISCARD, WRITE_ZEROES or SECURE_ERASE request */
#define VHOST_BLK_RANGES_MAX		256
/** VHOST_BLK_TRACED_MAX - most records of slow requests that a device keeps */
#define VHOST_BLK_TRACED_MAX		256

/**
 * VHOST_BLK_SET_BACKEND - attach the storage, or detach it
 *
 * @fd names a block device or a regular file, open for reading and, unless the disk is to be
 * read-only, for writing. A block device must not be open exclusively by anyone: the module
 * claims it. A file opened with O_DIRECT bypasses the page cache. fd -1 detaches.
 *
 * With index 0 all queues that are set up (address and size known) start on the new backend, or,
 * with fd -1, all queues stop. Attaching over an attached backend swaps it: requests taken before
 * complete on the old one, the ones after go to the new one, none is lost. Another index names one
 * queue to start on the backend that is attached (the fd must name the same file or device) or,
 * with fd -1, to stop. A queue that stops finishes what it took before the ioctl returns.
 *
 * The cgroups and credentials of the caller are those that I/O is charged to and checked against
 * where the module has to do it in another context than the owner's.
 *
 * Errors: EPERM not the owner; EBADF no such fd, or it is not open for reading; EINVAL neither a
 * block device nor a regular file, a file opened with O_APPEND, or (index not 0) another file or
 * mode than that of the one attached; EOPNOTSUPP a zoned block device; EBUSY the block device is
 * mounted or claimed; ENODEV (index not 0) nothing is attached; ENODEV or ENXIO the block device
 * was removed, even when another one has its number now; ENOBUFS index too large; for a queue that
 * is to start or to stop, those of VHOST_BLK_SET_QUEUE.
 */
#define VHOST_BLK_SET_BACKEND	_IOW(VHOST_VIRTIO, 0xFF, struct vhost_vring_file)

/** VHOST_BLK_SET_SERIAL - the answer to GET_ID, padded with zeroes; at any time */
#define VHOST_BLK_SET_SERIAL	_IOW(VHOST_VIRTIO, 0xFE, __u8[VHOST_BLK_SERIAL_BYTES])

/** VHOST_BLK_GET_INFO - capabilities of the module and of the attached backend; see &vhost_blk_info */
#define VHOST_BLK_GET_INFO	_IOWR(VHOST_VIRTIO, 0xFD, struct vhost_blk_info)

/**
 * VHOST_BLK_SET_QUEUE - start (num 1) or stop (num 0) one queue
 *
 * Stopping waits until what was taken is complete; VHOST_GET_VRING_BASE then tells exactly where
 * to go on. The rest of a DISCARD is skipped, successfully. Starting needs an attached backend and
 * a queue that is set up. Doing what is done already succeeds.
 *
 * Errors: EPERM not the owner; ENOBUFS index too large; EINVAL num is neither 0 nor 1, the ring has
 * no or more than %VHOST_BLK_QUEUE_SIZE_MAX descriptors, or the in-flight region has less; ENODEV
 * no backend; EFAULT the vring is not set up or not in the memory table; EINTR killed while
 * waiting; EAGAIN the rings cannot be reached before an IOTLB update: give it, and stop again;
 * ENOMEM.
 *
 * VHOST_SET_MEM_TABLE, VHOST_SET_FEATURES and VHOST_BLK_SET_OPTIONS (with a change of
 * %VHOST_BLK_OPT_PIN_MEMORY or %VHOST_BLK_OPT_IOPOLL) wait for requests in flight, too, and may
 * return EINTR. VHOST_SET_FEATURES has then changed the features of all queues, or of some
 * where a queue was locked for long: give them again. It refuses to switch
 * VIRTIO_F_ACCESS_PLATFORM while a queue runs (EBUSY), and unknown features (EOPNOTSUPP).
 */
#define VHOST_BLK_SET_QUEUE	_IOW(VHOST_VIRTIO, 0xFC, struct vhost_vring_state)

/** VHOST_BLK_SET_OPTIONS - behaviour of the disk; see &vhost_blk_options */
#define VHOST_BLK_SET_OPTIONS	_IOW(VHOST_VIRTIO, 0xFB, struct vhost_blk_options)

/** VHOST_BLK_SET_INFLIGHT - memory for the record of taken chains; see &vhost_blk_inflight */
#define VHOST_BLK_SET_INFLIGHT	_IOW(VHOST_VIRTIO, 0xFA, struct vhost_blk_inflight)

/**
 * VHOST_BLK_SET_NUM_QUEUES - number of queues of the device, at most %VHOST_BLK_QUEUES_MAX
 *
 * Without it, it has %VHOST_BLK_QUEUES_MAX, each of which takes some 60 KiB of memory from
 * VHOST_SET_OWNER on. It must come before all other ioctls but VHOST_BLK_GET_INFO,
 * VHOST_GET_FEATURES, VHOST_GET_BACKEND_FEATURES, VHOST_BLK_SET_SERIAL, VHOST_BLK_GET_FAILURE,
 * VHOST_BLK_SET_TRACE, VHOST_BLK_GET_TRACED and VHOST_BLK_GET_OLDEST. There is no way to change it.
 *
 * Errors: EINVAL 0 or too many; EBUSY the device has its queues already; ENOMEM.
 */
#define VHOST_BLK_SET_NUM_QUEUES	_IOW(VHOST_VIRTIO, 0xF9, __u32)

/**
 * VHOST_BLK_SET_FAILURE_EVENT - set the eventfd that tells the owner of failures; -1: none
 *
 * It is signalled when the first failure since the last VHOST_BLK_GET_FAILURE is noted, and now if
 * there is one already.
 *
 * Errors: EPERM not the owner; EBADF no such fd; EINVAL no eventfd.
 */
#define VHOST_BLK_SET_FAILURE_EVENT	_IOW(VHOST_VIRTIO, 0xF8, __s32)

/** VHOST_BLK_GET_FAILURE - failures since the last call; see &vhost_blk_failure */
#define VHOST_BLK_GET_FAILURE	_IOWR(VHOST_VIRTIO, 0xF7, struct vhost_blk_failure)

/**
 * VHOST_BLK_SET_TRACE - record slow requests, or end that; see &vhost_blk_trace
 *
 * At any time; it never waits for storage. A module without it returns ENOTTY.
 *
 * Errors: EBADF no such fd; EINVAL no eventfd; ENOMEM.
 */
#define VHOST_BLK_SET_TRACE	_IOW(VHOST_VIRTIO, 0xF6, struct vhost_blk_trace)

/** VHOST_BLK_GET_TRACED - take the oldest record of a slow request; see &vhost_blk_traced */
#define VHOST_BLK_GET_TRACED	_IOWR(VHOST_VIRTIO, 0xF5, struct vhost_blk_traced)

/**
 * VHOST_BLK_GET_OLDEST - the age of the oldest request in flight; see &vhost_blk_oldest
 *
 * At any time; it waits neither for storage nor for a queue. A module without it returns ENOTTY.
 *
 * Errors: ENOBUFS index too large, or no number of queues was set.
 */
#define VHOST_BLK_GET_OLDEST	_IOWR(VHOST_VIRTIO, 0xF4, struct vhost_blk_oldest)

/**
 * VHOST_BLK_GET_KEPT - the chains that a queue of a halted device keeps; see &vhost_blk_kept
 *
 * Errors: EPERM not the owner; ENOBUFS index too large; EINTR killed while waiting; ENOMEM.
 */
#define VHOST_BLK_GET_KEPT	_IOWR(VHOST_VIRTIO, 0xF3, struct vhost_blk_kept)

/**
 * VHOST_BLK_SHARE_LIMITS - use limits that other devices use, too; see &vhost_blk_share
 *
 * They replace those of VHOST_BLK_SET_OPTIONS, until addresses of 0 are given. At any time; it waits
 * for no queue itself, but for another task's ioctl that does. A module without it returns ENOTTY.
 *
 * Errors: EPERM not the owner; EINVAL one address is 0, or they are not aligned; EFAULT no memory to
 * write there, or that of a file on a disk; ENOMEM, also above RLIMIT_MEMLOCK.
 */
#define VHOST_BLK_SHARE_LIMITS	_IOW(VHOST_VIRTIO, 0xF2, struct vhost_blk_share)

/* Flags of &vhost_blk_info. */
#define VHOST_BLK_INFO_ATTACHED		(1u << 0)	/* the fields about the backend are valid */
#define VHOST_BLK_INFO_BLOCK_DEVICE	(1u << 1)	/* it is one; otherwise a regular file */
#define VHOST_BLK_INFO_READ_ONLY	(1u << 2)
#define VHOST_BLK_INFO_WRITE_CACHE	(1u << 3)	/* completed writes may need a FLUSH */
#define VHOST_BLK_INFO_DISCARD		(1u << 4)
#define VHOST_BLK_INFO_WRITE_ZEROES	(1u << 5)
#define VHOST_BLK_INFO_SECURE_ERASE	(1u << 6)
#define VHOST_BLK_INFO_POLL_QUEUES	(1u << 7)	/* VHOST_BLK_OPT_IOPOLL has an effect */
#define VHOST_BLK_INFO_DEAD		(1u << 8)	/* the block device was removed */

/**
 * struct vhost_blk_info - limits and features
 * @size: in: bytes the caller has room for, at least 8; out: bytes that the module knows. The
 *	smaller number of bytes is written, the rest of the caller's room is left alone.
 * @flags: out: VHOST_BLK_INFO_*
 * @option_flags: out: VHOST_BLK_OPT_* that VHOST_BLK_SET_OPTIONS takes
 * @queues_max: out: %VHOST_BLK_QUEUES_MAX
 * @queue_size_max: out: %VHOST_BLK_QUEUE_SIZE_MAX
 * @seg_max: out: most data segments of a request
 * @request_bytes_max: out: most data bytes of a request; larger ones get S_IOERR
 * @inflight_bytes_max: out: most data bytes of a device in flight, and, counted apart, most bytes
 *	of its WRITE_ZEROES and SECURE_ERASE; more wait in the ring
 * @capacity_sectors: out: size of the backend in 512-byte sectors
 * @logical_block_bytes: out: smallest addressable unit
 * @physical_block_bytes: out: smallest unit written without read-modify-write
 * @io_min_bytes: out: suggested minimum I/O size; 0 unknown
 * @io_opt_bytes: out: suggested optimal I/O size; 0 unknown
 * @memory_align_bytes: out: alignment below which a buffer is copied (bounced)
 * @discard_align_sectors: out: granularity of DISCARD
 * @max_discard_sectors: out: most sectors of one DISCARD range
 * @max_write_zeroes_sectors: out: most sectors of one WRITE_ZEROES range
 * @max_secure_erase_sectors: out: most sectors of one SECURE_ERASE range
 * @num_queues: out: queues that this device has, or would have without VHOST_BLK_SET_NUM_QUEUES;
 *	0: the module is too old to tell
 */
struct vhost_blk_info {
	__u32 size;
	__u32 flags;
	__u32 option_flags;
	__u32 queues_max;
	__u32 queue_size_max;
	__u32 seg_max;
	__u64 request_bytes_max;
	__u64 inflight_bytes_max;
	__u64 capacity_sectors;
	__u32 logical_block_bytes;
	__u32 physical_block_bytes;
	__u32 io_min_bytes;
	__u32 io_opt_bytes;
	__u32 memory_align_bytes;
	__u32 discard_align_sectors;
	__u32 max_discard_sectors;
	__u32 max_write_zeroes_sectors;
	__u32 max_secure_erase_sectors;
	__u32 num_queues;
};

/* Flags of &vhost_blk_options. */
#define VHOST_BLK_OPT_WRITE_THROUGH	(1u << 0)	/* a write completes when it is durable */
#define VHOST_BLK_OPT_READ_ONLY		(1u << 1)	/* refuse what writes */
#define VHOST_BLK_OPT_IOPOLL		(1u << 2)	/* poll the device's poll queues */
#define VHOST_BLK_OPT_PIN_MEMORY	(1u << 3)	/* pin the memory table once */
#define VHOST_BLK_OPT_NO_UNMAP		(1u << 4)	/* WRITE_ZEROES never frees space */
#define VHOST_BLK_OPT_COALESCE		(1u << 5)	/* hold calls while the driver gives chains */
#define VHOST_BLK_OPT_COALESCE_AUTO	(1u << 6)	/* the same where trials show that it pays */
#define VHOST_BLK_OPT_KEEP_FAILED	(1u << 7)	/* I/O errors halt the device */
#define VHOST_BLK_OPT_KEEP_NO_SPACE	(1u << 8)	/* ENOSPC, EDQUOT halt it */
#define VHOST_BLK_OPT_HALT_AT_FLUSH	(1u << 9)	/* so does one of these of a FLUSH */
#define VHOST_BLK_OPT_HALT		(1u << 10)	/* halt the device now */
#define VHOST_BLK_OPT_BATCH		(1u << 11)	/* the batches have a fixed size */
#define VHOST_BLK_OPT_READS_APART	(1u << 12)	/* reads have flags of their own: */
#define VHOST_BLK_OPT_READS_KEEP_FAILED	(1u << 13)	/* as KEEP_FAILED */
#define VHOST_BLK_OPT_READS_KEEP_NO_SPACE (1u << 14)	/* as KEEP_NO_SPACE */

/** VHOST_BLK_BATCH_SIZE_MAX - the largest fixed size of batches */
#define VHOST_BLK_BATCH_SIZE_MAX	64

/**
 * struct vhost_blk_options - behaviour of the disk
 * @size: bytes that the caller fills in, at least 8
 * @flags: VHOST_BLK_OPT_*; unknown ones are refused (EINVAL)
 * @max_discard_sectors: larger DISCARD ranges get S_IOERR; 0: only the capacity limits them
 * @max_write_zeroes_sectors: larger WRITE_ZEROES requests (the sum of their ranges) get S_IOERR; 0:
 *	only the capacity limits their ranges, and a stop may wait for long
 * @max_secure_erase_sectors: the same for SECURE_ERASE
 * @batch: with %VHOST_BLK_OPT_BATCH: most chains that a queue takes before it looks for completions,
 *	and most requests that it publishes together, unless they ended while the rings could not be
 *	reached; from 1 to %VHOST_BLK_BATCH_SIZE_MAX; else 0 (EINVAL)
 * @limit_iops: most requests a second of all queues together; 0: no limit
 * @limit_bytes: most bytes a second that they read, write or zero, and a sixteenth of the bytes that
 *	they discard; 0: no limit
 * @limit_burst_ms: unused time that later requests may catch up on; 0: 100; at least 10, at most
 *	%VHOST_BLK_LIMIT_BURST_MS_MAX (EINVAL)
 * @limit_debt_ms: if the limits change: time until the first request may be taken
 *
 * May be set at any time by the owner. %VHOST_BLK_OPT_PIN_MEMORY pins all pages of the memory table
 * (now and at each VHOST_SET_MEM_TABLE) and charges them to RLIMIT_MEMLOCK (ENOMEM when that is
 * too low; after VHOST_SET_MEM_TABLE, the table is the new one then and pages are pinned request by
 * request); it must not be used with ballooning. All other flags act on requests taken after.
 *
 * %VHOST_BLK_OPT_COALESCE and %VHOST_BLK_OPT_COALESCE_AUTO need a busy-loop timeout: the worker polls
 * while it holds a call, for at most 100 us.
 *
 * A limit makes requests wait in the ring, never in flight, and delays no stop. One request may exceed
 * it; the next ones wait for as long as it takes to make up for that. New limits forgive the debt of
 * the old ones.
 *
 * A device that is halted takes no further chain from any queue. It keeps the requests whose I/O
 * fails, except flushes and those that the storage does not support (EOPNOTSUPP): the driver gets no
 * answer, their chains stay taken, and a queue stops without them. A FLUSH that fails is answered. The
 * failure record has the reason (%VHOST_BLK_FAILURE_HALTED). The halt ends at the first start of a queue
 * after all of them have stopped, unless %VHOST_BLK_OPT_HALT is set. The owner fetches the kept chains
 * of a stopped queue with VHOST_BLK_GET_KEPT, and must carry them out or answer them itself: the
 * position of the ring is behind them.
 *
 * %VHOST_BLK_OPT_KEEP_FAILED and %VHOST_BLK_OPT_KEEP_NO_SPACE hold for all requests. With
 * %VHOST_BLK_OPT_READS_APART they do not hold for reads (VIRTIO_BLK_T_IN), for which
 * %VHOST_BLK_OPT_READS_KEEP_FAILED and %VHOST_BLK_OPT_READS_KEEP_NO_SPACE hold; without it these two
 * must not be set (EINVAL).
 */
struct vhost_blk_options {
	__u32 size;
	__u32 flags;
	__u32 max_discard_sectors;
	__u32 max_write_zeroes_sectors;
	__u32 max_secure_erase_sectors;
	__u32 batch;
	__u64 limit_iops;
	__u64 limit_bytes;
	__u32 limit_burst_ms;
	__u32 limit_debt_ms;
};

/**
 * struct vhost_blk_inflight - the in-flight region of one queue
 * @index: the queue (ENOBUFS), which must be stopped (EBUSY)
 * @desc_num: number of entries; at least the size of the queue at its start (EINVAL there)
 * @user_addr: address in the owner of the vhost-user protocol's "inflight split" structure, 8-byte
 *	aligned (EINVAL), or 0: keep no track
 *
 * The module marks a chain in the region before it starts to work on it and clears the mark after
 * its used entry is visible, as the vhost-user protocol says, so that the next owner of the ring
 * finds the requests that were in flight when this process died.
 */
struct vhost_blk_inflight {
	__u32 index;
	__u32 desc_num;
	__u64 user_addr;
};

/* Kinds of &vhost_blk_failure. */
#define VHOST_BLK_FAILURE_IO		(1u << 0)	/* an I/O error that is none of the below */
#define VHOST_BLK_FAILURE_REMOVED	(1u << 1)	/* the block device was removed */
#define VHOST_BLK_FAILURE_NO_SPACE	(1u << 2)	/* ENOSPC, EDQUOT: no space for a write */
#define VHOST_BLK_FAILURE_TIMEOUT	(1u << 3)	/* ETIMEDOUT: the device did not answer */
#define VHOST_BLK_FAILURE_READ_ONLY	(1u << 4)	/* EROFS: a write to what became read-only */
/*
 * A sync of the file failed, and completed writes may be lost. Every FLUSH of this backend fails
 * from now on, also after the same file was attached over it.
 */
#define VHOST_BLK_FAILURE_SYNC		(1u << 5)
#define VHOST_BLK_FAILURE_HALTED	(1u << 6)	/* a request has halted the device; halt_* */

/**
 * struct vhost_blk_failure - failures of the backend since the last VHOST_BLK_GET_FAILURE
 * @size: in: bytes the caller has room for, at least 8 (EINVAL); out: bytes that the module knows.
 *	The smaller number of bytes is written.
 * @kinds: out: VHOST_BLK_FAILURE_* of all failures; 0: there was none
 * @count: out: requests that failed
 * @sector: out: first sector of the first one; all ones: it was a FLUSH, or the failure was no request's
 * @error: out: errno of the first failure, positive
 * @reserved: out: 0
 * @halt_type: out: VIRTIO_BLK_T_* of the request that has halted the device
 * @halt_error: out: its errno, positive
 * @halt_sector: out: its first sector; all ones: it is a FLUSH
 * @halt_bytes: out: bytes that it moves, or that its ranges name; 0 if the storage was removed before
 *
 * Requests that the module refuses because the driver made them wrong are no failures.
 */
struct vhost_blk_failure {
	__u32 size;
	__u32 kinds;
	__u64 count;
	__u64 sector;
	__u32 error;
	__u32 reserved;
	__u32 halt_type;
	__u32 halt_error;
	__u64 halt_sector;
	__u64 halt_bytes;
};

/**
 * struct vhost_blk_trace - which requests are recorded
 * @size: bytes that the caller fills in, at least 16
 * @fd: an eventfd that is signalled if there is a record where there was none, and now if there is
 *	one already; -1: none
 * @slower_than_ns: requests that take as long, all stages together, are recorded when they complete;
 *	0: none. Records that exist stay
 *
 * A request that was submitted before has no times: it counts as in the storage until it completes.
 */
struct vhost_blk_trace {
	__u32 size;
	__s32 fd;
	__u64 slower_than_ns;
};

/* Flags of &vhost_blk_traced. */
#define VHOST_BLK_TRACED_VALID		(1u << 0)	/* there was a record; its fields are valid */
#define VHOST_BLK_TRACED_FAILED		(1u << 1)	/* the driver got an error */

/**
 * struct vhost_blk_traced - a slow request; its stages follow each other without a gap
 * @size: in: bytes the caller has room for, at least 16 (EINVAL); out: bytes that the module knows.
 *	The smaller number of bytes is written.
 * @flags: out: VHOST_BLK_TRACED_*
 * @lost: out: records since the last call that newer ones have replaced: a device keeps
 *	%VHOST_BLK_TRACED_MAX
 * @queue: out: the queue
 * @type: out: VIRTIO_BLK_T_*
 * @sector: out: first sector of an IN or OUT; all ones for others
 * @bytes: out: bytes that it moves, or that its ranges name
 * @limit_ns: out: wait of the queue for a limit, right before the chain was taken
 * @submit_ns: out: from the turn of the loop that takes the chain until the storage has the I/O
 * @storage_ns: out: in the storage
 * @used_ns: out: until the driver sees the request in the used ring. If the rings cannot be reached,
 *	because of a missing IOTLB entry: until all is done but that
 * @ring_ns: out: time in the ring before @limit_ns, at most: from the last look at the ring that did
 *	not show the chain, or from the kick if the queue waited for one. All ones: unknown, and not in
 *	the time that is compared with @slower_than_ns of &vhost_blk_trace
 *
 * GET_ID and requests that the module refuses are not recorded. Records outlive their queue.
 */
struct vhost_blk_traced {
	__u32 size;
	__u32 flags;
	__u64 lost;
	__u32 queue;
	__u32 type;
	__u64 sector;
	__u64 bytes;
	__u64 limit_ns;
	__u64 submit_ns;
	__u64 storage_ns;
	__u64 used_ns;
	__u64 ring_ns;
};

/**
 * struct vhost_blk_oldest - the age of the oldest request in flight of a queue
 * @size: in: bytes the caller has room for, at least 16 (EINVAL); out: bytes that the module knows.
 *	The smaller number of bytes is written.
 * @index: in: the queue
 * @age_ns: out: time since its oldest request in flight was taken; all ones: none is in flight
 *
 * Requests that wait in the ring, also for a limit, are not in flight.
 */
struct vhost_blk_oldest {
	__u32 size;
	__u32 index;
	__u64 age_ns;
};

/**
 * struct vhost_blk_kept - the chains that a queue keeps because the device is halted
 * @size: in: bytes the caller has room for, at least 16 (EINVAL); out: bytes that the module knows.
 *	No more bytes are written than fit.
 * @index: in: the queue
 * @count: out: number of chains
 * @reserved: left alone
 * @heads: out: the first @count ones: numbers of the chains in the ring, in the order in which their
 *	requests failed
 *
 * They stay until the next start of the queue. They are final if it has stopped.
 */
struct vhost_blk_kept {
	__u32 size;
	__u32 index;
	__u32 count;
	__u32 reserved;
	__u16 heads[VHOST_BLK_QUEUE_SIZE_MAX];
};

#endif /* _UAPI_VHOST_BLK_H */
