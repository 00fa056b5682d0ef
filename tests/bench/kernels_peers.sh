#!/bin/sh
# One query by code, ours beside faiss and NumPy: the same rows, k and one thread, in one run.
#
#   kernels_peers.sh BUILD [FOLDER [OPTION...]]   BUILD: where kv_bench was built; FOLDER: for the
#                                                 virtual environment, default BUILD/compare;
#                                                 OPTION: kernels_peers.py's, such as --json
#
# Installs `faiss-cpu` and `numpy` from the Python index, once.  CPU=N in the environment takes
# another processor than the last.
set -eu

case "${1:-}" in
'' | -*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
source=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
mkdir -p "${2:-$1/compare}"
folder=$(cd "${2:-$1/compare}" && pwd)
python=$folder/venv/bin/python
shift
[ $# -eq 0 ] || shift

if ! "$python" -c 'import faiss, numpy' 2>/dev/null; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" --quiet --disable-pip-version-check install faiss-cpu numpy >&2
fi
OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 exec taskset -c "${CPU:-$(($(nproc) - 1))}" \
    "$python" "$source/kernels_peers.py" "$build/tests/bench/kv_bench" "$@"
