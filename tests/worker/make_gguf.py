#!/usr/bin/env python3
"""make_gguf.py FILE [option ...]: writes a small model with random weights as a GGUF file.

It is a whole model: its shapes, tokenizer and keys are those of a real file of its architecture, so
that other programs load it too. The same options write the same bytes. Needs `gguf` and `numpy`.
"""

import argparse
import random
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import TokenType

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
TOKENIZERS = ["smollm", "gpt-2", "llama-bpe", "qwen2", "spm"]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a small test.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + '<<SYS>>\\n' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


# --- Tokenizers -------------------------------------------------------------------------------


def words(rng):
    """A text to learn merges from: words of syllables, some of other scripts, numbers and code."""
    syllables = [c + v + e for c in "bcdfglmnprst" for v in "aeiou" for e in ("", "n", "r", "s")]
    syllables += ["the", "ing", "er", "tion", "'s", "'ll", "ß", "ü", "é", "ция", "по", "世界", "日", "🙂"]
    lexicon = ["".join(rng.choice(syllables) for _ in range(rng.randint(1, 3))) for _ in range(600)]
    lexicon += ["the", "The", "THE", "and", "of", "for", "if", "return", "==", "->", "();", "int", "{", "}"]
    lexicon += ["42", "1999", "3", "000", "\n", "\n\n", "   ", "\t", "    "]
    return [" " * rng.randint(0, 1) + rng.choice(lexicon) for _ in range(6000)]


def learn_merges(counts, n_merges):
    """Byte-pair encoding on a dict of tuples of symbols; returns the pairs in order."""
    merges = []
    while len(merges) < n_merges:
        pairs = {}
        for symbols, count in counts.items():
            for pair in zip(symbols, symbols[1:]):
                pairs[pair] = pairs.get(pair, 0) + count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        merged = {}
        for symbols, count in counts.items():
            out, i = [], 0
            while i < len(symbols):
                if symbols[i : i + 2] == best:
                    out.append(symbols[i] + symbols[i + 1])
                    i += 2
                else:
                    out.append(symbols[i])
                    i += 1
            merged[tuple(out)] = merged.get(tuple(out), 0) + count
        counts = merged
    return merges


