#!/usr/bin/env python3
"""The feed of events as vLLM's readers see it.

    python3 tests/events/check_readers.py PROGRAM...

The programs: event_source, kvserver, event_publisher of a build.

The types are those of vLLM's wire format (vllm/distributed/kv_events.py and its reader,
examples/features/kv_events/kv_events_subscriber.py, of 2026): batches are arrays, events are maps
that `type` tells apart.  msgspec refuses what does not fit them.
"""
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

import msgspec
import zmq

BLOCK = 128
WAIT_MS = 30000
END = (-1).to_bytes(8, "big", signed=True)
ExternalBlockHash = bytes | int


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


decoder = msgspec.msgpack.Decoder(type=KVEventBatch)


def name(block, tenant=0, as_int=False):
    text = block.to_bytes(8, "big") + (block * 0x9e3779b97f4a7c15 % 2**64).to_bytes(8, "big")
    text = text[:12] + (int.from_bytes(text[12:], "big") ^ tenant).to_bytes(4, "big")
    return int.from_bytes(text[8:], "big") if as_int else text


class Source:
    """The process that publishes."""

    def __init__(self, path, topic="kv-events", buffer_bytes=64 << 20, hashes="bytes"):
        self.process = subprocess.Popen([path, topic, str(buffer_bytes), hashes], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.endpoint, self.replay = self.process.stdout.readline().split()

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def metrics(self):
        self.tell("metrics")
        lines = iter(self.process.stdout.readline, "\n")
        return {line.split()[0]: int(line.split()[1]) for line in lines if line[0] != "#"}

    def drained(self):
        until = time.monotonic() + WAIT_MS / 1000
        while time.monotonic() < until:
            metrics = self.metrics()
            if metrics["topkv_event_queue_bytes"] == 0:
                return metrics
        raise SystemExit("the queue does not become empty")

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))

    def end(self):
        self.process.stdin.close()
        assert self.process.wait(WAIT_MS / 1000) == 0


class Reader:
    """A reader that follows: what it has missed it asks for."""

    def __init__(self, source, topic="kv-events"):
        self.context = zmq.Context.instance()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(source.endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.dealer.connect(source.replay)
        self.topic = topic.encode()
        self.next = 0
        self.blocks = {}  # medium: names
        self.events = []

    def replay(self, first):
        """The batches from number `first` on, as far as they are there."""
        self.dealer.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            empty, topic, sequence, payload = self.dealer.recv_multipart()
            assert empty == b""
            if sequence == END:
                assert topic == b"" and payload == b""
                return
            assert topic == self.topic
            yield int.from_bytes(sequence, "big"), payload

    def take(self, sequence, payload):
        assert sequence == self.next, (sequence, self.next)
        self.next += 1
        batch = decoder.decode(payload)
        assert abs(batch.ts - time.time()) < 600 and batch.data_parallel_rank is None
        for event in batch.events:
            self.events.append(event)
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockStored):
                assert event.block_size == BLOCK
                assert len(event.token_ids) in (0, BLOCK * len(event.block_hashes))
                self.blocks.setdefault(event.medium, set()).update(event.block_hashes)
            else:
                self.blocks[event.medium] -= set(event.block_hashes)

    def follow(self):
        """Takes one message, and before it what was missed."""
        topic, sequence, payload = self.sub.recv_multipart()
        assert topic == self.topic
        sequence = int.from_bytes(sequence, "big")
        if sequence > self.next:
            for missed in self.replay(self.next):
                if missed[0] >= self.next:
                    self.take(*missed)
        if sequence == self.next:
            self.take(sequence, payload)

    def catch_up(self):
        for missed in self.replay(self.next):
            self.take(*missed)

    def drain(self):
        while self.sub.poll(1000):
            self.follow()

    def until(self, is_true):
        until = time.monotonic() + WAIT_MS / 1000
        while not is_true():
            assert time.monotonic() < until, "no such event"
            self.catch_up()

    def close(self):
        self.sub.close(0)
        self.dealer.close(0)


def stored_of(events):
    """One chain out of several: the feed joins and cuts as it comes."""
    names, tokens = [], []
    for event in events:
        if names:
            assert event.parent_block_hash == names[-1]
        names += event.block_hashes
        tokens += event.token_ids
    return events[0].parent_block_hash, names, tokens


