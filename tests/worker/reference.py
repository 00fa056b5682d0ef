#!/usr/bin/env python3
"""reference.py MODEL OUT [--kv fp32|fp16|bf16] [--limit X] - an independent forward pass.

Reads the tokens OUT.ids and the logits OUT.npy that `passes` wrote, computes the same with NumPy
in fp32 from weights that the gguf package dequantises, and compares at every position:

  difference   max |a - b| over the root mean square of the reference's logits
  next token   the same wherever the reference's margin (first minus second) exceeds twice the
               difference

Exit status 1: a difference above the limit (2e-3 with fp32 rows, 1e-2 with fp16, 5e-2 with bf16),
or another token.  Written from the published descriptions of the architectures, not from this
project's C code.
"""
import argparse
import sys

import gguf
import numpy as np


class Model:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.fields = reader.fields
        self.arch = self.value("general.architecture")
        self.tensors = {t.name: t for t in reader.tensors}
        self.n_layers = int(self.value(self.arch + ".block_count"))
        self.n_heads = int(self.value(self.arch + ".attention.head_count"))
        self.n_kv = int(self.value(self.arch + ".attention.head_count_kv", self.n_heads))
        hidden = int(self.value(self.arch + ".embedding_length"))
        self.d = int(self.value(self.arch + ".attention.key_length", hidden // self.n_heads))
        self.n_rot = int(self.value(self.arch + ".rope.dimension_count", self.d))
        self.base = float(self.value(self.arch + ".rope.freq_base", 10000.0))
        self.eps = float(self.value(self.arch + ".attention.layer_norm_rms_epsilon"))
        self.scale = 1.0
        if self.value(self.arch + ".rope.scaling.type", "none") == "linear":
            self.scale = float(self.value(self.arch + ".rope.scaling.factor"))

    def value(self, key, default=None):
        field = self.fields.get(key)
        if field is None:
            if default is None:
                raise KeyError(key)
            return default
        return field.contents()

    def weight(self, name):
        """(rows, columns) in fp32, or None."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return values.reshape([int(n) for n in tensor.shape][::-1])


def rms_norm(x, weight, eps):
    mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    return (x / np.sqrt(mean + eps)).astype(np.float32) * weight


def rotate(x, model, factors, begin=0):
    """x (tokens, heads, d) of the tokens from `begin` on"""
    half = model.n_rot // 2
    frequency = model.base ** (-np.arange(half, dtype=np.float64) * 2 / model.n_rot)
    if factors is not None:
        frequency = frequency / factors.astype(np.float64)
    angle = np.arange(begin, begin + x.shape[0])[:, None] * frequency[None, :] / model.scale
    cos = np.cos(angle).astype(np.float32)[:, None, :]
    sin = np.sin(angle).astype(np.float32)[:, None, :]
    out = x.copy()
    if model.arch == "qwen2":
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def to_rows(x, kind):
    """What is left of fp32 when a row is stored."""
    if kind == "fp16":
        return x.astype(np.float16).astype(np.float32)
    if kind == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.astype(np.uint32).view(np.float32)
    return x


def dense(layer, q, k, v):
    """Causal attention of q (n, heads, d), the last n tokens of k, v (tokens, kv heads, d)."""
    n, heads, d = q.shape
    group = heads // k.shape[1]
    hidden = np.triu(np.full((n, len(k)), -np.inf, dtype=np.float32), len(k) - n + 1)
    mixed = np.empty_like(q)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T / np.float32(np.sqrt(d)) + hidden
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed[:, head] = (scores @ v[:, head // group]) / scores.sum(axis=-1, keepdims=True)
    return mixed


def states(model, ids, kind, attend=dense, past=None):
    """The states (tokens, hidden) before the output's weight, and each layer's keys and values.

    past: those of the tokens before, which then are not computed again; attend(layer, q, k, v) gets
    all keys and values.
    """
    n, begin = len(ids), len(past[0][0]) if past else 0
    factors = model.weight("rope_freqs.weight")
    x = model.weight("token_embd.weight")[ids]
    rows = []
    for layer in range(model.n_layers):
        def linear(h, name):
            y = h @ model.weight(f"blk.{layer}.{name}.weight").T
            bias = model.weight(f"blk.{layer}.{name}.bias")
            return y if bias is None else y + bias

        h = rms_norm(x, model.weight(f"blk.{layer}.attn_norm.weight"), model.eps)
        q = rotate(linear(h, "attn_q").reshape(n, model.n_heads, model.d), model, factors, begin)
        k = rotate(linear(h, "attn_k").reshape(n, model.n_kv, model.d), model, factors, begin)
        v = linear(h, "attn_v").reshape(n, model.n_kv, model.d)
        k, v = to_rows(k, kind), to_rows(v, kind)
        if past:
            k, v = (np.concatenate(both) for both in zip(past[layer], (k, v)))
        rows.append((k, v))
        x = x + linear(attend(layer, q, k, v).reshape(n, -1), "attn_output")
        h = rms_norm(x, model.weight(f"blk.{layer}.ffn_norm.weight"), model.eps)
        gate = linear(h, "ffn_gate")
        with np.errstate(over="ignore"):
            gate = gate / (1 + np.exp(-gate))
        x = x + linear(gate * linear(h, "ffn_up"), "ffn_down")
    return rms_norm(x, model.weight("output_norm.weight"), model.eps), rows


def output_weight(model):
    output = model.weight("output.weight")
    return model.weight("token_embd.weight") if output is None else output


def forward(model, ids, kind):
    return states(model, ids, kind)[0] @ output_weight(model).T


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--kv", default="fp32", choices=["fp32", "fp16", "bf16"])
    parser.add_argument("--limit", type=float)
    parser.add_argument("--verbose", action="store_true", help="a line for each position")
    options = parser.parse_args()
    limit = options.limit or {"fp32": 2e-3, "fp16": 1e-2, "bf16": 5e-2}[options.kv]

    ids = np.loadtxt(options.out + ".ids", dtype=np.int64, ndmin=1)
    ours = np.load(options.out + ".npy")
    wanted = forward(Model(options.model), ids, options.kv)
    if ours.shape != wanted.shape:
        sys.exit(f"reference: shape {ours.shape}, expected {wanted.shape}")

    rms = np.sqrt(np.mean(wanted.astype(np.float64) ** 2, axis=-1))
    most = np.abs(ours.astype(np.float64) - wanted).max(axis=-1)
    difference = most / rms
    order = np.sort(wanted, axis=-1)
    margin = order[:, -1] - order[:, -2]
    decided = margin > 2 * most
    same = ours.argmax(axis=-1) == wanted.argmax(axis=-1)
    if options.verbose:
        for t in range(len(ids)):
            print(f"{t} difference {difference[t]:.3g} margin {margin[t]:.3g} same {same[t]}")
    worst = int(difference.argmax()) if np.isfinite(difference).all() else -1
    wrong = int((decided & ~same).sum())
    passed = bool((difference <= limit).all()) and wrong == 0
    print(f"{len(ids)} positions, {options.kv} rows: difference/rms at most {difference.max():.3g} "
          f"(position {worst}), median {np.median(difference):.3g}, limit {limit:g}; next token "
          f"decided at {int(decided.sum())}, other at {wrong}: {'ok' if passed else 'TOO MUCH'}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
