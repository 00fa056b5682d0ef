#!/usr/bin/env python3
"""Is there everything that comments and READMEs name?

    python3 tests/tree/names.py ROOT
    python3 tests/tree/names.py --self-test

A name in a comment, or in a README, that stands nowhere else in the repository is an error:

    word_with_underscores, call(), object->member    no code has that word
    file.c, folder/file.h, folder/, file.md          there is no such file or folder
    --option                                         no program has that option
    group.name, where tests/group is a folder        ctest has no such test

What code has in its strings counts: metrics and options are named there.  names.tsv beside this
file lists what is named although it is elsewhere; an entry that nothing needs is an error.
Exit status: 1 if there is an error, 2 if the list or the call is wrong.
"""
import collections
import fnmatch
import os
import pathlib
import re
import sys

TOPS = [".ci", "proto", "kernels", "kvserver", "client", "gpu-worker", "tests", "deploy",
        "CMakeLists.txt", "README.md"]
ALLOWED = pathlib.Path(__file__).resolve().parent / "names.tsv"

C_TOKEN = re.compile(
    r"""(?P<comment>/\*.*?\*/|//[^\n]*)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
PYTHON_TOKEN = re.compile(
    r"""(?P<comment>^[ \t]*\"{3}(?:.|\n)*?\"{3}|\#[^\n]*)|\"{3}(?:.|\n)*?\"{3}|"""
    r"""'{3}(?:.|\n)*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.MULTILINE)
HASH_TOKEN = re.compile(r"(?P<comment>(?:^|(?<=[ \t]))#[^\n]*)", re.MULTILINE)
FORMAT = re.compile(r"%[-+ #0]*[0-9*.]*[hlz]*[a-z]")
INCLUDE = re.compile(r"""^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)""", re.MULTILINE)

# Addresses, what_NAME stands for, a formula's x_i.
PLACEHOLDER = re.compile(r"\b[a-z]+://\S+|[\w./]*\bNAME\b[\w.]*|[\w./]*_NAME[\w.]*|\b[a-z]+_i\b")
ENDINGS = r"(?:c|h|inc|cu|cuh|py|sh|proto|md|tsv|txt|cmake|in|dict|supp|service)"
FILE = re.compile(rf"(?<![\w./*<$-])(?:[\w*-][\w.*-]*/)*[\w*-]*[\w*]\.{ENDINGS}\b(?![\w/(-]|\.\w)")
PATH = re.compile(r"(?<![\w./*<$-])[a-z][\w-]*(?:/[a-z][\w-]*)*/(?:[a-z][\w-]*)?(?![\w/.*-])")
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?![\w*])")
WORD = re.compile(r"(?<![\w*%$./-])[A-Za-z]\w*_\w*(?![\w*%])")
CALL = re.compile(r"(?<![\w*%$./-])([A-Za-z]\w*)\(\)")
MEMBER = re.compile(r"->([A-Za-z]\w*)")
DOTTED = re.compile(r"(?<![\w./-])([a-z]+)\.([a-z]\w*)(?![\w/(*])")
PLAIN_WORD = re.compile(r"[A-Za-z_]\w*")

Finding = collections.namedtuple("Finding", "file line name why")


def language(file):
    name = file.rpartition("/")[2]
    if name.endswith((".c", ".h", ".inc", ".proto")):
        return C_TOKEN
    if name.endswith(".py"):
        return PYTHON_TOKEN
    if name.endswith((".sh", ".cmake", ".supp", ".service", "-format")) or \
            name in ("CMakeLists.txt", "Containerfile", "run", ".gitignore"):
        return HASH_TOKEN
    return None


def parts_of(file, text):
    """What is code, and the list of (offset, comment)."""
    if file.endswith(".md"):
        return "", [(0, text)]
    if language(file) is None:
        return text, []
    comments = []

    def without_comment(found):
        if found["comment"] is None:
            return found.group()
        comments.append((found.start(), found["comment"]))
        return " "

    return language(file).sub(without_comment, text), comments


class Repository:
    """What there is: texts by file name, and the words of their code."""

    def __init__(self, texts):
        self.texts = texts
        self.comments = {}
        self.words = set()
        self.options = set()
        self.tests = collections.defaultdict(set)  # group -> names
        headers = set()
        for file, text in texts.items():
            code, self.comments[file] = parts_of(file, text)
            words = set(PLAIN_WORD.findall(FORMAT.sub(" ", code)))
            self.words |= words
            self.options.update(OPTION.findall(code))
            if language(file) is C_TOKEN:  # an option's name is a string, without its dashes
                self.options.update(re.findall(r'"([a-z][a-z0-9-]*)"', code))
                headers.update(INCLUDE.findall(code))
            if file.startswith("tests/") and file.endswith("/CMakeLists.txt"):
                self.tests[file.split("/")[1]] |= words
        self.words.update(word for file in texts for word in PLAIN_WORD.findall(file))
        # KVS_REQUEST_WAITING may be called WAITING.
        self.capital_ends = {word[at.end():] for word in self.words if word.isupper()
                             for at in re.finditer("_", word)}
        self.folders = {part for file in texts for part in file.split("/")[:-1]}
        self.paths = set()  # from any folder on: a/b/c.h, b/c.h, c.h; a/b/c; a/b
        for file in [*texts, *headers]:
            folders, _, name = file.rpartition("/")
            ways = [file, f"{folders}/{name.rpartition('.')[0]}"]
            ways += [folders[:at.start()] for at in re.finditer("/|$", folders)]
            self.paths.update(way[at.end():] for way in ways for at in re.finditer("^|/", way))

    def has_path(self, path):
        path = path.rstrip("/").replace(".pb-c.h", ".proto")  # made by the build
        if "*" in path:
            return any(fnmatch.fnmatchcase(way, path) for way in self.paths)
        return path in self.paths

    def has_word(self, word):
        if word in self.words or word in self.capital_ends:
            return True
        if word.endswith("_"):
            return any(word in known for known in self.words)
        return word.endswith("s") and word[:-1] in self.words or self.is_joined(word)

    def is_joined(self, word):
        """Is it put together by a macro, or printf, of words that have _ where they join?"""
        is_ours = re.match("kv[a-z]*_", word, re.IGNORECASE)
        joints = [found.start() for found in re.finditer("_", word)]
        begins = [at + 1 for at in joints if word[:at + 1] in self.words]
        ends = [at for at in joints if word[at:] in self.words]
        if is_ours:  # kv_ may begin anything, and kv_x_ much
            begins = [at for at in begins if at > is_ours.end()]
            ends = []
        for begin in [0, *begins]:
            if any(word[begin:end] in self.words for end in [len(word), *ends]):
                return True
        variable = re.fullmatch("KV[A-Z]+_([A-Z_]+)", word)  # --lease-ms is KVSERVER_LEASE_MS
        return variable and variable[1].lower().replace("_", "-") in self.options

    def faults_of(self, text):
        """(offset, name, why) for each name in this text that is not there."""
        text = PLACEHOLDER.sub(lambda found: " " * len(found.group()), text)
        for found in FILE.finditer(text):
            if not self.has_path(found.group()):
                yield found.start(), found.group(), "no such file"
        for found in PATH.finditer(text):
            path = found.group()
            if path.split("/")[0] in self.folders and not self.has_path(path):
                yield found.start(), path, "no such folder"
        for found in OPTION.finditer(text):
            if found[1] not in self.options:
                yield found.start(), found.group(), "no such option"
        for pattern, group in ((WORD, 0), (CALL, 1), (MEMBER, 1)):
            for found in pattern.finditer(text):
                if not self.has_word(found[group]):
                    yield found.start(), found[group], "no code has this word"
        for found in DOTTED.finditer(text):
            group, name = found.groups()
            if group in self.tests and not re.fullmatch(ENDINGS, name) and \
                    not {name, re.sub("_(emulated|strict)$", "", name)} & self.tests[group]:
                yield found.start(), found.group(), "no such test"

    def findings(self):
        for file in self.texts:
            seen = set()
            for offset, comment in self.comments[file]:
                for at, name, why in self.faults_of(comment):
                    line = self.texts[file].count("\n", 0, offset + at) + 1
                    if (line, name) not in seen:
                        seen.add((line, name))
                        yield Finding(file, line, name, why)


def fail(text):
    print(f"names: {text}", file=sys.stderr)
    sys.exit(2)


def texts_below(root):
    texts = {}
    for top in TOPS:
        for folder, folders, files in os.walk(root / top):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                path = pathlib.Path(folder, name)
                texts[path.relative_to(root).as_posix()] = path.read_text(errors="replace")
        if (root / top).is_file():
            texts[top] = (root / top).read_text(errors="replace")
    if "tests/tree/names.py" not in texts:
        fail(f"{root}: not the root of the repository")
    return texts


def allowed_names():
    allowed = {}
    for number, line in enumerate(ALLOWED.read_text().splitlines(), 1):
        if line and not line.startswith("#"):
            cells = line.split("\t")
            if len(cells) != 2 or not all(cells) or cells[0] in allowed:
                fail(f"{ALLOWED.name}:{number}: not a name and a reason, or a second time")
            allowed[cells[0]] = number
    return allowed


def check(root):
    texts = texts_below(root)
    # These two name what is not there: only that they are there counts.
    for own in ("tests/tree/names.py", "tests/tree/names.tsv"):
        texts[own] = ""
    allowed = allowed_names()
    needed = set()
    n_errors = 0
    for finding in Repository(texts).findings():
        if finding.name in allowed:
            needed.add(finding.name)
            continue
        n_errors += 1
        print(f"{finding.file}:{finding.line}: {finding.name}: {finding.why}")
    for name in allowed.keys() - needed:
        n_errors += 1
        print(f"{ALLOWED.name}:{allowed[name]}: {name}: nothing needs this entry any more: remove it")
    print(f"{len(texts)} files, {len(needed)} names allowed, {n_errors} errors")
    sys.exit(1 if n_errors else 0)


SELF_TEST = {
    "kvserver/store/unit.c": 'int kv_unit_open(struct kvs_unit *unit) { return unit->n_rows; }\n'
                             'const char *help = "lease-ms"; // "KV_UNIT_GONE" is no code\n'
                             '#define NAME(x) kv_##x(kv_ops_##x)\nNAME(put)\n"gone"; recount;\n',
    "kvserver/store/unit.h": "/* kv_unit_open() unit->n_rows, kv_ops_put and kv_unit_*: fine.\n"
                             " * So are unit.c, store/unit.h, kvserver/store/, unit.ring, --lease-ms,\n"
                             " * and https://example.org/some_page.md#a_part.\n"
                             " * kv_unit_shut() unit->n_cells KV_UNIT_MAX undo() kv_recount()\n"
                             " * units.c rows/unit.h store/rows/ limits.md --lease-s unit.rang */\n",
    "tests/unit/CMakeLists.txt": "foreach(name ring)  # made by cmake_helper\n",
    "tests/run.py": '"""Runs sim_node."""\nx = """not_a_comment"""  # x_y\n',
    "README.md": "`kv_unit_open`, `kv_unit_shut`\n",
}
SELF_TEST_FINDS = {
    "kvserver/store/unit.c": ["KV_UNIT_GONE"],
    "kvserver/store/unit.h": ["kv_unit_shut", "n_cells", "KV_UNIT_MAX", "undo", "kv_recount", "units.c",
                              "rows/unit.h", "store/rows/", "limits.md", "--lease-s", "unit.rang"],
    "tests/unit/CMakeLists.txt": ["cmake_helper"],
    "tests/run.py": ["sim_node", "x_y"],
    "README.md": ["kv_unit_shut"],
}


def self_test():
    found = collections.defaultdict(list)
    for finding in Repository(SELF_TEST).findings():
        found[finding.file].append(finding.name)
    for file in SELF_TEST:
        if sorted(found[file]) != sorted(SELF_TEST_FINDS.get(file, [])):
            print(f"{file}: found {sorted(found[file])}\n"
                  f"    not {sorted(SELF_TEST_FINDS.get(file, []))}")
            sys.exit(1)
    print("what is planted is found, and nothing else")


if len(sys.argv) != 2:
    fail("usage: names.py ROOT | --self-test")
if sys.argv[1] == "--self-test":
    self_test()
else:
    check(pathlib.Path(sys.argv[1]))
