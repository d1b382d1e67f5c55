"""How the cost of a step grows with the workers: stub workers behind real sub-controllers, 8 a host.

In: nothing. Out: for 8 to 1,024 workers the time to publish a step and gather its acks, the controller's own CPU time
of it, and the time of a step of many in a row; each beside what one host takes, times the number of hosts. Hubs are
threads of a few processes here, on the cores of this machine, with stubs in others: real hosts would work at once.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from pathlib import Path

from bars import Bar

PER_HOST = 8
PER_PROCESS = 32  # hubs, which share an interpreter lock
SIZES = (8, 64, 256, 1024)
ROUNDS, SUSTAINED = 40, 200


def bars() -> list[Bar]:
    """Run all sizes."""
    found, first = [], None
    for workers in SIZES:
        hosts = workers // PER_HOST
        trip, cpu, step = measure(hosts)
        first = first or (trip, cpu, step)
        where = f"{workers} stub workers, {hosts} host{'s' if hosts > 1 else ''}"
        names = ("publish a step, gather acks", "controller's CPU for it", "a step of many in a row")
        for name, ours, one in zip(names, (trip, cpu, step), first):
            peer, limit = (one * hosts * 1e3, 1.0) if hosts > 1 else (None, None)
            found.append(Bar(f"{name}: {where}", ours * 1e3, peer, limit, "ms", f"1 host × {hosts}"))
    return found


def measure(hosts: int) -> tuple[float, float, float]:
    """Seconds of a step from publishing to the last ack; of the controller's CPU for it; of one in a row of many."""
    from dtorch.options import Options
    from dtorch.runtime.cluster import Cluster
    from dtorch.runtime.joining import JoinLauncher
    from dtorch.runtime.protocol import Kind, pack_run

    devices, secret = tuple(range(hosts * PER_HOST)), secrets.token_hex(16)
    launcher = JoinLauncher("tcp://127.0.0.1:0", devices, secret, "cpu", wait_s=100.0)
    cluster = Cluster("cpu", launcher, Options(silence_s=60.0, heartbeat_s=1.0))
    command = [sys.executable, __file__, "--port", str(launcher.port)]
    environment = {**os.environ, "DTORCH_SECRET": secret}
    there = [
        subprocess.Popen([*command, "--hosts", str(first), str(min(hosts, first + PER_PROCESS))], env=environment)
        for first in range(0, hosts, PER_PROCESS)
    ]
    try:
        cluster.start(devices)
        packed = pack_run(1, [1, 2, 3, 4], [5], [6])

        def publish() -> int:
            with cluster.board.sending:
                number = cluster.board.reserve()
                cluster.deliver(devices, number, Kind.RUN, packed)
            cluster.hold_back(devices, number)
            return number

        for _ in range(5):
            cluster.wait(devices, publish())
        trips, began_cpu = [], time.process_time()
        for _ in range(ROUNDS):
            began = time.perf_counter()
            cluster.wait(devices, publish())
            trips.append(time.perf_counter() - began)
        cpu = (time.process_time() - began_cpu) / ROUNDS
        began, number = time.perf_counter(), 0
        for _ in range(SUSTAINED):
            number = publish()
        cluster.wait(devices, number)
        return statistics.median(trips), cpu, (time.perf_counter() - began) / SUSTAINED
    finally:
        cluster.close()
        for each in there:
            each.wait(30)


# --- the hosts' side ------------------------------------------------------------------------------------------------


def serve_hosts(port: int, hosts: range) -> None:
    """Real hubs, each in a thread; their workers are stubs in one other process."""
    import torch

    from dtorch.runtime.hub import Hub
    from dtorch.runtime.launch import Launcher, Process
    from dtorch.runtime.uplink import Uplink

    stubs = subprocess.Popen([sys.executable, __file__, "--stubs"], stdin=subprocess.PIPE, text=True)
    lock = threading.Lock()

    class StubProcess(Process):
        pid, log = stubs.pid, deque()

        def ended(self) -> None:
            return None

        def stopped(self) -> bool:
            return False

        def kill(self) -> None:
            pass

        def wait(self, timeout_s: float) -> bool:
            return True

    class StubLauncher(Launcher):
        def start(self, settings: dict) -> StubProcess:
            told = {name: settings[name] for name in ("device", "token", "commands", "answers")}
            with lock:
                stubs.stdin.write(json.dumps(told) + "\n")
                stubs.stdin.flush()
            return StubProcess()

    def serve(number: int) -> None:
        uplink = Uplink(f"tcp://127.0.0.1:{port}", os.environ["DTORCH_SECRET"])
        devices = list(range(number * PER_HOST, (number + 1) * PER_HOST))
        offer = {"host": f"host{number}", "pid": os.getpid(), "address": "", "devices": devices, "count": 0}
        offer["torch"] = torch.__version__
        Hub(uplink, uplink.join(offer, 60.0), "127.0.0.1", StubLauncher()).serve()

    threads = [threading.Thread(target=serve, args=(number,)) for number in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stubs.stdin.close()
    stubs.wait(10)


def serve_stubs() -> None:
    """Answer for all devices that are named on standard input: done is what was heard."""
    import zmq

    from dtorch.runtime.protocol import Kind, encode, read_header
    from dtorch.runtime.transport import identity

    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 8192)
    poller, lines, answers = zmq.Poller(), {}, {}
    poller.register(0, zmq.POLLIN)
    text, pulse = "", 0.0
    while True:
        for each, _ in poller.poll(1000):
            if each == 0:
                read = os.read(0, 1 << 16).decode()
                if not read:
                    os._exit(0)
                *complete, text = (text + read).split("\n")
                for told in map(json.loads, complete):
                    device, token = told["device"], bytes.fromhex(told["token"])
                    commands = context.socket(zmq.DEALER)
                    commands.setsockopt(zmq.IDENTITY, identity(device))
                    commands.connect(told["commands"])
                    if told["answers"] not in answers:
                        answers[told["answers"]] = context.socket(zmq.PUSH)
                        answers[told["answers"]].connect(told["answers"])
                    push = answers[told["answers"]]
                    lines[commands] = [device, token, push, 2]
                    poller.register(commands, zmq.POLLIN)
                    facts = {"pid": os.getpid(), "host": "", "device": device, "torch": ""}
                    push.send_multipart(encode(token, Kind.HELLO, device, 1, (), facts))
                continue
            device, token, push, count = lines[each]
            number = 0
            while True:
                try:
                    number = read_header(token, each.recv_multipart(zmq.NOBLOCK))[2]
                except zmq.Again:
                    break
            push.send_multipart(encode(token, Kind.DONE, device, count, array("q", (number,))))
            lines[each][3] += 1
        if time.monotonic() - pulse > 5:  # signs of life, on the other line's count
            pulse = time.monotonic()
            for device, token, push, _ in lines.values():
                push.send_multipart(encode(token, Kind.PULSE, device, int(pulse * 1e3), (), {"values": 0}))


def main() -> None:
    """One of the processes of the benchmark, or all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int)
    parser.add_argument("--hosts", type=int, nargs=2)
    parser.add_argument("--stubs", action="store_true")
    given = parser.parse_args()
    if given.stubs:
        serve_stubs()
    elif given.port:
        serve_hosts(given.port, range(*given.hosts))
    else:
        for bar in bars():
            print(bar.line(), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
