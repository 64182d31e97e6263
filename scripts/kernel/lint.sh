#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The kernel's own checks of the modules: checkpatch, gcc's and sparse's warnings against Debian's
# 6.12, all of them errors. Against sid's kernel gcc's warnings are reported, but only an error fails,
# because compiler and headers change there while the modules do not.
#
#   scripts/kernel/lint.sh

set -eu
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=scripts/kernel/lib.sh
. "$here/lib.sh"
sources=$here/../../kernel

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

kdir=$("$here/headers.sh")
tree=$("$here/source.sh" 6.12)
private=$("$here/vhost-private.sh" "$kdir")

find "$sources" -name '*.[ch]' -print0 | LC_ALL=C sort -z |
    xargs -0 -n 12 -P "$(nproc)" perl "$tree/scripts/checkpatch.pl" --no-tree --terse --show-types --quiet \
        --no-summary --file || failed=1

cp -r "$sources" "$work/kernel"
checks="W=1 KCFLAGS=-Werror"
if command -v sparse >/dev/null 2>&1; then
    checks="$checks C=2"
else
    echo "PARTLY SKIPPED: sparse is not installed (apt-get install sparse)"
fi
for module in "$work"/kernel/*/; do
    module=${module%/}
    [ -f "$module/Kbuild" ] || [ -f "$module/Makefile" ] || continue
    # shellcheck disable=SC2086
    make -s -j"$(nproc)" -C "$kdir" M="$module" VHOST_PRIVATE="$private" $without_btf $checks modules \
        >"$work/log" 2>&1 || failed=1
    sed "s|$work/kernel|kernel|" "$work/log"
    # sparse warns without failing; so does modpost.
    ! grep -qiE '(warning|error):' "$work/log" || failed=1
done
# With sid's compiler; sid.sh would fetch a whole system for it.
if [ -d "$cache/sid" ]; then
    if "$here/sid-modules.sh" W=1 KCFLAGS=-Werror >/dev/null; then
        :
    elif "$here/sid-modules.sh" W=1 >/dev/null; then
        echo "PARTLY SKIPPED: warnings of sid's compiler, see above, fail on 6.12 only"
    else
        failed=1
    fi
else
    echo "PARTLY SKIPPED: sid's kernel is not in the cache (make test puts it there)"
fi
[ "$failed" -eq 0 ] || die "the modules do not pass the kernel's checks: see above"
note "the modules pass the kernel's checks"
