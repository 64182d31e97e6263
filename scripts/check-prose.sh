#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Looks for sentences that are hard to read, in comments (*.rs, *.c, *.h, *.sh) and in documents
# (*.md). Prints one line for each finding and ends with 1 if there was one. docs/style.md has the
# rules. Without an argument it reads the directories that are clean.
#
#   scripts/check-prose.sh [DIR|FILE]...
#
# A comment ends at a blank line, or at code. Quotes, blocks and headings are not read.
set -u
cd "$(dirname "$0")/.." || exit 1

# Directories and files without a finding. Add one when it becomes clean.
clean="README.md ARCHITECTURE.md CONTRIBUTING.md SECURITY.md CHANGELOG.md LICENSES crates docs scripts test
    kernel fuzz packaging"
# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $clean
ls -d -- "$@" >/dev/null || exit 1

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
# Phrases that have a standard word, as `PHRASE=WORD`. A phrase is a regular expression.
cat >"$work/phrases" <<'PHRASES'
under way=in flight
(is|are) waited for=name the waiter: "stop waits for X"
(let|lets|letting) go=release
(take|takes|taken|took) up=resume, replay
all the same=still, anyway
be about to=is going to
(is|are|was|were) to be had=is available
that of (one|those) (that|who)=name the thing
(is|are|was|were|be|been) told=report, log, notify: name the actor
tells? of=report
(no|some)body=name the actor
PHRASES

# Each line of the input as `NUMBER<tab>TEXT`, comments only; an empty TEXT separates two comments.
comments_of() {
    case $1 in
    *.md) awk '/^ *```/ { fenced = !fenced; print NR "\t"; next }
               fenced || /^#/ { print NR "\t"; next }
               /^ *([-*]|[0-9]+\.) / { print NR "\t" }
               /^ *\|/ { n = split($0, cells, / \| |^ *\| | \|$/); print NR "\t"
                         for (i = 1; i <= n; i++) print NR "\t" cells[i] "\n" NR "\t"; next }
               { print NR "\t" $0 }' "$1" ;;
    *.sh) awk '!/^#!/ && match($0, /^[ \t]*#( |$)/) { print NR "\t" substr($0, RSTART + RLENGTH); next }
               { print NR "\t" }' "$1" ;;
    *.rs) awk 'match($0, /(^|[ \t])\/\/[\/!]?( |$)/) {
                   if (substr($0, 1, RSTART - 1) ~ /[^ \t]/) print NR "\t"
                   print NR "\t" substr($0, RSTART + RLENGTH); next }
               { print NR "\t" }' "$1" ;;
    *.c | *.h) awk '{ text = $0 }
               match(text, /\/\*+/) { inside = 1; print NR "\t"; text = substr(text, RSTART + RLENGTH) }
               !inside { print NR "\t"; next }
               { last = sub(/\*\/.*/, "", text); sub(/^[ \t]*\*?[ \t]*/, "", text); print NR "\t" text
                 if (last) { inside = 0; print NR "\t" } }' "$1" ;;
    esac
}

# Findings in the comments on standard input; FILE is their name.
findings() {
    awk -F '\t' -v file="$1" -v phrases="$work/phrases" '
        BEGIN { while ((getline < phrases) > 0) { n++; split($0, part, "="); bad[n] = part[1]; good[n] = part[2] } }
        { text = $2; sub(/^[ \t]*([-*+]|[0-9]+\.)[ \t]+/, "", text) }
        # Neither the licence nor a heading begins a sentence that the next line goes on with.
        text ~ /^ *(SPDX-|#+ )/ { text = "" }
        NR == 1 || text ~ /^[ \t]*$/ { start = 1 }
        text !~ /^[ \t]*$/ {
            # A mark stands before each sentence; code counts as one word, quotes count for nothing.
            gsub(/`[^`]*`/, "CODE", text); gsub(/"[^"]*"/, "QUOTE", text); gsub(/[*_]+/, "", text)
            line = (start ? "\001" : "") text
            gsub(/[.!?]["\047)]* +/, "&\001", line)
            if (match(line, /\001 *(Who|Whose|Whom|What|Whatever|Whoever|Where|How|Whether) +[A-Za-z]/))
                print file ":" $1 ": the sentence begins with a question word: " substr(line, RSTART + 1, 50)
            if (match(line, /\001 *(That|Those|The one) (of|that|who) /))
                print file ":" $1 ": the sentence begins with a pronoun: " substr(line, RSTART + 1, 50)
            for (i = 1; i <= n; i++) if (tolower(text) ~ "(^|[^a-z])" bad[i] "([^a-z]|$)")
                print file ":" $1 ": \"" bad[i] "\": say " good[i]
            start = text ~ /[.!?:]["\047)]*[ \t]*$/
        }'
}

list_files() {
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
        git ls-files --cached --others --exclude-standard -- "$@"
    else
        find "$@" -type f ! -path '*/target/*'
    fi
}

list_files "$@" |
    grep -E '\.(rs|c|h|sh|md)$' | sort -u | while read -r file; do
    [ -f "$file" ] && ! head -n 5 "$file" | grep -q 'do not edit' || continue # generated pages
    comments_of "$file" | findings "$file"
done >"$work/found"

if [ -s "$work/found" ]; then
    sort -u -t : -k 1,1 -k 2,2n "$work/found" >&2
    echo "check-prose: $(wc -l <"$work/found") findings; docs/style.md says how to mend them" >&2
    exit 1
fi
echo "check-prose: no findings"
