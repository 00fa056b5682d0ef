#!/bin/sh
# What the presets lose at the share of rows that long contexts afford: k = 51 of 6,500 tokens, eight
# texts of different kinds.
#
#   measure_share.sh BUILD [FOLDER] [--forms NAME,...] [--seeds N,...] [--jobs N]
#
#   BUILD    where kvworker was built; FOLDER: for what was measured (share.json), default BUILD/compare
#   --forms  of those below, default before,cheap,default,best
#   --seeds  of k-means, default 1,2,3
#   --jobs   texts at once, one processor each, default as many as there are
#
#   before, cheap, default, best   as in gpu-worker/README.md
#   m2, m8         codes of 2 x 6 bits with 16 candidates a chosen row, and of 8 x 4 bits with 8, both
#                  rotated and otherwise as `default`
#   oracle         exact selection, and the estimate of the rest: what is left to lose
#
# C is the store's own as one commit has it, whatever is checked out.  A text that a machine does not
# have is left out, and said.  A form takes about a minute a text and seed; what share.json has already
# is not measured again.  Losses do not depend on the machine's load.  The numbers of the table in
# gpu-worker/README.md.
set -eu
. "$(dirname "$0")/measure.sh"

exec python3 - "$build/gpu-worker/kvworker" "$model" "$folder" "$source/../.." "$@" <<'END'
import argparse, concurrent.futures, glob, gzip, hashlib, json, os, subprocess, sys, threading, time

TEXT_BYTES = 60000  # of a text: more than the tokens that are read
# Whose C is read: what the store's source is now would be another text after each change.
C_COMMIT = "578082ddda34689ef5547ee060fbe45f19ee4f9d"
FORMS = {
    "before": "pqcache:pq-m=2:pq-rotation=off:first-cut=none:summary-rows=1024",
    "cheap": "pqcache:quality=cheap",
    "default": "pqcache",
    "best": "pqcache:quality=best",
    "m2": "pqcache:pq-m=2:candidates=16",
    "m8": "pqcache:pq-m=8:pq-bits=4",
    "oracle": "oracle+rest",
}

parser = argparse.ArgumentParser(prog="measure_share.sh")
for word in ("kvworker", "model", "folder", "root"):
    parser.add_argument(word)
parser.add_argument("--forms", type=lambda text: text.split(","),
                    default=["before", "cheap", "default", "best"])
parser.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")],
                    default=[1, 2, 3])
parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
options = parser.parse_args()
if options.jobs < 1:
    parser.error(f"--jobs: {options.jobs}: at least 1")
for form in options.forms:
    if form not in FORMS:
        parser.error(f"--forms: {form}: none of {', '.join(FORMS)}")


def files(pattern):
    return sorted(glob.glob(pattern, recursive=True))


def committed(folder):
    """The beginnings of its C files, one after the other, as C_COMMIT has them; none: no repository,
    or one without that commit."""
    def git(*words):
        done = subprocess.run(["git", "-C", options.root, *words], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, check=False)
        return done.stdout if done.returncode == 0 else b""

    names = git("ls-tree", "--full-tree", "--name-only", C_COMMIT, f"{folder}/").decode().split()
    return b"".join(git("show", f"{C_COMMIT}:{name}") for name in sorted(names)
                    if name.endswith(".c"))[:TEXT_BYTES]


# The files whose beginnings, one after the other, are a text; or the text.
TEXTS = {
    "GPL-3": files("/usr/share/common-licenses/GPL-3"),
    "C: this store's kvserver/store/query": committed("kvserver/store/query"),
    "Python's argparse.py": files("/usr/lib/python3.11/argparse.py"),
    "Debian changelogs": files("/usr/share/doc/[a-c]*/changelog.Debian.gz"),
    "Perl's perldiag.pod": files("/usr/share/perl/5.*.*/pod/perldiag.pod")[:1],
    "Python's manual, pydoc_data.topics": files("/usr/lib/python3.11/pydoc_data/topics.py"),
    "HTML: Rust's platform-support.html": files(
        os.path.expanduser("~/.rustup/toolchains/*/share/doc/rust/html/rustc/platform-support.html")
    )[:1] or files("/usr/share/doc/rust*/html/rustc/platform-support.html"),
    "a table: /etc/mime.types": files("/etc/mime.types"),
}


