#!/bin/sh
# What a query over rows on a disk would read: in how many blocks of 128 rows the candidates of the
# real model's queries are, and how many of these memory would have.
#
#   measure_blocks.sh BUILD [FOLDER] [--json] [--seeds LIST]
#
#   BUILD    where `chapters` and `kvworker` were built
#   FOLDER   for what is recorded, default BUILD/compare; 64 MiB a context
#   --json   one object for each line of the table, as `chapters` (chapters.c) prints them
#   --seeds  of k-means, default 1,2,3
#
# Sets: one context of 8,192 tokens of documentation (pydoc_data/topics.py), and four in one session,
# of which the last one asks.  Recording takes half a minute to a minute a context on two cores, and
# is done once; measure_chapters.sh records the same ones.  The numbers do not depend on the
# machine's load.
set -eu
. "$(dirname "$0")/measure.sh"

exec python3 - "$build/tests/worker/chapters" "$model" "$folder" "$@" <<'END'
import argparse, json, os, subprocess, sys

CONTEXT, LAYERS = 8192, 10
TEXT = "/usr/lib/python3.11/pydoc_data/topics.py"
SHARES, RERANKS, CACHES = (0.0078125, 0.05), (1, 4, 8), (0.1, 0.25, 0.5)

parser = argparse.ArgumentParser(prog="measure_blocks.sh")
parser.add_argument("program")
parser.add_argument("model")
parser.add_argument("folder")
parser.add_argument("--json", action="store_true")
parser.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")],
                    default=[1, 2, 3])
options = parser.parse_args()


def recorded(skip):
    """The file of a context, which is made unless it is there."""
    path = os.path.join(options.folder, f"{os.path.basename(TEXT)}.{CONTEXT}.{skip}.{LAYERS}.chapters")
    if not os.path.exists(path):
        print(f"recording {CONTEXT} tokens of {TEXT} from {skip} on", file=sys.stderr)
        subprocess.run([options.program, "record", options.model, TEXT, str(CONTEXT), str(skip),
                        str(LAYERS), path + ".part"], check=True)
        os.rename(path + ".part", path)
    return path


def measure(paths, seed):
    out = subprocess.run(
        [options.program, "blocks"] + [",".join(map(str, values))
                                       for values in (SHARES, RERANKS, CACHES)]
        + [str(seed), *paths], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True).stdout
    return [json.loads(line) for line in out.splitlines()]


contexts = [recorded(i * CONTEXT) for i in range(4)]
if not options.json:
    head = ["rows", "k", "candidates", "touched", "of the chosen", "not a token before",
            *(f"missed, {cache * 100:g} % in memory" for cache in CACHES), "of any unit"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
for paths in (contexts[:1], contexts):
    found = [row for seed in options.seeds for row in measure(paths, seed)]
    for at in sorted({(row["share"], row["rerank"]) for row in found}):
        own = [row for row in found if (row["share"], row["rerank"]) == at]
        if options.json:
            for row in own:
                print(json.dumps(row), flush=True)
            continue
        shares = [sum(value(row) for row in own) / len(own) for value in (
            lambda row: row["touched"], lambda row: row["touched_values"],
            lambda row: row["fresh"],
            *((lambda row, cache=cache: row["missed"][f"{cache:g}"]) for cache in CACHES),
            lambda row: row["touched_any"])]
        first = own[0]
        print(f"| {first['rows']:,} | {first['k']:,} | {first['candidates']:,} | "
              + " | ".join(f"{share * 100:.0f} %" for share in shares) + " |", flush=True)
if not options.json:
    print("\nMeans over units and 32 tokens, of a unit's blocks: those in which there are candidates, "
          "chosen\nrows, candidates and none a token before, candidates and that are not among the last "
          "ones used\nthat memory has; and blocks in which any unit that was recorded has candidates.")
END
