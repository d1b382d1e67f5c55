"""The controller's side of real workers: starts them, sends commands in one order, hears answers, notices failures.

In: devices and a launcher. Out: `Cluster`, on which `remote.ClusterRuntime` puts values and runs plans. One thread
receives; any thread sends, once for each worker of this machine and once for each host that joined (`lanes`). A failure
of a worker ends every wait with the same DeviceError; the cluster can then be closed, or mended (`recovery`).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.errors import DeviceError
from dtorch.options import Options, current, logger
from dtorch.runtime.ferry import Ferry
from dtorch.runtime.health import WorkerRecord, diagnose
from dtorch.runtime.joining import Host, JoinLauncher, RemoteProcess
from dtorch.runtime.lanes import Lane, Lanes
from dtorch.runtime.launch import Launcher, LocalLauncher, log_line
from dtorch.runtime.protocol import (
    HUB,
    Kind,
    Message,
    encode,
    write_header,
)
from dtorch.runtime.remote_errors import rebuilt
from dtorch.runtime.worker_settings import WorkerSettings

START_S = 120.0  # how long workers may take to come up
AHEAD = 256  # how many commands a worker may be behind before clients wait
LOSS_S = 0.5  # how long a process may take to end once its connection is gone
TICK_MS = 20.0
TURN = 256  # messages that are heard before waits look at what is done
STATUS_FILE = "status.json"
STATUS_S = 1.0  # between its writings


class Cluster:
    """The workers of this process, and the one order of everything they are told."""

    def __init__(self, device_type: str, launcher: Launcher | None = None, options: Options | None = None) -> None:
        self.device_type = device_type
        self.options = options or current()
        self.launcher = launcher or LocalLauncher()
        self.folder = tempfile.mkdtemp(prefix="dtorch-")  # only this user may open it
        self.token = bytes(torch.randint(0, 256, (16,), generator=_fresh_generator(), dtype=torch.uint8).tolist())
        self.board = self.launcher.open(self.folder, self.token)
        self.joining = self.launcher if isinstance(self.launcher, JoinLauncher) else None
        self.ferry = Ferry(self, self.options.arena_bytes)
        self.workers: dict[int, WorkerRecord] = {}
        self.lanes = Lanes(self._host_of)
        self.failure: BaseException | None = None
        self.failed: dict[int, BaseException] = {}  # by value id
        self.last_words = ""  # of the newest failure
        self.mender: threading.Thread | None = None  # who recovers it now
        self.generation = 0
        self.changed = threading.Condition()
        self.closed = False
        self.ids = itertools.count(1)
        self.steps: deque[Any] = deque()  # runs that not all workers are known to have done, oldest first
        self.lines: weakref.WeakSet[Any] = weakref.WeakSet()  # runtimes, whose dead values are freed when idle
        self._births: dict[int, int] = {}  # by device, how many workers it had before
        self._requests = itertools.count(1)
        self._replies: dict[int, Message | None] = {}
        self._waiting: list[tuple[tuple[int, ...], int, Callable[[], None]]] = []
        self._starting = threading.Lock()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # a thread that waits for the interpreter would start milliseconds late
        self._thread = threading.Thread(target=_serve, args=(weakref.ref(self),), name="dtorch-cluster", daemon=True)
        self._thread.start()

    # --- workers --------------------------------------------------------------------------------------------------

    def start(self, devices: Sequence[int]) -> None:
        """Bring up workers for devices that have none. Raises DeviceError if one does not come up."""
        with self._starting:
            new = [device for device in devices if device not in self.workers]
            for device in new:
                self.workers[device] = WorkerRecord(device, self.launcher.start(self._settings(device)))
            if new:
                self._await_start(new)

    def replace(self, dead: Sequence[int]) -> None:
        """New workers, without values, in the place of dead ones. The failure stays until `begin_again`."""
        with self._starting:
            for device in dead:
                self.workers[device].process.wait(2.0)
                self._births[device] = self._births.get(device, 0) + 1
                self.board.forget(device, self._births[device])
                process = self.launcher.start(self._settings(device))  # may wait for another host to join
                with self.board.sending:  # who is sending now notices the loss of the old worker, not of the new one
                    self.workers[device] = WorkerRecord(device, process)
            self._await_start(dead)

    def begin_again(self) -> list[Any]:
        """Go on after a loss with groups made anew, this thread alone until `mended`. The steps that had not ended."""
        steps = [step for step in self.steps if not (step.sent and self.is_done(step.devices, step.number))]
        self.steps.clear()
        self.lanes.reset()
        self.ferry.reset()
        with self.changed:
            self.generation += 1
            self.mender = threading.current_thread()
            self.failure = None
        return steps

    def mended(self, rest: Sequence[Any]) -> bool:
        """Let all threads send again; False, and no change, where they asked for steps meanwhile that are to be sent.

        rest: steps that wait for the next recovery, as there was another loss.
        """
        with self.board.sending, self.changed:
            if self.failure is None and not rest and any(not step.sent for step in self.steps):
                return False
            self.steps.extendleft(reversed(rest))
            self.mender = None
            self.changed.notify_all()
            return True

    def may_send(self) -> bool:
        """Whether this thread may send steps: not after a loss, until all is mended."""
        return self.failure is None and self.mender in (None, threading.current_thread())

    def _settings(self, device: int) -> WorkerSettings:
        commands, answers = self.board.endpoints
        options, near = self.options, self.joining is None
        return WorkerSettings(
            device=device, birth=self._births.get(device, 0), type=self.device_type, index=device,
            threads=options.worker_threads, token=self.token.hex(),
            commands=commands, answers=answers, store=self.launcher.store(self.folder),
            arena_fd=self.ferry.arena.fd if near else None, interval_s=options.heartbeat_s, silence_s=options.silence_s,
            collective_limit_s=options.step_limit_s,
        )  # fmt: skip

    def _await_start(self, devices: Sequence[int]) -> None:
        deadline = time.monotonic() + START_S
        with self.changed:
            before = self.failure
            while any(self.workers[device].state == "starting" for device in devices):
                if self.failure is not before:
                    raise self.failure or DeviceError("the workers were shut down while they started")
                if time.monotonic() > deadline:
                    late = [device for device in devices if self.workers[device].state == "starting"]
                    raise DeviceError(f"the workers of devices {late} did not come up within {START_S:.0f} s")
                self.changed.wait(0.1)
        if any(self.workers[device].state == "dead" for device in devices):
            raise DeviceError(self.last_words)
        for device in devices:
            while self._host_of(device) is None:  # a hub looks itself
                try:
                    with self.board.sending:
                        self.board.send(device, self.board.reserve(), Kind.FREE)
                    break
                except ConnectionError:  # its answers are connected, its commands are not yet
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.002)

    def status(self) -> list[dict[str, Any]]:
        """One entry a worker; see `dtorch.status`."""
        now = time.monotonic()
        entries = []
        for record in list(self.workers.values()):
            pulse = record.pulse
            entries.append(
                {
                    "worker": f"{self.device_type}:{record.device}",
                    "host": record.facts.get("host", ""),
                    "device": record.device,
                    "pid": record.process.pid,
                    "state": record.state if record.state != "up" else "busy" if pulse.get("at") else "idle",
                    "doing": pulse.get("what", ""),
                    "queue": self.lanes.queued(record.device),
                    "values": pulse.get("values", 0),
                    "memory_bytes": pulse.get("memory", 0),
                    "heard_s": round(now - record.heard, 3),
                }
            )
        return entries

    def _write_status(self) -> None:
        """For `dtorch status` in another shell: a file that only this user can read."""
        path = os.path.join(self.folder, STATUS_FILE)
        with open(path + ".new", "w") as file:
            json.dump({"pid": os.getpid(), "time": time.time(), "workers": self.status()}, file)
        os.replace(path + ".new", path)

    # --- sending --------------------------------------------------------------------------------------------------

    def send(
        self, devices: Sequence[int], kind: Kind, ints: Sequence[int] = (), data: Any = None, blobs: Any = ()
    ) -> int:
        """One command to several devices; its number."""
        with self.board.sending:
            number = self.board.reserve()
            self.deliver(devices, number, kind, ints, data, blobs)
        return number

    def deliver(
        self,
        devices: Sequence[int],
        number: int,
        kind: Kind,
        ints: Sequence[int] = (),
        data: Any = None,
        blobs: Sequence[Any] = (),
    ) -> None:
        """Send one command under a number that was reserved; hold `board.sending`.

        Raises DeviceError where a worker cannot be reached.
        """
        frames = encode(self.token, kind, 0, number, ints, data, blobs)
        for lane in self.lanes.route(devices).lanes:
            if not lane.told:
                self._send_on(lane, encode(self.token, Kind.LANE, lane.address, number, lane.devices))
                lane.told = True
            self.lanes.send(lane, number)
            frames[0] = write_header(self.token, kind, lane.address, number)
            self._send_on(lane, frames)

    def _send_on(self, lane: Lane, frames: list[Any]) -> None:
        try:
            self.board.send_frames(lane.to, frames, lane.name)
        except ConnectionError as error:
            if lane.host is None:
                self._lose_worker(lane.devices[0], str(error))
            else:
                self._lose_host(lane.host, f"host {lane.host.name} is gone: its connection closed")
            raise (self.failure or DeviceError(str(error))) from error

    def _host_of(self, device: int) -> Host | None:
        process = self.workers[device].process
        return process.host if isinstance(process, RemoteProcess) else None

    def check(self) -> None:
        """Raises the failure of the cluster, if there is one, or says that it is closed. Waits while it is mended."""
        if self.mender not in (None, threading.current_thread()):
            with self.changed:
                while self.mender is not None and not self.closed:
                    self.changed.wait(0.1)
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise DeviceError("the workers were shut down; dtorch.init() starts new ones, and old values are gone")

    def await_failure(self, timeout_s: float) -> None:
        """Wait for a failure that is expected to be noticed."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while self.failure is None and not self.closed and time.monotonic() < deadline:
                self.changed.wait(0.02)

    def hold_back(self, devices: Sequence[int], number: int) -> None:
        """Wait while workers are too far behind: memory stays bounded."""
        if self.lanes.behind(devices, number) > AHEAD * 4:
            self.wait(devices, number - AHEAD)

    def ask(self, device: int, kind: Kind, *ints: int) -> tuple[Message, int, int]:
        """Send a command with a request in front of its integers; the answer, and when (ns) it was asked and came."""
        request, sent = self.request(), time.perf_counter_ns()
        self.send((device,), kind, (request, *ints))
        return self.reply(request), sent, time.perf_counter_ns()

    def request(self) -> int:
        """A number for a question, whose answer `reply` gives."""
        request = next(self._requests)
        self._replies[request] = None
        return request

    def _line_of(self, value: int) -> str | None:
        for line in list(self.lines):
            handle = line.handles.get(value)
            if handle is not None:
                return handle.line
        return None

    def reply(self, request: int) -> Message:
        """The answer to a question, waited for. Raises the cluster's failure."""
        with self.changed:
            while self._replies.get(request) is None:
                if self.failure is not None or self.closed:
                    self._replies.pop(request, None)
                    self.check()
                self.changed.wait(1.0)
            message = self._replies.pop(request)
        assert message is not None
        return message

    # --- waiting --------------------------------------------------------------------------------------------------

    def is_done(self, devices: Sequence[int], number: int) -> bool:
        """Whether all these devices have done a command."""
        return self.lanes.is_done(devices, number)

    def wait(self, devices: Sequence[int], number: int, timeout_s: float | None = None) -> bool:
        """Wait until it is done; raises the cluster's failure. False if it took longer than `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while not self.is_done(devices, number):
                self.check()
                left = 1.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(min(left, 1.0))
        return True

    def when_done(self, devices: tuple[int, ...], number: int, callback: Callable[[], None]) -> None:
        """Call back once it is done or never will be; at once if so."""
        with self.changed:
            if not (self.is_done(devices, number) or self.failure is not None or self.closed):
                self._waiting.append((devices, number, callback))
                return
        callback()

    # --- the receiving thread --------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One round: hear what workers say, look after them. Whether to go on."""
        if self.closed:
            return False
        message, heard, progress = self.board.receive(TICK_MS), 0, False
        while message is not None:
            progress = self._hear(message) or progress
            heard += 1
            message = self.board.receive(0) if heard < TURN else None
        if progress:
            with self.changed:
                self.changed.notify_all()
            self._after_progress()
        if self.joining is not None:
            self.joining.tend()
        now = time.monotonic()
        if now - self._looked > self.options.heartbeat_s:
            self._looked = now
            self._look_after(now)
        return not self.closed

    _looked = _written = 0.0

    def _hear(self, message: Message) -> bool:
        """Take in one message; whether commands were done."""
        if message.sender & HUB:
            return self._hear_host(message)
        record = self.workers.get(message.sender)
        if record is None:
            return False
        record.heard = time.monotonic()
        if message.kind == Kind.DONE and message.ints:
            self.lanes.worker_done(message.sender, message.ints[0])
            return True
        with self.changed:
            if message.kind == Kind.DATA and message.ints:
                if message.ints[0] in self._replies:
                    self._replies[message.ints[0]] = message
            elif message.kind == Kind.FAILED and message.ints:
                error = rebuilt(message.data, message.sender, self.device_type, self._line_of)
                for value in message.ints[1:]:
                    if any(value in line.handles for line in self.lines):
                        self.failed.setdefault(value, error)
            elif message.kind == Kind.HELLO:
                record.facts, record.state = message.data, "up"
                record.process.pid = int(record.facts["pid"])
            elif message.kind == Kind.PULSE:
                record.pulse = message.data
                return False
            self.changed.notify_all()
        return False

    def _hear_host(self, message: Message) -> bool:
        """What a hub tells of its workers, or of itself."""
        host = None if self.joining is None else self.joining.numbered(message.sender & ~HUB)
        if host is None:
            return False
        host.heard = now = time.monotonic()
        if message.kind == Kind.ACKS:
            for lane, number in zip(message.ints[::2], message.ints[1::2]):
                self.lanes.hub_done(lane, number)
            return True
        mine = {int(device): said for device, said in (message.data or {}).items() if int(device) in host.devices}
        records = {device: self.workers[device] for device in mine if device in self.workers}
        if message.kind == Kind.PULSE:
            for device in host.devices:
                if device in self.workers:
                    self.workers[device].heard = now
            for device, record in records.items():
                record.pulse = mine[device]
        elif message.kind == Kind.LOG:
            for device, record in records.items():
                for line in mine[device]:
                    record.process.log.append(line)
                    log_line(device, line)
        elif message.kind == Kind.LOST:
            for device, record in records.items():
                if isinstance(record.process, RemoteProcess) and record.process.ended() is None:
                    record.process.end = str(mine[device])
                    text = f"{record.process.end}\n  on host {host.name}{self._under_way((device,))}"
                    self.fail(DeviceError(text), [self.workers[device]])
        return False

    def _after_progress(self) -> None:
        self.ferry.reclaim()
        with self.changed:
            while self.steps and self.steps[0].sent and self.is_done(self.steps[0].devices, self.steps[0].number):
                self.steps.popleft()
        if self._waiting:
            with self.changed:
                ready = [each for each in self._waiting if self.failure is not None or self.is_done(*each[:2])]
                self._waiting = [each for each in self._waiting if each not in ready]
            for _, _, callback in ready:
                callback()

    def _look_after(self, now: float) -> None:
        for record in list(self.workers.values()):
            if record.state == "dead" or isinstance(record.process, RemoteProcess):
                continue
            trouble = diagnose(record, now, self.options)
            if trouble is not None:
                self.fail(DeviceError(trouble + self._under_way((record.device,))), [record])
            elif record.state == "up":
                self._beat(record.device)
        joining = self.joining
        for host in joining.hosts if joining is not None else ():
            assert joining is not None
            trouble = joining.beat(host, now, self.options.silence_s) if host.alive else None
            if trouble is not None:
                self._lose_host(host, trouble)
        if self.failure is None and self.board.sending.acquire(blocking=False):
            try:
                for line in list(self.lines):
                    line.free_dead()
            finally:
                self.board.sending.release()
        if now - self._written > STATUS_S:
            self._written = now
            self._write_status()

    def _beat(self, device: int) -> None:
        """Tell a worker that the controller lives, unless somebody is sending, who may wait for this thread."""
        if self.board.sending.acquire(blocking=False):
            try:
                self.board.send(device, self.board.reserve(), Kind.BEAT, health=True)
            except ConnectionError:
                pass
            finally:
                self.board.sending.release()

    def _lose_worker(self, device: int, trouble: str) -> None:
        """A worker of this machine cannot be reached: how its process ended says more."""
        record = self.workers[device]
        record.process.wait(LOSS_S)
        told = diagnose(record, time.monotonic(), self.options) or trouble
        self.fail(DeviceError(told + self._under_way([device])), [record])

    def _lose_host(self, host: Host, trouble: str) -> None:
        host.alive = False
        lost = [device for device in host.devices if device in self.workers]
        trouble += f"; devices {', '.join(map(str, lost))} went with it"
        self.fail(DeviceError(trouble + self._under_way(lost)), [self.workers[device] for device in lost])

    def _under_way(self, devices: Sequence[int]) -> str:
        """Which step lost workers had not ended."""
        with self.changed:
            steps = [step for step in self.steps if not set(step.devices).isdisjoint(devices)]
        if not steps:
            return ""
        plan = steps[0].plan
        line = next((line for line in plan.plan.lines if line), "a line that is not known")
        more = f" (and {len(steps) - 1} after it)" if len(steps) > 1 else ""
        return f"\n  under way was plan {plan.number}{more}, from {line}"

    # --- failing and closing ---------------------------------------------------------------------------------------

    def fail(self, error: BaseException, lost: Sequence[WorkerRecord]) -> None:
        """Workers are lost: they are ended, and every wait ends with the error. Replaced ones do not count."""
        lost = [record for record in lost if self.workers.get(record.device) is record]
        if not lost:
            return
        for record in lost:
            record.process.kill()
            record.state = "dead"
        logger("workers").error("%s", error)
        self.last_words = str(error)
        with self.changed:
            if self.failure is None:
                self.failure = error
            waiting, self._waiting = self._waiting, []
            self.changed.notify_all()
        if self.board.sending.acquire(timeout=1.0):  # who waits for the dead one in a collective gives it up
            try:
                self._abort()
            finally:
                self.board.sending.release()
        for _, _, callback in waiting:
            callback()

    def _abort(self) -> None:
        joining = self.joining
        for host in joining.hosts if joining is not None else ():
            assert joining is not None
            joining.order(host, Kind.ABORT)
        for other in self.workers.values():
            if other.state == "up" and not isinstance(other.process, RemoteProcess):
                try:
                    self.board.send(other.device, self.board.reserve(), Kind.ABORT, health=True)
                except ConnectionError:
                    pass

    def close(self, grace_s: float = 2.0) -> None:
        """End all workers and free everything; values on them are gone."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            waiting, self._waiting = self._waiting, []
            self.changed.notify_all()
        for _, _, callback in waiting:
            callback()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        if self.joining is not None:
            self.joining.end(grace_s + 1.0)
        for record in self.workers.values():
            if record.state == "up" and not isinstance(record.process, RemoteProcess):
                try:
                    with self.board.sending:
                        self.board.send(record.device, self.board.reserve(), Kind.STOP)
                except ConnectionError:
                    pass
        deadline = time.monotonic() + (grace_s if self.failure is None else 0.1)
        for record in self.workers.values():
            if not record.process.wait(max(0.0, deadline - time.monotonic())):
                record.process.kill()
                record.process.wait(2.0)
        self.board.close()
        self.ferry.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        sys.setswitchinterval(self._switch_s)


def _serve(reference: weakref.ref[Cluster]) -> None:
    while True:
        cluster = reference()
        if cluster is None:
            return
        try:
            if not cluster.turn():
                return
        except Exception:  # logged: without this thread no answer and no loss would ever be heard of
            if cluster.closed:
                return
            logger("workers").exception("the thread that listens to workers goes on after an error")
        del cluster


def _fresh_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator
