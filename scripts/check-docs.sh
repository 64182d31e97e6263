#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Compares the documents with the sources. Prints one line for each difference and ends with 1 if
# there was one. Reads only; needs git, awk and grep.
#
#   scripts/check-docs.sh

set -u
cd "$(dirname "$0")/.." || exit 1

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
: >"$work/wrong"
ticks='`'

wrong() { printf 'check-docs: %s\n' "$*" >>"$work/wrong"; }

# Every file that is or may become part of the repository, by its path from the root.
list_files() {
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git ls-files --cached --others --exclude-standard
    else
        find . -type f ! -path './target/*' ! -path './.git/*' | sed 's|^\./||'
    fi | sort -u | while read -r path; do [ ! -f "$path" ] || printf '%s\n' "$path"; done
}
list_files >"$work/files"
grep '\.md$' "$work/files" >"$work/documents"

# The text between single backticks outside of fenced blocks, one a line.
inline_code() {
    awk '/^ *```/ { fenced = !fenced; next } !fenced' "$1" | grep -o "${ticks}[^${ticks}]*${ticks}" | tr -d "$ticks"
}

# Links to files and to headings: [text](path#heading).
check_links() {
    awk '/^ *```/ { fenced = !fenced; next } !fenced' "$1" | grep -oE '\]\([^)]+\)' |
        sed 's/^](//; s/)$//' | while read -r link; do
        case $link in
        http://* | https://* | mailto:*) continue ;;
        esac
        path=${link%%#*}
        target=$1
        [ -z "$path" ] || target=$(dirname "$1")/$path
        if [ ! -e "$target" ]; then
            wrong "$1: the link $link leads to nothing"
            continue
        fi
        case $link in
        *#*) headings "$target" | grep -qxF "${link#*#}" || wrong "$1: no heading for the link $link" ;;
        esac
    done
}

# The anchors of a document's headings, as the usual web pages make them.
headings() {
    awk '/^ *```/ { fenced = !fenced; next } !fenced && /^#+ /' "$1" | sed -E 's/^#+ +//' |
        tr '[:upper:]' '[:lower:]' | sed -E 's/[^a-z0-9 _-]//g; s/ /-/g'
}

# Paths in backticks exist, and in `file:function` the file defines the function.
check_paths() {
    inline_code "$1" | grep -E '^[A-Za-z0-9_.@/-]+(:[a-z0-9_]+)?$' | sort -u | while read -r code; do
        path=${code%%:*}
        case $path in
        crates/* | test/* | scripts/* | packaging/* | docs/* | fuzz/* | kernel/* | LICENSES/* | .ci/*) ;;
        *.rs | *.sh | Makefile) ;;
        */*) continue ;;
        *.c)
            # The kernel's documents name their files by the last part.
            path=$(grep -E "^kernel/(.*/)?$path\$" "$work/files" | head -n 1)
            [ -n "$path" ] || wrong "$1: below kernel/ there is no ${code%%:*}"
            [ -n "$path" ] || continue
            ;;
        *) continue ;;
        esac
        if [ ! -e "$path" ]; then
            wrong "$1: there is no $path"
        elif [ "$code" != "${code%%:*}" ] && ! grep -qE "$(definition_of "$path" "${code#*:}")" "$path"; then
            wrong "$1: $path has no function ${code#*:}"
        fi
    done
}

# A pattern for the first line of a function, in Rust and in C.
definition_of() {
    case $1 in
    *.c | *.h) printf '^[a-z].*[ *]%s\(' "$2" ;;
    *) printf '\\bfn %s\\b' "$2" ;;
    esac
}

# `make TARGET`, in text and in blocks.
check_targets() {
    { inline_code "$1"; awk '/^ *```/ { fenced = !fenced; next } fenced' "$1"; } |
        grep -oE '^ *make [a-z][a-z-]*' | awk '{ print $2 }' | sort -u | while read -r target; do
        grep -qE "^$target:" Makefile || wrong "$1: the Makefile has no target $target"
    done
}

# Options of `vhost-blk serve`, in text and in blocks (lines joined at backslashes); an option alone
# in backticks may also be one of the other programs.
check_options() {
    { inline_code "$1"; awk '/^ *```/ { fenced = !fenced; next } fenced' "$1"; } |
        awk '{ line = line $0 } /\\$/ { sub(/\\$/, "", line); next } { print line; line = "" }' |
        grep -E 'vhost-blk serve ' | grep -oE -- '--[a-z][a-z-]*' | sort -u | while read -r option; do
        is_serve_option "$option" || wrong "$1: docs/options.md has no option $option"
    done
    inline_code "$1" | grep -oE -- '^--[a-z][a-z-]*' | sort -u | while read -r option; do
        is_serve_option "$option" || is_other_option "${option#--}" ||
            wrong "$1: no program has an option $option"
    done
}

is_serve_option() {
    [ "$1" = --help ] || grep -qE "^\\| $ticks$1[] =[$ticks]" docs/options.md
}

is_other_option() {
    field=$(printf '%s' "$1" | tr - _)
    grep -qE "^ +(pub )?$field: |long = \"$1\"" crates/vhost-blk/src/create.rs \
        crates/vhost-blk/src/doctor/mod.rs test/bench/src/*.rs test/lab/src/cli.rs
}

# No path of one machine.
check_machine() {
    grep -nE '(^|[^a-zA-Z0-9_.])/(work|root|home)/' "$1" | while read -r line; do
        wrong "$1: a path of one machine: $line"
    done
}

# Prose has at most 120 characters a line; tables and blocks have no limit.
check_width() {
    awk '/^ *```/ { fenced = !fenced } { print fenced || /^ *\|/ ? "" : $0 }' "$1" |
        LC_ALL=C.UTF-8 grep -nE '^.{121}' | while IFS=: read -r number _; do
        wrong "$1:$number: a line of more than 120 characters"
    done
}

# Every crate is in ARCHITECTURE.md, with its name in bold.
check_crates() {
    for manifest in crates/*/Cargo.toml test/*/Cargo.toml; do
        crate=$(basename "$(dirname "$manifest")")
        grep -qF "* **$crate**:" ARCHITECTURE.md || wrong "ARCHITECTURE.md: no line for the crate $crate"
    done
}

# In both lists of crates none stands above one that it uses (tests may use any).
check_order() {
    sed -n 's/^\* \*\*\([a-z-]*\)\*\*:.*/\1/p' ARCHITECTURE.md >"$work/listed"
    order_of ARCHITECTURE.md
    sed -n 's#^[a-z-]* = { path = "[a-z]*/\(.*\)" }$#\1#p' Cargo.toml >"$work/listed"
    order_of Cargo.toml
}

order_of() {
    : >"$work/above"
    while read -r crate; do
        dependencies_of "$crate" | while read -r used; do
            [ ! -d "crates/$used" ] && [ ! -d "test/$used" ] || grep -qxF "$used" "$work/above" ||
                wrong "$1: $crate stands above $used, which it uses"
        done
        echo "$crate" >>"$work/above"
    done <"$work/listed"
    [ -s "$work/above" ] || wrong "$1: no list of crates was recognized"
}

dependencies_of() {
    awk '/^\[/ { here = ($0 == "[dependencies]"); next } here && /^[a-z]/ { sub(/[. =].*/, ""); print }' \
        "$(ls -d crates/"$1" test/"$1" 2>/dev/null)/Cargo.toml"
}

# Every decision is in ARCHITECTURE.md.
check_decisions() {
    for decision in docs/decisions/0*.md; do
        grep -qF "]($decision)" ARCHITECTURE.md || wrong "ARCHITECTURE.md: no link to $decision"
    done
}

# Rows `| ... | `NAME` | `VALUE` | `FILE` |` of any document, against `const NAME: TYPE = VALUE;` or
# `#define NAME VALUE`.
check_bounds() {
    bounds_of "$1" >"$work/bounds"
    while IFS="$(printf '\t')" read -r name value file; do
        case $file in
        *.rs) rust_constant "$name" "$file" ;;
        *) c_constant "$name" "$file" ;;
        esac | grep -qxF -- "$value" || wrong "$1: $file does not say $name = $value"
    done <"$work/bounds"
}

bounds_of() { awk -F '`' '/^\|.*\| `[A-Z0-9_]+` \| `.*` \| `.*` \|$/ { print $2 "\t" $4 "\t" $6 }' "$1"; }

# The value of a constant in a source.
rust_constant() { sed -nE "s/.*const $1: [^=]* = (.*);\$/\\1/p" "$2"; }
c_constant() { sed -nE "s/^#define $1[[:space:]]+(.*)/\\1/p" "$2" | sed 's/[[:space:]]\+/ /g'; }

# The documents that are known to have such a table have at least so many rows.
check_tables_of_bounds() {
    for known in docs/bounds.md:30 docs/kernel.md:5; do
        rows=$(bounds_of "${known%:*}" | wc -l)
        [ "$rows" -ge "${known#*:}" ] || wrong "${known%:*}: the table of bounds was not recognized ($rows rows)"
    done
}

