#!/bin/sh
# quickstart.sh [--tokens N]: from a fresh Debian 12 to a language model that
# answers questions about a long text while its KV cache is in a storage node.
#
# Installs missing packages, builds into build/, fetches a small model (94 MiB),
# starts a node on free ports with a temporary folder, asks ten questions about
# the GPL-3 with full attention and with attention to a tenth of the rows,
# selected by the node, then the same question twice, which is computed once,
# kills the node, starts it again and asks once more: it has saved what it knew.
#   --tokens N   tokens of the text (default: 2000); the model's context has
#                space for 7000
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
build=$top/build
tokens=2000
server=
worker=

usage() {
    echo "usage: quickstart.sh [--tokens N]" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --help)
        sed -n '2,11s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --tokens)
        [ $# -gt 1 ] || usage
        tokens=$2
        shift
        ;;
    --tokens=*) tokens=${1#--tokens=} ;;
    *) usage ;;
    esac
    shift
done
case $tokens in
'' | *[!0-9]*) usage ;;
esac

work=$(mktemp -d)
finish() {
    for process in $worker $server; do
        kill "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

begun=$(date +%s)
say() {
    printf '==> %3d s: %s\n' $(($(date +%s) - begun)) "$*"
}
fail() {
    printf 'quickstart: %s\n' "$*" >&2
    exit 1
}
# Shows each command as a user would type it.
show() {
    printf '  $ %s\n' "$(echo "$*" | sed "s|$build/[a-z/-]*/||; s|$work|/tmp|g; s|$top/||g")"
}

# A number of the answer's JSON.
number() {
    sed -n "s/.*\"$1\": \([0-9.e+-]*\).*/\1/p" "$work/answer"
}

# Quotes a path for the shell.
typed() {
    case $1 in
    *[!A-Za-z0-9_./-]*) printf "'%s'" "$(printf '%s' "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf '%s' "$1" ;;
    esac
}

# On a terminal ninja shows its progress; elsewhere the log is printed only on failure.
build_all() {
    if [ -t 1 ]; then
        ninja -C "$build"
    else
        ninja -C "$build" >"$work/build.log" 2>&1 || {
            tail -n 40 "$work/build.log" >&2
            return 1
        }
    fi
}

say "packages"
sh "$top/deploy/packages.sh" build

if [ ! -e "$build/build.ninja" ]; then
    say "configure: build/"
    cmake -S "$top" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING=OFF \
        >"$work/cmake.log" 2>&1 || {
        tail -n 20 "$work/cmake.log" >&2
        fail "cmake failed"
    }
fi
if ninja -C "$build" -n 2>/dev/null | grep -q 'no work to do'; then
    say "build: up to date"
else
    say "build: kvserver, kvctl, kvworker, libkvclient (a minute or two on two cores)"
    build_all || fail "the build failed"
fi
kvctl=$build/client/kvctl/kvctl
kvworker=$build/gpu-worker/kvworker

say "model: SmolLM2-135M-Instruct, 94 MiB, fetched once"
model=$(sh "$top/deploy/fetch_model.sh")
echo "  $model"

start_node() {
    "$build/kvserver/kvserver" --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --memory 1G \
        --dir "$work/node" >"$work/ready" 2>>"$work/log" &
    server=$!
    tries=0
    until grep -qs '^ready ' "$work/ready"; do
        kill -0 "$server" 2>/dev/null || {
            cat "$work/log" >&2
            fail "kvserver ended"
        }
        tries=$((tries + 1))
        [ "$tries" -lt 150 ] || fail "kvserver did not become ready in 15 s"
        sleep 0.1
    done
    sed "s|$work|/tmp|; s/^/  /" "$work/ready"
    KVCTL_SERVER=$(sed -n 's/^ready control=\([^ ]*\).*/\1/p' "$work/ready")
    export KVCTL_SERVER
}

say "start a node on free ports"
start_node

text=/usr/share/common-licenses/GPL-3
[ -r "$text" ] || text=$top/README.md
say "ten questions about $tokens tokens of $(basename "$text"), each sentence hidden in the text"
set -- "$kvworker" ask --model "$model" --store "$KVCTL_SERVER" --text-file "$text" \
    --needles "$top/deploy/needles.txt" --tokens "$tokens"
show "$@"
# In the background, so that a signal ends it at once.
"$@" &
worker=$!
wait "$worker" || fail "kvworker ask ended with status $?"
worker=

say "the same beginning of $(basename "$text") twice, by two processes: the second finds what the first has stored"
head -c 9000 "$text" >"$work/prompt"
ask_again() {
    set -- "$kvworker" generate --model "$model" --store "$KVCTL_SERVER" \
        --prompt-file "$work/prompt" --raw --max-tokens 16 --json
    [ -n "$run" ] || {
        show "$@"
        run=first
    }
    "$@" >"$work/answer" &
    worker=$!
    wait "$worker" || fail "kvworker generate ended with status $?"
    worker=
    printf '  %s run: %d tokens, %d of them reused; first token after %.2f s\n' "$run" \
        "$(number prompt_tokens)" "$(number reused_tokens)" "$(number ttft_s)"
}
run=
ask_again
run=second
ask_again

say "counters of the node"
show "$kvctl" stats
"$kvctl" stats >"$work/stats"
for counter in rows_in_bytes rows_out_bytes rows_scored_by_code rows_scored_by_key \
    rows_reranked rows_selected codebooks_trained sessions_opened corrupt_rows; do
    sed -n "s/^$counter /  $counter /p" "$work/stats"
done
show "$kvctl" ping
"$kvctl" ping

say "kill -9 the node when all is saved, and start another on the same folder"
show "$kvctl" tiers
tries=0
until "$kvctl" tiers --json | grep '"disk", "blocks": [1-9].*"waiting": 0,' >/dev/null; do
    tries=$((tries + 1))
    [ "$tries" -lt 300 ] || fail "the node did not save its prefixes in 30 s"
    sleep 0.1
done
"$kvctl" tiers | sed 's/^/  /'
kill -9 "$server"
wait "$server" 2>/dev/null || true
server=
start_node
run=third
ask_again

say "stop the node"
kill "$server"
wait "$server" || fail "kvserver ended with status $?"
server=

say "done; next steps:"
kvserver=$(typed "$build/kvserver/kvserver")
kvctl=$(typed "$kvctl")
kvworker=$(typed "$kvworker")
model=$(typed "$model")
cat <<NEXT
  the same over the model's whole context (two to four minutes on two cores):
    sh deploy/quickstart.sh --tokens 7000
  chat with the model, with its KV cache in an embedded store:
    $kvworker chat --model $model
  measure the perplexity that methods and budgets lose on a text:
    $kvworker eval --model $model --methods oracle,pqcache,window --text-file $text
  start a node, and show its state:
    $kvserver
    $kvctl status
NEXT
