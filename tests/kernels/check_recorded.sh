#!/bin/sh
# The kernels' results beside those of an earlier build: for changes that must not change a bit.
#
#   check_recorded.sh BUILD [--record]    BUILD: where dump_kernels was built
#
# recorded/results.txt has a hash for each array that dump_kernels.c makes from one seed; every
# implementation that this machine has must give it.  --record: writes that file, from a build whose
# implementations agree.  Angles of rope are the C library's: another one may give other bits.
set -eu

case "${1:-}" in
'' | -*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
recorded=$(cd "$(dirname "$0")" && pwd)/recorded/results.txt
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/arrays"
"$1/tests/kernels/dump_kernels" "$folder/arrays" 1 >/dev/null

# CASE.NAME.IMPLEMENTATION becomes `CASE.NAME HASH`, once for each hash that there is.
(cd "$folder/arrays" && sha256sum ./*.*.*) |
    sed 's|^\([0-9a-f]\{16\}\)[0-9a-f]*  \./\(.*\)\.[^.]*$|\2 \1|' |
    LC_ALL=C sort -u >"$folder/results"
twice=$(cut -d ' ' -f 1 "$folder/results" | uniq -d)
if [ -n "$twice" ]; then
    echo "implementations differ:" $twice >&2
    exit 1
fi
if [ "${2:-}" = --record ]; then
    {
        echo '# Hashes of what kernels make from the inputs of dump_kernels.c with seed 1.  How to record'
        echo '# them anew: tests/kernels/check_recorded.sh.'
        cat "$folder/results"
    } >"$recorded"
    exit 0
fi
grep -v '^#' "$recorded" >"$folder/recorded"
if ! diff "$folder/recorded" "$folder/results"; then
    echo "not as recorded in $recorded (<: recorded, >: now)" >&2
    exit 1
fi