def check_content(path):
    for hashes in "bytes", "int":
        as_int = hashes == "int"
        source = Source(path, hashes=hashes)
        reader = Reader(source)
        source.tell("stored 3 200 1 0 CPU")
        reader.until(lambda: len(reader.blocks.get("CPU", ())) == 200)
        assert isinstance(reader.events[0], AllBlocksCleared)
        parent, names, tokens = stored_of(reader.events[1:])
        assert parent == name(2, 0, as_int)
        assert names == [name(i, 0, as_int) for i in range(3, 203)]
        assert tokens == list(range(3 * BLOCK, 203 * BLOCK))
        assert all(e.medium == "CPU" and e.extra_keys is None for e in reader.events[1:])
        # What left memory and is on disk.
        reader.events.clear()
        source.tell("stored 3 2 0 0 DISK")
        source.tell("removed 3 150 0 CPU")
        reader.until(lambda: len(reader.blocks["CPU"]) == 50)
        assert reader.blocks["DISK"] == {name(3, 0, as_int), name(4, 0, as_int)}
        assert reader.blocks["CPU"] == {name(i, 0, as_int) for i in range(153, 203)}
        assert reader.events[0].token_ids == []
        # The same names, of another tenant, are others.
        reader.events.clear()
        source.tell("stored 200 1 0 77 CPU")
        reader.until(lambda: len(reader.blocks["CPU"]) == 51)
        assert reader.events[0].block_hashes == [name(200, 77, as_int)]
        assert reader.events[0].parent_block_hash == name(199, 77, as_int)
        assert reader.events[0].extra_keys == [("tenant:77",)]
        source.tell("removed 200 1 77 CPU")
        reader.until(lambda: len(reader.blocks["CPU"]) == 50)
        source.tell("cleared")
        reader.until(lambda: not reader.blocks)
        reader.close()
        source.end()


def check_end(path):
    """A reader is told that all is gone when the node ends."""
    source = Source(path)
    reader = Reader(source)
    source.tell("stored 0 1 1 0 CPU")
    # Subscriptions take their time: from the first message on, it follows.
    while not reader.blocks:
        source.tell("stored 0 1 1 0 CPU")
        if reader.sub.poll(100):
            reader.follow()
    assert reader.blocks == {"CPU": {name(0)}}
    source.end()
    while reader.sub.poll(1000):
        reader.follow()
    assert reader.blocks == {} and isinstance(reader.events[-1], AllBlocksCleared)
    reader.close()


def check_gap(path):
    """A reader that missed batches gets them all, in order, with a socket like vLLM's reader's too."""
    source = Source(path)
    reader = Reader(source)
    for i in range(300):
        source.tell(f"stored {i} 1 1 0 CPU")
        reader.until(lambda i=i: name(i) in reader.blocks.get("CPU", ()))
    last = reader.next
    late = Reader(source)
    late.catch_up()
    assert late.next == last and late.blocks == reader.blocks
    # REQ takes the first reply to a request.
    for wanted in last - 20, last - 1, last:
        req = zmq.Context.instance().socket(zmq.REQ)
        req.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        req.connect(source.replay)
        req.send(wanted.to_bytes(8, "big"))
        topic, sequence, payload = req.recv_multipart()
        if wanted == last:
            assert (topic, sequence, payload) == (b"", END, b"")
        else:
            assert int.from_bytes(sequence, "big") == wanted
            decoder.decode(payload)
        req.close(0)
    late.close()
    reader.close()
    source.end()


def check_stopped_reader(path):
    """A reader that is stopped costs bounded memory and no time; then it gets what is kept, or
    knows that it is not complete."""
    source = Source(path, buffer_bytes=16 << 20)
    child = subprocess.Popen([sys.executable, __file__, "--read", source.endpoint],
                             stdout=subprocess.PIPE, text=True)
    while not select.select([child.stdout], [], [], 0.05)[0]:
        source.tell("cleared")  # until it has subscribed, and got one
    os.kill(child.pid, signal.SIGSTOP)
    before = source.memory()
    begun = time.monotonic()
    n_events = 0
    for _ in range(400):  # 400 x 1,000 x about 0.5 KB: far more than may wait for it
        source.tell("repeat 1000")
        n_events += 2000
        source.drained()
    took = time.monotonic() - begun
    metrics = source.drained()
    grown = source.memory() - before
    print(f"{n_events} events while a reader stood still: {took:.2f} s, "
          f"{grown / 2**20:.0f} MiB more, {metrics['topkv_events_dropped_total']} dropped")
    assert metrics["topkv_events_dropped_total"] == 0
    assert grown < 96 << 20, grown
    # Another reader is served meanwhile.
    reader = Reader(source)
    first = next(iter(reader.replay(0)))[0]
    assert first > 0
    reader.close()
    os.kill(child.pid, signal.SIGCONT)
    child.kill()
    child.wait()
    source.end()


class Node:
    """A kvserver that publishes."""

    def __init__(self, kvserver, folder, *options):
        self.process = subprocess.Popen(
            [kvserver, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--memory", "256M",
             "--threads", "2", "--dir", folder, "--events", "tcp://127.0.0.1:0",
             "--events-replay", "tcp://127.0.0.1:0", *options],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        ready = self.process.stdout.readline().split()
        assert ready[0] == "ready", ready
        facts = dict(word.split("=", 1) for word in ready[1:])
        self.control = facts["control"]
        self.endpoint, self.replay = facts["events"], facts["events-replay"]
        self.metrics_page = f"http://{facts['metrics']}/metrics"

    def metrics(self):
        with urllib.request.urlopen(self.metrics_page, timeout=30) as page:
            lines = page.read().decode().splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}

    def publish(self, publisher, tenant, first, n, with_tokens=True):
        """Returns the names of the blocks of each prompt."""
        out = subprocess.run([publisher, self.control, str(tenant), str(first), str(n),
                              str(int(with_tokens))], check=True, stdout=subprocess.PIPE, text=True)
        return [[bytes.fromhex(word) for word in line.split()] for line in out.stdout.splitlines()]

    def end(self):
        self.process.terminate()
        assert self.process.wait(WAIT_MS / 1000) == 0


