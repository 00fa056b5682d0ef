#!/bin/sh
# full_disk.sh KVSERVER KVCTL: a file system that others fill while a node saves in it: the node
# serves on, says what is short, saves once there is room, and starts again with all that it had saved.
# Skipped (77) where no file system can be mounted.
set -eu
if [ "${FULL_DISK_INSIDE-}" = "" ]; then
    unshare -m true 2>/dev/null || {
        echo "full_disk.sh: no file system can be mounted here"
        exit 77
    }
    FULL_DISK_INSIDE=1 exec unshare -m sh "$0" "$@"
fi
kvserver=$1 kvctl=$2
work=$(mktemp -d)
node=
finish() {
    if [ -n "$node" ]; then
        kill -9 "$node" 2>/dev/null || true
        wait "$node" 2>/dev/null || true
    fi
    umount "$work/disk" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT

wrong() {
    echo "full_disk.sh: $*" >&2
    cat "$work/log" >&2
    exit 1
}

# start [OPTION]...
start() {
    rm -f "$work/ready"
    "$kvserver" --listen 127.0.0.1:0 --metrics 127.0.0.1:0 --memory 128M --threads 2 \
        --dir "$work/disk/node" "$@" >"$work/ready" 2>>"$work/log" &
    node=$!
    tries=0
    until grep -qs '^ready ' "$work/ready"; do
        kill -0 "$node" 2>/dev/null || return 1
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || wrong "no node came up"
        sleep 0.1
    done
    KVCTL_SERVER=$(sed -n 's/^ready control=\([^ ]*\).*/\1/p' "$work/ready")
    export KVCTL_SERVER
}

# until_disk COLUMN VALUE: of the line of the disk in the table of tiers
until_disk() {
    tries=0
    until "$kvctl" tiers --json | grep '"tier": "disk"' | grep -q "\"$1\": $2[,}]"; do
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || {
            "$kvctl" tiers >&2 || true
            wrong "$1 does not become $2"
        }
        sleep 0.1
    done
}

check() {
    for i in "$@"; do
        "$kvctl" get "object $i" "$work/back" >"$work/out" 2>&1 || wrong "$(cat "$work/out")"
        cmp -s "$work/back" "$work/bytes" || wrong "object $i: other bytes"
    done
}

mkdir "$work/disk"
mount -t tmpfs -o size=160m none "$work/disk" 2>/dev/null || {
    echo "full_disk.sh: no file system can be mounted here"
    exit 77
}
head -c 2000000 /dev/urandom >"$work/bytes"
start --disk 100M || wrong "no node came up"
for i in 1 2 3; do
    "$kvctl" put "object $i" "$work/bytes" >/dev/null
done
until_disk objects 3

# Others fill it, to the last byte.
cat /dev/zero >"$work/disk/filler" 2>/dev/null || true
for i in 4 5 6; do
    "$kvctl" put "object $i" "$work/bytes" >/dev/null || wrong "object $i: not put"
done
tries=0
until grep -q 'the file system is full: 0 MiB are free' "$work/log"; do
    tries=$((tries + 1))
    [ "$tries" -lt 600 ] || wrong "nothing is said of a full file system"
    sleep 0.1
done
# What cannot be removed for sure is not said to be.
! "$kvctl" delete "object 1" >"$work/out" 2>&1 || wrong "an object is deleted on a full disk"
sleep 3
check 2 3 4 5 6
until_disk objects 2
"$kvctl" doctor | grep -q '^warn .*disk: .* errors' || wrong "the doctor finds nothing"

# There is room again.
rm "$work/disk/filler"
until_disk objects 5
until_disk waiting 0

# It is full, and the node killed: it does not start until there is room, or it need not save.
cat /dev/zero >"$work/disk/filler" 2>/dev/null || true
kill -9 "$node"
wait "$node" 2>/dev/null || true
! start --disk 100M || wrong "a node starts without room"
grep -q 'make room, or give --disk none' "$work/log" || wrong "it does not say why it does not start"
start --disk none || wrong "no node came up without a disk"
kill "$node"
wait "$node" || wrong "the node ended badly"
rm "$work/disk/filler"
start --disk 100M || wrong "no node came up with room"
until_disk objects 5
check 2 3 4 5 6
kill "$node"
wait "$node" || wrong "the node ended badly"
node=
