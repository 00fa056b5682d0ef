#!/usr/bin/env python3
"""Are the declarations of topkv/_library.py those of kvclient.h?

A C compiler prints the size of every structure, the place of every field and the value of every
constant, from the header; they are compared with what ctypes has.  The header's text says whether a
field, an enumerator or a function is missing on either side.

Environment: CC, a C compiler.
"""
import ctypes
import enum
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from topkv import _library

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = ["proto/kv_status.h", "proto/kv_types.h", "client/include/kvclient.h",
           "client/include/kvclient_nodes.h"]

# Enumerations, and how their enumerators begin in C.
ENUMS = {
    "kv_status": (_library.Status, "KV_"),
    "kv_dtype": (_library.DType, "KV_"),
    "kv_memory_type": (_library.MemoryType, "KV_MEMORY_"),
    "kv_answer": (_library.Answer, "KV_ANSWER_"),
    "kv_first_cut": (_library.FirstCut, "KV_CUT_"),
    "kv_selection": (_library.Selection, "KV_SELECT_"),
    "kv_merge": (_library.Merge, "KV_MERGE_"),
    "kv_layer_kind": (_library.LayerKind, "KV_LAYER_"),
    "kv_object_verb": (_library.ObjectVerb, "KV_OBJECT_"),
    "kv_prefix_verb": (_library.PrefixVerb, "KV_PREFIX_"),
    "kv_node_state": (_library.NodeState, "KV_NODE_"),
}
PLAIN = {"uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t,
         "unsigned": ctypes.c_uint, "int": ctypes.c_int, "bool": ctypes.c_bool,
         "kv_status_t": ctypes.c_int, "void": None}


def header_text():
    text = "\n".join((ROOT / name).read_text() for name in HEADERS)
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def structures():
    return [value for value in vars(_library).values()
            if isinstance(value, type) and issubclass(value, ctypes.Structure) and
            value is not ctypes.Structure]


def constants():
    """Python's names without KV_, and values."""
    return {name: value for name, value in vars(_library).items()
            if re.fullmatch("[A-Z][A-Z0-9_]*", name) and isinstance(value, int)}


def field_name(name):
    return name.rstrip("_")


def type_of(text):
    """The ctypes class of a parameter or result, or "pointer"."""
    text = text.strip()
    if "*" in text:
        return "pointer"
    if re.match(r"(const )?enum ", text):
        return ctypes.c_uint
    words = [word for word in text.split() if word != "const"]
    return PLAIN[words[0]]


def kind_of(ctype):
    if ctype in (ctypes.c_void_p, ctypes.c_char_p) or \
            isinstance(ctype, type) and issubclass(ctype, ctypes._Pointer):
        return "pointer"
    return ctype


