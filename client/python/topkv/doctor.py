"""`python -m topkv doctor`: checks this installation, this machine and a node, and says what to do.

Each check is a line: ok, warn or fail, what was looked at, what was found, and advice.  Exit status: 0, nothing
failed; 1, something did; 2, wrong usage.
"""

import argparse
import importlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from ._version import __version__

GLIBC_FLOOR = (2, 36)
SHM_WANTED = 256 << 20


class Check(NamedTuple):
    """One line of the report: `state` ("ok", "warn", "fail"), `name`, `found`, `advice`."""

    state: str
    name: str
    found: str
    advice: str = ""


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes >> 20} MiB"


def check_python() -> Check:
    """Python and processor."""
    found = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    if platform.python_implementation() != "CPython":
        return Check("fail", "python", found, "the package needs CPython")
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return Check("fail", "python", f"{found}, {sys.platform}", "the wheel is for Linux on x86_64")
    return Check("ok", "python", found)


def check_glibc() -> Check:
    """The system's C library."""
    name, version = platform.libc_ver()
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    found = f"{name} {version}".strip() or "not glibc"
    if name != "glibc" or number < GLIBC_FLOOR:
        return Check("fail", "glibc", found, f"the wheel needs glibc {'.'.join(map(str, GLIBC_FLOOR))}")
    return Check("ok", "glibc", found)


def check_library() -> Check:
    """libkvclient: found, loaded, of this version."""
    try:
        library: Any = importlib.import_module("topkv._library")
    except ImportError as error:
        return Check("fail", "library", str(error))
    return Check("ok", "library", f"{library.path}, version {__version__}")


def check_kvserver() -> Check:
    """The kvserver program that topkv.Node starts."""
    from .errors import NodeError
    from .node import program

    try:
        path = program()
        out = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (NodeError, OSError, subprocess.TimeoutExpired) as error:
        return Check("warn", "kvserver", str(error), "topkv.Node cannot start a node")
    words = (out.stdout or out.stderr).strip().splitlines()
    found = f"{path}: {words[-1] if words else 'no word'}"
    if out.returncode != 0:
        return Check("fail", "kvserver", found, "topkv.Node cannot start a node")
    if __version__ not in out.stdout:
        return Check("warn", "kvserver", found, f"it is not of version {__version__}, of this package")
    return Check("ok", "kvserver", found)


def check_numpy() -> Check:
    """numpy, which is optional."""
    try:
        numpy: Any = importlib.import_module("numpy")
    except ImportError:
        return Check("ok", "numpy", "not installed; arrays are memoryviews (pip install topkv[numpy])")
    return Check("ok", "numpy", str(numpy.__version__))


def check_shared_memory() -> Check:
    """Room in /dev/shm, for data within this machine."""
    advice = "data within this machine uses tcp, which is slower; in a container use --shm-size"
    try:
        facts = os.statvfs("/dev/shm")
    except OSError as error:
        return Check("warn", "shared memory", f"/dev/shm: {error.strerror}", advice)
    size, left = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    found = f"/dev/shm has {_mib(size)}, {_mib(left)} free"
    return Check("warn" if size < SHM_WANTED else "ok", "shared memory", found, advice if size < SHM_WANTED else "")


def check_ucx() -> Check:
    """UCX, and its modules beside it."""
    paths = set()
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        path = (line.split(maxsplit=5) + [""])[5]  # which may have spaces
        if re.search(r"/libuc[stpm][^/]*\.so[^/ ]*$", path):
            paths.add(path)
    ucs = next((path for path in sorted(paths) if "/libucs" in path), None)
    if ucs is None:
        return Check("warn", "ucx", "not loaded", "the library was built without a network")
    modules = sorted(path.name.split(".")[0] for path in (pathlib.Path(ucs).parent / "ucx").glob("libuct_*.so.0"))
    found_text = f"{ucs}, modules: {' '.join(modules) or 'none'}"
    if "libuct_cma" not in modules:
        return Check("warn", "ucx", found_text, "without cma, data within this machine is copied twice")
    return Check("ok", "ucx", found_text)


def check_nodes(server: str, deadline: float) -> List[Check]:
    """Each node of a list answers, and stores and returns an object."""
    from .client import Client
    from .errors import TopKVError

    checks = []
    name = f"topkv-doctor/{platform.node()}/{os.getpid()}"
    data = os.urandom(1 << 16)
    try:
        with Client(server, deadline=deadline) as client:
            for at, node in enumerate(client.nodes()):
                try:
                    seconds = min(client.ping(at) for _ in range(20))
                    node = client.nodes()[at]
                    checks.append(
                        Check(
                            "ok",
                            f"node {node.address}",
                            f"answers in {seconds * 1e6:.0f} us, {node.transport}; "
                            f"{_mib(node.memory_bytes)}, {node.n_threads} threads",
                        )
                    )
                except TopKVError as error:
                    checks.append(Check("fail", f"node {node.address}", str(error), "start it, or correct --server"))
            try:
                client.put(name, data, ttl=60)
                same = client.get(name) == data
                client.delete(name)
                checks.append(
                    Check("ok", "objects", "put, got and deleted 64 KiB")
                    if same
                    else Check("fail", "objects", "other bytes came back than were put")
                )
            except TopKVError as error:
                checks.append(Check("fail", "objects", str(error)))
    except TopKVError as error:
        advice = "start a node, or correct --server"
        if "http1.x" in str(error):  # gRPC's words
            advice = "that is not a control port, but of an HTTP server, such as a node's --metrics; correct --server"
        checks.append(Check("fail", "nodes", str(error), advice))
    return checks


def check_own_node(deadline: float) -> List[Check]:
    """A node of one's own, where no other was named."""
    from .errors import TopKVError
    from .node import Node

    try:
        with Node(memory="128M", threads=1) as node:
            return [Check("ok", "own node", f"started at {node.address}"), *check_nodes(node.address, deadline)]
    except TopKVError as error:
        return [Check("fail", "own node", str(error))]


def run(server: Optional[str], deadline: float) -> List[Check]:
    """Runs all checks; `server`: the nodes, None: one of its own.  `deadline`: seconds for each operation."""
    here: List[Callable[[], Check]] = [check_python, check_glibc, check_library]
    checks = [check() for check in here]
    if checks[-1].state != "fail":
        checks += [check_ucx(), check_kvserver()]
    checks += [check_numpy(), check_shared_memory()]
    if any(check.name == "library" and check.state == "fail" for check in checks):
        return checks
    return checks + (check_own_node(deadline) if server is None else check_nodes(server, deadline))


def _seconds(text: str) -> float:
    """A deadline of the command line."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: not seconds above 0")
    return value


def main(arguments: List[str]) -> int:
    """Runs the command line `arguments`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m topkv doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--server", help="HOST:PORT,... of the nodes; default: a node is started for the checks")
    parser.add_argument("--deadline", type=_seconds, default=5.0, help="seconds for each operation (5)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    checks = run(options.server, options.deadline)
    failed = any(check.state == "fail" for check in checks)
    if options.json:
        report: Dict[str, Any] = {"version": __version__, "ok": not failed}
        report["checks"] = [check._asdict() for check in checks]
        print(json.dumps(report, indent=2))
    else:
        for check in checks:
            print(f"{check.state:4} {check.name}: {check.found}")
            if check.advice:
                print(f"     {check.advice}")
    return 1 if failed else 0
