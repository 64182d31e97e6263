#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The guest's first process: runs the job script that QEMU hands over (fw_cfg), reports its exit
# code on the results port, powers off.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM="${TERM:-linux}"
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp

LAB_RESULTS=/dev/null
for port in /sys/class/virtio-ports/*; do
    [ "$(cat "$port/name" 2>/dev/null)" = lab.results ] && LAB_RESULTS=/dev/${port##*/}
done
export LAB_RESULTS

modprobe qemu_fw_cfg
cat /sys/firmware/qemu_fw_cfg/by_name/opt/lab/job/raw >/run/job.sh
sh /run/job.sh
echo "exit $?" >"$LAB_RESULTS"
busybox poweroff -f
