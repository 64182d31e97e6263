// SPDX-License-Identifier: GPL-2.0-only
/* vhost_discard_vq_desc() has a parameter for the number of ring descriptors. */
#include "vhost.h"

void probe(struct vhost_virtqueue *vq);

void probe(struct vhost_virtqueue *vq)
{
	vhost_discard_vq_desc(vq, 1, 1);
}
