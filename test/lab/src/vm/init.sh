#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The host VM's first process, or a service of systemd, from the payload: mounts what the cases need,
# loads the modules, runs the job beside it, reports its exit code on the results port, ends the machine.

export PATH=/lab/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM="${TERM:-linux}"
# systemd has done the same in its machines, and loads no module of this project.
if [ ! -d /run/systemd/system ]; then
    mkdir -p /dev/pts /dev/shm
    mount -t devpts devpts /dev/pts
    for place in /dev/shm /run /tmp; do
        mount -t tmpfs tmpfs $place
    done
    mount -t debugfs debugfs /sys/kernel/debug
    mount -t tracefs tracefs /sys/kernel/tracing
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    mount -L lab-modules /lib/modules
    for module in configfs vhost; do
        modprobe $module
    done
    mount -t configfs configfs /sys/kernel/config
    modprobe -q kvm_amd 2>/dev/null || modprobe -q kvm_intel 2>/dev/null
fi

port_named() {
    for port in /sys/class/virtio-ports/*; do
        [ "$(cat "$port/name" 2>/dev/null)" != "$1" ] || echo "/dev/${port##*/}"
    done
}
LAB_RESULTS=$(port_named lab.results)
LAB_STDOUT=$(port_named lab.stdout)
LAB_STDERR=$(port_named lab.stderr)
export LAB_RESULTS="${LAB_RESULTS:-/dev/null}" LAB_STDOUT LAB_STDERR

module=/lab/modules/vhost_blk.ko
[ -d /run/systemd/system ] || [ ! -e "$module" ] || insmod "$module" || echo "fail cannot load $module" >"$LAB_RESULTS"
cd /root || exit
if [ -n "$LAB_STDOUT" ]; then
    sh /lab/job >"$LAB_STDOUT" 2>"${LAB_STDERR:-$LAB_STDOUT}" </dev/null
else
    sh /lab/job
fi
echo "exit $?" >"$LAB_RESULTS"
busybox reboot -f
