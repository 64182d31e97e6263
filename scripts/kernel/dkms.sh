#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Builds both modules as a machine with DKMS would, from the files of packaging/*/install.sh, for
# Debian's 6.12 or the kernel of a build directory. Installs nothing.
#
#   scripts/kernel/dkms.sh [KDIR]

set -eu
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/kernel/lib.sh
. "$here/lib.sh"

command -v dkms >/dev/null 2>&1 || {
    echo "SKIP: dkms is not installed (apt-get install dkms)"
    exit 0
}
kdir=${1:-$("$here/headers.sh")}
release=$(cat "$kdir/include/config/kernel.release")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
# The packages' build would take the machine's cache of headers.
export XDG_CACHE_HOME="${cache%/*}"

for directory in dkms dkms-guest; do
    package=$("$here/../../packaging/$directory/install.sh" "$work")
    mkdir -p "$work/tree"
    dkms build "$package" -k "$release" --kernelsourcedir "$kdir" \
        --sourcetree "$work/usr/src" --dkmstree "$work/tree" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        find "$work/tree" -name make.log -exec cat {} + >&2
        die "DKMS cannot build $package for $release: see above"
    }
    module=$(find "$work/tree/$package/$release" -name '*.ko*')
    made_for=$(modinfo -F vermagic "$module" | cut -d' ' -f1)
    [ "$made_for" = "$release" ] || die "$module is for '$made_for', not for $release"
    # DKMS installs a module only if its version is not that of the kernel's own module.
    [ "$(modinfo -F version "$module")" = "${package#*/}" ] || die "$module has another version than $package"
    note "DKMS builds $package for $release: ${module##*/}"
done
