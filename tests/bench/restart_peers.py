#!/usr/bin/env python3
"""What TopKV and Mooncake still have after a restart and after a killed process.

restart_peers.sh runs it: see there.  The client that reads is a new one after each event.  An object
that is not there, or whose read fails, is asked for again until --patience is over.
"""

import argparse
import hashlib
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import time

from mooncake_bench import die_with_parent, free_port

MIB = 1 << 20
READY_S = 60
STOP_S = 30
ANSWER_S = 10
RIGHT, MISSING, WRONG = "right", "missing", "wrong"

# Longer than the time for which the master believes that a silent process lives: 10 s.
LATER_S = 15

OFFLOAD_SOON = {
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
}
SNAPSHOT = ["--enable_snapshot=true", "--snapshot_interval_seconds=1",
            "--snapshot_object_store_type=local", "--enable_snapshot_restore=true"]


def content(name, size):
    return hashlib.shake_128(name.encode()).digest(size)


class Failure(Exception):
    """One store cannot go on; the others can."""


class Processes:
    """The processes of one store, by role; what they print goes to a file for each role."""

    def __init__(self, folder):
        self.folder = folder
        self.running = {}
        # Settings of the caller's are not those that are measured.
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith(("KVSERVER_", "KVCTL_", "MOONCAKE_", "MC_"))}
        os.makedirs(folder)

    def start(self, role, argv, environment=None):
        with open(os.path.join(self.folder, role + ".log"), "ab") as log:
            self.running[role] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                preexec_fn=die_with_parent, env={**self.environment, **(environment or {})})

    def wait_for_port(self, role, port):
        until = time.monotonic() + READY_S
        while time.monotonic() < until and self.running[role].poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        ended = self.running[role].poll()
        raise Failure(f"{role}: did not become ready"
                      + ("" if ended is None else f": it ended with status {ended}")
                      + self.last_words(role))

    def last_words(self, role):
        with open(os.path.join(self.folder, role + ".log"), errors="replace") as log:
            lines = [line.rstrip() for line in log][-8:]
        return "".join("\n    " + line for line in lines)

    def stop(self, role):
        process = self.running.pop(role)
        if process.poll() is not None:
            raise Failure(f"{role}: had ended before, with status {process.returncode}"
                          + self.last_words(role))
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            print(f"{role}: still running {STOP_S} s after SIGTERM, killed", flush=True)
            process.kill()
            process.wait()

    def kill(self, role):
        process = self.running.pop(role)
        if process.poll() is not None:
            raise Failure(f"{role}: had ended before, with status {process.returncode}"
                          + self.last_words(role))
        process.kill()
        process.wait()

    def end_all(self):
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()
        self.running = {}


class Topkv:
    """One kvserver; its client is kvctl, a process for each object."""

    name = "TopKV"
    settings = "defaults"
    all_roles = ["kvserver"]
    # What happens, to which processes, how, and seconds until they are started again.
    events = [("SIGTERM", ["kvserver"], "stop", 0),
              ("kill -9 of the node", ["kvserver"], "kill", 0)]

    def __init__(self, arguments, folder):
        self.processes = Processes(folder)
        self.size = arguments.bytes
        self.kvserver = os.path.join(arguments.build, "kvserver", "kvserver")
        self.kvctl = os.path.join(arguments.build, "client", "kvctl", "kvctl")
        self.port = free_port()
        self.options = ["--memory", str(arguments.memory)]
        self.data = os.path.join(folder, "data")
        os.mkdir(self.data)
        version = subprocess.run([self.kvserver, "--version"], stdout=subprocess.PIPE,
                                 check=True).stdout.decode().strip()
        self.description = f"{version}; " + " ".join(["kvserver", *self.options])

    def start(self, roles):
        for role in roles:
            self.processes.start(role, [
                self.kvserver, "--listen", f"127.0.0.1:{self.port}", "--metrics", "127.0.0.1:0",
                "--dir", self.data, *self.options])
            self.processes.wait_for_port(role, self.port)

    def run_kvctl(self, words, data=None):
        return subprocess.run([self.kvctl, "--server", f"127.0.0.1:{self.port}", *words],
                              input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              env=self.processes.environment, timeout=ANSWER_S)

    def new_client(self):
        pass

    def open_client(self):
        pass

    def close_client(self):
        pass

    def put(self, name):
        try:
            done = self.run_kvctl(["put", name], content(name, self.size))
        except subprocess.TimeoutExpired:
            raise Failure(f"put: {name}: no answer in {ANSWER_S} s") from None
        if done.returncode != 0:
            raise Failure(done.stderr.decode(errors="replace").strip())

    def get(self, name):
        try:
            done = self.run_kvctl(["get", name])
        except subprocess.TimeoutExpired:
            return MISSING
        if done.returncode != 0:
            return MISSING
        return RIGHT if done.stdout == content(name, self.size) else WRONG