def write_text(number, source):
    """The text as a file of its own."""
    text = source if isinstance(source, bytes) else b""
    for path in [] if isinstance(source, bytes) else source:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            text += file.read(TEXT_BYTES - len(text))
    path = os.path.join(options.folder, f"share.{number}.txt")
    with open(path, "wb") as file:
        file.write(text)
    return path


kept = os.path.join(options.folder, "share.json")
found = {}  # (text, form, seed): what eval said
lock = threading.Lock()


def key_of(name, form, seed):
    """What the file has a row under: another text or form of the same name is another row."""
    with open(texts[name], "rb") as file:
        return [hashlib.sha256(file.read()).hexdigest()[:16], FORMS[form], seed]


def read_kept():
    rows = {}
    if os.path.exists(kept):
        with open(kept, encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):  # or it was cut off
                    key, row = json.loads(line)
                    rows[tuple(key)] = row
    for name in texts:
        for form in options.forms:
            for seed in options.seeds:
                key = tuple(key_of(name, form, seed))
                if key in rows:
                    found[(name, form, seed)] = rows[key]


def measure(name, path, forms, seed):
    begin = time.time()
    command = [options.kvworker, "eval", "--model", options.model, "--text-file", path, "--json",
               "--long-context", "--seeds", str(seed), "--kmeans-iters", "10", "--wait-index",
               "--threads", "1", "--methods", ",".join(FORMS[form] for form in forms)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                         text=True).stdout
    rows = [json.loads(line) for line in out.splitlines()]
    with lock, open(kept, "a", encoding="utf-8") as file:
        for form in forms:
            row = next(row for row in rows if row["method"] == FORMS[form])
            found[(name, form, seed)] = row
            print(json.dumps((key_of(name, form, seed), row)), file=file)
        print(f"{name}, seed {seed}: {', '.join(forms)}: {time.time() - begin:.0f} s",
              file=sys.stderr)


texts = {}
for number, (name, source) in enumerate(TEXTS.items()):
    if source:
        texts[name] = write_text(number, source)
    else:
        print(f"{name}: not on this machine, left out", file=sys.stderr)
read_kept()
with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
    jobs = []
    for seed in options.seeds:
        for name, path in texts.items():
            # Exact selection has no seed.
            forms = [form for form in options.forms if (name, form, seed) not in found
                     and (form != "oracle" or seed == options.seeds[0])]
            if forms:
                jobs.append(pool.submit(measure, name, path, forms, seed))
    for job in jobs:
        job.result()


def cell(rows):
    losses = [row["loss_percent"] for row in rows]
    spread = f" ({min(losses):.1f} to {max(losses):.1f})" if len(rows) > 1 else ""
    return f"{sum(losses) / len(losses):.1f}{spread}; {sum(r['kl'] for r in rows) / len(rows):.3f}"


def rows_of(form, names):
    return [found[name, form, seed] for name in names for seed in options.seeds
            if (name, form, seed) in found]


print("| text | " + " | ".join(options.forms) + " |\n" + "|---" * (1 + len(options.forms)) + "|")
for name in texts:
    print(f"| {name} | " + " | ".join(cell(rows_of(form, [name])) for form in options.forms) + " |")
means = []
for form in options.forms:
    rows = rows_of(form, texts)
    means.append(f"{sum(r['loss_percent'] for r in rows) / len(rows):.2f}; "
                 f"{sum(r['kl'] for r in rows) / len(rows):.4f}")
print("| mean | " + " | ".join(means) + " |")
print("\nLoss of perplexity over full attention's in %, its mean over seeds and, in parentheses, the "
      "least\nand the most; KL of the next token's distribution.")
END
