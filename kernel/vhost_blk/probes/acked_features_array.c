// SPDX-License-Identifier: GPL-2.0-only
/* The features of a queue are an array. */
#include "vhost.h"

void probe(struct vhost_virtqueue *vq);

void probe(struct vhost_virtqueue *vq)
{
	virtio_features_from_u64(vq->acked_features_array, 0);
}
