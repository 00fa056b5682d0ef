#!/bin/sh
# Compares what the worker computes with an independent forward pass, and with llama.cpp.
#
#   compare_numbers.sh BUILD [FOLDER]     BUILD: where kvworker and passes were built; FOLDER: for
#                                         the virtual environment and the files, default
#                                         BUILD/compare
#
# Installs `gguf`, `numpy` and `xllamacpp` from the Python index and fetches the model, both once.
#   1  made models of every kind against NumPy
#   2  512 tokens through the real model, in several ways, against NumPy: fp32 and fp16 rows
#   3  the same greedy tokens as llama.cpp on weights dequantised to F32
#   4  a prompt of 7,000 tokens in less than 1.5 GB
#   5  speed beside llama.cpp, which wants an idle machine
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
kvworker=$build/gpu-worker/kvworker
passes=$build/tests/worker/passes

if ! "$python" -c 'import gguf, numpy, xllamacpp' 2>/dev/null; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" --quiet --disable-pip-version-check install gguf numpy xllamacpp >&2
fi
model=$(sh "$source/../../deploy/fetch_model.sh" "$folder")
failed=0

"$python" "$source/check_models.py" "$passes" || failed=1
for rows in fp32 fp16; do
    "$passes" "$model" "$text" 512 $rows "$(nproc)" "$folder/real" || failed=1
    "$python" "$source/reference.py" "$model" "$folder/real" --kv $rows || failed=1
done
rm -f "$folder/real.npy" "$folder/real.ids"
"$python" "$source/compare_llama.py" "$kvworker" "$model" tokens || failed=1
"$python" - "$kvworker" "$model" "$text" <<'END' || failed=1
import json, resource, subprocess, sys, tempfile

kvworker, model, text = sys.argv[1:]
with tempfile.NamedTemporaryFile("w") as file:
    file.write(open(text, encoding="utf-8").read()[:32500])
    file.flush()
    out = subprocess.run([kvworker, "generate", "--raw", "--json", "--model", model,
                          "--prompt-file", file.name, "--max-tokens", "8"],
                         check=True, capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
answer = json.loads(out.stdout)
passed = peak < 1.5e9 and answer["prompt_tokens"] >= 7000
print(f"prompt of {answer['prompt_tokens']} tokens in {answer['prefill_s']:.1f} s: peak memory "
      f"{peak / 1e6:.0f} MB: {'ok' if passed else 'TOO MUCH'}")
sys.exit(not passed)
END
"$python" "$source/compare_llama.py" "$kvworker" "$model" speed || failed=1
exit $failed
