#!/usr/bin/env python3
"""Does every header keep to its names, and do its declarations serve somebody?

    python3 tests/tree/headers.py ROOT
    python3 tests/tree/headers.py --self-test

What each rule says of the product, the folders proto, kernels, kvserver, client and gpu-worker:

    guard       a header's guard is its path: KV_CLIENT_OP_H in client/op.h
    prefix      what a header gives to those who include it, functions, variables, tags, typedefs,
                enumerators and macros, begins with the prefix of everybody, kv_ or KV_, or with
                that of the folder (PREFIXES); headers of kernels/x86, for that folder only, may
                have any names
    undefined   a function or variable that a header declares is defined
    undeclared  a function or variable that is defined without `static` is declared in a header
    alone       and some other file, maybe of the tests, uses it
    twice       a name that begins with kv is defined in one file only; a tag may have the name
                of a function
    long        a file has at most 1,000 lines

headers.tsv beside this file lists the exceptions.  They may only become fewer: one that nothing
needs any more is an error.  Exit status: 1 if there is an error, 2 if the list or the call is
wrong.
"""
import collections
import pathlib
import re
import sys

PRODUCT = ["proto", "kernels", "kvserver", "client", "gpu-worker"]
EXCEPTIONS = pathlib.Path(__file__).resolve().parent / "headers.tsv"
PREFIXES = [("", "kv_"), ("kvserver/", "kvs_"), ("client/", "kvc_"), ("client/kvctl/", "kvctl"),
            ("gpu-worker/", "kvw_"), ("gpu-worker/", "kvworker_")]
RULES = {"guard": "the guard is not {}", "prefix": "no prefix", "undefined": "nowhere defined",
         "undeclared": "neither static nor declared in a header",
         "alone": "used in this file only: it may be static",
         "twice": "defined in another file, too", "long": "more than 1,000 lines"}
LINES_MAX = 1000

