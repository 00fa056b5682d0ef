#!/bin/sh
# test.sh [--quick] [--jobs N]: builds and tests everything, in several
# configurations.
#   warnings   everything, with warnings as errors, and fuzzing    build-test/
#   address    everything, with address and undefined-behavior
#              sanitizers                                          build-asan/
#   thread     threads, with the thread sanitizer; without UCX,
#              gRPC and RocksDB                                    build-tsan/
#   format     clang-format
# --quick skips the sanitizers. The last line is the total: `N passed, N failed`.
set -eu
top=$(cd "$(dirname "$0")/.." && pwd)
jobs=$(nproc)
quick=no

while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=yes ;;
    --jobs)
        [ $# -gt 1 ] || {
            echo "test.sh: --jobs: needs a number" >&2
            exit 2
        }
        jobs=$2
        shift
        ;;
    --jobs=*) jobs=${1#--jobs=} ;;
    --help)
        sed -n '2,10s/^# //p' "$0"
        exit 0
        ;;
    *)
        echo "test.sh: unknown option: $1" >&2
        exit 2
        ;;
    esac
    shift
done
case $jobs in
'' | 0 | *[!0-9]*)
    echo "test.sh: --jobs: not a number: $jobs" >&2
    exit 2
    ;;
esac

passed=0
failed=0
summary=

# note STEP PASSED FAILED SKIPPED SECONDS
note() {
    line=$(printf '%-9s %s passed, %s failed, %s skipped, %s s' "$1:" "$2" "$3" "$4" "$5")
    echo "$line"
    summary="$summary$line
"
    passed=$((passed + $2))
    failed=$((failed + $3))
}

# count PATTERN FILE: ctest's lines of single tests that end so
count() {
    grep -Ec "^ *[0-9]+/[0-9]+ Test +#[0-9]+: .*($1)" "$2" || true
}

# step NAME FOLDER CMAKE-OPTION...: a build that fails is one test that failed
step() {
    name=$1
    folder=$top/$2
    shift 2
    begun=$(date +%s)
    echo "==> $name: build $(basename "$folder")/"
    mkdir -p "$folder"
    log=$folder/test.log
    if ! cmake -S "$top" -B "$folder" -G Ninja "$@" >"$log" 2>&1 ||
        ! ninja -C "$folder" -j "$jobs" >"$log" 2>&1; then
        tail -n 60 "$log"
        note "$name" 0 1 0 $(($(date +%s) - begun))
        return
    fi
    echo "==> $name: test"
    # More jobs than processors: most tests wait for a lease, a deadline or another process most of
    # the time.
    ctest --test-dir "$folder" -j $((2 * jobs + 1)) --output-on-failure >"$log" 2>&1 || true
    not_passed='\*\*\*(Failed|Timeout|Exception|Not Run)|Subprocess'
    n_passed=$(count ' Passed ' "$log")
    n_failed=$(count "$not_passed" "$log")
    n_skipped=$(count '\*\*\*Skipped' "$log")
    if [ "$n_failed" -gt 0 ]; then
        grep -Ev "^ *[0-9]+/[0-9]+ Test .* Passed |^ *Start " "$log" | tail -n 200
    elif [ "$n_passed" -eq 0 ]; then
        tail -n 20 "$log"
        n_failed=1
    fi
    grep -E '\*\*\*Skipped' "$log" || true
    note "$name" "$n_passed" "$n_failed" "$n_skipped" $(($(date +%s) - begun))
}

format() {
    begun=$(date +%s)
    echo "==> format"
    if find "$top/proto" "$top/kernels" "$top/kvserver" "$top/client" "$top/gpu-worker" \
        "$top/tests" -name '*.[ch]' -print0 2>/dev/null |
        xargs -0 clang-format --dry-run -Werror 2>&1 | tail -n 40 | grep .; then
        note format 0 1 0 $(($(date +%s) - begun))
    else
        note format 1 0 0 $(($(date +%s) - begun))
    fi
}

sh "$top/deploy/packages.sh" test

# UCX must not handle the signals that sanitizers use for their reports.
UCX_ERROR_SIGNALS=
export UCX_ERROR_SIGNALS

# The worker is compared with NumPy, events are read with vLLM's types, and types of the Python package
# are checked with mypy; without access to the Python index, these tests are skipped.
venv=$top/build-test/compare/venv
if ! "$venv/bin/python" -c 'import gguf, numpy, msgspec, zmq, mypy' 2>/dev/null; then
    echo "==> numpy, gguf, msgspec, pyzmq, mypy: build-test/compare/venv"
    mkdir -p "$top/build-test/compare"
    { python3 -m venv "$venv" &&
        "$venv/bin/pip" --quiet --disable-pip-version-check install gguf numpy msgspec pyzmq mypy; } \
        >"$top/build-test/compare/log" 2>&1 ||
        tail -n 3 "$top/build-test/compare/log"
fi

# Alerts are tried on made-up series with promtool. Debian's package of it is unpacked, not installed:
# installed, it starts a server. Without access to the mirror, this test is skipped.
PROMTOOL=$(command -v promtool || echo "$top/build-test/promtool/usr/bin/promtool")
export PROMTOOL
if [ ! -x "$PROMTOOL" ]; then
    echo "==> promtool: build-test/promtool"
    mkdir -p "$top/build-test/promtool"
    (cd "$top/build-test/promtool" && apt-get download prometheus &&
        dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool &&
        rm prometheus_*.deb) >"$top/build-test/promtool/log" 2>&1 ||
        tail -n 3 "$top/build-test/promtool/log"
fi

step warnings build-test -DKV_WERROR=ON -DKV_FUZZ=ON
if [ "$quick" = no ]; then
    step address build-asan -DKV_WERROR=ON -DKV_SANITIZE=address
    step thread build-tsan -DKV_WERROR=ON -DKV_SANITIZE=thread -DKV_WITH_UCX=OFF \
        -DKV_WITH_GRPC=OFF -DKV_WITH_ROCKSDB=OFF
fi
format

echo
printf '%s' "$summary"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
