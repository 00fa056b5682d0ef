#!/bin/sh
# The feed of events as its readers see it: check_readers.py with a Python that has what it takes.
#
#   check_readers.sh BUILD PROGRAM...
#
# Exit status 77: there is no such Python.
set -eu

case "${1:-}" in
'' | -*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
source=$(cd "$(dirname "$0")" && pwd)
build=$1
shift
for python in "${KV_TEST_PYTHON:-python3}" "$build/compare/venv/bin/python" \
    "$source/../../build-test/compare/venv/bin/python"; do
    if "$python" -c 'import msgspec, zmq' 2>/dev/null; then
        exec "$python" "$source/check_readers.py" "$@"
    fi
done
echo "skipped: no Python with the packages msgspec and pyzmq: deploy/test.sh installs them"
exit 77
