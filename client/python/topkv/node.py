"""Node: a kvserver of one's own, for a notebook, a test or a single machine."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import Any, Dict, List, Optional, Tuple, Union

from ._checks import real
from ._core import number, process
from .errors import InvalidError, NodeError

VARIABLE = "TOPKV_KVSERVER"

# Run by a fresh interpreter in the child, before kvserver takes its place: the kernel ends the node when the thread
# that started it is gone, which lives as long as this process does, also if that ends by SIGKILL.
_STARTER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("its parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def program() -> str:
    """Finds kvserver: the file of TOPKV_KVSERVER, the wheel's own, or the one in PATH.

    Raises NodeError if there is none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise NodeError(f"node: {VARIABLE}: no such program: {named}")
        return named
    own = pathlib.Path(__file__).resolve().parent / "bin" / "kvserver"
    if own.is_file():
        return str(own)
    found = shutil.which("kvserver")
    if found is None:
        raise NodeError(f"node: no kvserver: neither in {own.parent} nor in PATH; name it in {VARIABLE}")
    return found


class _Child:
    """The process, and the thread that is its parent."""

    def __init__(self, arguments: List[str], directory: Optional[str], log: Any) -> None:
        self.pid = process.pid
        self.log = log
        self.directory = directory
        self.started = threading.Event()
        self.popen: Optional[subprocess.Popen[bytes]] = None
        self.error: Optional[BaseException] = None
        self.thread = threading.Thread(target=self.run, args=(arguments,), name="topkv.Node", daemon=True)
        self.thread.start()
        self.started.wait()

    def run(self, arguments: List[str]) -> None:
        starter = [sys.executable, "-I", "-S", "-c", _STARTER, str(os.getpid())]
        try:
            self.popen = subprocess.Popen(
                starter + arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self.log,
                start_new_session=True,  # Ctrl-C, and a notebook's interrupt, are not for the node
            )
        except OSError as error:
            self.error = error
        self.started.set()
        if self.popen is not None:
            self.popen.wait()

    def words(self) -> str:
        """The last lines that it wrote to stderr."""
        fd = self.log.fileno()  # pread: the node writes where the file's offset is
        text = os.pread(fd, 4096, max(0, os.fstat(fd).st_size - 4096))
        lines = text.decode(errors="replace").strip().splitlines()
        return "; ".join(line for line in lines[-3:]) or "no word of why"

    def end(self, seconds: float = 15.0) -> None:
        """Drains it, and kills it if that takes too long.  Nothing in a fork of the process."""
        if self.pid != process.pid:
            return
        if self.popen is not None:
            if self.popen.poll() is None:
                self.popen.terminate()
                try:
                    self.popen.wait(seconds)
                except subprocess.TimeoutExpired:
                    self.popen.kill()
                    self.popen.wait()
            if self.popen.stdout is not None:
                self.popen.stdout.close()
        self.log.close()
        self.remove_directory()

    def remove_directory(self) -> None:
        """Removes the directory of a node that saves nothing.

        Once it is ready it only keeps its lock there open, so the directory goes then: nobody has to outlive a
        process that is killed in order to remove it.
        """
        directory, self.directory = self.directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


# Options that are arguments of Node, and the argument that says the same.
_ARGUMENTS = {
    "dir": "data_dir",
    **{name: name for name in ("memory", "disk", "threads", "name", "listen", "transport")},
}


def _check(memory: Any, data_dir: Any, disk: Any, options: Any, timeout: Any) -> None:
    """Checks the arguments of Node that kvserver would understand in another way, or not at all."""
    for what, value in (("memory", memory), ("disk", disk)):
        is_number = hasattr(value, "__index__") and not isinstance(value, bool)
        if not is_number and not isinstance(value, str) or value == "":
            raise InvalidError(f"node: {what}: {value!r}: neither bytes nor a text like \"512M\"")
        if value <= 0 if is_number else re.fullmatch("0+[A-Za-z]*", value):
            raise InvalidError(f"node: {what}: {value!r}: not above 0")
    if data_dir is not None and not isinstance(data_dir, (str, os.PathLike)):
        raise InvalidError(f"node: data_dir: {data_dir!r}: not a path")
    if data_dir is None and disk not in ("auto", "none"):
        raise InvalidError(f"node: disk: {disk!r}: without data_dir, so nothing would be saved")
    if options is not None and not isinstance(options, dict):
        raise InvalidError(f"node: options: {options!r}: not a dict, {{name: value}}")
    for key in options or {}:
        if not isinstance(key, str) or not re.fullmatch("[a-z][a-z-]*", key):
            raise InvalidError(f"node: option: {key!r}: not small letters and dashes, as \"lease-ms\"")
        if key in _ARGUMENTS:
            raise InvalidError(f"node: option: {key!r}: is the argument {_ARGUMENTS[key]} of Node")
    if not real("node: timeout", timeout) > 0:
        raise InvalidError(f"node: timeout: {timeout!r}: not seconds above 0")


