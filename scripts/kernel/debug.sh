#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prints the directory of the debug kernel: Debian's source with debug.config. It holds bzImage,
# lib/modules/RELEASE, and build/, against which external modules are built. About twenty minutes on
# two cores, once.
#
#   scripts/kernel/debug.sh

set -eu
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/kernel/lib.sh
. "$here/lib.sh"

series=6.12
fragment=$here/debug.config

# kernel_make DIR ARGUMENT...: make in the kernel's source with the output in DIR.
kernel_make() {
    output=$1
    shift
    make -s -C "$source" O="$output" ARCH=x86_64 "$@"
}

# Every line of the fragment must have survived: kconfig drops unusable options without a message.
check_config() {
    lost=$(grep -E '^CONFIG_|^# CONFIG_' "$fragment" | while read -r line; do
        case $line in
        "# "*) name=${line#\# } && ! grep -q "^${name%% *}=" "$1" || echo "$line" ;;
        *) grep -qxF "$line" "$1" || echo "$line" ;;
        esac
    done)
    [ -z "$lost" ] || die "kconfig did not take these lines of $fragment: $lost"
}

fill() {
    note "building the debug kernel $version (about twenty minutes on two cores)"
    build=$1/build
    mkdir "$build"
    kernel_make "$build" tinyconfig
    "$source/scripts/kconfig/merge_config.sh" -m -O "$build" "$build/.config" "$fragment" >/dev/null
    kernel_make "$build" olddefconfig
    check_config "$build/.config"
    nice make -s -C "$source" O="$build" ARCH=x86_64 -j"$(nproc)" bzImage modules
    kernel_make "$build" INSTALL_MOD_PATH="$1" modules_install
    cp "$build/arch/x86/boot/bzImage" "$build/vmlinux" "$1"
    # External modules need the rest: headers, configuration, symbol versions, tools.
    find "$build" -path "$build/scripts" -prune -o -path "$build/tools" -prune -o -type f \
        \( -name '*.o' -o -name '*.a' -o -name '*.ko' -o -name '*.cmd' -o -name 'vmlinux*' \) \
        ! -name 'vmlinux.lds' -exec rm {} +
    rm -f "$1"/lib/modules/*/build
}

version=$(candidate "linux-source-$series")
if [ -z "$version" ]; then
    known=$(find "$cache" -maxdepth 1 -name "debug-$series.*" 2>/dev/null | sort -V | tail -n 1)
    [ -z "$known" ] || { note "apt offers no linux-source-$series: taking what the cache has" && echo "$known" && exit; }
fi
[ -n "$version" ] || die "apt offers no linux-source-$series: add Debian's main repository to its sources"
source=$("$here/source.sh" "$series" "$version")
entry "debug-$version-$(key_of "$fragment" "$here/debug.sh" "$(gcc --version | head -n 1)")" fill
