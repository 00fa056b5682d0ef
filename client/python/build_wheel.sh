#!/bin/sh
# build_wheel.sh [OUT]: builds the wheel of the Python package, with all that it needs at the
# user's: libkvclient, kvserver, kvctl and the shared libraries that they use, except those that
# PEP 600 leaves to the system (glibc, libstdc++, libgcc).  Installs the Debian packages that it needs
# (deploy/packages.sh wheel).  OUT: default build-wheel/ here.  Prints the wheel's path last.
# KV_WHEEL_BUILD: the build folder, default build-wheel/.
set -eu
top=$(cd "$(dirname "$0")/../.." && pwd)
build=${KV_WHEEL_BUILD:-$top/build-wheel}
out=${1:-$top/build-wheel}
jobs=${KV_JOBS:-$(nproc)}

case $#${1-} in
0 | 1[!-]*) ;;
*)
    sed -n '2,7s/^# //p' "$0" >&2
    exit 2
    ;;
esac
sh "$top/deploy/packages.sh" wheel
mkdir -p "$build" "$out"
log=$build/wheel.log
cmake -S "$top" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING=OFF >"$log" 2>&1 &&
    ninja -C "$build" -j "$jobs" kvclient kvserver kvctl >>"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    echo "build_wheel: the build failed: $log" >&2
    exit 1
}
wheel=$(python3 "$top/client/python/make_wheel.py" "$build" "$out")
python3 "$top/client/python/check_wheel.py" "$wheel"
echo "$wheel"
