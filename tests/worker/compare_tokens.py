#!/usr/bin/env python3
"""compare_tokens.py PRINT_TOKENS FILE ...: the same token ids as llama.cpp?

PRINT_TOKENS is the program built from print_tokens.c, FILE a GGUF file. Lines of text, code,
numbers, emoji, control tokens and broken UTF-8 are made from a seed; every one goes through both,
with control tokens read and not read, and the pieces of all tokens are compared. Exit status 0: no
difference. llama.cpp is the library inside of PyPI's `xllamacpp`.
"""

import argparse
import ctypes
import glob
import importlib.util
import os
import random
import subprocess
import sys


class Llama:
    """The few functions of llama.h that it takes. The big structs are only passed on."""

    class Params(ctypes.Structure):
        # More than llama_model_params has: it is returned and passed in memory, and only its own
        # size of it is looked at.
        _fields_ = [("bytes", ctypes.c_char * 512)]

    def __init__(self, path):
        package = importlib.util.find_spec("xllamacpp").submodule_search_locations[0]
        library = ctypes.CDLL(glob.glob(os.path.join(package, "*.so"))[0])
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self.quiet = quiet(lambda *_: None)
        library.llama_log_set(self.quiet, None)
        library.llama_backend_init()
        library.llama_model_default_params.restype = self.Params
        library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, self.Params]
        library.llama_model_load_from_file.restype = ctypes.c_void_p
        library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        library.llama_model_get_vocab.restype = ctypes.c_void_p
        library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
        library.llama_tokenize.argtypes = [
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32),
            ctypes.c_int32, ctypes.c_bool, ctypes.c_bool,
        ]
        library.llama_token_to_piece.argtypes = [
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32,
            ctypes.c_bool,
        ]
        self.library = library
        model = library.llama_model_load_from_file(
            path.encode(), library.llama_model_default_params()
        )
        if not model:
            sys.exit("compare_tokens: llama.cpp does not load it: %s" % path)
        self.vocab = library.llama_model_get_vocab(model)

    def tokens(self, text, special, bounds):
        room = len(text) * 4 + 16
        ids = (ctypes.c_int32 * room)()
        count = self.library.llama_tokenize(
            self.vocab, text, len(text), ids, room, bounds, special
        )
        return list(ids[:count])

    def pieces(self):
        buffer = ctypes.create_string_buffer(4096)
        for token in range(self.library.llama_vocab_n_tokens(self.vocab)):
            count = self.library.llama_token_to_piece(self.vocab, token, buffer, 4096, 0, True)
            yield buffer.raw[:count]


PROSE = (
    "The quick brown fox jumps over the lazy dog. It's what we'll have, isn't it? They've said I'M "
    "OK, WE'LL see; don't DON'T. Zażółć gęślą jaźń, naïve café, Straße, ÅNGSTRÖM. Съешь же ещё этих "
    "мягких французских булок. 我能吞下玻璃而不伤身体。 いろはにほへと ちりぬるを 한국어 문장입니다. "
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก Γειά σου Κόσμε"
).split(" ")
CODE = [
    "for (int i = 0; i < n; i++) {", "\treturn x->y[i] & 0xff;", "    def f(self, *args):", "}",
    "#include <stdio.h>", "a += b**2 // c", 'printf("%d\\n", x);', "if(!(a&&b)||c){", "=> [1,2];",
    "<div class='x'>", "SELECT * FROM t WHERE a='b';", "// ----------", "/* *** */", "===", "....",
]
EMOJI = ["🙂", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "🏳️‍🌈", "1️⃣", "🤷🏻‍♂️", "é", "ﬁ", "𝒳", "Ⅷ", "½", "٣", "๔", "〇"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u2003", "\u200b", "\u180e", "\x85", "\x0b", "\x0c", "\u2028", "\ufeff"]
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<tool>", "<tool>x", "<|eot_id|>",
    "<|begin_of_text|>", "<|im_start|", "|im_end|>", "<0x41>", "<|im_start|>user\n", "    <b>", "Ġ", "▁", "▁▁▁▁", "zyzzyva",
]
BROKEN = [
    b"\x80", b"\xff", b"\xc0\x80", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf8\x88",
    b"\xc3\x28", b"\x00", b"\xfe\xff", b"\xf0\x80\x80\x80", b"\xed\xb0\x80x", b"\xef\xbf\xbd", b"\xe2\x28\xa1", b"\xc1\xbf",
]


def some_text(rng):
    kind = rng.randrange(8)
    out = []
    for _ in range(rng.randint(1, 30)):
        choice = kind if rng.random() < 0.6 else rng.randrange(8)
        if choice == 0:
            out.append(" ".join(rng.choice(PROSE) for _ in range(rng.randint(1, 6))).encode())
        elif choice == 1:
            out.append(rng.choice(CODE).encode())
        elif choice == 2:
            out.append(str(rng.randrange(10 ** rng.randint(1, 12))).encode())
        elif choice == 3:
            out.append(rng.choice(EMOJI).encode())
        elif choice == 4:
            out.append(rng.choice(SPACES).encode() * rng.randint(1, 4))
        elif choice == 5:
            out.append(rng.choice(SPECIAL).encode())
        elif choice == 6:
            out.append(rng.choice(BROKEN))
        else:
            letter = rng.choice([rng.randrange(32, 127), rng.randrange(0x80, 0x3000), rng.randrange(0x3000, 0xD800)])
            out.append(chr(letter).encode())
        if rng.random() < 0.5:
            out.append(b" ")
    return b"".join(out)


def differences(program, path, texts):
    llama = Llama(path)
    lines = "\n".join(text.hex() for text in texts) + "\n"
    n_tokens = 0
    for special, bounds in ((False, False), (True, False), (True, True)):
        options = ["--special"] * special + ["--bounds"] * bounds
        answer = subprocess.run([program, path, *options], input=lines, capture_output=True, text=True)
        if answer.returncode:
            yield "%s: %s" % (path, answer.stderr.strip())
            return
        for text, line in zip(texts, answer.stdout.split("\n")):
            ours = [int(token) for token in line.split()]
            theirs = llama.tokens(text, special, bounds)
            n_tokens += len(theirs)
            if ours != theirs:
                yield "%s: %r (special %s, bounds %s):\n  ours      %s\n  llama.cpp %s" % (
                    path, text, special, bounds, ours, theirs
                )
    answer = subprocess.run([program, path, "--pieces"], capture_output=True, text=True)
    pieces = [bytes.fromhex(line) for line in answer.stdout.split("\n")]
    n_pieces = 0
    for token, theirs in enumerate(llama.pieces()):
        n_pieces += 1
        if pieces[token] != theirs:
            yield "%s: token %d: ours %r, llama.cpp %r" % (path, token, pieces[token], theirs)
    print("%s: %d lines, %d tokens, %d pieces" % (path, len(texts), n_tokens, n_pieces))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    option = parser.parse_args()
    rng = random.Random(option.seed)
    texts = [some_text(rng) for _ in range(option.lines - 3)]
    texts += [b"a" * 20000, b" " * 20000 + b"x"]
    # llama.cpp ends the process where F4 to F7 spell something above U+10FFFF.
    texts.append(bytes(byte for byte in rng.randbytes(5000) if byte not in range(0xF4, 0xF8)))
    n_different = 0
    for path in option.files:
        for line in differences(option.program, path, texts):
            n_different += 1
            if n_different <= 10:
                print(line)
    print("%d differences" % n_different)
    return 0 if n_different == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
