#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Agent in a guest. Each line "NUMBER COMMAND" from the command port is run by a shell; its
# output goes back, then "@@ NUMBER CODE". Says "@@ ready" when it starts.

export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=linux
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null
mkdir -p /dev/shm /run/disk
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp

# The device node of a virtio-serial port.
port_named() {
    for port in /sys/class/virtio-ports/*; do
        [ "$(cat "$port/name" 2>/dev/null)" = "$1" ] && echo "/dev/${port##*/}"
    done
}
export PROGRESS="$(port_named nested.progress)"
commands=$(port_named agent.commands)

exec 3<>"$commands"
echo "@@ ready" >&3
while :; do
    # The end of the file only says that no peer is connected, as in the middle of a migration.
    while read -r number command <&3; do
        sh -c "$command" >/run/output 2>&1 </dev/null 3<&-
        code=$?
        { cat /run/output; echo "@@ $number $code"; } >&3
    done
    sleep 0.1
done
