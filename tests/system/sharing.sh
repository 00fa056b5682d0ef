#!/bin/sh
# sharing.sh KVSERVER PROGRAM ROUNDS [SEED]: rounds of PROGRAM, which is test_sharing.c,
# over two kvservers of this machine, with processes, UCX and gRPC between.
set -eu
kvserver=$1 program=$2 rounds=$3 seed=${4:-1}
work=$(mktemp -d)
servers=
finish() {
    for server in $servers; do
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap finish EXIT

nodes=
for name in a b; do
    "$kvserver" --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --memory 256M --threads 2 \
        --dir "$work/$name" >"$work/$name.ready" 2>"$work/$name.log" &
    servers="$servers $!"
    tries=0
    until grep -qs '^ready ' "$work/$name.ready"; do
        tries=$((tries + 1))
        [ "$tries" -lt 300 ] || {
            cat "$work/$name.log" >&2
            exit 1
        }
        sleep 0.1
    done
    nodes="$nodes,$(sed -n 's/^ready control=\([^ ]*\).*/\1/p' "$work/$name.ready")"
done
if "$program" --nodes "${nodes#,}" --rounds "$rounds" --seed "$seed"; then
    exit 0
fi
tail -n 20 "$work/a.log" "$work/b.log" >&2
exit 1
