#!/bin/sh
# How many of the exact top-k are found for the bytes that are read, by ours and by faiss, on keys and queries of
# the real model: compare_recall.py.
#
#   compare_recall.sh BUILD [FOLDER [OPTION...]]   BUILD: where choose_by_code and print_tokens were
#                                                  built; FOLDER: as in
#                                                  tests/worker/compare_numbers.sh, default
#                                                  BUILD/compare; OPTION: compare_recall.py's
#
# Installs `faiss-cpu`, `gguf` and `numpy` from the Python index and fetches the model, both once.
# Exit status 1: something of faiss finds more for the bytes that it reads.
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
text=/usr/share/common-licenses/GPL-3
shift
[ $# -eq 0 ] || shift

if ! "$python" -c 'import faiss, gguf, numpy' 2>/dev/null; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" --quiet --disable-pip-version-check install faiss-cpu gguf numpy >&2
fi
model=$(sh "$source/../../deploy/fetch_model.sh" "$folder")
od -An -v -tx1 "$text" | tr -d ' \n' | { cat; echo; } |
    "$build/tests/worker/print_tokens" "$model" --bounds | tr ' ' '\n' >"$folder/recall.ids"
PYTHONPATH=$source/../worker exec "$python" "$source/compare_recall.py" \
    "$build/tests/kernels/choose_by_code" "$model" "$folder/recall.ids" \
    --keep "$folder/recall.npz" "$@"
