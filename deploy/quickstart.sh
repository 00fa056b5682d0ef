#!/bin/sh
# quickstart.sh: from a fresh Debian 12 to a running store, and back: builds into build/, starts a
# node on free ports with a temporary folder, stores and fetches, stops the node.
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
build=$top/build
work=$(mktemp -d)
server=

finish() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

say() {
    printf '==> %s\n' "$*"
}
fail() {
    printf 'quickstart: %s\n' "$*" >&2
    exit 1
}
# What it runs is shown, so that it can be typed again.
show() {
    printf '  $ %s\n' "$(echo "$*" | sed "s|$build/[a-z/]*/||; s|$work|/tmp|g")"
    "$@"
}

# On a terminal ninja shows its own progress; elsewhere only a failure is worth reading.
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

begun=$(date +%s)
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
    say "build: kvserver, kvctl, libkvclient, examples (a minute on two cores)"
    build_all || fail "the build failed"
fi
kvctl=$build/client/kvctl/kvctl

say "start a node on free ports"
"$build/kvserver/kvserver" --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --memory 512M \
    --dir "$work/node" >"$work/ready" 2>"$work/log" &
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

say "store a file, fetch it, compare"
file=/usr/share/common-licenses/GPL-3
[ -r "$file" ] || file=$top/README.md
show "$kvctl" put hello "$file"
show "$kvctl" get hello "$work/copy"
cmp "$file" "$work/copy" || fail "other bytes came back"
echo "  the same"

say "a model's session: prefill, decode, fork, resume (client/examples/session.c)"
show "$build/client/examples/session" "$KVCTL_SERVER"

say "what the node tells"
show "$kvctl" status
show "$kvctl" ping

say "stop the node"
kill "$server"
wait "$server" || fail "kvserver ended with status $?"
server=
say "done in $(($(date +%s) - begun)) s; next, with your own node:"
printf '  $ %s\n' "$build/kvserver/kvserver" "$kvctl status" "sh $top/deploy/two-nodes.sh"
