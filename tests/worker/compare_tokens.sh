#!/bin/sh
# Compares the tokenizers with llama.cpp: the real model's, and a made file for each of the others.
#
#   compare_tokens.sh BUILD [FOLDER]     BUILD: where print_tokens was built; FOLDER: for the virtual
#                                        environment and the files, default BUILD/compare
#
# Installs `gguf` and `xllamacpp` from the Python index and fetches the model, both once.
# SEEDS="1 2 3" in the environment takes more texts and made files than seed 1.
set -eu

case "${1:-}" in
'' | -*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
source=$(cd "$(dirname "$0")" && pwd)
program=$(cd "$1" && pwd)/tests/worker/print_tokens
mkdir -p "${2:-$1/compare}"
folder=$(cd "${2:-$1/compare}" && pwd)
python=$folder/venv/bin/python

if ! "$python" -c 'import gguf, xllamacpp' 2>/dev/null; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" --quiet --disable-pip-version-check install gguf numpy xllamacpp >&2
fi
model=$(sh "$source/../../deploy/fetch_model.sh" "$folder")
failed=0
for seed in ${SEEDS:-1}; do
    set -- "$model"
    for tokenizer in smollm gpt-2 llama-bpe qwen2 spm; do
        file=$folder/$tokenizer-$seed.gguf
        arch=llama
        [ $tokenizer != qwen2 ] || arch=qwen2
        "$python" "$source/make_gguf.py" "$file" --seed "$seed" --tokenizer $tokenizer --arch $arch
        set -- "$@" "$file"
    done
    "$python" "$source/compare_tokens.py" "$program" "$@" --seed "$seed" || failed=1
done
exit $failed