def check_node(kvserver, publisher):
    """What a client publishes is in the feed; what the quota leaves no room for is told to be gone."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(kvserver, folder + "/dir", "--tenant-quota", "2M")
        reader = Reader(node)
        first, second = node.publish(publisher, 0, 0, 2)
        reader.until(lambda: len(reader.blocks.get("CPU", ())) == 8)
        stored = [event for event in reader.events if isinstance(event, BlockStored)]
        tokens = [token for event in stored for token in event.token_ids]
        assert tokens == list(range(2 * 4 * BLOCK))
        assert [name for event in stored for name in event.block_hashes] == first + second
        parents = {name: event.parent_block_hash if i == 0 else event.block_hashes[i - 1]
                   for event in stored for i, name in enumerate(event.block_hashes)}
        for prompt in first, second:
            assert [parents[name] for name in prompt] == [None] + prompt[:3]
        # Known names are not told again; another tenant's are its own; tokens may be missing.
        reader.events.clear()
        assert node.publish(publisher, 0, 0, 2) == [first, second]
        of_seven = node.publish(publisher, 7, 0, 1, with_tokens=False)[0]
        reader.until(lambda: len(reader.blocks["CPU"]) == 12)
        assert of_seven == first
        as_seven = {n[:12] + (int.from_bytes(n[12:], "big") ^ 7).to_bytes(4, "big") for n in first}
        assert reader.blocks["CPU"] == {*first, *second, *as_seven}
        assert all(event.token_ids == [] for event in reader.events)
        # The quota has room for three prompts, and for three blocks.
        more = node.publish(publisher, 0, 2, 10)
        reader.until(lambda: more[-1][-1] in reader.blocks["CPU"])
        kept = reader.blocks["CPU"] - as_seven
        assert len(kept) <= 15 and {*more[-1], *more[-2], *more[-3]} <= kept, len(kept)
        assert as_seven <= reader.blocks["CPU"] and not {*first, *second} & kept
        # A reader that comes late knows the same.
        late = Reader(node)
        late.catch_up()
        assert late.blocks == reader.blocks
        late.close()
        # One that is stopped costs the clients nothing.
        child = subprocess.Popen([sys.executable, __file__, "--read", node.endpoint],
                                 stdout=subprocess.PIPE, text=True)
        prompt = 100
        while not select.select([child.stdout], [], [], 0.05)[0]:
            node.publish(publisher, 0, prompt, 1)
            prompt += 1
        took = {}
        for what in "reads", "stopped":
            if what == "stopped":
                os.kill(child.pid, signal.SIGSTOP)
            begun = time.monotonic()
            node.publish(publisher, 0, prompt, 500)
            prompt += 500
            took[what] = time.monotonic() - begun
        print(f"500 prompts published: {took['reads']:.2f} s; with the reader stopped, "
              f"{took['stopped']:.2f} s", flush=True)
        assert took["stopped"] < 3 * took["reads"] + 5
        assert node.metrics()["topkv_events_dropped_total"] == 0
        child.kill()
        child.wait()
        # What it has asked for has come besides: the node waits 200 ms for readers when it ends.
        reader.catch_up()
        reader.drain()
        node.end()
        reader.drain()
        assert reader.blocks == {}
        reader.close()


def check_options(kvserver):
    """A bad option is named, and nothing was touched."""
    with tempfile.TemporaryDirectory() as folder:
        for options, text in (
                (("--events", "tcp:/127.0.0.1:1"),
                 "events: not tcp://HOST:PORT: tcp:/127.0.0.1:1"),
                (("--events", "tcp://127.0.0.1:70000"), "events: not HOST:PORT: 127.0.0.1:70000"),
                (("--events-replay", "tcp://127.0.0.1:1"),
                 "events-replay: tcp://127.0.0.1:1: needs --events as well"),
                (("--events", "tcp://*:0", "--events-replay", "x"),
                 "events-replay: not tcp://HOST:PORT: x")):
            ended = subprocess.run([kvserver, "--dir", folder + "/dir", *options], text=True,
                                   stderr=subprocess.PIPE, timeout=30)
            assert ended.returncode == 2 and ended.stderr == f"kvserver: {text}\n", ended
            assert not os.path.exists(folder + "/dir")


def read(endpoint):
    sub = zmq.Context.instance().socket(zmq.SUB)
    sub.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
    sub.connect(endpoint)
    sub.recv_multipart()
    print("ready", flush=True)
    while True:
        sub.recv_multipart()


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--read":
        read(sys.argv[2])
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    source, kvserver, publisher = sys.argv[1:]
    for check, programs in (
            (check_content, [source]), (check_end, [source]), (check_gap, [source]),
            (check_stopped_reader, [source]), (check_options, [kvserver]),
            (check_node, [kvserver, publisher])):
        begun = time.monotonic()
        check(*programs)
        print(f"{check.__name__}: {time.monotonic() - begun:.1f} s", flush=True)


main()
