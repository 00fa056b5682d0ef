#!/usr/bin/env python3
"""quality.py MODEL IDS [option ...] - what is lost when a step attends to some rows only.

The protocol of `kvworker eval`, written in NumPy on top of reference.py and independent of this
project's C code: the first --from tokens by full attention, every later one as a decode step that
attends, in all layers, to sinks, window and k rows between them; perplexity over the tokens that
these steps predict, and its loss against full attention.  Rows are rounded to fp16.

  full       everything
  oracle     the k rows with the largest sum over the query heads of a KV head of softmax(q k)
  window     the k rows before the window
  random     k rows at random, another draw for each seed
  pq         as the oracle, by keys quantised to m = 2 sub-vectors of b = 6 bits: a codebook of
             k-means over the prompt's middle, whose codes later rows get as they leave the window
  rerankN    as pq, which names N k rows, of which exact scores choose k

IDS: the text's tokens, a number each.  A text's loss is exp(mean difference of log likelihood) - 1,
its standard error that of the mean over tokens, taken as independent.
"""
import argparse
import json
import multiprocessing
import os
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np  # noqa: E402

import reference  # noqa: E402

QUERIES = 128  # computed at once
RECALL_EVERY = 16


class Model(reference.Model):
    """Keeps its weights."""

    def __init__(self, path):
        super().__init__(path)
        self.kept = {}

    def weight(self, name):
        if name not in self.kept:
            self.kept[name] = super().weight(name)
        return self.kept[name]


def largest(scores, k):
    """A mask of the k[i] largest of each row, of equal ones the first; below 0 is none."""
    n = scores.shape[1]
    k = np.minimum(k, (scores >= 0).sum(axis=1))
    order = np.sort(scores, axis=1)
    least = order[np.arange(len(k)), n - np.maximum(k, 1)][:, None]
    above, equal = scores > least, scores == least
    wanted = (k - above.sum(axis=1))[:, None]
    mask = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= wanted))
    mask[k == 0] = False
    return mask


def merged(scores, mask):
    """scores (group, queries, rows): the sum over the group of softmax over the mask's rows."""
    total = np.zeros(scores.shape[1:], dtype=np.float32)
    for of_head in scores:
        weights = np.where(mask, of_head, -np.inf)
        most = weights.max(axis=1, keepdims=True)
        np.subtract(weights, np.where(np.isfinite(most), most, 0), out=weights)
        np.exp(weights, out=weights)
        total += weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-30)
    return np.where(mask, total, -1)


def k_means(x, n_centroids, iterations, start, rng):
    if start == "random":
        centroids = x[rng.choice(len(x), n_centroids, replace=False)].copy()
    else:
        centroids = x[rng.integers(len(x), size=1)]
        for _ in range(n_centroids - 1):
            far = np.maximum(distances(x, centroids).min(axis=1), 0).astype(np.float64)
            centroids = np.vstack([centroids, x[rng.choice(len(x), p=far / far.sum())]])
    for _ in range(iterations):
        nearest = distances(x, centroids).argmin(axis=1)
        for c in range(n_centroids):
            if (nearest == c).any():
                centroids[c] = x[nearest == c].mean(axis=0)
    return centroids


def distances(x, centroids):
    return ((x**2).sum(axis=1)[:, None] - 2 * x @ centroids.T + (centroids**2).sum(axis=1)[None, :])


class Sparse:
    """attend() of states() for the tokens from `first` on."""

    def __init__(self, method, ratio, seed, first, options):
        self.method, self.ratio, self.seed, self.first = method, ratio, seed, first
        self.options = options
        self.rerank = int(method[6:]) if method.startswith("rerank") else 0
        self.coded = method == "pq" or self.rerank > 0
        self.attended = self.possible = self.recalled = self.to_recall = 0

    def codes(self, k, layer, head):
        """A codebook and codes of all rows: [(centroids, codes)] by sub-vector."""
        options, half = self.options, k.shape[1] // 2
        coded = []
        for part in range(2):
            x = k[:, part * half:(part + 1) * half]
            rng = np.random.default_rng([self.seed, layer, head, part])
            middle = x[options.sinks:self.first - options.window]
            centroids = k_means(middle, 64, options.iterations, options.start, rng)
            coded.append((centroids, distances(x, centroids).argmin(axis=1)))
        return coded

    def chosen(self, q, scores, middle, k, coded, rng):
        """q (group, queries, d), scores (group, queries, rows): a mask (queries, rows)."""
        if self.method == "oracle":
            return largest(merged(scores, middle), k)
        if self.method == "random":
            return largest(np.where(middle, rng.random(middle.shape, dtype=np.float32), -1), k)
        if self.method == "window":
            last = middle.cumsum(axis=1, dtype=np.int32)
            return middle & (last > (last[:, -1] - k)[:, None])
        rows, half = scores.shape[2], q.shape[2] // 2
        guess = np.zeros_like(scores)
        for part, (centroids, codes) in enumerate(coded):
            table = q[:, :, part * half:(part + 1) * half] @ centroids.T
            guess += np.take(table, codes[:rows], axis=2)
        guess /= np.float32(np.sqrt(q.shape[2]))
        guess = merged(guess, middle)
        if not self.rerank:
            return largest(guess, k)
        candidates = largest(guess, self.rerank * k)
        return largest(merged(scores, candidates), k)

    def __call__(self, layer, q, keys, values):
        options, d = self.options, q.shape[2]
        group = q.shape[1] // keys.shape[1]
        mixed = np.empty_like(q)
        for head in range(keys.shape[1]):
            k, v = keys[:, head], values[:, head]
            coded = self.codes(k, layer, head) if self.coded else None
            rng = np.random.default_rng([self.seed, layer, head, 7])
            for begin in range(0, len(q), QUERIES):
                part = q[begin:begin + QUERIES, head * group:(head + 1) * group].transpose(1, 0, 2)
                so_far = self.first + begin + 1 + np.arange(part.shape[1])
                ids = np.arange(so_far[-1])[None, :]
                causal = ids < so_far[:, None]
                middle = (ids >= options.sinks) & (ids < (so_far - options.window)[:, None])
                share = np.floor(self.ratio * so_far + 1e-9).astype(np.int64)
                n = np.clip(share - options.sinks - options.window, 0, middle.sum(axis=1))
                scores = part @ k[:so_far[-1]].T / np.float32(np.sqrt(d))
                mask = self.chosen(part, scores, middle, n, coded, rng)
                sample = (so_far - 1) % RECALL_EVERY == 0  # by position
                exact = largest(merged(scores[:, sample], middle[sample]), n[sample])
                self.recalled += int((exact & mask[sample]).sum())
                self.to_recall += int(exact.sum())
                mask |= causal & ~middle
                self.attended += int(mask.sum())
                self.possible += int(so_far.sum())
                for g in range(group):
                    weights = np.where(mask, scores[g], -np.inf)
                    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
                    mixed[begin:begin + QUERIES, head * group + g] = (
                        weights @ v[:so_far[-1]] / weights.sum(axis=1, keepdims=True))
        return mixed


