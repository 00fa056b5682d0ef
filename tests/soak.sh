#!/bin/sh
# soak.sh [--minutes N] [--jobs N] [--seed N] [BUILD]: what CI runs for a minute, for an hour or as
# long as you like, with seeds that nobody has run: kv_sim for four fifths of the time, then the
# fuzzers, if BUILD has them (KV_FUZZ).  BUILD is a folder that was built (build); with sanitizers
# it finds more.
#   --minutes N  60; --seconds N is finer
#   --jobs N     so many kv_sims at once (the number of processors)
#   --seed N     the first seed (the time: other seeds in every run)
# It stops at the first failure and says how to run that one again.
# Exit status: 0 nothing found, 1 something was, 2 wrong usage.
set -eu
tests=$(cd "$(dirname "$0")" && pwd)
seconds=3600
jobs=$(nproc)
seed=
build=build

# number OPTION VALUE: ends unless the value is one, of at most nine digits
number() {
    case $2 in
    '' | *[!0-9]* | ??????????*)
        echo "soak.sh: $1: not a number: $2" >&2
        exit 2
        ;;
    esac
}

while [ $# -gt 0 ]; do
    case $1 in
    --minutes | --seconds | --jobs | --seed)
        number "$1" "${2-}"
        case $1 in
        --minutes) seconds=$(($2 * 60)) ;;
        --seconds) seconds=$2 ;;
        --jobs) jobs=$2 ;;
        --seed) seed=$2 ;;
        esac
        shift
        ;;
    --help)
        sed -n '2,11s/^# //p' "$0"
        exit 0
        ;;
    -*)
        echo "soak.sh: unknown option: $1" >&2
        exit 2
        ;;
    *) build=$1 ;;
    esac
    shift
done
if [ "$jobs" -eq 0 ] || [ "$seconds" -eq 0 ]; then
    echo "soak.sh: --jobs, --minutes: at least 1" >&2
    exit 2
fi
if [ ! -x "$build/tests/sim/kv_sim" ]; then
    echo "soak.sh: $build/tests/sim/kv_sim: not there; build it first" >&2
    exit 2
fi
build=$(cd "$build" && pwd)
# Jobs are so far apart that their seeds never meet.
[ -n "$seed" ] || seed=$(($(date +%s) % 100000000 * 10))
apart=10000000000
logs=$(mktemp -d)
running=

finish() {
    for job in $running; do
        kill "$job" 2>/dev/null || true
    done
    rm -rf "$logs"
}
trap finish EXIT
trap 'exit 1' INT TERM

# start NAME COMMAND...: in the background, its output to $logs/NAME
start() {
    name=$1
    shift
    "$@" >"$logs/$name" 2>&1 &
    running="$running $!"
    eval "name_$!=\$name"
}

# failed NAME STATUS: says what failed, and ends
failed() {
    [ ! -t 2 ] || printf '\r\033[K' >&2
    echo "soak.sh: $1: failed with status $2:" >&2
    tail -n 20 "$logs/$1" >&2
    case $1 in
    sim-*) ;; # it has said how to run it again
    *)
        sed -n "s|.*Test unit written to \\./|soak.sh: again: $build/tests/fuzz/fuzz_$1 $build/tests/fuzz/|p" \
            "$logs/$1" >&2
        ;;
    esac
    exit 1
}

# wait_for_all WHAT SECONDS: until all that was started has ended; ends with the first that fails
wait_for_all() {
    began=$(date +%s)
    while [ -n "$running" ]; do
        left=
        for job in $running; do
            if kill -0 "$job" 2>/dev/null; then
                left="$left $job"
                continue
            fi
            status=0
            wait "$job" || status=$?
            eval "name=\$name_$job"
            [ "$status" -eq 0 ] || [ "$status" -eq 77 ] || failed "$name" "$status"
            [ ! -t 2 ] || printf '\r\033[K' >&2
            sed -n "s/^stat::number_of_executed_units: */$name: good: inputs: /p
                    s/^good: /$name: &/p; s/^skipped: /$name: &/p" "$logs/$name"
        done
        running=$left
        if [ -n "$running" ]; then
            [ ! -t 2 ] || printf '\r%s: %s of %s s' "$1" $(($(date +%s) - began)) "$2" >&2
            sleep 1
        fi
    done
}

fuzz=no
[ ! -x "$build/tests/fuzz/fuzz_gguf" ] || fuzz=yes
for_sim=$seconds
if [ "$fuzz" = yes ]; then
    for_sim=$((seconds * 4 / 5 > 0 ? seconds * 4 / 5 : 1))
fi
for_fuzz=$((seconds - for_sim > 0 ? seconds - for_sim : 1))

job=0
while [ "$job" -lt "$jobs" ]; do
    first=$((seed + job * apart))
    echo "sim-$job: kv_sim: seeds from $first on, $for_sim s"
    start "sim-$job" "$build/tests/sim/kv_sim" --seed "$first" --seconds "$for_sim"
    job=$((job + 1))
done
wait_for_all kv_sim "$for_sim"
if [ "$fuzz" = no ]; then
    echo "fuzzers: not in $build: configure with -DKV_FUZZ=ON, and clang"
    exit 0
fi
for name in gguf tokenizer; do
    echo "$name: fuzz_$name: seed $((seed % 1000000000 + 1)), $for_fuzz s"
    start "$name" sh "$tests/fuzz/run.sh" "$name" "$build/tests/fuzz" "$for_fuzz" \
        $((seed % 1000000000 + 1))
done
wait_for_all fuzzers "$for_fuzz"
