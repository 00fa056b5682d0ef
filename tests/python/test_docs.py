#!/usr/bin/env python3
"""Docstrings, types, and the README's example.

Every public name has a docstring; that of a function or class names each of its parameters, and says which
errors there are; that of a method of AsyncClient or AsyncSession refers to the blocking one, and has its parameters.
"""
import enum
import inspect
import os
import re
import shutil
import subprocess
import unittest

import support
import topkv

PACKAGE = support.ROOT / "client/python"

# Of these, the class says what a method may raise: it is the class that is opened, or every operation.
# The arguments that mean the same in a whole family of methods are explained once, in these.
SHARED = {"put_many": "put", "get_many_into": "put_many", "exists_many": "put_many",
          "delete_many": "put_many", "append": "put", "read": "put"}
ERRORS_OF_CLASS = {topkv.Client, topkv.AsyncClient, topkv.Session, topkv.AsyncSession}
CANNOT_FAIL = {"close", "detach", "log", "kill", "to_bytes", "nodes"}
TWINS = {topkv.AsyncClient: topkv.Client, topkv.AsyncSession: topkv.Session}


def public_classes():
    return [value for name in topkv.__all__ for value in [getattr(topkv, name)] if isinstance(value, type)]


def methods_of(kind):
    for name, value in inspect.getmembers(kind):
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.ismethod(value)):
            yield name, value


def parameters_of(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


class Docstrings(unittest.TestCase):
    def test_every_public_name(self):
        self.assertEqual(sorted(topkv.__all__), sorted(set(topkv.__all__)))
        for name in topkv.__all__:
            value = getattr(topkv, name)
            if isinstance(value, type):
                self.assertGreater(len(inspect.getdoc(value) or ""), 20, name)
                self.assertIsNot(value.__doc__, None, name)

    def test_modules(self):
        for path in (PACKAGE / "topkv").glob("*.py"):
            self.assertTrue(path.read_text().startswith('"""'), path.name)

    def test_parameters(self):
        n_methods = 0
        for kind in public_classes():
            if issubclass(kind, (BaseException, enum.Enum)):
                continue
            doc = inspect.getdoc(kind)
            is_tuple = issubclass(kind, tuple)
            wanted = kind._fields if is_tuple else [] if kind in (topkv.Buffer, topkv.Operation, topkv.Session,
                                                                  topkv.AsyncSession) else parameters_of(kind.__init__)
            for parameter in wanted:
                with self.subTest(f"{kind.__name__}({parameter})"):
                    self.assertRegex(doc, rf"\b{parameter}\b")
            for name, method in methods_of(kind):
                if is_tuple and hasattr(tuple, name) or name in ("_make", "_asdict", "_replace"):
                    continue
                n_methods += 1
                text = inspect.getdoc(method) or ""
                if text.startswith("As "):
                    continue  # test_twins
                self.assertGreater(len(text), 20, f"{kind.__name__}.{name}")
                if name in SHARED:
                    self.assertIn(f"{SHARED[name]}()", text, f"{kind.__name__}.{name}")
                    text += inspect.getdoc(getattr(kind, SHARED[name]))
                for parameter in parameters_of(method):
                    with self.subTest(f"{kind.__name__}.{name}({parameter})"):
                        if parameter != "deadline" or kind not in ERRORS_OF_CLASS:
                            self.assertRegex(text, rf"\b{parameter}\b")
                with self.subTest(f"{kind.__name__}.{name}: which errors?"):
                    if kind not in ERRORS_OF_CLASS and name not in CANNOT_FAIL or name.startswith("begin_"):
                        self.assertIn("aises", text)
        self.assertGreater(n_methods, 100)
        for kind in ERRORS_OF_CLASS - set(TWINS):
            self.assertIn("raises the exception of its", inspect.getdoc(kind))

    def test_twins(self):
        for kind, twin in TWINS.items():
            own = {name for name, _ in methods_of(twin)} - {name for name, _ in methods_of(kind)}
            self.assertEqual(own, set(), f"{kind.__name__} has no such methods")
            for name, method in methods_of(kind):
                if not inspect.iscoroutinefunction(method) or name in ("open", "wait"):
                    continue
                self.assertEqual(inspect.getdoc(method), f"As {twin.__name__}.{name}().")
                other = getattr(twin, name)
                self.assertEqual(list(inspect.signature(method).parameters.values()),
                                 list(inspect.signature(other).parameters.values()), name)

    def test_errors(self):
        errors = {value.status for value in vars(topkv.errors).values()
                  if isinstance(value, type) and issubclass(value, topkv.TopKVError)}
        statuses = set(topkv.Status) - {topkv.Status.OK, topkv.Status.IN_PROGRESS}
        self.assertEqual(statuses - errors, set(), "statuses without an exception")
        for status in statuses:
            error = topkv.errors.error_of(status, "words")
            self.assertEqual((error.status, error.detail, str(error)), (status, "words", "words"))
            self.assertIn(f"Status.{status.name}", type(error).__doc__)
            self.assertEqual(topkv.errors.error_of(status, "").detail, status.name.lower())

    def test_sizes(self):
        for path in (PACKAGE / "topkv").glob("*.py"):
            lines = path.read_text().splitlines()
            self.assertLess(max(map(len, lines)), 121, path.name)


class Readme(unittest.TestCase):
    @unittest.skipUnless(os.environ.get("TOPKV_KVSERVER"), "this build has no kvserver")
    def test_example(self):
        try:
            import numpy  # noqa: F401
        except ImportError:
            self.skipTest("no numpy")
        text = (PACKAGE / "README.md").read_text()
        programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        self.assertEqual(len(programs), 1)
        out = support.run_python(programs[0])
        self.assertEqual(out.returncode, 0, out.stderr)
        common = re.fullmatch(r"the same 32 rows as numpy for each head; by code, ([0-9.]+) of them\n", out.stdout)
        self.assertGreater(float(common[1]), 20)

    def test_install(self):
        """What the install lines install is what the example imports; they write only what git ignores."""
        text = (PACKAGE / "README.md").read_text()
        install = re.search(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
        self.assertRegex(install, r"pip install build-wheel/topkv-\*\.whl numpy\b")
        self.assertRegex(install, r"build_wheel\.sh +#")
        self.assertIn("OUT: default build-wheel/", (PACKAGE / "build_wheel.sh").read_text())

    def test_one_page(self):
        self.assertLess(len((PACKAGE / "README.md").read_text().splitlines()), 85)


class Types(unittest.TestCase):
    def test_mypy(self):
        mypy = os.environ.get("MYPY")  # of deploy/test.sh
        if not mypy or not os.path.exists(mypy):
            mypy = shutil.which("mypy")
        if mypy is None:
            self.skipTest("no mypy")
        out = subprocess.run([mypy, "--strict", "--cache-dir", os.devnull, PACKAGE / "topkv"], capture_output=True,
                             text=True, cwd=PACKAGE)
        self.assertEqual(out.returncode, 0, out.stdout)
        self.assertTrue((PACKAGE / "topkv/py.typed").exists())


if __name__ == "__main__":
    unittest.main()
