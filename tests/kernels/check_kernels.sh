#!/bin/sh
# Kernels of arithmetic against NumPy: check_kernels.py with a Python that has it.
#
#   check_kernels.sh BUILD [FOLDER]    BUILD: where dump_kernels was built; FOLDER: with the virtual
#                                      environment, as in tests/worker/compare_numbers.sh
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
for python in "${2:-$1/compare}/venv/bin/python" python3; do
    if "$python" -c 'import numpy' 2>/dev/null; then
        exec "$python" "$source/check_kernels.py" "$1/tests/kernels/dump_kernels"
    fi
done
echo "skipped: no Python with the package numpy: deploy/test.sh installs it"
exit 77