# The first column of the table under a heading of a document, one a line, sorted.
first_column() {
    awk -v heading="$2" '/^#/ { here = ($0 == heading); next } here && /^\| [A-Z]/ { print $2 }' "$1" |
        grep -vxE 'Feature|Message|Field|Request' | sort
}

same() {
    comm -3 "$work/documented" "$work/coded" | tr -d '\t' | while read -r name; do
        wrong "$1: $name is in the table or in the code, not in both"
    done
    [ -s "$work/coded" ] || wrong "$1: nothing was found in the code to compare with"
}

# docs/protocol.md against the handlers.
check_protocol() {
    handler=crates/vhost-user/src/handler.rs
    first_column docs/protocol.md '## Messages' >"$work/documented"
    awk '/^impl VhostUserBackendReqHandlerMut/ { here = 1 }
         here && /^    fn / { name = $2; sub(/\(.*/, "", name) }
         here && /not_offered\(\)/ { name = "" }
         here && /^    }/ { if (name != "") print toupper(name); name = "" }' "$handler" |
        sed 's/^ADD_MEM_REGION$/ADD_MEM_REG/; s/^REMOVE_MEM_REGION$/REM_MEM_REG/' >"$work/found"
    grep -oE 'FrontendReq::[A-Z_]+' crates/vhost-user/src/peeked.rs | sed 's/.*:://' >>"$work/found"
    sort -u "$work/found" >"$work/coded"
    same docs/protocol.md

    first_column docs/protocol.md '## Protocol features' >"$work/documented"
    awk '/^fn protocol_features/ { here = 1 } here && /^}/ { here = 0 } here' "$handler" |
        grep -oE 'VhostUserProtocolFeatures::[A-Z_]+' | sed 's/.*:://' | sort -u >"$work/coded"
    same docs/protocol.md
}

# docs/device.md against the features offered.
check_features() {
    first_column docs/device.md '## Feature bits' >"$work/documented"
    awk '/pub fn features/ { here = 1 } here && /^    }/ { here = 0 } here' crates/virtio-blk/src/config.rs |
        grep -oE '::F_[A-Z0-9_]+' | sed 's/^::F_//' | sort -u >"$work/coded"
    same docs/device.md
}

# The table of options, where a program is there that is newer than its sources; in `make test` a
# test of the program compares it in any case.
check_options_table() {
    for program in "${CARGO_TARGET_DIR:-target}/debug/vhost-blk" "${CARGO_TARGET_DIR:-target}/release/vhost-blk"; do
        [ -x "$program" ] || continue
        [ -z "$(find crates/vhost-blk/src -newer "$program" -name '*.rs')" ] || continue
        "$program" generate options-table | cmp -s - docs/options.md ||
            wrong "docs/options.md: not what $program writes (generate options-table)"
        return
    done
}

# Each source names its licence in its first lines: GPL-2.0-only below kernel/, else Apache-2.0.
check_licences() {
    grep -E '(\.(rs|sh|c|h|S|service|socket)|(^|/)(Makefile|Kbuild|Dockerfile)|^\.ci/run)$' "$work/files" |
        while read -r file; do
            case $file in
            kernel/*) wanted=GPL-2.0-only ;;
            *) wanted=Apache-2.0 ;;
            esac
            head -n 3 "$file" | grep -qF "SPDX-License-Identifier: $wanted" ||
                wrong "$file: no line SPDX-License-Identifier: $wanted at its top"
            [ -f "LICENSES/$wanted.txt" ] || wrong "LICENSES/$wanted.txt is missing"
        done
}

for document in README ARCHITECTURE CONTRIBUTING SECURITY CHANGELOG LICENSES/README docs/options; do
    [ -f "$document.md" ] || wrong "$document.md is missing"
done
while read -r document; do
    for check in check_links check_paths check_targets check_options check_machine check_bounds check_width; do
        $check "$document"
    done
done <"$work/documents"
check_crates
check_order
check_decisions
check_tables_of_bounds
check_protocol
check_features
check_options_table
check_licences

if [ -s "$work/wrong" ]; then
    sort -u "$work/wrong" >&2
    echo "check-docs: $(sort -u "$work/wrong" | wc -l) things are not true" >&2
    exit 1
fi
echo "check-docs: $(wc -l <"$work/documents") documents agree with the sources"