BLANKED = re.compile(r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*", re.MULTILINE | re.DOTALL)
MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
GUARD = re.compile(r"^#ifndef (\w+)\n#define \1$", re.MULTILINE)
WORD = re.compile(r"\w+")
ATTRIBUTE = re.compile(
    r"\b(?:__attribute__\s*\(\(.*?\)\)|_Alignas\s*\([^()]*\)|alignas\s*\([^()]*\))", re.DOTALL)
TOKEN = re.compile(r"\w+|[^\w\s]")
OPENS, CLOSES = {"(": ")", "[": "]", "{": "}"}, ")]}"

Name = collections.namedtuple("Name", "line kind text is_static is_defined")
Finding = collections.namedtuple("Finding", "rule file line name")


def blank(found):
    return re.sub(r"[^\n]", " ", found.group())


def statements(code):
    """Those of the outermost level: lists of (offset, token); what is in brackets is one token."""
    statement, begin, awaited = [], 0, []
    for found in TOKEN.finditer(code):
        token = found.group()
        if token in OPENS:
            if not awaited:
                begin = found.start()
            awaited.append(OPENS[token])
        elif token in CLOSES and awaited:
            awaited.pop()
            if not awaited:
                statement.append((begin, code[begin:found.end()]))
                # A function's body ends a statement, that of a struct does not.
                if token == "}" and any(part[0] == "(" for _, part in statement[:-1]) and \
                        "=" not in (part for _, part in statement):
                    yield statement
                    statement = []
        elif not awaited:
            if token == ";":
                yield statement
                statement = []
            else:
                statement.append((found.start(), token))


def names_of(text):
    code = BLANKED.sub(blank, text)
    for found in MACRO.finditer(code):
        yield Name(code.count("\n", 0, found.start()) + 1, "macro", found[1], False, True)
    code = DIRECTIVE.sub(blank, code)
    code = ATTRIBUTE.sub(blank, code)
    code = re.sub(r'\bextern\s+\{', blank, code)  # of "C"; its brace closes nothing
    for statement in statements(code):
        yield from names_in(code, statement)


def names_in(code, statement):
    tokens = [token for _, token in statement]
    is_static = "static" in tokens or "INLINE" in tokens  # which says static

    def name(at, kind, text, is_defined=True):
        return Name(code.count("\n", 0, at) + 1, kind, text, is_static, is_defined)

    if not tokens or tokens[0] in ("_Static_assert", "static_assert"):
        return
    yield from tags_in(statement, tokens, name)
    if "typedef" in tokens:
        pointer = re.match(r"\(\s*\*\s*(\w+)", tokens[-2])  # to a function
        yield name(statement[-1][0], "typedef", pointer[1] if pointer else tokens[-1])
    else:
        yield from declared_in(statement, tokens[:[*tokens, "="].index("=")], name)


def tags_in(statement, tokens, name):
    for i, token in enumerate(tokens):
        if token in ("struct", "union", "enum"):
            if i + 2 < len(tokens) and tokens[i + 2][0] == "{":
                yield name(statement[i + 1][0], token, tokens[i + 1])
            at, body = next((part for part in statement[i + 1:i + 3] if part[1][0] == "{"), (0, ""))
            if token == "enum":
                for found in re.finditer(r"[{,]\s*(\w+)", re.sub(r"\([^()]*\)", blank, body)):
                    yield name(at + found.start(1), "enumerator", found[1])


def declared_in(statement, tokens, name):
    """A function or a variable; tokens are those of the statement that stand before a =."""
    paren = next((i for i, token in enumerate(tokens) if token[0] == "(" and i > 0), 0)
    if paren > 0 and WORD.fullmatch(tokens[paren - 1]):
        # Else a macro's use, or an array of functions.
        if paren > 1 and tokens[paren - 1] not in ("void", "int"):
            yield name(statement[paren - 1][0], "function", tokens[paren - 1],
                       tokens[-1][0] == "{")
        return
    words = [i for i, token in enumerate(tokens) if re.fullmatch(r"[A-Za-z_]\w*", token) and
             token not in ("const", "volatile")]
    if len(words) > (2 if tokens[0] in ("struct", "union", "enum") else 1):
        yield name(statement[words[-1]][0], "variable", tokens[words[-1]],
                   "extern" not in tokens)


def is_ours(file):
    return file.split("/")[0] in PRODUCT


def guard_of(file):
    return "KV_" + re.sub(r"\W", "_", file.removesuffix(".h")).upper() + "_H"


def has_prefix(file, name):
    return any(file.startswith(folder) and name.lower().startswith(prefix)
               for folder, prefix in PREFIXES)


def findings(texts):
    """What breaks a rule in these texts, by file name: the product's, and the tests'."""
    names = {file: list(names_of(text)) for file, text in texts.items() if is_ours(file)}
    headers = [file for file in names if file.endswith(".h")]
    sources = [file for file in names if file.endswith(".c")]
    users = collections.defaultdict(set)  # word -> files, but for headers that are not its own
    for file, text in texts.items():
        for word in set(WORD.findall(BLANKED.sub(blank, text))):
            users[word].add(file)

    for file in headers:
        guard = GUARD.search(texts[file])
        if not guard or guard[1] != guard_of(file):
            yield Finding("guard", file, 1, guard[1] if guard else "none")
        if not file.startswith("kernels/x86/"):
            for name in names[file]:
                if not has_prefix(file, name.text) and not (guard and name.text == guard[1]):
                    yield Finding("prefix", file, name.line, name.text)

    linked = {file: [name for name in names[file] if name.kind in ("function", "variable") and
                     not name.is_static] for file in names}
    declared = {name.text for file in headers for name in linked[file]}
    defined = {name.text for file in names for name in linked[file] if name.is_defined}
    for file in headers:
        for name in linked[file]:
            if name.text not in defined:
                yield Finding("undefined", file, name.line, name.text)
    for file in sources:
        for name in linked[file]:
            if name.text not in declared:
                if name.text != "main":
                    yield Finding("undeclared", file, name.line, name.text)
            elif not any(user.endswith((".c", ".inc")) for user in users[name.text] - {file}) and \
                    sum(user.endswith(".h") for user in users[name.text]) < 2:
                yield Finding("alone", file, name.line, name.text)

    owners = collections.defaultdict(list)  # (is it a tag, name) -> where it is defined
    for file in sorted(names):
        for name in names[file]:
            if name.is_defined and re.match("kv[a-z]*_", name.text, re.IGNORECASE):
                owners[name.kind in ("struct", "union", "enum"), name.text].append((file, name.line))
    for (_, name), places in owners.items():
        for file, line in places:
            if file != places[0][0]:
                yield Finding("twice", file, line, name)
    for file in names:
        n_lines = texts[file].count("\n")
        if n_lines > LINES_MAX:
            yield Finding("long", file, n_lines, file.rpartition("/")[2])


def fail(text):
    print(f"headers: {text}", file=sys.stderr)
    sys.exit(2)


def texts_below(root):
    paths = [path for top in [*PRODUCT, "tests"] for path in sorted((root / top).rglob("*"))
             if path.suffix in (".c", ".h", ".inc")]
    if not paths:
        fail(f"{root}: not the root of the repository")
    return {path.relative_to(root).as_posix(): path.read_text(errors="replace") for path in paths}


def exceptions():
    """(rule, file, name) -> line of the list."""
    listed = {}
    for number, line in enumerate(EXCEPTIONS.read_text().splitlines(), 1):
        if line and not line.startswith("#"):
            cells = line.split("\t")
            if len(cells) != 4 or cells[0] not in RULES or not all(cells):
                fail(f"{EXCEPTIONS.name}:{number}: not a rule, a file, names and a reason")
            for name in cells[2].split():
                if (cells[0], cells[1], name) in listed:
                    fail(f"{EXCEPTIONS.name}:{number}: {name}: a second time")
                listed[cells[0], cells[1], name] = number
    return listed


def check(root):
    texts = texts_below(root)
    listed = exceptions()
    needed = set()
    n_errors = 0
    for finding in findings(texts):
        key = finding.rule, finding.file, finding.name
        if key in listed:
            needed.add(key)
            continue
        n_errors += 1
        print(f"{finding.file}:{finding.line}: {finding.name}: {finding.rule}: "
              f"{RULES[finding.rule].format(guard_of(finding.file))}")
    for key in [key for key in listed if key not in needed]:
        n_errors += 1
        print(f"{EXCEPTIONS.name}:{listed[key]}: {' '.join(key)}: "
              "nothing needs this exception any more: remove it")
    print(f"{len(texts)} files, {len(needed)} exceptions, {n_errors} errors")
    sys.exit(1 if n_errors else 0)


SELF_TEST = {
    "client/op.h": """#ifndef KV_CLIENT_OP_H
#define KV_CLIENT_OP_H
#define KVC_OP_MAX 4
#define LEAST(a, \\
              b) ((a) < (b) ? (a) : (b)) /* int in_comment(void); */
struct kv_op;
enum kvc_state { KVC_OPEN = sizeof(int), CLOSED };
typedef void (*kv_op_fn)(struct kv_op *op, int (*then)(void));
typedef struct pair { int a, b[2]; } kv_pair;
struct kvc_op { struct kv_op *next; union { int x; } u; };
extern const struct kvc_op kvc_ops[2];
const char *kvc_op_name(const struct kv_op *op) __attribute__((format(printf, 1, 2)));
void kvs_op_end(struct kv_op *op);
static inline bool is_open(void) { return LEAST(1, 2) == 1; }
int kv_op_gone(void);
#endif
""",
    "client/op.c": """const struct kvc_op kvc_ops[2] = {{NULL}, {.u = {1}}};
const char *kvc_op_name(const struct kv_op *op) { return kvs_op_end, ""; }
void kvs_op_end(struct kv_op *op) { }
static int at_rest[4], kept = 1;
static void (*table[])(void) = {NULL};
int forgotten(void) { return 0; }
int main(void) { return kvc_op_name(kvc_ops); }
""",
    "kvserver/op.c": "struct kvc_op { int x; };\nstatic int kv_op_gone(void) { }\nstruct open { };\n",
    "kvserver/open.c": "struct open { };\n" + "/* 1,000 */\n" * 999,
    "kvserver/long.c": "\n" * 1001,
    "tests/test_op.c": "int helper(void) { return kvs_op_end(NULL); }\n",
    "kernels/x86/avx.h": "#ifndef KV_KERNELS_AVX_H\n#define KV_KERNELS_AVX_H\n#define LANES 8\n#endif\n",
}
SELF_TEST_FINDS = [
    "alone client/op.c kvc_op_name", "alone client/op.c kvc_ops",
    "guard kernels/x86/avx.h KV_KERNELS_AVX_H", "long kvserver/long.c long.c", "prefix client/op.h CLOSED",
    "prefix client/op.h LEAST", "prefix client/op.h is_open", "prefix client/op.h kvs_op_end",
    "prefix client/op.h pair", "twice kvserver/op.c kvc_op",
    "undeclared client/op.c forgotten", "undefined client/op.h kv_op_gone",
]


def self_test():
    found = sorted(f"{rule} {file} {name}" for rule, file, _, name in findings(SELF_TEST))
    if found != SELF_TEST_FINDS:
        print("\n".join(["found:", *found, "not:", *SELF_TEST_FINDS]))
        sys.exit(1)
    print("what is planted is found, and nothing else")


if len(sys.argv) != 2:
    fail("usage: headers.py ROOT | --self-test")
if sys.argv[1] == "--self-test":
    self_test()
else:
    check(pathlib.Path(sys.argv[1]))
