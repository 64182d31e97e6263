#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# DKMS runs this in the directory of a build: puts vhost.h of the kernel KDIR into vhost-private. The
# cache is the machine's, not that of root's home, so that a purge of the package finds it.
#
#   pre-build.sh KDIR

set -eu
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-/var/cache}"
exec "$(dirname "$0")/scripts/kernel/vhost-private.sh" "$1" vhost-private