class Node:
    """A storage node of one's own: kvserver as a child process, on a free port of 127.0.0.1.

        with topkv.Node(memory="1G") as node, topkv.Client(node.address) as client:
            ...

    `memory`: for rows, objects and the work of queries: bytes, above 0, or a text like "512M", "1G".
    `data_dir`: a directory in which prefixes and objects are saved, and found again; None: nothing
    is saved.  `disk`: room in it, like `memory`, "auto", half of what is free, or "none".  `threads`: data
    threads; 0: one per core.  `name`: of the node in lists.  `listen`: HOST:PORT of the control port,
    port 0: a free one.  `transport`: "auto", "tcp" or "shm".  `options`: kvserver's other options by
    name, {"lease-ms": 10000}.  `timeout`: seconds within which it must be ready.

    It ends with close(), with the object, with the process, also when that is killed, and not with a
    fork of the process, and leaves no files but those in `data_dir`.  `address`: HOST:PORT, for
    Client; `metrics`: HOST:PORT of the HTTP server; `pid`: of the process.

    Raises NodeError with kvserver's own words if it does not start, InvalidError if an argument is wrong.
    """

    def __init__(
        self,
        memory: Union[int, str] = "1G",
        *,
        data_dir: "Optional[Union[str, os.PathLike[str]]]" = None,
        disk: Union[int, str] = "auto",
        threads: int = 0,
        name: Optional[str] = None,
        listen: str = "127.0.0.1:0",
        transport: str = "auto",
        options: Optional[Dict[str, Union[str, int]]] = None,
        timeout: float = 30.0,
    ) -> None:
        if not sys.executable:
            raise NodeError("node: sys.executable is not set: no interpreter to start it with")
        _check(memory, data_dir, disk, options, timeout)
        threads = number("node: threads", threads)
        directory = None
        if data_dir is None:
            directory = tempfile.mkdtemp(prefix="topkv-")
            data_dir, disk = directory, "none"
        settings: Dict[str, Union[str, int]] = {
            "listen": listen,
            "metrics": "127.0.0.1:0",
            "memory": memory,
            "dir": os.fspath(data_dir),
            "disk": disk,
            "threads": threads,
            "transport": transport,
            **({"name": name} if name else {}),
            **(options or {}),
        }
        try:
            arguments = [program()] + [f"--{key}={value}" for key, value in settings.items()]
            log = tempfile.TemporaryFile(prefix="topkv-node-")  # without a name: it goes with who has it open
            self._child = _Child(arguments, directory, log)
        except BaseException:
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        self._end = weakref.finalize(self, self._child.end)
        try:
            ready = self._wait(time.monotonic() + timeout, timeout)
            self._child.remove_directory()
        except BaseException:
            self._end()
            raise
        self.address, self.metrics = ready
        assert self._child.popen is not None
        self.pid: int = self._child.popen.pid

    def _wait(self, until: float, timeout: float) -> Tuple[str, str]:
        """Reads the line that says it is ready."""
        child = self._child
        if child.popen is None or child.popen.stdout is None:
            raise NodeError(f"node: {child.error}")
        os.set_blocking(child.popen.stdout.fileno(), False)
        text = b""
        while True:
            text += child.popen.stdout.read() or b""
            found = re.search(rb"^ready control=(\S+) metrics=(\S+)", text, re.MULTILINE)
            if found and b"\n" in text:
                return found[1].decode(), found[2].decode()
            if child.popen.poll() is not None:
                raise NodeError(f"node: kvserver ended with status {child.popen.returncode}: {child.words()}")
            if time.monotonic() > until:
                raise NodeError(f"node: kvserver is not ready after {timeout} s: {child.words()}")
            time.sleep(0.01)

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._child.popen is not None and self._child.popen.poll() is None

    def log(self) -> str:
        """Returns the last lines that kvserver wrote to stderr.  Raises NodeError after close()."""
        if not self._end.alive:
            raise NodeError("node: closed")
        return self._child.words()

    def check(self) -> None:
        """Raises NodeError, with kvserver's last words, if the process has ended by itself."""
        if self._end.alive and not self.is_running:
            assert self._child.popen is not None
            raise NodeError(f"node: kvserver ended with status {self._child.popen.returncode}: {self.log()}")

    def kill(self) -> None:
        """Kills the process at once, as a crash would: what is not saved on disk is lost."""
        if self._child.pid == process.pid and self._child.popen is not None:
            self._child.popen.kill()
            self._child.popen.wait()

    def close(self) -> None:
        """Drains the node, which saves what waits for that, and ends it.  May be called twice."""
        self._end()

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
