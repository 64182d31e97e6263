#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Installs the missing Debian packages of the make targets. It names each one with its reason, asks
# no question, and never removes or downgrades a package. It does not install Rust (Debian's is too
# old) and QEMU (the lab takes the installed one, or unpacks one of its own into its cache).
#
#   scripts/setup.sh [--dry-run] [SET...]     (no set: all of them; --dry-run only shows)
#
#   build    a C linker for cargo          run    the tools that make and check disks and guests
#   modules  tools that build modules      lab    the same, and tools that build a kernel
#   test     the needs of `make test`      bench  the needs of `make bench`

set -eu

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# One word for each thing: the command (or file) whose presence proves it, and its package.
needs_of() {
    case $1 in
    build) echo "cc:gcc pkg-config:pkg-config" ;;
    run) echo "mmdebstrap:mmdebstrap mke2fs:e2fsprogs e2fsck:e2fsprogs blkid:util-linux setpriv:util-linux dpkg-deb:dpkg" ;;
    modules) echo "cc:gcc make:make xz:xz-utils dpkg-deb:dpkg flock:util-linux" ;;
    lab) echo "$(needs_of run) $(needs_of modules) depmod:kmod flex:flex bison:bison bc:bc /usr/include/gelf.h:libelf-dev" ;;
    test) echo "cc:gcc pkg-config:pkg-config sparse:sparse dkms:dkms pahole:pahole mkfs.xfs:xfsprogs $(needs_of lab)" ;;
    bench) echo "fio:fio $(needs_of run)" ;;
    *) return 1 ;;
    esac
}

have() {
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ] ||
        { [ "${1#/}" != "$1" ] && [ -e "$1" ]; }
}

# One line `PACKAGE COMMAND SET` for each thing that a set lacks.
missing_of() {
    for set_name in "$@"; do
        for pair in $(needs_of "$set_name"); do
            have "${pair%%:*}" || printf '%s %s %s\n' "${pair#*:}" "${pair%%:*}" "$set_name"
        done
    done | sort -u
}

# The names in the first column, each once.
packages_in() { printf '%s\n' "$1" | sed 's/ .*//' | sort -u | tr '\n' ' ' | sed 's/ *$//'; }

# Prints the purpose of each package.
explain() {
    printf '%s\n' "$1" | awk '
        { if (!($1 in why)) names[++count] = $1
          if (index(commands[$1] " ", " " $2 " ") == 0) commands[$1] = commands[$1] " " $2
          if (index(sets[$1] " ", " " $3 " ") == 0) sets[$1] = sets[$1] " " $3
          why[$1] = 1 }
        END { for (i = 1; i <= count; i++)
            print "setup: missing: package " names[i] ", for" commands[names[i]] ", used by:" sets[names[i]] }'
}

apt() {
    LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@" </dev/null
}

# A mirror fails for a moment during its update: try again.
refresh_index() {
    for wait_seconds in 2 8 20 0; do
        apt update && return 0
        [ "$wait_seconds" -gt 0 ] || break
        say "apt-get update failed, next try in ${wait_seconds} s"
        sleep "$wait_seconds"
    done
    die "apt-get update failed four times: check the network and /etc/apt, then run this again"
}

# Lets apt plan the installation, and refuses a plan that removes a package.
check_plan() {
    if plan=$(apt --simulate --no-remove --no-install-recommends install "$@" 2>&1); then
        printf '%s\n' "$plan" | sed -n 's/^Inst /setup: apt would install: /p'
        return 0
    fi
    printf '%s\n' "$plan" | sed -n '/will be REMOVED:/,/^[^ ]/p; /will be DOWNGRADED:/,/^[^ ]/p
        /unmet dependencies:/,/^[^ ]/p; /^E: /p' | sort -u | sed 's/^/setup: apt says: /' >&2
    die "$* cannot be installed without removing or downgrading what apt names above. Nothing was \
changed. Install these packages by hand, in versions that fit, then run this again"
}

check_machine() {
    [ -r /etc/os-release ] || die "no /etc/os-release: this script knows Debian only"
    # shellcheck disable=SC1091
    . /etc/os-release
    case " ${ID:-} ${ID_LIKE:-} " in
    *" debian "*) ;;
    *) die "this is '${ID:-unknown}', not Debian: install by hand: $*" ;;
    esac
}

need_cargo() {
    command -v cargo >/dev/null 2>&1 || [ -x "$HOME/.cargo/bin/cargo" ] ||
        die "cargo is not there: install Rust $(rust_version) or newer (by rustup), then run this again"
}

# The version in Cargo.toml.
rust_version() { sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$(dirname "$0")/../Cargo.toml"; }

main() {
    dry_run=
    if [ "${1:-}" = --dry-run ]; then
        dry_run=yes
        shift
    fi
    [ $# -gt 0 ] || set -- build run modules lab test bench
    for set_name in "$@"; do
        needs_of "$set_name" >/dev/null ||
            die "unknown set '$set_name': use build, run, modules, lab, test or bench"
    done
    need_cargo

    missing=$(missing_of "$@")
    if [ -z "$missing" ]; then
        say "ready ($*)"
        return 0
    fi
    explain "$missing"
    packages=$(packages_in "$missing")
    check_machine "$packages"
    # The list of packages must be split into words.
    # shellcheck disable=SC2086
    if [ -n "$dry_run" ]; then
        check_plan $packages
        say "nothing was installed (--dry-run)"
        return 0
    fi
    [ "$(id -u)" -eq 0 ] || die "must be root to install packages: run it with sudo"
    refresh_index
    # shellcheck disable=SC2086
    check_plan $packages
    # shellcheck disable=SC2086
    apt install --no-remove --no-install-recommends $packages ||
        die "apt-get install failed: its message is above; see what it says about: $packages"
    left=$(missing_of "$@")
    [ -z "$left" ] || die "still missing after the installation: $(packages_in "$left")"
    say "ready ($*)"
}

main "$@"
