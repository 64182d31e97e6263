#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Builds the kernel modules and prints the directory that holds the .ko files. The checkout stays
# clean: the build happens in a copy in the cache, named after all its inputs.
#
#   scripts/kernel/modules.sh [KDIR] [MAKE-ARGUMENT...]     for example: W=1 KCFLAGS=-Werror
#
# MODULE_SOURCES=DIR builds another directory of modules than this checkout's.

set -eu
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/kernel/lib.sh
. "$here/lib.sh"
sources=${MODULE_SOURCES:-$here/../../kernel}

fill() {
    note "building the modules for $release"
    cp -r "$sources" "$1/kernel"
    directory=$1
    for module in "$directory"/kernel/*/; do
        module=${module%/}
        [ -f "$module/Kbuild" ] || [ -f "$module/Makefile" ] || continue
        # shellcheck disable=SC2086
        nice make -s -j"$(nproc)" -C "$kdir" M="$module" VHOST_PRIVATE="$private" $without_btf $arguments modules
        cp "$module"/*.ko "$directory"
    done
}

if [ $# -gt 0 ] && [ -d "$1" ]; then
    kdir=$(cd "$1" && pwd)
    shift
else
    case ${1:-} in
    /* | ./*) die "$1: there is no such kernel build directory" ;;
    esac
    kdir=$("$here/headers.sh")
fi
arguments=$*
release=$(cat "$kdir/include/config/kernel.release" 2>/dev/null ||
    sed -n 's/^#define UTS_RELEASE "\(.*\)"$/\1/p' "$kdir/include/generated/utsrelease.h")
[ -n "$release" ] || die "$kdir is not prepared for modules: run make modules_prepare there"
private=$("$here/vhost-private.sh" "$kdir")
key=$(tree_key "$sources" "$kdir" "$kdir/.config" "$kdir/Module.symvers" "$private/vhost.h" "$arguments")
entry "modules-$release-$key" fill
drop_old modules 12
