#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Builds the modules for sid's kernel with sid's compiler, in the chroot of sid.sh, and prints the
# directory that holds the .ko files.
#
#   scripts/kernel/sid-modules.sh [MAKE-ARGUMENT...]     for example: W=1 KCFLAGS=-Werror

set -eu
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/kernel/lib.sh
. "$here/lib.sh"
sources=${MODULE_SOURCES:-$here/../../kernel}

# In its own mount namespace, so that nothing stays mounted: objtool needs /proc.
in_chroot() {
    # shellcheck disable=SC2016
    unshare --mount sh -ec 'mount -t proc proc "$1/proc"; mount --bind "$2" "$1/mnt"; shift 2; exec "$@"' \
        - "$chroot" "$1" chroot "$chroot" sh -ec "$2"
}

fill() {
    note "building the modules for $release (sid)"
    cp -r "$sources" "$1/kernel"
    in_chroot "$1" "for module in /mnt/kernel/*/; do
        module=\${module%/}
        [ -f \$module/Kbuild ] || [ -f \$module/Makefile ] || continue
        nice make -s -j$(nproc) -C /lib/modules/$release/build M=\$module VHOST_PRIVATE=/vhost-private $without_btf $arguments modules
        cp \$module/*.ko /mnt
    done"
}

arguments=$*
chroot=$("$here/sid.sh")
release=$(basename "$chroot"/lib/modules/*)
key=$(tree_key "$sources" "$chroot/usr/src/linux-headers-$release/Module.symvers" "$arguments")
entry "modules-$release-$key" fill
drop_old modules 12
