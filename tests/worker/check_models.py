#!/usr/bin/env python3
"""check_models.py PASSES [--quick] - small made models of every kind against the reference.

Every tensor type, RoPE scaling, head dimension, grouping, bias and tied or untied output that a
file may have: make_gguf.py writes the model, `passes` (passes.c) computes it in several ways, and
reference.py compares with NumPy.  Exit status 1: one of them is not right.
"""
import os
import random
import subprocess
import sys
import tempfile

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
SHAPES = [
    ["--head-dim", "128", "--heads", "2", "--kv-heads", "1", "--hidden", "256"],
    ["--head-dim", "256", "--heads", "1", "--kv-heads", "1", "--hidden", "256"],
    ["--head-dim", "80", "--heads", "6", "--kv-heads", "2", "--hidden", "480", "--ffn", "1000"],
    ["--head-dim", "96", "--heads", "5", "--kv-heads", "5", "--hidden", "200", "--ffn", "72"],
    ["--rope-scaling", "linear"],
    ["--rope-scaling", "llama3"],
    ["--untied"],
    ["--bias"],
    ["--arch", "qwen2"],
    ["--arch", "qwen2", "--head-dim", "128", "--heads", "4", "--kv-heads", "1", "--untied"],
    ["--hidden", "256", "--ffn", "2048", "--heads", "8", "--kv-heads", "1"],
    ["--rope-base", "500000"],
]


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode == 0, result.stdout + result.stderr


def check(passes, folder, options, rows):
    here = os.path.dirname(os.path.abspath(__file__))
    model, out = os.path.join(folder, "model.gguf"), os.path.join(folder, "out")
    steps = [
        [sys.executable, os.path.join(here, "make_gguf.py"), *options, model],
        [passes, model, f"ids:{folder}/ids", "300", rows, "2", out],
        [sys.executable, os.path.join(here, "reference.py"), model, out, "--kv", rows],
    ]
    for step in steps:
        passed, text = run(step)
        if not passed:
            print(f"{' '.join(options)} {rows}: FAILED: {' '.join(step)}\n{text}", flush=True)
            return False
    print(f"{' '.join(options)}: {text.strip()}", flush=True)
    return True


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: check_models.py PASSES [--quick]")
    quick = "--quick" in sys.argv[2:]
    random.seed(1)
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "ids"), "w", encoding="ascii") as file:
            file.write("\n".join(str(random.randrange(256)) for _ in range(40 if quick else 280)))
        for kind in TYPES:
            passed &= check(sys.argv[1], folder, ["--type", kind], "fp32")
        for shape in SHAPES:
            passed &= check(sys.argv[1], folder, shape, "fp32")
        for rows in [] if quick else ["fp16", "bf16"]:
            passed &= check(sys.argv[1], folder, ["--type", "Q8_0"], rows)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
