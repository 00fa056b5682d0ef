#!/bin/sh
# How long chapters should be: recall and time of codes on keys and queries of the real model, for
# chapters of 1,024, 4,096 and 16,384 rows and for one codebook for all.
#
#   measure_chapters.sh BUILD [FOLDER] [--json] [--contexts N] [--seeds LIST]
#
#   BUILD       where `chapters` and `kvworker` were built
#   FOLDER      for what is recorded, default BUILD/compare; 64 MiB a context
#   --json      one object for each line of the table, as `chapters` (chapters.c) prints them, with
#               the name of the set
#   --contexts  contexts of 8,192 tokens in the sets of several, 1 to 16; default 4.  More than the
#               model can read at once: contexts of their own, one after the other in one session,
#               of which the last one asks
#   --seeds     of k-means, default 1,2,3
#
# Sets: law, code and documentation (6,144 tokens of the GPL-3; 8,192 of Python's argparse.py and of
# pydoc_data/topics.py, which is the model's context), one line for all three; these and more
# documentation, four contexts in one; N contexts of the documentation.  Recording takes half a minute
# to a minute a context on two cores, and is done once; the measurement takes some seconds for each
# set, length and seed.  Recall does not depend on the machine's load; times do: compare within one
# run.  The numbers of the table in gpu-worker/README.md.
set -eu
. "$(dirname "$0")/measure.sh"

exec python3 - "$build/tests/worker/chapters" "$model" "$folder" "$@" <<'END'
import argparse, json, os, subprocess, sys

CHAPTERS = {8: "1,024", 32: "4,096", 128: "16,384", 0: "all"}  # blocks: rows
# The share of rows that 1,024 of 128K are, and a usual budget; and their factors in the table.
SHARES = {0.0078125: "0.78 %", 0.05: "1/20"}
COLUMNS = [(0.0078125, rerank) for rerank in (1, 4, 8, 16)] + [(0.05, 1), (0.05, 4)]
CONTEXT, LAYERS, ITERATIONS = 8192, 10, 20
LAW, CODE, DOCUMENTATION = ("/usr/share/common-licenses/GPL-3", "/usr/lib/python3.11/argparse.py",
                            "/usr/lib/python3.11/pydoc_data/topics.py")

parser = argparse.ArgumentParser(prog="measure_chapters.sh")
parser.add_argument("program")
parser.add_argument("model")
parser.add_argument("folder")
parser.add_argument("--json", action="store_true")
parser.add_argument("--contexts", type=int, default=4, choices=range(1, 17), metavar="N")
parser.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")],
                    default=[1, 2, 3])
options = parser.parse_args()


def recorded(text, tokens=CONTEXT, skip=0):
    """The file of a context, which is made unless it is there."""
    name = f"{os.path.basename(text)}.{tokens}.{skip}.{LAYERS}.chapters"
    path = os.path.join(options.folder, name)
    if not os.path.exists(path):
        print(f"recording {tokens} tokens of {text} from {skip} on", file=sys.stderr)
        subprocess.run([options.program, "record", options.model, text, str(tokens), str(skip),
                        str(LAYERS), path + ".part"], check=True)
        os.rename(path + ".part", path)
    return path


law, code = recorded(LAW, 6144), recorded(CODE)
documentation = [recorded(DOCUMENTATION, skip=i * CONTEXT)
                 for i in range(max(2, options.contexts))]
SETS = {"one context": [[law], [code], [documentation[0]]],
        "four texts": [[law, code, *documentation[1::-1]]],
        f"documentation, {options.contexts} contexts": [documentation[:options.contexts]]}
if options.contexts == 1:
    SETS.popitem()


def measure(paths, rows, seed):
    # A length that holds all is the last one.
    chapters = [n for n in CHAPTERS if n == 0 or n * 128 < rows]
    out = subprocess.run(
        [options.program, "measure", ",".join(map(str, chapters)), ",".join(map(str, SHARES)),
         ",".join(map(str, sorted({r for _, r in COLUMNS}))), str(ITERATIONS), str(seed), *paths],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def mean(rows, member):
    return sum(row[member] for row in rows) / len(rows)


if not options.json:
    columns = [f"{SHARES[share]}, rerank {rerank}" for share, rerank in COLUMNS]
    print("| rows | chapters of | codebooks, KiB | training, ms | " + " | ".join(columns)
          + " |\n" + "|---" * (4 + len(columns)) + "|")
for name, sessions in SETS.items():
    sizes = [sum(6144 if path == law else CONTEXT for path in paths) for paths in sessions]
    found = [row for paths, rows in zip(sessions, sizes) for seed in options.seeds
             for row in measure(paths, rows, seed)]
    for blocks in CHAPTERS:
        own = [row for row in found if row["chapter_blocks"] == blocks]
        if options.json:
            for row in own:
                print(json.dumps({**row, "set": name}), flush=True)
            continue
        if not own:
            continue
        cells = []
        for column in COLUMNS:
            rows = [row for row in own if (row["share"], row["rerank"]) == column]
            cells.append(f"{mean(rows, 'recall'):.3f} ({mean(rows, 'recall_worst'):.2f}), "
                         f"{mean(rows, 'query_us'):.0f} us")
        print(f"| {max(sizes):,}, {name} | {CHAPTERS[blocks]} | "
              f"{mean(own, 'codebook_bytes') / 1024:.0f} | {mean(own, 'train_us') / 1e3:.0f} | "
              + " | ".join(cells) + " |", flush=True)
if not options.json:
    print("\nOf a unit: codebooks, the training of all its rows, and in a cell recall, in "
          "parentheses that of\nthe worst tenth of the units, and the node's time for a query.")
END
