#!/bin/sh
# test_soak.sh SOAK: tests/soak.sh over programs that only say what they were asked: which seeds run,
# and that it ends with the first failure and says how to run that again.
set -eu
soak=$1
work=$(mktemp -d)
bad=0
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/tests/sim" "$work/tests/fuzz"

# program PATH LINES...: a program of these lines
program() {
    path=$work/$1
    shift
    printf '#!/bin/sh\n' >"$path"
    printf '%s\n' "$@" >>"$path"
    chmod +x "$path"
}

# expect STATUS ARGUMENTS...: runs it; its output is in $work/out
expect() {
    wanted=$1
    shift
    got=0
    sh "$soak" "$@" >"$work/out" 2>&1 || got=$?
    if [ "$got" -ne "$wanted" ]; then
        echo "soak.sh $*: status $got, not $wanted:"
        cat "$work/out"
        bad=1
    fi
}

# prints TEXT: so it did
prints() {
    if ! grep -qF -e "$1" "$work/out"; then
        echo "not printed: $1"
        cat "$work/out"
        bad=1
    fi
}

program tests/sim/kv_sim 'echo "good: asked for $*"'
expect 0 --seconds 10 --jobs 2 --seed 5 "$work"
prints 'asked for --seed 5 --seconds 10'
prints 'asked for --seed 10000000005 --seconds 10'
prints 'fuzzers: not in'

# The other job would run for minutes.
program tests/sim/kv_sim '[ "$2" -eq 7 ] || exec sleep 200' \
    'echo "kv_sim: again: kv_sim --seed 12"; exit 1'
began=$(date +%s)
expect 1 --seconds 200 --jobs 2 --seed 7 "$work"
prints 'soak.sh: sim-0: failed with status 1'
prints 'kv_sim: again: kv_sim --seed 12'
if [ $(($(date +%s) - began)) -ge 200 ]; then
    echo "it waited for the other job"
    bad=1
fi

program tests/sim/kv_sim 'echo "good: asked for $*"'
program tests/fuzz/write_seeds ''
program tests/fuzz/fuzz_tokenizer 'echo "stat::number_of_executed_units: 12"'
program tests/fuzz/fuzz_gguf 'echo "==1== Test unit written to ./crash-12"; exit 77'
expect 0 --seconds 10 --jobs 1 --seed 5 "$work"
prints 'asked for --seed 5 --seconds 8'
prints 'gguf: fuzz_gguf: seed 6, 2 s'
prints 'tokenizer: good: inputs: 12'
program tests/fuzz/fuzz_gguf 'echo "==1== Test unit written to ./crash-12"; exit 1'
expect 1 --seconds 10 --jobs 1 --seed 5 "$work"
prints "soak.sh: again: $work/tests/fuzz/fuzz_gguf $work/tests/fuzz/crash-12"

expect 2 --minutes x "$work"
expect 2 --jobs 0 "$work"
expect 2 --unknown
expect 2 "$work/nothing"
expect 0 --help
prints 'soak.sh [--minutes N]'
exit $bad