def log_likelihoods(model, x, targets):
    """Of each target after the state before it."""
    weight, parts = reference.output_weight(model).T, []
    for begin in range(0, len(targets), QUERIES):
        logits = x[begin:begin + QUERIES] @ weight
        most = logits.max(axis=1, keepdims=True)
        norm = most[:, 0] + np.log(np.exp(logits - most).sum(axis=1, dtype=np.float64))
        wanted = targets[begin:begin + QUERIES]
        parts.append(logits[np.arange(len(wanted)), wanted] - norm)
    return np.concatenate(parts)


SHARED = {}  # with the processes that are forked


def run(job):
    method, ratio, seed = job
    model, ids, past, options = (SHARED[name] for name in ("model", "ids", "past", "options"))
    begin_s = time.time()
    attend = Sparse(method, ratio, seed, options.first, options)
    x, _ = reference.states(model, ids[options.first:-1], "fp16",
                            reference.dense if method == "full" else attend, past)
    found = log_likelihoods(model, x, ids[options.first + 1:])
    return job, found, attend, time.time() - begin_s


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("ids")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--from", dest="first", type=int, default=2048)
    parser.add_argument("--methods", default="oracle,window,random,pq,rerank4")
    parser.add_argument("--ratios", default="1/10", help="such as 1/5,0.1")
    parser.add_argument("--seeds", default="0,1,2", help="of random, pq and rerank")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=20, help="of k-means")
    parser.add_argument("--start", default="k-means++", choices=["k-means++", "random"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="an object for each line of the table")
    options = parser.parse_args()

    ids = np.loadtxt(options.ids, dtype=np.int64, ndmin=1)[:options.tokens]
    if len(ids) < options.first + 2:
        sys.exit(f"quality: {options.ids}: {len(ids)} tokens: expected more than {options.first}")
    ratios = [float(a) / float(b or 1) for a, _, b in
              (text.partition("/") for text in options.ratios.split(","))]
    seeds = [int(text) for text in options.seeds.split(",")]
    jobs = [("full", 1.0, 0)]
    for method in options.methods.split(","):
        known = method in ("oracle", "window", "random", "pq")
        if not known and not (method.startswith("rerank") and method[6:].isdigit()):
            sys.exit(f"quality: method: {method}: unknown")
        drawn = method not in ("oracle", "window")
        jobs += [(method, ratio, seed) for ratio in ratios for seed in (seeds if drawn else [0])]

    model = Model(options.model)
    _, past = reference.states(model, ids[:options.first], "fp16")
    SHARED.update(model=model, ids=ids, past=past, options=options)
    model.weight("output.weight")
    full = None
    if not options.json:
        print(f"{'method':10} {'ratio':>6} {'seed':>4} {'perplexity':>10} {'loss %':>8} {'+-':>5} "
              f"{'recall':>6} {'rows %':>6} {'s':>6}", flush=True)
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for (method, ratio, seed), found, attend, seconds in pool.imap(run, jobs):
            full = found if method == "full" else full
            worse = full - found
            row = {
                "method": method, "ratio": ratio, "seed": seed, "tokens": len(ids),
                "from": options.first, "perplexity": float(np.exp(-found.mean())),
                "loss_percent": float(100 * np.expm1(worse.mean())),
                "loss_error_percent": float(100 * np.exp(worse.mean()) * worse.std(ddof=1)
                                            / np.sqrt(len(worse))),
                "recall": attend.recalled / attend.to_recall if attend.to_recall else 1.0,
                "rows_attended_share": attend.attended / max(attend.possible, 1) or 1.0,
                "seconds": seconds,
            }
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                print(f"{method:10} {ratio:6.3f} {seed:4} {row['perplexity']:10.4f} "
                      f"{row['loss_percent']:8.2f} {row['loss_error_percent']:5.2f} "
                      f"{row['recall']:6.3f} {100 * row['rows_attended_share']:6.2f} "
                      f"{seconds:6.1f}", flush=True)


if __name__ == "__main__":
    main()
