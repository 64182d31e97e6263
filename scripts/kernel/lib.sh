# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
#
# Shared functions of the scripts of this directory and of nextest.sh; source it with `.`. Each script prints
# one directory on its standard output, its messages on standard error, and keeps expensive results in the
# cache.

cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/vhost-blk
mkdir -p "$cache"

# For make: no type information for BPF in modules. It has no use here, and needs pahole if the
# kernel's headers come with a vmlinux.
# shellcheck disable=SC2034
without_btf=CONFIG_DEBUG_INFO_BTF_MODULES=

note() { printf 'kernel: %s\n' "$*" >&2; }
die() { note "$*"; exit 1; }

# entry NAME COMMAND...: prints the cache directory NAME. If it is not there, COMMAND fills a directory
# beside it (its last argument), which is then renamed: an entry is complete or absent. If COMMAND
# fails, the script ends with its exit code. The lock is that of the lab's own cache. Do not call entry
# if the shell ignores errors (before || or &&, in a condition).
entry() {
    entry_name=$1
    shift
    [ -d "$cache/$entry_name" ] || build_entry "$@"
    printf '%s\n' "$cache/$entry_name"
}

build_entry() {
    staging=$cache/.building-$entry_name
    exec 9>"$cache/.lock-$entry_name"
    flock -n 9 || { note "another process is making $entry_name, waiting for it"; flock 9; }
    [ ! -d "$cache/$entry_name" ] || return 0
    rm -rf "$staging"
    mkdir "$staging"
    # A subshell, which ends at an error.
    set +e
    (set -e && exec 9>&- >&2 && "$@" "$staging")
    status=$?
    set -e
    [ "$status" -eq 0 ] || rm -rf "$staging"
    [ "$status" -eq 0 ] || { note "cannot make $entry_name in $cache: see above"; exit "$status"; }
    mv -T "$staging" "$cache/$entry_name"
    exec 9>&-
}

# key_of FILE-OR-WORD...: a short name for the contents of files and for words.
key_of() {
    for input in "$@"; do
        if [ -f "$input" ]; then cat "$input"; else printf '%s\n' "$input"; fi
    done | sha256sum | cut -c1-16
}

# tree_key DIR FILE-OR-WORD...: the same for all files below a directory, with their names.
tree_key() {
    tree=$1
    shift
    key_of "$(cd "$tree" && find . -type f | LC_ALL=C sort | tr '\n' '\0' | xargs -0 sha256sum)" "$@"
}

# drop_old PREFIX COUNT: removes all but the newest COUNT entries of that kind.
drop_old() {
    find "$cache" -maxdepth 1 -name "$1-*" -type d -printf '%T@ %p\n' | sort -rn |
        tail -n "+$(($2 + 1))" | cut -d' ' -f2- | while read -r old; do rm -rf "$old"; done
}

# download PACKAGE[=VERSION] DIR: puts the .deb into DIR without installing it.
download() { (cd "$2" && apt-get -q -o APT::Sandbox::User=root download "$1" >&2); }

# unpack PACKAGE[=VERSION] DIR: downloads a package and unpacks it into DIR.
unpack() {
    mkdir -p "$2/.deb"
    download "$1" "$2/.deb"
    dpkg-deb -x "$2"/.deb/*.deb "$2"
    rm -r "$2/.deb"
}

# candidate PACKAGE: the version that apt would take; the index is refreshed if it knows none.
candidate() {
    for try in first second; do
        found=$(LC_ALL=C apt-cache policy "$1" | sed -n '/(none)/d; s/^ *Candidate: //p')
        [ -z "$found" ] || break
        [ "$try" = second ] || apt-get -q update >&2 || true
    done
    printf '%s\n' "$found"
}

# debian_version KDIR: Debian's package version, from the kernel's build files; nothing if it is not
# Debian's.
debian_version() {
    sed -n 's/^#define LINUX_PACKAGE_ID " Debian \(.*\)"$/\1/p' "$1/include/generated/package.h" \
        2>/dev/null || true
}

# has_vhost_h VERSION: true if the vhost.h of this package version is cached or can be fetched.
has_vhost_h() {
    [ -f "$cache/source-$1/drivers/vhost/vhost.h" ] || [ -f "$cache/vhost-h-$1/vhost.h" ] ||
        apt-cache madison "linux-source-$(echo "$1" | cut -d. -f1-2)" | grep -qF " $1 |"
}
