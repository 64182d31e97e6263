#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The first process of a User Mode Linux guest, on the read-only root image: runs the job and powers
# off. /run/lab is the one directory of the host that the guest sees: hostfs knows no other.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM="${TERM:-linux}"
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /tmp
mkdir /run/lab
mount -t hostfs none /run/lab

LAB_RESULTS=/run/lab/results
# The image's modules are another kernel's.
modprobe() { insmod "/run/lab/$1.ko"; }

(. /run/lab/job)
echo "exit $?" >>"$LAB_RESULTS"
busybox poweroff -f
