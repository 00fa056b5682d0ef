#!/bin/sh
# What attention methods lose: `kvworker eval` beside quality.py, which computes the same protocol
# with NumPy and shares no code with it.
#
#   compare_quality.sh BUILD [FOLDER]     BUILD: where kvworker and print_tokens were built; FOLDER:
#                                         as in compare_numbers.sh, default BUILD/compare
#
# GPL-3, 4,096 tokens, the later 2,048 as decode steps, a tenth of the rows attended.  Takes a
# quarter of an hour or so on two cores.  Exit status 1: full attention's perplexity differs by more
# than 0.5 %, or a method's loss by more points than the table below allows.
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

if ! "$python" -c 'import gguf, numpy' 2>/dev/null; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" --quiet --disable-pip-version-check install gguf numpy >&2
fi
model=$(sh "$source/../../deploy/fetch_model.sh" "$folder")

exec "$python" - "$build" "$model" "$text" "$source/quality.py" "$folder/quality.ids" <<'END'
import json, subprocess, sys, time

build, model, text, quality, ids = sys.argv[1:]
# quality.py's name, kvworker's, points that the mean loss over the seeds may differ
CODES = ":pq-m=2:pq-rotation=off:first-cut=none"  # those of quality.py
METHODS = [
    ("oracle", "oracle", 0.3),
    ("window", "window", 0.3),
    ("random", "random", 5.0),
    ("pq", "pqcache:chapter=prompt:rerank=1:summaries=0" + CODES, 1.0),
    ("rerank4", "pqcache:chapter=prompt:rerank=4:summaries=0" + CODES, 1.0),
]


def rows(command):
    begin = time.time()
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(f"{' '.join(command)}: {time.time() - begin:.0f} s", flush=True)
    return [json.loads(line) for line in out.splitlines()]


def mean(found, name, key):
    values = [row[key] for row in found if row["method"] == name and row[key] is not None]
    return sum(values) / len(values) if values else float("nan")


with open(text, "rb") as file, open(ids, "w", encoding="ascii") as to:
    listed = subprocess.run([f"{build}/tests/worker/print_tokens", model, "--bounds"], check=True,
                            input=file.read().hex() + "\n", stdout=subprocess.PIPE, text=True)
    to.write("\n".join(listed.stdout.split()))
ours = rows([f"{build}/gpu-worker/kvworker", "eval", "--model", model, "--text-file", text, "--json",
             "--tokens", "4096", "--from", "2048", "--budgets", "1/10", "--seeds", "0,1,2",
             "--wait-index", "--kmeans-iters", "20",
             "--methods", ",".join(name for _, name, _ in METHODS)])
theirs = rows([sys.executable, quality, model, ids, "--tokens", "4096", "--from", "2048",
               "--ratios", "1/10", "--seeds", "0,1,2", "--json",
               "--methods", ",".join(name for name, _, _ in METHODS)])

full = [mean(found, "full", "perplexity") for found in (ours, theirs)]
passed = abs(full[0] / full[1] - 1) < 0.005
print(f"full: perplexity {full[0]:.3f}, NumPy {full[1]:.3f}: {'ok' if passed else 'TOO MUCH'}")
for reference, name, limit in METHODS:
    wanted = mean(theirs, reference, "loss_percent")
    line = f"{reference}: NumPy {wanted:.2f} %, recall {mean(theirs, reference, 'recall'):.3f}"
    if name:
        loss = mean(ours, name, "loss_percent")
        good = abs(loss - wanted) <= limit
        passed &= good
        line += (f"; kvworker {loss:.2f} %, recall {mean(ours, name, 'recall'):.3f}, limit {limit} "
                 f"points: {'ok' if good else 'TOO MUCH'}")
    print(line)
sys.exit(not passed)
END
