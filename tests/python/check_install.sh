#!/bin/sh
# check_install.sh WHEEL [PYTHON]: what a user sees who has the wheel and nothing of this project's: installs
# it, with numpy, into a new environment of PYTHON (default python3), runs the README's example and
# `python -m topkv doctor`, and prints how long that took; exit status 1: more than two minutes, or something failed.
# As root on a Debian without Python, installs that first, within the time.  Takes numpy from the Python index.
set -eu
[ $# -ge 1 ] || {
    sed -n '2,5s/^# //p' "$0"
    exit 2
}
wheel=$1
python=${2:-python3}
top=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
begun=$(date +%s)

if ! "$python" -c 'import ensurepip' 2>/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends python3 python3-venv; } >"$work/log" 2>&1 || {
        tail -n 5 "$work/log" >&2
        exit 1
    }
fi
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install "$wheel[numpy]"
sed -n '/^```python$/,/^```$/{ /^```/!p; }' "$top/client/python/README.md" >"$work/example.py"
cd "$work" # not the source tree
unset TOPKV_LIBRARY TOPKV_KVSERVER PYTHONPATH
"$work/venv/bin/python" example.py
"$work/venv/bin/python" -m topkv doctor
"$work/venv/bin/kvctl" --version
seconds=$(($(date +%s) - begun))
compiler=$(command -v cc || command -v gcc || echo none)
echo "check_install: $seconds s; wheel $(du -k "$wheel" | cut -f1) KiB, installed $(du -sk "$work"/venv/lib/python*/site-packages/topkv | cut -f1) KiB; compiler: $compiler"
[ "$seconds" -le 120 ]
