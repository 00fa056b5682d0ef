#!/bin/sh
# What a node that owns the rows adds to codes: exact scores of some candidates (rerank) and an
# estimate of what rows that were not chosen would have added (rest), step by step.
#
#   measure_rest.sh BUILD [FOLDER]     BUILD: where kvworker was built; FOLDER: for the model and
#                                      what was measured, default BUILD/compare
#
# Law, code and documentation: 4,000 tokens with three seeds and 8,000 with one (the GPL has 7,000),
# the last 256 as decode steps; a tenth and a twentieth of the rows; chapters of 1,024 rows and of
# the prompt.  The numbers of the table in gpu-worker/README.md.  Takes an hour on two cores; what
# FOLDER/rest.json has already is not measured again.  Times are worth something on an idle machine
# only.
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
model=$(sh "$source/../../deploy/fetch_model.sh")

exec python3 - "$build/gpu-worker/kvworker" "$model" "$folder/rest.json" <<'END'
import json, os, subprocess, sys, time

kvworker, model, kept = sys.argv[1:]
TEXTS = {  # and the most tokens that it has
    "/usr/share/common-licenses/GPL-3": 7000,
    "/usr/lib/python3.11/argparse.py": 8000,
    "/usr/lib/python3.11/pydoc_data/topics.py": 8000,
}
STEPS = 256
SEEDS = {4000: (1, 2, 3), 8000: (1,)}  # by tokens
CHAPTERS = {"8": "1,024 rows", "prompt": "the prompt"}
RERANKS = {"1/10": 4, "1/20": 8}  # of the last step, by budget
WAYS = ("codes alone", "and rerank", "and rest of 16")


def name(method, budget, *options):
    """--budgets says 1/10: so it is the usual share."""
    return ":".join((method, *([] if budget == "1/10" else [f"ratio={budget}"]), *options))


def entries(chapter, budget):
    """kvworker's names of the ways; the first has summaries, so that one prompt does for all."""
    options = ("pqcache", budget, *([] if chapter == "8" else [f"chapter={chapter}"]))
    rerank = f"rerank={RERANKS[budget]}"
    return dict(zip(reversed(WAYS), (name(*options, rerank), name(*options, rerank, "summaries=0"),
                                     name(*options, "rerank=1", "summaries=0"))))


def measure(text, tokens, seed):
    methods = [entry for chapter in CHAPTERS for budget in RERANKS
               for entry in entries(chapter, budget).values()]
    if seed == SEEDS[4000][0]:
        methods = [name("oracle", budget) for budget in RERANKS] + methods
    command = [kvworker, "eval", "--model", model, "--text-file", text, "--json",
               "--tokens", str(tokens), "--from", str(tokens - STEPS), "--budgets", "1/10",
               "--seeds", str(seed), "--wait-index", "--kmeans-iters", "20",
               "--chapter", "8", "--summaries", "16", "--summary-rows", "1024",
               "--pq-m", "2", "--pq-rotation", "off", "--first-cut", "none",
               "--methods", ",".join(methods)]
    begin = time.time()
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(f"{text}, {tokens} tokens, seed {seed}: {time.time() - begin:.0f} s", file=sys.stderr)
    return [json.loads(line) for line in out.splitlines()]


found = {}  # (text, tokens, seed): what eval said
if os.path.exists(kept):
    with open(kept, encoding="utf-8") as file:
        for line in file:
            key, rows = json.loads(line)
            found[tuple(key)] = rows
for length, seeds in SEEDS.items():
    for seed in seeds:
        for text, most in TEXTS.items():
            key = (text, min(length, most), seed)
            if key not in found:
                found[key] = measure(*key)
                with open(kept, "a", encoding="utf-8") as file:
                    print(json.dumps((key, found[key])), file=file)


def pick(length, method):
    """What eval said of a method at a length, over all texts and seeds."""
    keys = [(text, min(length, most)) for text, most in TEXTS.items()]
    return [row for key, rows in sorted(found.items()) if key[:2] in keys
            for row in rows if row["method"] == method]


def mean(rows, member):
    return sum(row[member] for row in rows) / len(rows)


def digit(percent):
    return f"{round(percent, 1) + 0:.1f}"  # no -0.0


def losses(rows):
    by_text = [mean([row for row in rows if row["text"] == text], "loss_percent")
               for text in TEXTS]
    return f"{digit(mean(rows, 'loss_percent'))} ({', '.join(map(digit, by_text))})"


print("| tokens, chapters of | | 1/10, % | 1/20, % | keys read to choose, % | KiB a step "
      "| node, ms a step |")
print("|---|---|---|---|---|---|---|")
verdicts = []
for length in SEEDS:
    exact = {budget: pick(length, name("oracle", budget)) for budget in RERANKS}
    print(f"| {length:,} | `oracle` | " + " | ".join(losses(exact[budget]) for budget in RERANKS)
          + " | | | |")
    for chapter, of in CHAPTERS.items():
        for way in WAYS:
            rows = [pick(length, entries(chapter, budget)[way]) for budget in RERANKS]
            print(f"| {length:,}, {of} | {way} | " + " | ".join(map(losses, rows)) + " | "
                  + "; ".join(f"{100 * mean(r, 'rows_scored_exactly_share'):.0f}" for r in rows)
                  + " | " + "; ".join(f"{mean(r, 'step_bytes_fetched') / 1024:.0f}" for r in rows)
                  + " | " + "; ".join(f"{1000 * mean(r, 'step_node_s'):.1f}" for r in rows) + " |")
        for budget, share in (("1/10", 1 / 2), ("1/20", 1 / 3)):
            ours = mean(pick(length, entries(chapter, budget)[WAYS[-1]]), "loss_percent")
            limit = share * mean(exact[budget], "loss_percent")
            verdicts.append(f"{length:,} tokens, chapters of {of}, {budget}: {ours:.2f} %, wanted at "
                            f"most {limit:.2f}: {'yes' if ours <= limit else 'NO'}")
print("\nIn parentheses the three texts: " + ", ".join(map(os.path.basename, TEXTS)))
print("\n".join(verdicts))
END