class Layout(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        lines = []
        for structure in structures():
            lines.append(f'printf("{structure.C_NAME} %zu\\n", sizeof({structure.C_NAME}));')
            for name, *_ in structure._fields_:
                field = f"{structure.C_NAME}, {field_name(name)}"
                size = f"sizeof((({structure.C_NAME} *)0)->{field_name(name)})"
                lines.append(f'printf("{structure.C_NAME}.{field_name(name)} %zu %zu\\n", '
                             f'offsetof({field}), {size});')
        for c_enum, (python, prefix) in ENUMS.items():
            lines.append(f'printf("enum {c_enum} %zu\\n", sizeof(enum {c_enum}));')
            lines += [f'printf("{prefix}{name} %lld\\n", (long long){prefix}{name});'
                      for name in python.__members__]
        lines += [f'printf("KV_{name} %lld\\n", (long long)KV_{name});' for name in constants()
                  if name not in ("SONAME", "VARIABLE")]
        program = ('#include "client/include/kvclient.h"\n#include <stdio.h>\n'
                   "int main(void)\n{\n    " + "\n    ".join(lines) + "\n    return 0;\n}\n")
        compiler = os.environ.get("CC", "cc")
        if shutil.which(compiler) is None:
            raise unittest.SkipTest(f"no C compiler: {compiler}")
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "layout.c")
            source.write_text(program)
            subprocess.run([compiler, "-I", ROOT, source, "-o", f"{folder}/layout"], check=True)
            out = subprocess.run([f"{folder}/layout"], check=True, capture_output=True, text=True)
        cls.c = {}
        for line in out.stdout.splitlines():
            name, *numbers = re.match(r"(.*?)((?: -?\d+)+)$", line).groups()
            cls.c[name] = tuple(int(number) for number in numbers[0].split())

    def test_structures(self):
        self.assertGreater(len(structures()), 25)
        for structure in structures():
            with self.subTest(structure.C_NAME):
                self.assertEqual(ctypes.sizeof(structure), self.c[structure.C_NAME][0])
                for name, *_ in structure._fields_:
                    field = getattr(structure, name)
                    self.assertEqual((field.offset, field.size),
                                     self.c[f"{structure.C_NAME}.{field_name(name)}"], name)

    def test_constants(self):
        for name, value in constants().items():
            self.assertEqual((value,), self.c[f"KV_{name}"], name)
        for c_enum, (python, prefix) in ENUMS.items():
            self.assertEqual(self.c[f"enum {c_enum}"], (4,))
            for name, member in python.__members__.items():
                self.assertEqual((member.value,), self.c[prefix + name], prefix + name)


class Complete(unittest.TestCase):
    text = header_text()

    def test_fields(self):
        bodies = dict(re.findall(r"struct (kv_\w+) \{(.*?)\n\}", self.text, re.DOTALL))
        have = {structure.C_NAME.split()[1]: structure for structure in structures()}
        self.assertEqual(sorted(bodies), sorted(have))
        for name, body in bodies.items():
            fields = []
            for declaration in body.split(";"):
                for declarator in declaration.split(","):
                    words = re.findall(r"\w+", re.sub(r"\[.*?\]", "", declarator))
                    fields += words[-1:]
            self.assertEqual(fields, [field_name(field[0]) for field in have[name]._fields_], name)

    def test_enumerators(self):
        found = re.findall(r"enum (kv_\w+) \{(.*?)\}", self.text, re.DOTALL)
        self.assertEqual(sorted(name for name, _ in found), sorted(ENUMS))
        for name, body in found:
            python, prefix = ENUMS[name]
            names = re.findall(r"\b(KV_\w+)\b", re.sub(r"=[^,]*", "", body))
            self.assertEqual(names, [prefix + member for member in python.__members__], name)

    def test_limits(self):
        body = re.search(r"\benum \{(.*?)\}", self.text, re.DOTALL)[1]
        names = re.findall(r"\bKV_(\w+) =", body)
        self.assertGreater(len(names), 15)
        self.assertEqual([name for name in names if name not in constants()], [])

    def test_functions(self):
        found = re.findall(r"(?:KV_API |^)((?:const )?(?:struct |enum )?\w+\s\*?)\s*(kv_\w+)\(([^;{]*)\);",
                           self.text, re.MULTILINE)
        self.assertGreater(len(found), 80)
        self.assertFalse(set(_library._WAITS) & set(_library._QUICK))
        have = {**_library._WAITS, **_library._QUICK}
        self.assertEqual(sorted(name for _, name, _ in found), sorted(have))
        for result, name, arguments in found:
            with self.subTest(name):
                parts = [] if arguments.strip() == "void" else arguments.split(",")
                self.assertEqual([type_of(part) for part in parts],
                                 [kind_of(argument) for argument in have[name][1]])
                self.assertEqual(type_of(result), kind_of(have[name][0]))

    def test_every_enum_is_checked(self):
        enums = [value for value in vars(_library).values()
                 if isinstance(value, type) and issubclass(value, enum.IntEnum) and
                 value is not enum.IntEnum]
        self.assertEqual(set(enums), {python for python, _ in ENUMS.values()})


if __name__ == "__main__":
    unittest.main()