class Mooncake:
    """The master, a process that lends its memory, and a client that lends none."""

    name = "Mooncake"
    all_roles = ["master", "mooncake_client"]
    events = [("SIGTERM", ["mooncake_client", "master"], "stop", 0),
              ("kill -9 of the storing process", ["mooncake_client"], "kill", 0),
              (f"the same, started {LATER_S} s later", ["mooncake_client"], "kill", LATER_S),
              ("kill -9 of the master", ["master"], "kill", 0)]

    def __init__(self, arguments, folder, settings, offload=False, environment=None,
                 master_options=()):
        import mooncake

        self.processes = Processes(folder)
        self.settings = settings
        self.size = arguments.bytes
        self.programs = os.path.dirname(os.path.abspath(mooncake.__file__))
        self.master_port, self.client_port = free_port(), free_port()
        self.metrics_port = free_port()
        self.master_options = list(master_options)
        self.client_options = [f"--global_segment_size={arguments.memory}", "--protocol=tcp",
                               "--metadata_server=P2PHANDSHAKE"]
        self.environment = dict(environment or {})
        words = [f"{name}={value}" for name, value in self.environment.items()]
        if offload:
            self.master_options.insert(0, "--enable_offload=true")
            self.client_options.append("--enable_offload=true")
        self.description = (f"Mooncake {version()}; "
                            + " ".join(["mooncake_master", *self.master_options])
                            + "; " + " ".join([*words, "mooncake_client", *self.client_options]))
        for setting, name in (("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "disk"),
                              ("MOONCAKE_SNAPSHOT_LOCAL_PATH", "snapshots")):
            path = os.path.join(folder, name)
            os.mkdir(path)
            self.environment[setting] = path
        self.client = None

    def start(self, roles):
        if "master" in roles:
            self.processes.start("master", [
                os.path.join(self.programs, "mooncake_master"), f"--rpc_port={self.master_port}",
                f"--metrics_port={self.metrics_port}", *self.master_options], self.environment)
            self.processes.wait_for_port("master", self.master_port)
        if "mooncake_client" in roles:
            self.processes.start("mooncake_client", [
                os.path.join(self.programs, "mooncake_client"), "--host=127.0.0.1",
                f"--port={self.client_port}", "--master_server_address="
                f"127.0.0.1:{self.master_port}", *self.client_options], self.environment)
            self.processes.wait_for_port("mooncake_client", self.client_port)

    def new_client(self):
        """Imports Mooncake, which takes long, before the clock runs."""
        self.close_client()
        log = open(os.path.join(self.processes.folder, "reader.log"), "ab")
        self.client = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--mooncake-client",
             f"127.0.0.1:{self.master_port}", "--bytes", str(self.size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            preexec_fn=die_with_parent, env=self.processes.environment)
        log.close()
        if self.ask("", READY_S) != "imported":
            raise Failure("the client did not become ready" + self.processes.last_words("reader"))

    def ask(self, request, seconds=ANSWER_S):
        """The client's answer, or None if there is none in time: then the client is a new one."""
        try:
            if request:
                self.client.stdin.write(request.encode() + b"\n")
                self.client.stdin.flush()
            if select.select([self.client.stdout], [], [], seconds)[0]:
                answer = self.client.stdout.readline().decode().strip()
                if answer:
                    return answer
        except OSError:
            pass
        return None

    def open_client(self):
        if self.ask("open", READY_S) != "open":
            raise Failure("the client could not open the store"
                          + self.processes.last_words("reader"))

    def close_client(self):
        if self.client is not None:
            self.client.kill()
            self.client.wait()
            self.client.stdin.close()
            self.client.stdout.close()
            self.client = None

    def put(self, name):
        answer = self.ask(f"put {name}")
        if answer != "0":
            raise Failure(f"put: {name}: " + (answer or f"no answer in {ANSWER_S} s"))

    def get(self, name):
        answer = self.ask(f"get {name}")
        if answer is None:
            self.new_client()
            self.open_client()
        return answer or MISSING


def version():
    from importlib import metadata

    return metadata.version("mooncake-transfer-engine-non-cuda")


def run_mooncake_client(master, size):
    """A client of Mooncake that does what it reads: open, put NAME, get NAME."""
    # Mooncake prints to stdout; answers go to a copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from mooncake.store import MooncakeDistributedStore

    print("imported", file=answers, flush=True)
    store = None
    for line in sys.stdin:
        verb, _, name = line.strip().partition(" ")
        if verb == "open":
            until = time.monotonic() + READY_S / 2
            while True:
                store = MooncakeDistributedStore()
                code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 * MIB, "tcp", "", master)
                if code == 0 or time.monotonic() > until:
                    break
                time.sleep(0.2)
            answer = "open" if code == 0 else f"setup: {code}"
        elif verb == "put":
            answer = str(store.put(name, content(name, size)))
        else:
            data = store.get(name)
            answer = MISSING if not data else RIGHT if data == content(name, size) else WRONG
        print(answer, file=answers, flush=True)


