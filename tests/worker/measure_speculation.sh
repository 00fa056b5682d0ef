#!/bin/sh
# What is lost if a guess of a layer's query picks the candidates before the query is there.
#
#   measure_speculation.sh BUILD [FOLDER] [--texts NAME,...] [--budgets K,...] [--jobs N]
#
#   BUILD      where kvworker was built; FOLDER: for what was measured (speculation.json), default
#              BUILD/compare
#   --texts    of law, code, documentation; default all
#   --budgets  of k=64, k=256, 1/10, k=1024; default all
#   --jobs     texts and budgets at once, one processor each, default as many as there are
#
# 6,756 tokens, the last 256 as decode steps, 1, 2, 4 and 8 candidates per selected row, which are
# those of the query itself; of a guess from the input of the layer before; of the same from layer 3
# on; of a guess from that input with the layer's attention added.  No summaries: what is missed is not
# estimated.  A text and budget take about four minutes on a processor; what speculation.json has
# already is not measured again.  The numbers do not depend on the machine's load.  They are those of
# the tables in gpu-worker/README.md.
set -eu
. "$(dirname "$0")/measure.sh"

exec python3 - "$build/gpu-worker/kvworker" "$model" "$folder" "$@" <<'END'
import argparse, collections, concurrent.futures, csv, json, os, subprocess, sys, threading, time

TEXTS = {
    "law": "/usr/share/common-licenses/GPL-3",
    "code": "/usr/lib/python3.11/argparse.py",
    "documentation": "/usr/lib/python3.11/pydoc_data/topics.py",
}
BUDGETS = ("k=64", "k=256", "1/10", "k=1024")
RERANKS = (1, 2, 4, 8)
# What each adds to the method; --methods has room for 511 characters.
FORMS = {
    "query": ":speculate=none",
    "input": "",
    "input, from layer 3": ":speculate-first=3",
    "attention": ":speculate=attention",
}
TOKENS, STEPS = 6756, 256
BLOCK = 64  # neighbours err together


def names_of(known):
    def names(text):
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name}: none of {', '.join(known)}")
        return text.split(",")
    return names


parser = argparse.ArgumentParser(prog="measure_speculation.sh")
for word in ("kvworker", "model", "folder"):
    parser.add_argument(word)
parser.add_argument("--texts", type=names_of(TEXTS), default=list(TEXTS))
parser.add_argument("--budgets", type=names_of(BUDGETS), default=list(BUDGETS))
parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
options = parser.parse_args()
kept = os.path.join(options.folder, "speculation.json")
found = {}  # (text, budget, method): what eval said, and `kls` of the tokens
lock = threading.Lock()


def method(form, rerank):
    return f"speculated{FORMS[form]}" + (f":rerank={rerank}" if rerank != 4 else "")


def measure(text, budget):
    begin = time.time()
    tokens = os.path.join(options.folder, f"speculation.{text}.{budget.replace('/', '-')}.csv")
    if os.path.exists(tokens):
        os.remove(tokens)  # of a run that was cut off
    command = [options.kvworker, "eval", "--model", options.model, "--text-file", TEXTS[text],
               "--json", "--tokens", str(TOKENS), "--from", str(TOKENS - STEPS), "--seeds", "1",
               "--budgets", budget, "--wait-index", "--kmeans-iters", "10", "--first-cut", "none",
               "--threads", "1", "--per-token", tokens, "--methods",
               ",".join(method(form, rerank) for form in FORMS for rerank in RERANKS)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                         text=True).stdout
    kls = collections.defaultdict(list)
    with open(tokens, encoding="utf-8") as file:
        for line in csv.DictReader(file):
            kls[line["method"]].append(float(line["kl"]))
    os.remove(tokens)
    rows = [json.loads(line) | {"kls": kls[json.loads(line)["method"]]}
            for line in out.splitlines()]
    with lock, open(kept, "a", encoding="utf-8") as file:
        print(json.dumps((text, budget, rows)), file=file)
        found.update({(text, budget, row["method"]): row for row in rows})
        print(f"{text}, {budget}: {time.time() - begin:.0f} s", file=sys.stderr)


if os.path.exists(kept):
    with open(kept, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):  # or it was cut off
                text, budget, rows = json.loads(line)
                found.update({(text, budget, row["method"]): row for row in rows})
with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
    for job in [pool.submit(measure, text, budget) for text in options.texts
                for budget in options.budgets if (text, budget, "full") not in found]:
        job.result()


def rows_of(form, rerank, budget):
    return [found[text, budget, method(form, rerank)] for text in options.texts]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def kls_above(rows, others):
    """The mean of the tokens' differences, and its standard error."""
    blocks = []
    for row, other in zip(rows, others):
        above = [x - y for x, y in zip(row["kls"], other["kls"])]
        blocks += [mean(above[i:i + BLOCK]) for i in range(0, len(above), BLOCK)]
    middle = mean(blocks)
    error = (sum((x - middle) ** 2 for x in blocks) / (len(blocks) - 1) / len(blocks)) ** 0.5
    return f"{middle:+.4f} ({error:.4f})"


print("| budget | rerank | " + " | ".join(FORMS) + " |\n" + "|---" * (2 + len(FORMS)) + "|")
for budget in options.budgets:
    for rerank in RERANKS:
        cells = []
        for form in FORMS:
            rows = rows_of(form, rerank, budget)
            cells.append(f"{mean(r['recall'] for r in rows):.3f}; "
                         f"{mean(r['loss_percent'] for r in rows):.2f}; "
                         + (f"{mean(r['kl'] for r in rows):.4f}" if form == "query" else
                            kls_above(rows, rows_of("query", rerank, budget))))
        print(f"| {budget} | {rerank} | " + " | ".join(cells) + " |")
print("\nMeans of the texts: recall of exact top-k; loss of perplexity over full attention's in %; KL of"
      "\nthe next token's distribution, for guesses what it is above the query's at the same rerank, and"
      "\nthe standard error of that.\n")
print("| text | | cosine between guess and query, layer by layer from 1 on |\n|---|---|---|")
for text in options.texts:
    for form in ("input", "attention"):
        row = found[text, options.budgets[-1], method(form, RERANKS[-1])]
        print(f"| {text} | {form} | "
              + " ".join(f"{x:.2f}" for x in row["guess_cosine_by_layer"][1:]) + " |")
END
