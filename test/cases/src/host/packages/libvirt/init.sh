#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
#
# First process of a guest of libvirt: loads the disk's driver and becomes the agent.

/bin/busybox mkdir -p /proc /sys /dev /tmp /run /mnt /etc
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do
    insmod "$module"
done
# The kernel finds the ports while this process runs.
until grep -qsx agent.commands /sys/class/virtio-ports/*/name; do
    sleep 0.05
done
exec /bin/sh /agent
