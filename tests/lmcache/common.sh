# common.sh: options and installation of check.sh and bench.sh, which have it read.  Sets top, venv and
# the variables of support.py.

top=$(cd "$(dirname "$0")/../.." && pwd)
venv=
build=
version=0.5.6
quick=no
only=
json=
workers=0

fail() {
    echo "$(basename "$0"): $1" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    --venv | --build | --only | --json | --workers)
        [ $# -gt 1 ] || fail "$1: needs a value"
        case $1 in
        --venv) venv=$2 ;;
        --build) build=$2 ;;
        --only) only=$2 ;;
        --json) json=$2 ;;
        --workers) workers=$2 ;;
        esac
        shift
        ;;
    --newest) version= ;;
    --quick) quick=yes ;;
    --help)
        sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    *) fail "unknown option: $1" ;;
    esac
    shift
done
[ -n "$venv" ] || venv=$top/.cache/lmcache-${version:-newest}

# Before anything is downloaded: what it is for is there.
if [ -z "$build" ]; then
    build=$top/build-lmcache
    echo "builds kvserver, kvctl and libkvclient in $build"
    mkdir -p "$build"
    { cmake -S "$top" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release &&
        ninja -C "$build" kvserver kvctl kvclient; } >"$build/build.log" 2>&1 || {
        tail -n 30 "$build/build.log" >&2
        fail "$build: does not build"
    }
fi
[ -d "$build" ] || fail "--build: $build: no such folder"
TOPKV_LIBRARY=$(cd "$build" && pwd)/client/libkvclient.so.0
TOPKV_KVSERVER=$(cd "$build" && pwd)/kvserver/kvserver
TOPKV_KVCTL=$(cd "$build" && pwd)/client/kvctl/kvctl
for file in "$TOPKV_LIBRARY" "$TOPKV_KVSERVER" "$TOPKV_KVCTL"; do
    [ -f "$file" ] || fail "--build: $file: does not exist"
done

has() { # has PACKAGE: its version, if the environment has it
    "$venv/bin/python" -c "from importlib.metadata import version; print(version('$1'))" 2>/dev/null
}

[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || fail "$venv: no virtual environment: apt-get install python3-venv"
if [ -n "$version" ] && [ "$(has lmcache)" = "$version" ]; then
    echo "LMCache $version is in $venv: nothing is downloaded"
else
    echo "downloads LMCache ${version:-(the newest)} with torch from the Python index into $venv: 6.2 GB installed"
    # shellcheck disable=SC2086 # no version, no argument
    "$venv/bin/pip" install -q --upgrade lmcache${version:+==$version} || fail "pip: cannot install LMCache"
    echo "LMCache $(has lmcache) is installed"
fi

PYTHONPATH=$top/client/python:$top/tests/lmcache
LMCACHE_DISABLE_BANNER=1
LMCACHE_TRACK_USAGE=false
PYTHONDONTWRITEBYTECODE=1
export TOPKV_LIBRARY TOPKV_KVSERVER TOPKV_KVCTL PYTHONPATH LMCACHE_DISABLE_BANNER LMCACHE_TRACK_USAGE PYTHONDONTWRITEBYTECODE
