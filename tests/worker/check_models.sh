#!/bin/sh
# Small made models of every kind against the reference: check_models.py with a Python that has
# what it takes.
#
#   check_models.sh BUILD [FOLDER]     BUILD: where passes was built; FOLDER: with the virtual
#                                      environment, as in compare_numbers.sh
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
    if "$python" -c 'import gguf, numpy' 2>/dev/null; then
        exec "$python" "$source/check_models.py" "$1/tests/worker/passes" --quick
    fi
done
echo "skipped: no Python with the packages gguf and numpy: compare_numbers.sh installs them"
exit 77
