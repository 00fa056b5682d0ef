#!/bin/sh
# A session whose rows are several times a node's --memory: the same tokens as with enough of it, after
# kill -9 of the node, too; and the time to its first token beside what reading its rows takes.
#
#   measure_memory.sh BUILD [TOKENS] [PART]
#
#   BUILD   where kvserver, kvctl and kvworker were built
#   TOKENS  of the prompt, about: the beginning of GPL-3 (default: 6000)
#   PART    the session's rows are so many times --memory (default: 4)
#
# For each --memory, enough and a PART of the rows: a run that stores the prompt, kill -9 when all is
# saved, another node, a run that finds it.  The prompt's own computation is that of the second run in a
# node that has all rows in memory: what is more is the disk.  Beside it: the bytes that the node has read
# by then, read again from its file, past the system's cache.  The last run asks once more, and says what
# the node reads for a token.  Exit status: 0 the tokens are the same.
#
#   KV_METHOD  more options of kvworker generate: --attention pqcache --ratio 0.02
#   KV_TOKENS  that each run generates (default: 16)
set -eu
if [ $# -lt 1 ] || [ $# -gt 3 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
fi
[ -x "$1/kvserver/kvserver" ] || {
    echo "measure_memory: $1: has no kvserver/kvserver" >&2
    exit 2
}
build=$1 tokens=${2:-6000} part=${3:-4} new_tokens=${KV_TOKENS:-16}
top=$(cd "$(dirname "$0")/../.." && pwd)
model=${KV_MODEL:-$(sh "$top/deploy/fetch_model.sh")}
text=/usr/share/common-licenses/GPL-3
work=$(mktemp -d -p "${KV_WORK:-/var/tmp}")
server=
finish() {
    [ -z "$server" ] || kill -9 "$server" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

fail() {
    printf 'measure_memory: %s\n' "$*" >&2
    exit 1
}

start_node() { # MEMORY
    rm -f "$work/ready" # the last node's
    "$build/kvserver/kvserver" --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --memory "$1" \
        --threads 1 --dir "$work/node" >"$work/ready" 2>>"$work/log" &
    server=$!
    tries=0
    until grep -qs '^ready ' "$work/ready"; do
        tries=$((tries + 1))
        [ "$tries" -lt 150 ] || fail "kvserver did not become ready in 15 s"
        sleep 0.1
    done
    KVCTL_SERVER=$(sed -n 's/^ready control=\([^ ]*\).*/\1/p' "$work/ready")
    export KVCTL_SERVER
}

stop_node() {
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
    server=
}

wait_saved() {
    tries=0
    until "$build/client/kvctl/kvctl" tiers --json |
        grep '"disk", "blocks": [1-9].*"waiting": 0,' >/dev/null; do
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || fail "the node did not save its prefixes in 60 s"
        sleep 0.1
    done
}

generate() { # NAME
    "$build/gpu-worker/kvworker" generate --model "$model" --store "$KVCTL_SERVER" \
        --prompt-file "$work/prompt" --raw --max-tokens "$new_tokens" --json ${KV_METHOD:-} \
        >"$work/$1" || {
        tail -n 5 "$work/log" >&2
        "$build/client/kvctl/kvctl" stats >&2 || true
        fail "kvworker generate ended"
    }
}

number() { # NAME FILE
    sed -n "s/.*\"$1\": \([0-9.e+-]*\).*/\1/p" "$2"
}

stat_of() {
    "$build/client/kvctl/kvctl" stats | sed -n "s/^$1 *\([0-9]*\).*/\1/p"
}

tokens_of() {
    sed -n 's/.*"token_ids": \(\[[^]]*\]\).*/\1/p' "$1"
}

# Seconds that reading so many bytes of the rows takes, past the system's cache.
read_file() {
    python3 - "$work/node/rows" "$1" <<'END'
import mmap, os, sys, time
path, left = sys.argv[1], int(sys.argv[2])
piece = mmap.mmap(-1, 1 << 20)
fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
size = os.fstat(fd).st_size
begun, at = time.monotonic(), 0
while left > 0:
    n = os.preadv(fd, [piece], at)
    if n <= 0:
        at = 0
        continue
    left -= n
    at = at + n if at + n < size else 0
print(f"{time.monotonic() - begun:.3f}")
END
}

head -c $((tokens * 5)) "$text" >"$work/prompt"

start_node 1G
generate enough
wait_saved
rows=$(stat_of rows_in_bytes)
generate warm
stop_node
start_node 1G
generate restarted
read_bytes=$(stat_of disk_read_bytes)
disk_s=$(read_file "$read_bytes")
stop_node
rm -rf "$work/node"

memory=$((rows / part / 1048576))
[ "$memory" -ge 16 ] || memory=16
start_node "${memory}M"
generate small
wait_saved
let_go=$(stat_of rows_let_go_bytes)
stop_node
start_node "${memory}M"
generate small_restarted
small_bytes=$(stat_of disk_read_bytes)
small_disk_s=$(read_file "$small_bytes")
generate small_again
again_bytes=$(($(stat_of disk_read_bytes) - small_bytes))
again_disk_s=$(read_file "$again_bytes")

printf '%s prompt tokens, rows of %s bytes, --memory %sM in the second node\n' \
    "$(number prompt_tokens "$work/enough")" "$rows" "$memory"
printf '%-34s %8s %8s %8s %14s %10s\n' run reused ttft_s tpot_s bytes_read disk_s
line() { # WORDS FILE BYTES SECONDS
    printf '%-34s %8s %8.3f %8.4f %14s %10s\n' "$1" "$(number reused_tokens "$work/$2")" \
        "$(number ttft_s "$work/$2")" "$(number tpot_s "$work/$2")" "$3" "$4"
}
line "enough memory, first" enough 0 -
line "enough memory, rows in memory" warm 0 -
line "enough memory, after kill -9" restarted "$read_bytes" "$disk_s"
line "1/$part of it, first" small - -
line "1/$part of it, after kill -9" small_restarted "$small_bytes" "$small_disk_s"
line "1/$part of it, once more" small_again "$again_bytes" "$again_disk_s"
printf 'rows that made room for others: %s bytes\n' "$let_go"
for run in warm restarted small small_restarted small_again; do
    [ "$(tokens_of "$work/$run")" = "$(tokens_of "$work/enough")" ] || fail "$run: other tokens"
done
printf 'the same tokens in all runs\n'
