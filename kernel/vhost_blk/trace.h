/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * One trace event for each stage of a request.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM vhost_blk

#if !defined(_VHOST_BLK_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define _VHOST_BLK_TRACE_H

#include <linux/tracepoint.h>

#include "queue.h"

TRACE_EVENT(vhost_blk_chain,
	TP_PROTO(struct vhost_blk_queue *q, const struct vhost_blk_chain *chain),
	TP_ARGS(q, chain),
	TP_STRUCT__entry(
		__field(const void *, blk)
		__field(u32, queue)
		__field(u32, head)
		__field(u32, out)
		__field(u32, in)
	),
	TP_fast_assign(
		__entry->blk = q->blk;
		__entry->queue = vhost_blk_queue_index(q);
		__entry->head = chain->head;
		__entry->out = chain->out;
		__entry->in = chain->in;
	),
	TP_printk("dev %p queue %u head %u readable %u writable %u", __entry->blk, __entry->queue,
		  __entry->head, __entry->out, __entry->in)
);

TRACE_EVENT(vhost_blk_request,
	TP_PROTO(struct vhost_blk_req *req, int error),
	TP_ARGS(req, error),
	TP_STRUCT__entry(
		__field(const void *, blk)
		__field(u32, queue)
		__field(u32, head)
		__field(u32, type)
		__field(u64, sector)
		__field(u32, bytes)
		__field(int, error)
	),
	TP_fast_assign(
		__entry->blk = req->q->blk;
		__entry->queue = vhost_blk_queue_index(req->q);
		__entry->head = req->head;
		__entry->type = req->type;
		__entry->sector = req->sector;
		__entry->bytes = req->bytes;
		__entry->error = error;
	),
	TP_printk("dev %p queue %u head %u type %u sector %llu bytes %u error %d", __entry->blk,
		  __entry->queue, __entry->head, __entry->type, __entry->sector, __entry->bytes,
		  __entry->error)
);

DECLARE_EVENT_CLASS(vhost_blk_head,
	TP_PROTO(struct vhost_blk_req *req, u32 value),
	TP_ARGS(req, value),
	TP_STRUCT__entry(
		__field(const void *, blk)
		__field(u32, queue)
		__field(u32, head)
		__field(u32, value)
	),
	TP_fast_assign(
		__entry->blk = req->q->blk;
		__entry->queue = vhost_blk_queue_index(req->q);
		__entry->head = req->head;
		__entry->value = value;
	),
	TP_printk("dev %p queue %u head %u bytes %u", __entry->blk, __entry->queue, __entry->head,
		  __entry->value)
);

DEFINE_EVENT(vhost_blk_head, vhost_blk_submit,
	TP_PROTO(struct vhost_blk_req *req, u32 value),
	TP_ARGS(req, value)
);

DEFINE_EVENT(vhost_blk_head, vhost_blk_completion,
	TP_PROTO(struct vhost_blk_req *req, u32 value),
	TP_ARGS(req, value)
);

DECLARE_EVENT_CLASS(vhost_blk_batch,
	TP_PROTO(struct vhost_blk_queue *q, u32 count),
	TP_ARGS(q, count),
	TP_STRUCT__entry(
		__field(const void *, blk)
		__field(u32, queue)
		__field(u32, count)
	),
	TP_fast_assign(
		__entry->blk = q->blk;
		__entry->queue = vhost_blk_queue_index(q);
		__entry->count = count;
	),
	TP_printk("dev %p queue %u requests %u", __entry->blk, __entry->queue, __entry->count)
);

DEFINE_EVENT(vhost_blk_batch, vhost_blk_used,
	TP_PROTO(struct vhost_blk_queue *q, u32 count),
	TP_ARGS(q, count)
);

DEFINE_EVENT(vhost_blk_batch, vhost_blk_notify,
	TP_PROTO(struct vhost_blk_queue *q, u32 count),
	TP_ARGS(q, count)
);

#endif /* _VHOST_BLK_TRACE_H */

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>
