#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
#
# First process of an inner guest: mounts the root image read-only and becomes the agent in it.

/bin/busybox mkdir -p /dev /root
/bin/busybox mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do
    parameters=/parameters/${module##*/}
    [ ! -e "$parameters" ] || set -- $(/bin/busybox cat "$parameters")
    /bin/busybox insmod "$module" "$@"
    set --
done
until /bin/busybox mount -t ext4 -o ro,noload /dev/vda /root 2>/dev/null; do
    /bin/busybox sleep 0.05
done
/bin/busybox mount -t tmpfs tmpfs /root/run
/bin/busybox cp /agent /root/run/agent
exec /bin/busybox chroot /root /bin/sh /run/agent