def byte_letters():
    """The letter that stands for each byte in a byte-level vocabulary: itself if it is printable,
    else the next one from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, extra = {}, 0
    for byte in range(256):
        if byte in plain:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(0x100 + extra)
            extra += 1
    return letters


def add_bpe(writer, pre, rng):
    letters = byte_letters()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bos, eos, template = 1, 2, CHATML
    if pre == "llama-bpe":
        specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
        specials += ["<|eot_id|>"]
        bos, eos, template = 0, 4, LLAMA3
    counts = {}
    for word in words(rng):
        word = tuple(letters[byte] for byte in word.encode())
        counts[word] = counts.get(word, 0) + 1
    merges, seen = [], set()
    for left, right in learn_merges(counts, 700):
        # Two ways to one text would make it a token twice.
        if left + right not in seen:
            seen.add(left + right)
            merges.append((left, right))
    tokens = specials + [letters[byte] for byte in range(256)]
    # smollm's real vocabulary lacks bytes that no UTF-8 text has.
    if pre == "smollm":
        lacking = {letters[byte] for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
        tokens = [token for token in tokens if token not in lacking]
    types = [TokenType.CONTROL] * len(specials) + [TokenType.NORMAL] * (len(tokens) - len(specials))
    tokens += [left + right for left, right in merges]
    types += [TokenType.NORMAL] * len(merges)
    if pre == "llama-bpe":  # whole words that no merge makes
        for word in ("Ġzyzzyva", "qwxyz"):
            tokens.append(word)
            types.append(TokenType.NORMAL)
    for user in ("<tool>", "    <b>", "<tool>x"):
        assert user not in tokens
        tokens.append(user)
        types.append(TokenType.USER_DEFINED)
    while len(tokens) % 32:
        tokens.append("<unused%d>" % len(tokens))
        types.append(TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([left + " " + right for left, right in merges])
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    if pre != "llama-bpe":
        writer.add_add_bos_token(False)
    writer.add_chat_template(template)
    return len(tokens)


def add_spm(writer, rng):
    counts = {}
    for word in words(rng):
        # SentencePiece knows no words: a few are enough for merges across the space.
        word = tuple(word.replace(" ", "▁"))
        counts[word] = counts.get(word, 0) + 1
    letters = sorted({letter for word in counts for letter in word})
    pieces = []
    for left, right in learn_merges(counts, 600):
        if left + right not in pieces:
            pieces.append(left + right)
    tokens = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % byte for byte in range(256)]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    scores = [0.0] * len(tokens)
    # Some letters are no tokens: they are spelled in bytes.
    letters = [letter for letter in letters if letter not in "🙂日\t\n"]
    for i, piece in enumerate(pieces + letters):
        tokens.append(piece)
        types.append(TokenType.NORMAL)
        # Equal scores: the left pair goes first.
        scores.append(-float(i // 3 * 3))
    for user in ("<tool>", "▁▁▁▁▁▁▁"):
        assert user not in tokens
        tokens.append(user)
        types.append(TokenType.USER_DEFINED)
        scores.append(0.0)
    while len(tokens) % 32:
        tokens.append("<unused%d>" % len(tokens))
        types.append(TokenType.UNUSED)
        scores.append(0.0)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(LLAMA2)
    return len(tokens)


# --- Weights ----------------------------------------------------------------------------------


def halves(values):
    return values.astype(np.float16).view(np.uint8).reshape(*values.shape[:-1], -1)


def pack_scales(scales, minima):
    """Eight 6-bit scales and minima each, as 12 bytes."""
    packed = np.empty((*scales.shape[:-1], 12), np.uint8)
    packed[..., 0:4] = scales[..., :4] | scales[..., 4:] >> 4 << 6
    packed[..., 4:8] = minima[..., :4] | minima[..., 4:] >> 4 << 6
    packed[..., 8:12] = scales[..., 4:] & 15 | (minima[..., 4:] & 15) << 4
    return packed


def random_blocks(rng, kind, n_rows, n_columns, deviation):
    """K-quants can be read by the package but not made: blocks of random numbers, whose scales give
    the values about the deviation wanted and a mean near zero."""
    assert n_columns % 256 == 0, "K-quants need rows of 256"
    shape = (n_rows, n_columns // 256)

    def some(count):
        return rng.integers(0, 256, (*shape, count), dtype=np.uint8)

    spread = deviation * rng.uniform(0.8, 1.25, (*shape, 1))
    if kind == "Q6_K":
        scales = rng.integers(-40, 41, (*shape, 16), dtype=np.int8).view(np.uint8)
        blocks = [some(128), some(64), scales, halves(spread / (24 * 18.5))]
    else:
        levels, quant_bytes = (16, 128) if kind == "Q4_K" else (32, 160)
        scales = rng.integers(1, 64, (*shape, 8), dtype=np.uint8)
        drift = rng.integers(-1, 2, (*shape, 8))
        minima = np.clip(scales + drift, 0, 63).astype(np.uint8)
        d = spread / (34 * levels / 12**0.5)
        blocks = [halves(d), halves(d * (levels - 1) / 2), pack_scales(scales, minima)]
        blocks += [some(quant_bytes)]
    return np.concatenate(blocks, axis=-1).reshape(n_rows, -1)


def add_matrix(writer, rng, name, kind, n_rows, n_columns, deviation=None):
    deviation = n_columns**-0.5 if deviation is None else deviation
    kind_number = Type[kind]
    if kind.endswith("_K"):
        data = random_blocks(rng, kind, n_rows, n_columns, deviation)
    else:
        values = rng.standard_normal((n_rows, n_columns), dtype=np.float32) * np.float32(deviation)
        data = gguf.quants.quantize(values, kind_number)
    writer.add_tensor(name, data, raw_dtype=kind_number)


def add_vector(writer, rng, name, count, mean, deviation):
    values = mean + deviation * rng.standard_normal(count, dtype=np.float32)
    writer.add_tensor(name, values.astype(np.float32))


def llama3_factors(head_dim, base, factor, low, high, context):
    """What Llama 3.1 divides each frequency by, as its files bring it."""
    frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factors = []
    for frequency in frequencies:
        wave = 2 * np.pi / frequency
        if wave < context / high:
            factors.append(1.0)
        elif wave > context / low:
            factors.append(factor)
        else:
            smooth = (context / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arch", choices=["llama", "qwen2"], default="llama")
    parser.add_argument("--type", choices=TYPES, default="F32", help="of the matrices")
    parser.add_argument("--embedding-type", choices=TYPES, help="default: --type")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="smollm")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rope-base", type=float, default=10000.0)
    parser.add_argument("--rope-scaling", choices=["none", "linear", "llama3"], default="none")
    parser.add_argument("--untied", action="store_true", help="an output matrix of its own")
    parser.add_argument("--bias", action="store_true", help="of q, k and v; qwen2 always has them")
    parser.add_argument("--tokenizer-only", action="store_true", help="no tensors")
    option = parser.parse_args()
    if option.heads % option.kv_heads:
        parser.error("--heads must be a multiple of --kv-heads")

    writer = gguf.GGUFWriter(option.file, option.arch)
    writer.add_name("test %d" % option.seed)
    text_rng = random.Random(option.seed)
    if option.tokenizer == "spm":
        n_tokens = add_spm(writer, text_rng)
    else:
        n_tokens = add_bpe(writer, option.tokenizer, text_rng)
    writer.add_vocab_size(n_tokens)
    writer.add_context_length(option.context)
    writer.add_embedding_length(option.hidden)
    writer.add_block_count(option.layers)
    writer.add_feed_forward_length(option.ffn)
    writer.add_head_count(option.heads)
    writer.add_head_count_kv(option.kv_heads)
    if option.head_dim * option.heads != option.hidden:
        writer.add_key_length(option.head_dim)
        writer.add_value_length(option.head_dim)
    writer.add_rope_dimension_count(option.head_dim)
    writer.add_rope_freq_base(option.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    if option.rope_scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    rng = np.random.default_rng(option.seed)
    if not option.tokenizer_only:
        q_width = option.heads * option.head_dim
        kv_width = option.kv_heads * option.head_dim
        kind = option.type
        embedding_kind = option.embedding_type or kind
        add_matrix(writer, rng, "token_embd.weight", embedding_kind, n_tokens, option.hidden, 0.5)
        if option.rope_scaling == "llama3":
            factors = llama3_factors(
                option.head_dim, option.rope_base, 8.0, 1.0, 4.0, option.context / 4
            )
            writer.add_tensor("rope_freqs.weight", factors)
        for layer in range(option.layers):
            block = "blk.%d." % layer
            add_vector(writer, rng, block + "attn_norm.weight", option.hidden, 1.0, 0.1)
            add_matrix(writer, rng, block + "attn_q.weight", kind, q_width, option.hidden)
            add_matrix(writer, rng, block + "attn_k.weight", kind, kv_width, option.hidden)
            add_matrix(writer, rng, block + "attn_v.weight", kind, kv_width, option.hidden)
            if option.bias or option.arch == "qwen2":
                add_vector(writer, rng, block + "attn_q.bias", q_width, 0.0, 0.3)
                add_vector(writer, rng, block + "attn_k.bias", kv_width, 0.0, 0.3)
                add_vector(writer, rng, block + "attn_v.bias", kv_width, 0.0, 0.3)
            add_matrix(writer, rng, block + "attn_output.weight", kind, option.hidden, q_width)
            add_vector(writer, rng, block + "ffn_norm.weight", option.hidden, 1.0, 0.1)
            add_matrix(writer, rng, block + "ffn_gate.weight", kind, option.ffn, option.hidden)
            add_matrix(writer, rng, block + "ffn_up.weight", kind, option.ffn, option.hidden)
            add_matrix(writer, rng, block + "ffn_down.weight", kind, option.hidden, option.ffn)
        add_vector(writer, rng, "output_norm.weight", option.hidden, 1.0, 0.1)
        if option.untied:
            add_matrix(writer, rng, "output.weight", kind, n_tokens, option.hidden)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
