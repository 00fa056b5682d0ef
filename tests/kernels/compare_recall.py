#!/usr/bin/env python3
"""compare_recall.py CHOOSE_BY_CODE MODEL IDS [option ...] - recall by code, ours and faiss's.

Records the keys (rounded to fp16, as they are stored) and the queries of some layers while
reference.py's forward pass reads the tokens of IDS.  Each of the last --queries positions asks,
with each query head, for the k keys of largest inner product between the first 4 and the first of
these positions.  Recall is the share of the exact ones that are found, the mean over layers, heads
and queries, for each seed; beside it, the bytes that one query reads, and those of the index.

  ours      m x b: codes of m subspaces with b bits, rotated or not, trained and scored by our
            kernels; int4 c: copies of keys in 4 bits choose among c k candidates by code
  faiss     IndexPQ; OPQ and IndexPQ; IndexPQFastScan (b = 4), of whose k_factor k best the keys,
            in fp32, fp16 or 4 bits, are scored again (IndexRefine); IndexScalarQuantizer, 4 bits

rerank r: of those that are left, the keys (fp16) of r k are scored again.  Codebooks and matrices are
read once for each query.  Exit status 1: one of faiss's is more than 0.01 above the best of ours that
reads as much or less (within 2 %), or ours of m = 2, b = 6 more than 0.01 below faiss's.
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
LIMIT = 0.01
AS_MUCH = 1.02


class Ours:
    """Codes of m subspaces with `bits`, of rotated keys or not; candidates 0: no copies; rerank 1:
    no keys."""

    def __init__(self, m, bits, rotates=False, candidates=0, rerank=1):
        self.m, self.bits, self.rotates = m, bits, rotates
        self.candidates, self.rerank = candidates, rerank
        self.name = f"ours {m}x{bits}" + " rotated" * rotates + \
            (f" int4 {candidates}" if candidates else "") + \
            (f" rerank {rerank}" if rerank > 1 else "")

    def book_bytes(self, d):
        return 4 * d * (1 << self.bits) + 4 * d * d * self.rotates

    def copy_bytes(self, d):
        return ((d + 1) // 2 + 15) // 16 * 16 + 2 if self.candidates else 0

    def read_bytes(self, n, d, k):
        return self.book_bytes(d) + n * self.m * self.bits // 8 + \
            min(self.candidates * k, n) * self.copy_bytes(d) + \
            (self.rerank > 1) * min(self.rerank * k, n) * 2 * d

    def index_bytes(self, n, d):
        keys = 2 * d * (self.rerank > 1)
        return self.book_bytes(d) + n * (self.m * self.bits // 8 + self.copy_bytes(d) + keys)

    def find(self, options, folder, keys, queries, seed, ks):
        paths = [os.path.join(folder, name) for name in ("keys", "queries", "chosen")]
        keys.tofile(paths[0])
        queries.tofile(paths[1])
        for k in ks:
            subprocess.run([options.program, *paths, *map(str, (
                keys.shape[1], seed, options.iterations, k, self.m, self.bits,
                int(self.rotates), self.candidates, self.rerank))], check=True)
            yield np.fromfile(paths[2], dtype=np.uint32).reshape(len(queries), k)


class Theirs:
    """An index of faiss over codes of m subspaces with `bits`; m is 0: of scalars."""

    def __init__(self, m, bits, rotates=False, refine=None, factor=0):
        self.m, self.bits, self.rotates = m, bits, rotates
        self.refine, self.factor = refine, factor
        self.name = "faiss " + ("SQ4" if m == 0 else "OPQ " * rotates + (
            f"FastScan {m}x4" if refine else f"PQ {m}x{bits}"))
        if refine:
            self.name += f" + {factor} k {refine}"

    def book_bytes(self, d):
        if self.m == 0:
            return 8 * d
        return 4 * d * (1 << self.bits) + 4 * d * d * self.rotates

    def key_bytes(self, d):
        return {None: 0, "fp32": 4 * d, "fp16": 2 * d, "SQ4": d // 2}[self.refine]

    def code_bytes(self, d):
        return d / 2 if self.m == 0 else self.m * self.bits / 8

    def read_bytes(self, n, d, k):
        return self.book_bytes(d) + int(n * self.code_bytes(d)) + \
            min(self.factor * k, n) * self.key_bytes(d)

    def index_bytes(self, n, d):
        return self.book_bytes(d) + int(n * (self.code_bytes(d) + self.key_bytes(d)))

    def find(self, _options, _folder, keys, queries, seed, ks):
        d, product = keys.shape[1], faiss.METRIC_INNER_PRODUCT
        if self.m == 0:
            index = faiss.IndexScalarQuantizer(d, faiss.ScalarQuantizer.QT_4bit, product)
        else:
            index = faiss.IndexPQFastScan(d, self.m, 4, product) if self.refine else \
                faiss.IndexPQ(d, self.m, self.bits, product)
            index.pq.cp.seed = seed
            index.pq.cp.min_points_per_centroid = 1  # of fewer it warns
        parts = [index]
        if self.rotates:
            turn = faiss.OPQMatrix(d, self.m)
            codes = faiss.ProductQuantizer(d, self.m, self.bits)
            codes.cp.seed, codes.cp.min_points_per_centroid = seed, 1
            turn.pq = codes
            parts += [turn, codes]
            index = faiss.IndexPreTransform(turn, index)
        if self.refine:
            scalar = faiss.ScalarQuantizer
            kept = faiss.IndexFlat(d, product) if self.refine == "fp32" else \
                faiss.IndexScalarQuantizer(
                    d, scalar.QT_fp16 if self.refine == "fp16" else scalar.QT_4bit, product)
            parts += [index, kept]
            index = faiss.IndexRefine(index, kept)
            index.k_factor = self.factor
        index.train(keys)
        index.add(keys)
        for k in ks:
            yield index.search(queries, k)[1]


METHODS = [
    Ours(2, 6), Ours(4, 6), Ours(8, 6), Ours(4, 4, False, 2), Ours(8, 4, False, 4),
    Ours(2, 6, True), Ours(4, 6, True), Ours(8, 6, True), Ours(2, 6, True, 8),
    Ours(4, 6, True, 4), Ours(4, 6, True, 8), Ours(4, 6, True, 16), Ours(8, 4, False, 8),
    Ours(8, 4, True, 8), Ours(2, 6, False, 0, 4), Ours(8, 4, False, 4, 2), Ours(4, 6, True, 4, 2),
    Ours(4, 6, True, 8, 2),
    Theirs(2, 6), Theirs(4, 4), Theirs(4, 6), Theirs(8, 4), Theirs(8, 6),
    Theirs(2, 6, True), Theirs(4, 6, True), Theirs(8, 6, True),
    Theirs(4, 4, False, "fp32", 2), Theirs(8, 4, False, "fp32", 4),
    Theirs(8, 4, False, "fp16", 4), Theirs(8, 4, False, "SQ4", 8), Theirs(8, 4, True, "SQ4", 8),
    Theirs(16, 4, False, "SQ4", 4), Theirs(0, 4),
]


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


def compare(options, layers, arrays, folder):
    """{(method, k): [(seed, recall)]}, the k, the keys and their elements."""
    table = {}
    for layer in layers:
        queries_of, keys_of = arrays[f"queries.{layer}"], arrays[f"keys.{layer}"]
        group = len(queries_of) // len(keys_of)
        for head, all_keys in enumerate(keys_of):
            keys = np.ascontiguousarray(all_keys[SINKS:-options.queries])
            queries = np.ascontiguousarray(
                queries_of[head * group:(head + 1) * group].reshape(-1, keys.shape[1]))
            ks = (len(keys) // 128, len(keys) // 20)
            order = np.argsort(-(queries @ keys.T), axis=1, kind="stable")
            for method in METHODS:
                for seed in options.seeds:
                    found_of = method.find(options, folder, keys, queries, seed, ks)
                    for k, found in zip(ks, found_of):
                        table.setdefault((method, k), []).append(
                            (seed, recall(found, order[:, :k])))
    return table, ks, len(keys), keys.shape[1]


def ahead(means, n, d, k):
    """What the other does better for its bytes, in words."""
    mine = [method for method in means if isinstance(method, Ours)]
    for method, mean in means.items():
        if isinstance(method, Ours):
            continue
        best = max((means[m] for m in mine
                    if m.read_bytes(n, d, k) <= AS_MUCH * method.read_bytes(n, d, k)),
                   default=None)
        if best is not None and mean > best + LIMIT:
            yield f"{method.name}: {mean:.4f}, the best of ours for its bytes {best:.4f}"
    named = {method.name: mean for method, mean in means.items()}
    if named["ours 2x6"] < named["faiss PQ 2x6"] - LIMIT:
        yield f"ours 2x6: {named['ours 2x6']:.4f}, faiss PQ 2x6: {named['faiss PQ 2x6']:.4f}"


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
        table, ks, n, d = compare(options, layers, arrays, folder)
    heads = len(arrays[f"keys.{layers[0]}"])
    if not options.json:
        print(f"layers {layers}, {heads} KV heads, {n} keys, {options.queries} positions; faiss "
              f"{faiss.__version__}\n{'':31} {'k':>5} {'KB read':>8} {'index KB':>9} {'recall':>7}  "
              f"by seed")
    faults = []
    for k in ks:
        of_seed = {method: [float(np.mean([r for s, r in found if s == seed]))
                            for seed in options.seeds]
                   for (method, at), found in table.items() if at == k}
        means = {method: float(np.mean(values)) for method, values in of_seed.items()}
        faults += [f"k = {k}: {fault}" for fault in ahead(means, n, d, k)]
        for method, values in sorted(of_seed.items(), key=lambda of: of[0].read_bytes(n, d, k)):
            read, index = method.read_bytes(n, d, k), method.index_bytes(n, d)
            if options.json:
                print(json.dumps({"name": "kernels.recall", "codes": method.name, "k": k, "n": n,
                                  "read_bytes": read, "index_bytes": index,
                                  "recall": means[method], "seeds": values}), flush=True)
            else:
                print(f"{method.name:31} {k:5} {read / 1e3:8.1f} {index / 1e3:9.1f} "
                      f"{means[method]:7.4f}  {' '.join(f'{value:.4f}' for value in values)}")
    if not options.json:
        print("\n".join(faults) if faults else
              f"nothing of faiss more than {LIMIT} above ours for the bytes that it reads")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
