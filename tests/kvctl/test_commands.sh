#!/bin/sh
# test_commands.sh KVSERVER KVCTL SESSION KEEPER: every command of kvctl against real nodes, and against
# none: what is printed where, and the exit status (0 done, 1 failed, 2 usage, 3 exists cannot tell).
set -eu
kvserver=$1
kvctl=$2
session=$3
keeper=$4
work=$(mktemp -d)
nodes=
bad=0

finish() {
    for node in $nodes; do
        kill -9 "$node" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap finish EXIT
# Without it UCX has no network (kvserver/net/ucx/ucx_context.c), and there is no tcp to try.
transports="tcp auto"
[ -d /sys/class/net ] || transports=auto
unset KVCTL_SERVER KVCTL_JSON 2>/dev/null || true

# Nodes that live, A|B.  One that does not reply in time is slow, and is asked again.
alive=none
is_slow() {
    grep -Eq "node ($alive): .*(unreachable|deadline)" "$work/err" "$work/out"
}
input=/dev/null # of kvctl

# expect STATUS COMMAND...: runs kvctl; its output is in $work/out and $work/err
expect() {
    wanted=$1
    shift
    for _ in 1 2 3 4 5; do
        got=0
        "$kvctl" "$@" <"$input" >"$work/out" 2>"$work/err" || got=$?
        is_slow || break
    done
    if [ "$got" -ne "$wanted" ]; then
        wrong "kvctl $*: exit status $got, not $wanted"
    elif [ "$wanted" -eq 0 ] && [ -s "$work/err" ]; then
        wrong "kvctl $*: done, yet there is something on stderr"
    elif [ "$wanted" -ne 0 ] && ! grep -q '^kvctl: ' "$work/err" && ! echo "$*" | grep -q doctor &&
        ! grep -q '^{' "$work/out"; then
        wrong "kvctl $*: failed without a word"
    fi
}
wrong() {
    bad=$((bad + 1))
    echo "FAILED: $*"
    sed 's/^/    out: /' "$work/out" | head -n 20
    sed 's/^/    err: /' "$work/err" | head -n 20
}
# has PATTERN FILE, lacks PATTERN FILE: of the last command
has() {
    grep -Eq -- "$1" "$work/$2" || wrong "std$2 lacks: $1"
}
lacks() {
    ! grep -Eq -- "$1" "$work/$2" || wrong "std$2 has: $1"
}
# Each line of stdout is one object.
is_json() {
    [ -s "$work/out" ] || wrong "no JSON at all"
    ! grep -Evq '^\{.*\}$' "$work/out" || wrong "a line that is no object"
}

options= # of the next kvserver, beside these
start() {
    "$kvserver" --name "$1" --listen "127.0.0.1:${2:-0}" --metrics 127.0.0.1:0 --threads 2 \
        --memory 256M --dir "$work/$1" --log-level error $options >"$work/$1.ready" 2>"$work/$1.log" &
    node=$!
    nodes="$nodes $node"
    tries=0
    until grep -qs '^ready ' "$work/$1.ready"; do
        kill -0 "$node" 2>/dev/null || {
            cat "$work/$1.log"
            echo "kvserver ended"
            exit 1
        }
        tries=$((tries + 1))
        [ "$tries" -lt 600 ] || {
            echo "kvserver did not become ready"
            exit 1
        }
        sleep 0.1
    done
    address=$(sed -n 's/^ready control=\([^ ]*\).*/\1/p' "$work/$1.ready")
}

# Usage.
expect 0 --help
has '^Usage: kvctl' out
expect 0 --version
has '^kvctl [0-9]+\.[0-9]+\.[0-9]+$' out
expect 2
expect 2 frobnicate
has 'kvctl: command: unknown: frobnicate' err
expect 2 --frobnicate status
has 'kvctl: option: unknown: --frobnicate' err
expect 2 status --server
expect 2 status --server nowhere
# One list for every command, whether it connects to the nodes one by one or to all.
for command in status doctor ping "get x"; do
    expect 2 $command --server 127.0.0.1:1,127.0.0.1:2,127.0.0.1:1
    has 'option: --server: twice in the list: 127.0.0.1:1$' err
done
# A list may have 1,024 nodes with names.
many=$(seq 1 1024 | sed 's/.*/storage-node-number-&=127.0.0.1:&/' | paste -s -d ,)
expect 2 status --server "$many,storage-node-number-1025=127.0.0.1:1025"
has 'option: --server: too many nodes: limit 1024$' err
expect 2 status --server "${many%:1024}:1023"
has 'option: --server: twice in the list: 127.0.0.1:1023$' err
expect 3 exists x --server "$many"
has '^kvctl: exists: node 127.0.0.1:1: open: ' err
expect 2 status extra
expect 2 put
expect 2 put a b c
expect 2 --deadline-ms 0 status

# Nobody there: told by name, soon, and nothing on stdout.
expect 1 --server 127.0.0.1:1 status
has 'node 127.0.0.1:1: .*unreachable' err
[ ! -s "$work/out" ] || wrong "something on stdout"
for command in status sessions clients models ops stats scrub scrub-disk verify ping drain; do
    expect 1 --server 127.0.0.1:1 --json $command
    is_json
    has '^\{"node": "127.0.0.1:1", "state": "unreachable", "detail": "open: unreachable: ' out
    has "^kvctl: $command: node 127.0.0.1:1: open: unreachable: " err
    has "; start the node, or see kvctl doctor$" err
done
expect 1 --server 127.0.0.1:1 get x
has "; start the node, or see kvctl doctor$" err
[ ! -s "$work/out" ] || wrong "something on stdout"
expect 3 --server 127.0.0.1:1 exists x
has '^kvctl: exists: node 127.0.0.1:1: open: unreachable: ' err
expect 3 --server 127.0.0.1:1 exists x --json
[ ! -s "$work/out" ] || wrong "something on stdout"
expect 1 --server 127.0.0.1:1 delete x
expect 1 --server 127.0.0.1:1 doctor
has '^fail  node 127.0.0.1:1: control port: ' out
has '^ok    client: version ' out
expect 1 --server 127.0.0.1:1 doctor --json
is_json
has '"verdict": "fail", "what": "control port"' out

start one
one=$address
one_process=$node
alive=$one
export KVCTL_SERVER="$one"

for table in status sessions clients ops stats models scrub; do
    expect 0 "$table"
    [ -s "$work/out" ] || wrong "kvctl $table: nothing"
done
for table in status clients ops stats scrub; do
    expect 0 "$table" --json
    is_json
    has "^\\{\"node\": \"$one\", " out
done
# A line for each column: a line for each thread would be 200 characters long.
expect 0 scrub
has '^thread +0 +1$' out
has '^bad_rows +0 +0$' out
expect 0 scrub-disk
has '^bad_columns +0$' out
expect 0 status
has '^memory_bytes +268435456 \(256M\)$' out
expect 0 ping
has "^node $one: 1000 round trips of 64 B: p50 [0-9.]+ us" out
for transport in $transports; do
    expect 0 ping --transport "$transport" --json
    is_json
    has '"transport": "[a-z]+/' out
done
expect 0 doctor
has 'data threads: all 2 respond' out
has 'disk: .* of .* in use; 0 wait to be saved; 0 errors and 0 damaged since the start$' out
has 'ports: all [0-9]+ of process [0-9]+ are on loopback' out
expect 0 doctor --json
is_json

# Objects: small, empty, as large as may be, larger.
head -c 100000 /dev/urandom >"$work/some"
: >"$work/empty"
head -c 67108864 /dev/zero >"$work/large"
{ cat "$work/large"; echo; } >"$work/larger"
for transport in $transports; do
    for name in some empty large; do
        expect 0 put "$name" "$work/$name" --transport "$transport"
        has "^put $name: [0-9]+ bytes in .* crc32c [0-9a-f]{8}\$" out
        expect 0 get "$name" "$work/copy" --transport "$transport"
        cmp "$work/$name" "$work/copy" || wrong "get $name: other bytes"
        expect 0 delete "$name" --transport "$transport"
    done
done
expect 2 put larger "$work/larger"
has 'too large' err
input=$work/larger
expect 2 put larger -
input=/dev/null
has 'too large' err
rm "$work/large" "$work/larger"
expect 2 put gone "$work/gone"
has 'gone: cannot open: No such file' err
expect 2 put folder "$work"
expect 2 put '' "$work/some"

input=$work/some
expect 0 put some --json
input=/dev/null
is_json
has '"name": "some", "bytes": 100000, ' out
expect 0 put some "$work/some"
expect 1 put some "$work/empty"
has 'the name has different bytes' err
expect 0 get some
cmp "$work/some" "$work/out" || wrong "get to stdout: other bytes"
expect 0 get some -
cmp "$work/some" "$work/out" || wrong "get to stdout: other bytes"
expect 2 get some --json
expect 0 get some "$work/copy" --json
is_json
echo old >"$work/old"
expect 1 get nosuch "$work/old"
has 'kvctl: get: nosuch: no such object' err
grep -q old "$work/old" || wrong "a get that failed touched the file"
expect 1 get some "$work/no/such/folder"
expect 0 exists some
has '^exists some: 100000 bytes$' out
expect 0 exists some --json
is_json
expect 1 exists nosuch
expect 1 exists nosuch --json
has '"exists": false' out
expect 0 delete some
expect 1 delete some
expect 0 put -- --odd "$work/some"
expect 0 exists -- --odd

# Prefixes by name: what is not kept is not found, and a name is a name.
for command in pin unpin evict hint; do
    expect 2 $command
    expect 2 $command xyz
    has '^kvctl: '$command': NAME: xyz: must be 16 or 32 hexadecimal digits$' err
    expect 1 $command 0123456789abcdef0123456789ABCDEF --for-ms 1000
    has ': '$command': 0 blocks$' out
    has ': no node keeps it$' err
    expect 1 $command 0123456789abcdef0123456789abcdef --session --json
    has '"blocks": 0}$' out
done
expect 2 hint 0123456789abcdef0123456789abcdef --for-ms 3600001
expect 0 prefixes --json
expect 0 prefixes --limit 2
has '^name +tenant +tokens +bytes +unused_s +uses +sessions +pinned_s$' out
expect 0 tenants

# Prefixes that are kept: a prompt of four blocks, and one that is the same up to its second.
keep() {
    "$keeper" "$one" "$1" >"$work/out" 2>"$work/err" || wrong "keep_prompt $1 failed"
    has "^matched $2\$" out
    has '^published 512$' out
    kept=$(sed -n 's/^session //p' "$work/out")
    block() {
        sed -n 's/^block //p' "$work/kept.$fork" | sed -n "$(($1 + 1))p"
    }
    fork=$1
    cp "$work/out" "$work/kept.$fork"
}
# shown NUMBER: how the table tells the name of a block
shown() {
    echo "$(block "$1" | cut -c 1-16)0000000000000000"
}
keep 4 0
first=$kept
last=$(block 3)
keep 2 256
expect 0 reuse
has '^tenant +asked +matched +missed_new +missed_evicted +missed_elsewhere +matched_on_disk$' out
has '^ +0 +1024 +256 +768 +0 +0 +0$' out
expect 0 tenants
# The two ends may leave memory as soon as they are saved, since their sessions rest.
has '^ +0 +6 +811008 \(792K\) +0 +[0-2]$' out
expect 0 prefixes
[ "$(grep -c '^[0-9a-f]' "$work/out")" -eq 6 ] || wrong "prefixes: not all are listed"
has "^$(shown 1) +0 +256 +135168 \(132K\) .* 0\$" out
has "^$(shown 3) +0 +512 +135168 \(132K\) .* 0\$" out
expect 0 pin "$(block 3 | cut -c 1-16)"
has ': pin: 1 blocks$' out
expect 0 unpin "$(block 3)"
expect 0 pin "$(block 3)"
has ': pin: 1 blocks$' out
expect 0 pin "$last" --for-ms 600000 --json
has '"blocks": 1}$' out
expect 0 pin "$kept" --session
has ': pin: 1 blocks$' out
expect 0 prefixes
has "^$(shown 3) .* always\$" out
fork=4
has "^$(shown 3) .* 5[0-9]{2}\$" out
fork=2
expect 0 unpin "$(block 3)"
has ': unpin: 1 blocks$' out
expect 0 hint "$(block 3)" --for-ms 2000
has ': hint: 1 blocks$' out
expect 0 prefixes
has "^$(shown 3) .* 0\$" out
# By the name as the table tells it, too; the other prompt keeps what is its own.
expect 0 evict "$(shown 2)"
has ': evict: 2 blocks$' out
expect 0 prefixes --json
is_json
[ "$(wc -l <"$work/out")" -eq 4 ] || wrong "evict: not four blocks are left"
expect 1 evict "$(block 3)"
expect 0 evict "$(block 0)" --json
has '"blocks": 4}$' out
expect 0 prefixes
[ "$(grep -c '^[0-9a-f]' "$work/out")" -eq 0 ] || wrong "evict: some blocks are left"
keep 2 0
expect 0 reuse --json
has '"tenant": 0, "asked": 1536, "matched": 256, "missed_new": 768, "missed_evicted": 512, "missed_elsewhere": 0, "matched_on_disk": 0}$' out
expect 0 evict "$(block 0)"
# Sessions that nobody closes, and an operator does.
expect 0 sessions
has "^id .* $first( |\$)" out
has '^tokens +512 +512 +512$' out
has '^bytes +540672 \(528K\) +540672 \(528K\) +540672 \(528K\)$' out
has '^owner +keep_prompt +keep_prompt +keep_prompt$' out
expect 0 close "$first"
has "^closed $first on 1 of 1 nodes\$" out
expect 1 close "$first"
expect 0 sessions
lacks "$first" out
expect 0 close "$kept" --json
is_json
has '"nodes_closed": 1}$' out

# Lists of objects, and their end.
expect 0 objects --json
has '"name": "--odd", "bytes": 100000, "age_s": [0-9.]+, "ttl_left_s": "none", "evictable": "no", "pinned": "(yes|no)", "bad_pieces": 0}$' out
expect 0 delete -- --odd
for i in $(seq 1 12); do
    expect 0 put "a/$i" "$work/empty"
    expect 0 put "b/$i" "$work/some" --ttl 1000 --evictable
done
expect 0 objects
[ "$(grep -c '^[ab]/[0-9]' "$work/out")" -eq 24 ] || wrong "objects: not all are listed"
has '^name +bytes +age_s +ttl_left_s +evictable +pinned +bad_pieces$' out
has '^b/12 +100000 \(97.66K\) +[0-9.]+ +(99[0-9.]+|1000.0) +yes +(yes|no) +0$' out
expect 0 objects --prefix b/1 --json
is_json
[ "$(grep -c '"name": "b/1[0-2]*", "bytes": 100000, ' "$work/out")" -eq 4 ] || wrong "objects --prefix"
expect 0 objects --limit 7 --json
[ "$(wc -l <"$work/out")" -eq 7 ] || wrong "objects --limit"
expect 2 delete --prefix a/
has '^found 12 objects, 0 bytes$' out
has '^kvctl: delete: a/: nothing is deleted without --yes$' err
expect 0 exists a/7
expect 0 delete --prefix a/ --yes
has '^deleted 12 objects, 0 bytes$' out
expect 1 exists a/7
expect 0 delete --prefix a/ --yes --json
has '^{"prefix": "a/", "deleted": 0, "bytes": 0}$' out
expect 0 exists b/7
expect 2 delete
has 'one NAME, or --prefix' err
expect 2 delete b/7 --prefix b/
expect 0 exists b/7
expect 0 delete --prefix '' --yes
has '^deleted 12 objects, 1200000 bytes$' out
expect 0 objects
[ ! -s "$work/out" ] || wrong "objects: some are left"

"$session" "$one" >"$work/out" 2>"$work/err" || wrong "the example session failed"
expect 0 models
has '^example, 4 layers +[0-9a-f]{32} +4 +8 +2048$' out
expect 0 models --json
is_json
expect 0 ops --json
has '"op": "fetch", "plane": "data", "count": 160, "errors": 0' out

expect 0 sessions
expect 2 close 12
has '^kvctl: close: SESSION-ID: 12: must be 32 hexadecimal digits' err
expect 2 close 0123456789abcdef0123456789abcdeF
expect 1 close 0123456789abcdef0123456789abcdef
has '^kvctl: close: 0123456789abcdef0123456789abcdef: no such session$' err
expect 1 close 0123456789abcdef0123456789abcdef --json
is_json
has '"nodes_closed": 0}$' out
expect 2 save
expect 2 save 12
has '^kvctl: save: SESSION-ID: 12: must be 32 hexadecimal digits' err
expect 1 save 0123456789abcdef0123456789abcdef
has '^kvctl: save: 0123456789abcdef0123456789abcdef: no such session$' err
expect 0 threads
has '^thread +0 +1$' out
has '^rows_bytes +[0-9]' out
expect 0 threads --json
is_json
[ "$(wc -l <"$work/out")" -eq 2 ] || wrong "threads: not one line each"

# A node that calls itself otherwise than the list is refused, whatever is asked of it.
expect 0 status --server "one=$one"
for command in status ping drain; do
    expect 1 $command --server "uno=$one"
    has 'the list calls it uno, it calls itself one' err
done
expect 0 status --server "one=$one"

# Objects whose put says nothing of how long they stay: as the node's option says.
options='--object-ttl 10'
start brief
options=
alive="$one|$address"
expect 0 put brief "$work/some" --server "$address"
expect 0 put long "$work/some" --ttl 1000 --server "$address"
expect 0 objects --server "$address"
has '^brief +100000 \(97.66K\) +[0-9.]+ +([0-9](\.[0-9])?|10(\.0)?) ' out
has '^long +100000 \(97.66K\) +[0-9.]+ +(99[0-9](\.[0-9])?|1000(\.0)?) ' out
tries=0
while "$kvctl" exists brief --server "$address" >"$work/out" 2>"$work/err"; do
    tries=$((tries + 1))
    [ "$tries" -lt 300 ] || break
    sleep 0.1
done
expect 1 exists brief --server "$address"
expect 0 exists long --server "$address"
kill -9 "$node"
alive=$one

# A session that is saved is there after a node that died right then; without a disk there is no way.
start quick
alive="$one|$address"
"$keeper" "$address" 4 >"$work/out" 2>"$work/err" || wrong "keep_prompt failed"
kept=$(sed -n 's/^session //p' "$work/out")
expect 0 save "$kept" --server "$address"
has "^saved 512 tokens of $kept on 1 of 1 nodes\$" out
kill -9 "$node"
wait "$node" 2>/dev/null || true
rm "$work/quick.ready"
start quick
alive="$one|$address"
"$keeper" "$address" 4 >"$work/out" 2>"$work/err" || wrong "keep_prompt failed"
has '^matched 512$' out
kept=$(sed -n 's/^session //p' "$work/out")
expect 0 save "$kept" --server "$address,$one" --json
is_json
has "^{\"session\": \"$kept\", \"nodes_saved\": 1, \"tokens\": 512}\$" out
kill -9 "$node"
options='--disk none'
start diskless
options=
alive="$one|$address"
"$keeper" "$address" 4 >"$work/out" 2>"$work/err" || wrong "keep_prompt failed"
kept=$(sed -n 's/^session //p' "$work/out")
expect 1 save "$kept" --server "$address"
has "^kvctl: save: node $address: save: unsupported: .*: the node has no disk \(--disk\)" err
expect 1 save "$kept" --server "$address" --json
is_json
kill -9 "$node"
alive=$one

# Verification of memory and disk: of nothing, and of a prompt of four blocks that is saved; that is
# damaged in the file under the node, while it is in memory and when it is not.
# counts TIER BLOCKS BAD MENDED LOST: of the last verify
counts() {
    has "^$1 +$2 +[0-9]+( \([^)]*\))? +$3 +$4 +$5 +0 +0\$" out
}
# scratch: a byte in each page
scratch() {
    pages=$(($(wc -c <"$work/kept/rows") / 4096))
    [ "$pages" -le 4096 ] || pages=4096
    for i in $(seq 0 $((pages - 1))); do
        printf '\377' | dd of="$work/kept/rows" bs=1 seek=$((i * 4096 + 1000)) conv=notrunc 2>"$work/err" ||
            wrong "dd"
    done
}
# saved BLOCKS: waits until so many are
saved() {
    tries=0
    until "$kvctl" tiers --server "$kept_node" 2>"$work/err" | grep -q "^disk  *$1 "; do
        tries=$((tries + 1))
        [ "$tries" -lt 300 ] || wrong "not $1 blocks are saved"
        [ "$tries" -lt 300 ] || break
        sleep 0.1
    done
}
expect 0 verify
has '^tier +blocks +bytes +bad +mended +lost +unread +refused$' out
counts disk 0 0 0 0
expect 2 verify all
options='--scrub-disk 0' # what the background had begun to verify would count as well
start kept
kept_node=$address
alive="$one|$address"
"$keeper" "$kept_node" 4 >"$work/kept.4" 2>"$work/err" || wrong "keep_prompt failed"
saved 4
expect 0 verify --server "$kept_node"
counts disk 4 0 0 0
counts memory 8 0 0 0
scratch
expect 0 verify --server "$kept_node"
counts disk 4 4 4 0
expect 0 verify --server "$kept_node" --json
is_json
has '"tier": "disk", "blocks": 4, "bytes": [0-9]+, "bad": 0, "mended": 0, "lost": 0, "unread": 0, "refused": 0}$' out
[ "$(wc -l <"$work/out")" -eq 2 ] || wrong "verify: not one line for each tier"
kill -9 "$node"
wait "$node" 2>/dev/null || true
rm "$work/kept.ready"
start kept
kept_node=$address
alive="$one|$address"
expect 0 verify --server "$kept_node"
counts disk 4 0 0 0
scratch
expect 1 verify --server "$kept_node"
has '^disk +[1-4] .* 0 +4 +0 +0$' out
has ': 4 blocks or pieces of objects on disk are lost, 0 could not be verified; 0 rows ' err
saved 0
expect 0 verify --server "$kept_node"
counts disk 0 0 0 0
kill -9 "$node"
options=
alive=$one

# Two nodes: one list; the dead one is named, the other still answers.
start two
two=$address
two_process=$node
alive="$one|$two"
export KVCTL_SERVER="one=$one,two=$two"
expect 0 status
has "^node $one\$" out
has "^node $two\$" out
expect 0 put both "$work/some"
expect 0 get both "$work/copy"
cmp "$work/some" "$work/copy" || wrong "get over two nodes: other bytes"
"$session" "$one,$two" >"$work/out" 2>"$work/err" || wrong "the example session failed"
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do
    expect 0 put "spread-$i" "$work/some"
done
alive=$one
kill -9 "$two_process"
wait "$two_process" 2>/dev/null || true
expect 1 status
has "^node $one\$" out
has "^node $two\$" out
has '^state +unreachable$' out
has '^detail +open: unreachable: ' out
has "^kvctl: status: node $two: .*unreachable" err
for table in status sessions clients models ops stats ping; do
    expect 1 "$table" --json
    is_json
    has "^\\{\"node\": \"$two\", \"state\": \"unreachable\", \"detail\": \"open: " out
done
expect 1 status --json
has "^\\{\"node\": \"$one\", .*\"memory_bytes\": 268435456, " out
expect 1 doctor
has "^fail  node $two: control port" out

# object NAME STATUS DEAD: one that lies on the living node is there, of another nobody can tell.
object() {
    expect "$2" exists "$1" --deadline-ms 2000
    if [ "$2" -eq 0 ]; then
        expect 0 get "$1" "$work/copy" --deadline-ms 2000
        cmp "$work/some" "$work/copy" || wrong "get $1: other bytes"
    else
        has "^kvctl: exists: $1: node $3: object_exists: (unreachable|deadline): " err
        expect 1 get "$1" "$work/copy" --deadline-ms 2000
        has "^kvctl: get: $1: node $3: " err
    fi
}
here='' there=''
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do
    for _ in 1 2 3 4 5; do
        got=0
        "$kvctl" exists "spread-$i" >"$work/out" 2>"$work/err" || got=$?
        is_slow || break
    done
    if [ "$got" -eq 0 ]; then
        here="spread-$i"
    else
        there="spread-$i"
    fi
done
object "$here" 0 "$two"
object "$there" 3 "$two"
# Where an object lies depends on the names in the list alone.
export KVCTL_SERVER="two=127.0.0.1:1,one=$one"
object "$here" 0 127.0.0.1:1
object "$there" 3 127.0.0.1:1

# A node that is back: what it had is gone, and that is told as such.
export KVCTL_SERVER="one=$one,two=$two"
start two "${two##*:}"
two_process=$node
alive="$one|$two"
expect 0 exists "$here"
expect 1 exists "$there"
has "no such object" err
expect 0 put "$there" "$work/some"
expect 0 exists "$there"
alive=$one
kill -STOP "$two_process"
object "$here" 0 "$two"
object "$there" 3 "$two"
expect 1 status --json --deadline-ms 500
has "^\\{\"node\": \"$two\", \"state\": \"unreachable\", " out
kill -CONT "$two_process"
alive="$one|$two"
expect 0 status --json
alive=$one
kill -9 "$two_process"

# A node that is stopped but not gone: the deadline holds.
export KVCTL_SERVER="$one"
alive=none
kill -STOP "$one_process"
expect 1 status --deadline-ms 500
expect 1 doctor --deadline-ms 500
kill -CONT "$one_process"
alive=$one
expect 0 status

alive=none
expect 0 drain --json
is_json
status=0
wait "$one_process" || status=$?
[ "$status" -eq 0 ] || wrong "drained, the node ended with status $status"
expect 1 status
start last
expect 0 drain --server "$address"
has 'draining: .* saves .* its sessions end$' out

echo "$bad failed"
[ "$bad" -eq 0 ]
