#!/bin/sh
# two-nodes.sh [COMMAND [ARG...]]: runs two nodes here while COMMAND runs.
#
# COMMAND finds their addresses in KVCTL_SERVER, and kvserver, kvctl and the
# examples in PATH. Without COMMAND, runs the example session over both nodes,
# then kvctl status. Each node has a temporary folder, 256M of memory and free
# ports. Build first: sh deploy/quickstart.sh, or set KV_BUILD to a build folder.
set -eu
case ${1:-} in
--help)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
-*)
    echo "two-nodes: unknown option: $1" >&2
    exit 2
    ;;
esac
top=$(cd "$(dirname "$0")/.." && pwd)
build=${KV_BUILD:-$top/build}
work=$(mktemp -d)
nodes=

finish() {
    for node in $nodes; do
        kill "$node" 2>/dev/null || true
        wait "$node" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

PATH=$build/kvserver:$build/client/kvctl:$build/client/examples:$PATH
export PATH
command -v kvserver >/dev/null || {
    echo "two-nodes: $build: kvserver not found: build first: sh deploy/quickstart.sh" >&2
    exit 1
}

# Each node has its own ports, folder and memory, and does not know the other.  The store is defined
# by the list of nodes that clients are given.
KVCTL_SERVER=
for name in one two; do
    kvserver --name "$name" --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --threads 1 --memory 256M \
        --dir "$work/$name" --log-level warn >"$work/$name.ready" &
    nodes="$nodes $!"
    tries=0
    until grep -qs '^ready ' "$work/$name.ready"; do
        kill -0 $! 2>/dev/null || exit 1
        tries=$((tries + 1))
        [ "$tries" -lt 150 ] || {
            echo "two-nodes: node $name did not become ready in 15 s" >&2
            exit 1
        }
        sleep 0.1
    done
    address=$(sed -n 's/^ready control=\([^ ]*\).*/\1/p' "$work/$name.ready")
    KVCTL_SERVER=${KVCTL_SERVER:+$KVCTL_SERVER,}$name=$address
done
export KVCTL_SERVER

if [ $# -gt 0 ]; then
    "$@"
    exit
fi
echo "two nodes: $KVCTL_SERVER"
session "$KVCTL_SERVER"
echo
kvctl status
