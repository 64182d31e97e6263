#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Debian packages that the make targets need, and nothing that is there already. Rust it
# does not install: Debian's is older than what is needed.
#
#   scripts/setup.sh [SET...]     (no argument: all of them)
#
#   build    a C linker for cargo          run    QEMU and the tools that make and check disks
#   modules  what modules are built with   lab    the same, and what a kernel is built with
#   test     what `make test` needs        bench  what `make bench` needs (fio, qemu-storage-daemon)

set -eu

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# One line for each thing: the command (or file) whose presence proves it, and its package.
needs_of() {
    case $1 in
    build) echo "cc:gcc pkg-config:pkg-config" ;;
    run) echo "qemu-system-x86_64:qemu-system-x86 mmdebstrap:mmdebstrap mke2fs:e2fsprogs e2fsck:e2fsprogs blkid:util-linux setpriv:util-linux dpkg-deb:dpkg" ;;
    modules) echo "cc:gcc make:make xz:xz-utils dpkg-deb:dpkg flock:util-linux" ;;
    lab) echo "$(needs_of run) $(needs_of modules) depmod:kmod flex:flex bison:bison bc:bc /usr/include/gelf.h:libelf-dev" ;;
    test) echo "cc:gcc pkg-config:pkg-config sparse:sparse dkms:dkms pahole:pahole $(needs_of lab)" ;;
    bench) echo "fio:fio qemu-storage-daemon:qemu-system-common" ;;
    *) die "unknown set '$1': use build, run, modules, lab, test or bench" ;;
    esac
}

have() {
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ] ||
        { [ "${1#/}" != "$1" ] && [ -e "$1" ]; }
}

missing_packages() {
    for pair in $1; do
        have "${pair%%:*}" || printf '%s\n' "${pair#*:}"
    done | sort -u
}

apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@" </dev/null
}

# A mirror that is being updated fails for a moment: try again before giving up.
refresh_index() {
    for wait_seconds in 2 8 20 0; do
        apt update && return 0
        [ "$wait_seconds" -gt 0 ] || break
        say "apt-get update failed, next try in ${wait_seconds} s"
        sleep "$wait_seconds"
    done
    die "apt-get update failed four times: check the network and /etc/apt, then run this again"
}

# QEMU's packages come from one source and conflict with each other across versions. Where an
# older or newer qemu-utils is installed (from backports, say), it must move with the rest.
with_matching_qemu_utils() {
    wanted=$*
    case " $wanted " in
    *" qemu-system-"*) ;;
    *)
        echo "$wanted"
        return
        ;;
    esac
    present=$(dpkg-query -W -f '${db:Status-Abbrev}${Version}' qemu-utils 2>/dev/null || true)
    case $present in
    ii*)
        version=$(apt-cache policy qemu-system-common | sed -n 's/^ *Candidate: //p')
        echo "$wanted qemu-utils=$version"
        ;;
    *) echo "$wanted" ;;
    esac
}

check_machine() {
    [ "$(id -u)" -eq 0 ] || die "must be root to install packages: run it with sudo"
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

# As Cargo.toml has it.
rust_version() { sed -n 's/^rust-version = "\(.*\)"$/\1/p' "$(dirname "$0")/../Cargo.toml"; }

main() {
    need_cargo
    [ $# -gt 0 ] || set -- build run modules lab test bench
    needs=
    for set_name in "$@"; do
        needs="$needs $(needs_of "$set_name")"
    done
    # A failure inside $( ) above does not end the script by itself in every shell.
    for set_name in "$@"; do
        case $set_name in build | run | modules | lab | test | bench) ;; *) exit 1 ;; esac
    done

    packages=$(missing_packages "$needs" | tr '\n' ' ')
    packages=${packages% }
    if [ -n "$packages" ]; then
        # shellcheck disable=SC2086
        check_machine $packages
        say "missing: $packages"
        refresh_index
        # shellcheck disable=SC2086
        packages=$(with_matching_qemu_utils $packages)
        say "installing: $packages"
        # shellcheck disable=SC2086
        apt install --no-install-recommends --allow-downgrades $packages ||
            die "apt-get install failed: its message is above; see what it says about: $packages"
        left=$(missing_packages "$needs" | tr '\n' ' ')
        [ -z "$left" ] || die "still missing after the installation: $left"
    fi
    say "ready ($*)"
}

main "$@"
