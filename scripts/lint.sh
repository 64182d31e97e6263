#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# All checks that read the sources without running them. Each one runs even if another failed.

set -u
cd "$(dirname "$0")/.." || exit 1

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=0
check() {
    echo "== $*"
    "$@" || {
        failed=$((failed + 1))
        echo "lint: FAILED: $*" >&2
    }
}

shell_syntax() {
    status=0
    scripts="scripts/*.sh scripts/kernel/*.sh test/lab/src/*.sh test/lab/src/vm/*.sh .ci/run packaging/*/*.sh
        packaging/debian/after-upgrade packaging/proxmox/vhost-blk-hook"
    for script in $scripts; do
        sh -n "$script" || status=1
    done
    if command -v shellcheck >/dev/null 2>&1; then
        # shellcheck disable=SC2086
        shellcheck -x $scripts || status=1
    else
        echo "SKIP: shellcheck is not installed (apt-get install shellcheck); syntax was checked"
    fi
    return $status
}

# `make test` counts the lines `SKIP: reason` of the captured standard output, and no others.
skips_are_counted() {
    git grep -nE '"SKIP[^:]|(stderr|eprint|dbg).*SKIP' -- crates test && return 1
    [ $? -eq 1 ] # nothing was found; git itself has not failed
}

# Each permission for unsafe code has a line `UNSAFETY: ` with its reason.
unsafety_is_explained() {
    git ls-files '*.rs' >"$work/sources" || return 1
    [ -s "$work/sources" ] || return 1
    while read -r file; do
        let_in=$(grep -cE '(expect|allow)\(unsafe_code' "$file")
        [ "$let_in" -le "$(grep -c 'UNSAFETY: ' "$file")" ] || echo "$file: unsafe code without UNSAFETY:"
    done <"$work/sources" >"$work/unsafety"
    cat "$work/unsafety"
    [ ! -s "$work/unsafety" ]
}

check cargo fmt --all --check
check cargo clippy --locked --workspace --all-targets -- -D warnings
check env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items
check shell_syntax
check skips_are_counted
check unsafety_is_explained
check scripts/kernel/lint.sh
check cargo test --quiet -p docs
check scripts/check-prose.sh
if cargo deny --version >/dev/null 2>&1; then
    # Advisories would need the network.
    check cargo deny --offline check licenses bans sources
else
    echo "SKIP: cargo-deny is not installed (cargo install --locked cargo-deny)"
fi

[ "$failed" -eq 0 ] || {
    echo "lint: $failed of the checks failed" >&2
    exit 1
}
echo "lint: clean"
