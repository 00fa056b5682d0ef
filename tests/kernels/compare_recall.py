#!/usr/bin/env python3
"""compare_recall.py CHOOSE_BY_CODE MODEL IDS [option ...] - recall by code, ours and faiss's.

Records the keys (rounded to fp16, as they are stored) and the queries of some layers while
reference.py's forward pass reads the tokens of IDS.  Each of the last --queries positions asks,
with each query head, for the k keys of largest inner product between the first 4 and the first of
these positions.  Recall is the share of the exact ones that codes find, the mean over layers, heads
and queries, for each seed.

  ours      m = 2, b = 6, trained and scored by our kernels: 12 bits a key
  faiss     IndexPQ, inner product, of the same bytes: m = 2, b = 6; and m = 4, b = 4, which has 16

Exit status 1: ours is more than 0.01 below faiss's m = 2, b = 6.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import faiss
import numpy as np

import reference

AT_ONCE = 256
SINKS = 4
FAISS = [(2, 6), (4, 4)]
LIMIT = 0.01


class Recorder:
    """attend() of reference.states(): full attention, which keeps what it was given."""

    def __init__(self, layers, n_queries):
        self.layers, self.n_queries, self.found = layers, n_queries, {}

    def __call__(self, layer, q, k, v):
        if layer in self.layers:
            self.found[f"keys.{layer}"] = k.transpose(1, 0, 2).copy()
            self.found[f"queries.{layer}"] = q[-self.n_queries:].transpose(1, 0, 2).copy()
        if sys.stderr.isatty():
            print(f"\rlayer {layer + 1}\033[K", end="", file=sys.stderr, flush=True)
        parts = [reference.dense(layer, q[i:i + AT_ONCE], k[:i + AT_ONCE], v[:i + AT_ONCE])
                 for i in range(0, len(q), AT_ONCE)]
        return np.concatenate(parts)


def record(options):
    """Arrays `keys.LAYER` (KV heads, tokens, d) and `queries.LAYER` (query heads, queries, d)."""
    ids = np.loadtxt(options.ids, dtype=np.int64, ndmin=1)[:options.tokens]
    model = reference.Model(options.model)
    layers = sorted({int(i) for i in
                     np.linspace(1, model.n_layers - 2, options.layers).round()})
    name = f"{len(ids)} {options.queries} {layers}"
    if options.keep and os.path.exists(options.keep):
        with np.load(options.keep) as kept:
            if str(kept["name"]) == name:
                return layers, dict(kept)
    recorder = Recorder(layers, options.queries)
    reference.states(model, ids, "fp16", recorder)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if options.keep:
        np.savez(options.keep, name=name, **recorder.found)
    return layers, recorder.found


def recall(found, exact):
    return np.mean([len(np.intersect1d(a, b, assume_unique=True)) / len(b)
                    for a, b in zip(found, exact)])


def ours(program, folder, keys, queries, seed, iterations, k):
    paths = [os.path.join(folder, name) for name in ("keys", "queries", "chosen")]
    keys.tofile(paths[0])
    queries.tofile(paths[1])
    subprocess.run([program, *paths, str(keys.shape[1]), str(seed), str(iterations), str(k)],
                   check=True)
    return np.fromfile(paths[2], dtype=np.uint32).reshape(len(queries), k)


def theirs(keys, queries, m, bits, seed, ks):
    index = faiss.IndexPQ(keys.shape[1], m, bits, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.seed = seed
    index.pq.cp.min_points_per_centroid = 1  # of fewer it warns
    index.train(keys)
    index.add(keys)
    return [index.search(queries, k)[1] for k in ks]


def compare(options, layers, arrays, folder):
    """{(name, k): [(seed, recall)]} and the k."""
    table = {}
    for layer in layers:
        queries_of, keys_of = arrays[f"queries.{layer}"], arrays[f"keys.{layer}"]
        group = len(queries_of) // len(keys_of)
        for head, all_keys in enumerate(keys_of):
            keys = np.ascontiguousarray(all_keys[SINKS:-options.queries])
            queries = np.ascontiguousarray(
                queries_of[head * group:(head + 1) * group].reshape(-1, keys.shape[1]))
            ks = (256, len(keys) // 10)
            order = np.argsort(-(queries @ keys.T), axis=1, kind="stable")
            for seed in options.seeds:
                for m, bits in FAISS:
                    for k, found in zip(ks, theirs(keys, queries, m, bits, seed, ks)):
                        table.setdefault((f"faiss m={m} b={bits}", k), []).append(
                            (seed, recall(found, order[:, :k])))
                for k in ks:
                    found = ours(options.program, folder, keys, queries, seed,
                                 options.iterations, k)
                    table.setdefault(("ours m=2 b=6", k), []).append(
                        (seed, recall(found, order[:, :k])))
    return table, ks, len(keys)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("ids")
    parser.add_argument("--tokens", type=int, default=7168)
    parser.add_argument("--layers", type=int, default=5, help="so many, evenly through the model")
    parser.add_argument("--queries", type=int, default=64, help="last positions, which ask")
    parser.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")],
                        default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=20, help="of our k-means; faiss: 25")
    parser.add_argument("--keep", help="file of what was recorded, made or used again")
    parser.add_argument("--json", action="store_true", help="an object for each line of the table")
    options = parser.parse_args()

    layers, arrays = record(options)
    with tempfile.TemporaryDirectory() as folder:
        table, ks, n = compare(options, layers, arrays, folder)
    heads = len(arrays[f"keys.{layers[0]}"])
    if not options.json:
        print(f"layers {layers}, {heads} KV heads, {n} keys, {options.queries} positions; faiss "
              f"{faiss.__version__}\n{'codes':14} {'k':>5} {'recall':>7} {'difference':>10}  "
              f"by seed")
    passed = True
    for k in ks:
        of_seed = {name: [float(np.mean([r for s, r in found if s == seed]))
                          for seed in options.seeds]
                   for (name, at), found in table.items() if at == k}
        mine = np.mean(of_seed["ours m=2 b=6"])
        passed &= bool(mine >= np.mean(of_seed["faiss m=2 b=6"]) - LIMIT)
        for name, values in of_seed.items():
            mean = float(np.mean(values))
            if options.json:
                print(json.dumps({"name": "kernels.recall", "codes": name, "k": k, "n": n,
                                  "recall": mean, "difference": float(mine - mean),
                                  "seeds": values}), flush=True)
            else:
                print(f"{name:14} {k:5} {mean:7.4f} {mine - mean:+10.4f}  "
                      f"{' '.join(f'{value:.4f}' for value in values)}")
    if not options.json:
        print(f"not more than {LIMIT} below faiss m=2 b=6: {'ok' if passed else 'TOO MUCH'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
