#!/bin/sh
# test_loads.sh KV_BENCH LOAD TRANSPORT: a smoke run of one of the loads below prints one record for
# each figure, and each record has what the figure needs.  No figure is judged.
set -eu
bench=$1
load=$2
transport=$3
bad=0

records=$("$bench" "$load" --smoke --json --transport "$transport")

wrong() {
    bad=$((bad + 1))
    echo "FAILED: $load: $*"
}

# expect N PATTERN...: so many records match all patterns.
expect() {
    wanted=$1
    shift
    found=$records
    for pattern; do
        found=$(echo "$found" | grep -E -- "$pattern" || true)
    done
    n=$(echo "$found" | grep -c . || true)
    [ "$n" -eq "$wanted" ] || wrong "$n records instead of $wanted with: $*"
}

number='[0-9.e+-]+'
case $load in
scale)
    for axis in sessions clients threads tokens; do
        for operation in open append query resume fork close; do
            expect 3 "\"name\": \"scale\.$axis\"" "\"operation\": \"$operation\"" \
                "\"n\": [0-9]+" "\"node_us\": $number" "\"slowdown\": $number" \
                "\"value\": $number, \"unit\": \"us\"" '"limit_name": "at 1 %"'
        done
    done
    expect 6 '"name": "scale\.tokens"' '"per": "block"'
    # At 1 % at least: another one may be the same by chance.
    n=$(echo "$records" | grep -cE '"slowdown": 1[,}].*"ratio": 1[,}]' || true)
    [ "$n" -ge 24 ] || wrong "$n records instead of 24 that are their own limit"
    ;;
bookkeeping)
    for units in 32 8 9; do
        for source in tables rss; do
            expect 1 "\"name\": \"bookkeeping\.$units\"" "\"source\": \"$source\"" \
                "\"units\": $units[,}]" \
                "\"value\": $number, \"unit\": \"B\", \"limit\": 64"
        done
    done
    ;;
match)
    expect 1 '"name": "match\.index"' "\"value\": $number, \"unit\": \"us\"" "\"limit\": 1000"
    expect 1 '"name": "match\.bytes"' "\"value\": $number"
    expect 1 '"name": "match\.route"' "\"value\": $number"
    expect 1 '"name": "match\.share"' '"limit": 20'
    ;;
tier)
    expect 1 '"name": "tier\.put"' "\"value\": $number, \"unit\": \"GB/s\"" '"limit_name": "raw disk"'
    expect 1 '"name": "tier\.read"' "\"value\": $number, \"unit\": \"GB/s\"" '"limit_name": "raw disk"'
    expect 1 '"name": "tier\.kept"' "\"value\": $number, \"unit\": \"%\""
    expect 1 '"name": "tier\.start"' "\"value\": $number, \"unit\": \"s/GB\""
    expect 1 '"name": "tier\.match"' "\"value\": $number, \"unit\": \"us\""
    for k in 64 1024; do
        for rerank in 1 4; do
            expect 1 '"name": "tier\.query"' "\"k\": $k, \"rerank\": $rerank, \"p99\"" \
                "\"value\": $number, \"unit\": \"us\"" '"limit_name": "in memory \+ raw disk"'
            for away in 50 100; do
                expect 1 '"name": "tier\.query"' \
                    "\"k\": $k, \"rerank\": $rerank, \"away\": $away"
                expect 1 '"name": "tier\.query\.read"' "\"value\": $number, \"unit\": \"MB\"" \
                    "\"k\": $k, \"rerank\": $rerank, \"away\": $away"
            done
        done
    done
    ;;
query.spill)
    expect 1 '"name": "query\.spill"' "\"value\": $number, \"unit\": \"us\"" \
        '"limit_name": "the same, nothing saved"'
    ;;
query.worst)
    transports=1
    [ "$transport" != both ] || transports=2
    expect "$transports" '"name": "query\.worst"' "\"p50\": $number" "\"limit_p50\": $number" \
        "\"limit_p99\": $number" '"limit_name": "idle node"'
    expect 1 '"name": "query\.worst\.own"' "\"p50\": $number" "\"limit_p50\": $number" \
        "\"limit_p99\": $number" '"limit_name": "idle node"'
    ;;
*)
    wrong "not a load of this test"
    ;;
esac
[ "$bad" -eq 0 ] || echo "$records"
[ "$bad" -eq 0 ]