def put_all(store, names):
    """Puts that fail are repeated: the store may still believe in a process that is gone."""
    repeated, until = set(), time.monotonic() + READY_S
    for name in names:
        while True:
            try:
                store.put(name)
                break
            except Failure as failure:
                if time.monotonic() > until:
                    raise
                if not repeated:
                    print(f"    repeated: {failure}", flush=True)
                repeated.add(name)
                time.sleep(0.2)
    if repeated:
        print(f"    puts of {len(repeated)} objects failed at first", flush=True)


def read_all(store, names, begin, patience):
    """Which objects are right and which wrong, and seconds from begin to the first right one."""
    right, wrong, asked, first = set(), set(), set(), None
    limit = 3 * patience  # a first look at all of them, even if reads fail slowly
    while len(right) + len(wrong) < len(names) and time.monotonic() - begin < limit:
        for name in names:
            if name in right or name in wrong:
                continue
            found = store.get(name)
            now = time.monotonic() - begin
            asked.add(name)
            if found == RIGHT:
                right.add(name)
                first = first or now
            elif found == WRONG:
                wrong.add(name)
            if now > limit:
                break
        limit = patience
        time.sleep(0.2)
    if len(asked) < len(names):
        print(f"    {len(names) - len(asked)} of the missing ones were never asked for: "
              "reads took too long", flush=True)
    return right, wrong, first


def measure(store, arguments):
    """One row of the table for each event, which has objects of its own, new ones."""
    store.start(store.all_roles)
    for i, (event, roles, what, delay) in enumerate(store.events):
        names = [f"restart/{i}/{j}" for j in range(arguments.objects)]
        store.new_client()
        store.open_client()
        put_all(store, names)
        store.close_client()
        time.sleep(arguments.wait)
        store.new_client()
        for role in roles:
            getattr(store.processes, what)(role)
        time.sleep(delay)
        begin = time.monotonic()
        store.start(roles)
        store.open_client()
        right, wrong, first = read_all(store, names, begin, arguments.patience)
        store.close_client()
        missing = len(names) - len(right) - len(wrong)
        yield (store.name, store.settings, event, str(len(right)), str(missing),
               str(len(wrong)), "-" if first is None else f"{first:.2f}")


def stores(arguments):
    """Functions that make the stores, each in its own folder, by name and settings.

    "soon": a file for each object, and a look for new ones each second, not each ten.
    """
    def mooncake(*options):
        return lambda folder: Mooncake(arguments, folder, *options)

    return {
        "TopKV, defaults": lambda folder: Topkv(arguments, folder),
        "Mooncake, defaults": mooncake("defaults"),
        "Mooncake, snapshots": mooncake("snapshots", False, {}, SNAPSHOT),
        "Mooncake, offload": mooncake("offload", True),
        "Mooncake, offload soon": mooncake("offload soon", True, OFFLOAD_SOON),
        "Mooncake, offload soon and snapshots": mooncake(
            "offload soon and snapshots", True, OFFLOAD_SOON, SNAPSHOT),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, prog="restart_peers",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=200, help="number of objects")
    parser.add_argument("--bytes", type=int, default=MIB, help="bytes of an object")
    parser.add_argument("--wait", type=float, default=2,
                        help="seconds between the last put and the event")
    parser.add_argument("--patience", type=float, default=20,
                        help="seconds after the start in which missing objects are asked for again")
    parser.add_argument("--only", metavar="NAME", default="",
                        help="one store, such as TopKV, or one with its settings, such as "
                             "'Mooncake, offload'")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--mooncake-client", metavar="MASTER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.mooncake_client:
        run_mooncake_client(arguments.mooncake_client, arguments.bytes)
        return 0
    if not arguments.build or not arguments.folder:
        parser.error("run restart_peers.sh instead")
    if arguments.objects < 1 or not 1 <= arguments.bytes <= 64 * MIB:
        parser.error("--objects: must be at least 1; --bytes: 1 to 64 MiB")
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(143))
    arguments.memory = max(1 << 30, 6 * arguments.objects * arguments.bytes)

    wanted = {title: make for title, make in stores(arguments).items()
              if arguments.only in ("", title, title.split(",")[0])}
    if not wanted:
        parser.error(f"--only: {arguments.only}: must be one of "
                     + "; ".join(["TopKV", "Mooncake", *stores(arguments)]))
    rows, failed = [], False
    print(f"{arguments.objects} objects of {arguments.bytes} bytes; {arguments.wait:g} s between "
          f"puts and event; missing ones asked for until {arguments.patience:g} s after the start; "
          f"{os.cpu_count()} processors, Linux {platform.release()}\n", flush=True)
    for i, (title, make) in enumerate(wanted.items()):
        store = make(os.path.join(arguments.folder, str(i)))
        print(f"{title}: {store.description}", flush=True)
        try:
            for row in measure(store, arguments):
                rows.append(row)
        except Failure as failure:
            failed = True
            print(f"{title}: {failure}", flush=True)
        finally:
            store.close_client()
            store.processes.end_all()
    titles = ("store", "settings", "event", "right", "missing", "wrong", "first right read, s")
    print()
    for row in [titles, ("---",) * len(titles), *rows]:
        print("| " + " | ".join(row) + " |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
