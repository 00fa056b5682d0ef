#!/usr/bin/env python3
"""compare_llama.py KVWORKER MODEL [tokens|speed|all] - beside llama.cpp, in one run.

tokens  the weights dequantised to F32 (to_f32.py), fp32 rows: the same 64 greedy tokens on four
        prompts
speed   MODEL as it is, the same threads, prompt and answer length, taken in turns: prefill at
        least 0.7 times, decode at least 0.8 times llama.cpp's rate (medians)

llama.cpp is the one in the package xllamacpp.  Exit status 1: other tokens, or slower than that.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at 100 degrees Celsius because",
]
ANSWER = 64


def load(path, threads, context, flags):
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = path
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = 0
    params.cache_prompt = False
    params.verbosity = -1
    for name, value in flags.items():
        setattr(params, name, value)
    return llama.Server(params)


def ask(server, prompt, n):
    answer = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": n,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "logprobs": 1,  # the only way to see ids
            "cache_prompt": False,
        }
    )
    return answer if isinstance(answer, dict) else json.loads(answer)


def ours(kvworker, model, prompt, n, threads, kv):
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt)
        file.flush()
        out = subprocess.run(
            [kvworker, "generate", "--model", model, "--raw", "--prompt-file", file.name,
             "--max-tokens", str(n), "--threads", str(threads), "--kv-type", kv, "--json"],
            check=True, capture_output=True, text=True,
        )
    return json.loads(out.stdout)


def check_tokens(options):
    import xllamacpp as llama

    here = os.path.dirname(os.path.abspath(__file__))
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "f32.gguf")
        subprocess.run([sys.executable, os.path.join(here, "to_f32.py"), options.model, path],
                       check=True)
        server = load(path, options.threads, 1024, {
            "cache_type_k": llama.ggml_type.GGML_TYPE_F32,
            "cache_type_v": llama.ggml_type.GGML_TYPE_F32,
        })
        for prompt in PROMPTS:
            content = ask(server, prompt, ANSWER)["choices"][0]["logprobs"]["content"]
            theirs = [token["id"] for token in content]
            mine = ours(options.kvworker, path, prompt, ANSWER, options.threads, "fp32")
            ids = mine["token_ids"]
            if mine["end"] == "stop" and len(theirs) == len(ids) + 1:
                theirs = theirs[:-1]  # llama.cpp lists the token that ended the answer
            same = ids == theirs
            passed &= same
            first = next((i for i, pair in enumerate(zip(ids, theirs)) if pair[0] != pair[1]),
                         min(len(ids), len(theirs)))
            print(f"{len(ids)} tokens after {prompt!r}: "
                  f"{'the same' if same else f'OTHER from {first} on: {ids} {theirs}'}", flush=True)
        del server
    return passed


def check_speed(options):
    text = open(options.text, encoding="utf-8").read()[: options.bytes]
    server = load(options.model, options.threads, 8192, {})
    rates = {"prefill": ([], []), "decode": ([], [])}
    ask(server, text[:200], 4)
    for _ in range(options.runs):
        mine = ours(options.kvworker, options.model, text, ANSWER, options.threads, "fp16")
        theirs = ask(server, text, ANSWER)["timings"]
        rates["prefill"][0].append(mine["prompt_tokens"] / mine["prefill_s"])
        rates["prefill"][1].append(theirs["prompt_per_second"])
        rates["decode"][0].append(1 / mine["tpot_s"])
        rates["decode"][1].append(theirs["predicted_per_second"])
    passed = True
    for name, least in (("prefill", 0.7), ("decode", 0.8)):
        a, b = (statistics.median(r) for r in rates[name])
        passed &= a >= least * b
        print(f"{name}: {a:.1f} tokens/s, llama.cpp {b:.1f}: {a / b:.2f} "
              f"(at least {least}: {'ok' if a >= least * b else 'TOO SLOW'}); prompt of "
              f"{mine['prompt_tokens']} tokens, {options.threads} threads, {options.runs} runs")
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kvworker")
    parser.add_argument("model")
    parser.add_argument("what", nargs="?", default="all", choices=["tokens", "speed", "all"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3")
    parser.add_argument("--bytes", type=int, default=4000, help="of the text, for speed")
    options = parser.parse_args()
    passed = True
    if options.what != "speed":
        passed &= check_tokens(options)
    if options.what != "tokens":
        passed &= check_speed(options)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
