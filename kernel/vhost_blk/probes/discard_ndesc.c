// SPDX-License-Identifier: GPL-2.0-only
/* vhost_discard_vq_desc() wants to know the number of ring descriptors, too. */
#include "vhost.h"

void probe(struct vhost_virtqueue *vq);

void probe(struct vhost_virtqueue *vq)
{
	vhost_discard_vq_desc(vq, 1, 1);
}
