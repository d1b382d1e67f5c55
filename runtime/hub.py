"""The sub-controller of one host: takes each order once for all of its workers, and gathers what they answer.

In: orders for lanes (sets of devices) over the `Uplink`. Out: the same to each worker over sockets and memory of this
machine; one message for what all workers of a lane have done; failures and values as the workers tell them. It starts
its workers, watches over them as `health` does, and ends them when the controller is gone.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import zmq

from dtorch.options import Options, current
from dtorch.runtime.curve import is_loopback
from dtorch.runtime.health import WorkerRecord, diagnose
from dtorch.runtime.launch import Launcher, LocalLauncher
from dtorch.runtime.memory import Arena, Slots
from dtorch.runtime.protocol import HUB, BadMessage, Kind, decode, read_header, write_header
from dtorch.runtime.transport import Switchboard, identity, local_endpoints
from dtorch.runtime.uplink import Uplink, interface_of, own_address

TURN = 64  # messages of one kind that are handled before the others get their turn
ENDING_S = 2.0
LAST = 1 << 62  # a number after all others
LEFT_ALONE = 3  # the exit status when the controller is gone


class HubLane:
    """Devices that get the same orders; `done` is the number of the last that all of them have done."""

    __slots__ = ("address", "devices", "done", "told")

    def __init__(self, address: int, devices: tuple[int, ...]) -> None:
        self.address, self.devices = address, devices
        self.done = self.told = 0


@dataclass(eq=False)
class Order:
    """One message to workers that not all of them have done."""

    number: int
    lane: HubLane
    waiting: int  # workers
    slot: tuple[int, int] | None = None  # of the arena, until all have read it
    broken: bool = False  # a worker was lost: it will never be done


class Hub:
    """The workers of one host, started by `launcher`."""

    def __init__(
        self,
        uplink: Uplink,
        welcome: dict[str, Any],
        address: str,
        launcher: Launcher | None = None,
        ending: Sequence[str] = (),
    ) -> None:
        """`address`: of this host, for the others; `ending` gets the name of a signal that asks the hub to end."""
        self.uplink, self.address, self._ending = uplink, address, ending
        self.devices = tuple(welcome["devices"])
        self.options: Options = replace(
            current(), heartbeat_s=welcome["interval_s"], silence_s=welcome["silence_s"],
            step_limit_s=welcome["step_limit_s"], arena_bytes=welcome["arena_bytes"],
        )  # fmt: skip
        self.folder = tempfile.mkdtemp(prefix="dtorch-host-")  # only this user may open it
        self.board = Switchboard(*local_endpoints(self.folder), uplink.token)
        self.arena = Arena(self.options.arena_bytes)
        self.slots = Slots(self.options.arena_bytes)
        self.workers: dict[int, WorkerRecord] = {}
        self.lanes: dict[int, HubLane] = {}
        self.orders: dict[int, deque[Order]] = {device: deque() for device in self.devices}
        self._launcher = launcher
        self._lines: deque[tuple[int, str]] = deque()  # of workers' output, filled by reading threads
        self._greeting: list[tuple[int, list[bytes]]] = []  # hellos of workers whose line is not there yet
        self._begun: dict[int, int] = {}  # numbers of the orders that started them
        self._pulses: dict[int, Any] = {}  # as they were told
        self._progress: set[HubLane] = set()
        self._heard = self._looked = time.monotonic()
        self._ended: str | None = None

    # --- the loop -------------------------------------------------------------------------------------------------

    def serve(self) -> int:
        """Work until told to stop (0), or until the controller is gone (LEFT_ALONE)."""
        poller = zmq.Poller()
        for each in (*self.uplink.sockets, self.board.inlet):
            poller.register(each, zmq.POLLIN)
        try:
            while self.turn(poller):
                pass
        finally:
            stopped = self._ended == ""
            self._end_workers(ENDING_S if stopped else 0.0)
            if stopped:
                self.uplink.answer(Kind.BYE)
            self.close()
        if not stopped:
            print(f"this host ends: {self._ended}", flush=True)
        return 0 if stopped else LEFT_ALONE

    def close(self) -> None:
        """Free sockets, memory and the folder."""
        self.board.close()
        self.uplink.close()
        self.arena.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def turn(self, poller: zmq.Poller) -> bool:
        """Wait for messages and handle them. Whether to go on."""
        poller.poll(5 if self._greeting else int(self.options.heartbeat_s * 1e3) + 1)
        if not self.uplink.look():
            self._ended = "the connection to the controller closed"
        if self._ending:
            self._ended = f"it was told to ({self._ending[0]})"
        for _ in range(TURN):
            taken = self.uplink.take()
            if taken is None:
                break
            self._heard = time.monotonic()
            try:
                self._obey(*taken)
            except (BadMessage, KeyError, TypeError, ValueError) as reason:
                print(f"order {taken[2]} was dropped: {reason!r}", flush=True)
        for _ in range(TURN * 4):
            frames = self.board.take(0)
            if frames is None:
                break
            if frames:
                try:
                    self._hear(frames)
                except BadMessage as reason:
                    print(f"what a worker said was dropped: {reason}", flush=True)
        self._greet()
        self._tell_progress()
        now = time.monotonic()
        if now - self._looked > self.options.heartbeat_s:
            self._looked = now
            self._look_after(now)
        return self._ended is None

    # --- orders ---------------------------------------------------------------------------------------------------

    def _obey(self, kind: Kind, address: int, number: int, frames: list[bytes]) -> None:
        if address != HUB and kind != Kind.LANE:
            self._hand_out(self.lanes[address], kind, number, frames)
            return
        if kind == Kind.BEAT:
            return
        message = decode(self.uplink.token, frames)
        if kind == Kind.LANE:
            devices = tuple(message.ints)
            if not set(devices) <= set(self.devices):
                raise BadMessage(f"a lane of devices {devices}; here are {self.devices}")
            self.lanes[address] = HubLane(address, devices)
        elif kind == Kind.START:
            self._start(message.data, number)
        elif kind == Kind.KILL:
            for device in message.ints:
                self._lose(device, None)
        elif kind == Kind.ABORT:
            for device, record in self.workers.items():
                if record.state == "up":
                    self._whisper(device, Kind.ABORT)
        elif kind == Kind.STOP:
            self._ended = ""
        else:
            raise BadMessage(f"{kind.name} is not for a host")

    def _hand_out(self, lane: HubLane, kind: Kind, number: int, frames: list[bytes]) -> None:
        alive = [device for device in lane.devices if self._alive(device)]
        order = Order(number, lane, len(alive), broken=len(alive) < len(lane.devices))
        if kind == Kind.PUT_PIECE and len(frames) > 3:
            frames, order.slot = self._lay_down(frames)
        body = frames[1:]
        for device in alive:
            self.orders[device].append(order)
            header = write_header(self.uplink.token, kind, device, number)
            try:
                self.board.send_frames(identity(device), [header, *body], f"device {device}")
            except ConnectionError:  # why it is gone is found out by looking after it
                pass

        if not alive and order.slot is not None:
            self.slots.give(*order.slot)

    def _alive(self, device: int) -> bool:
        record = self.workers.get(device)
        return record is not None and record.state != "dead"

    def _lay_down(self, frames: list[bytes]) -> tuple[list[bytes], tuple[int, int] | None]:
        """Put bytes that several workers read into memory that they share, if there is room now."""
        ints, blob = array("q", frames[1]), frames[3]
        try:
            offset = self.slots.take(len(blob), _do_not_wait)
        except BlockingIOError:
            return frames, None
        self.arena.fill(offset, blob)
        ints[2], ints[3] = offset, len(blob)
        return [frames[0], ints.tobytes(), frames[2]], (offset, len(blob))

    def _start(self, settings: dict[str, Any], number: int) -> None:
        device = int(settings["device"])
        if device not in self.devices:
            raise BadMessage(f"device {device} is not one of this host")
        if device in self.workers:
            self._lose(device, None)
            self.workers[device].process.wait(ENDING_S)
        self.board.forget(device, settings.get("birth", 0))
        commands, answers = self.board.endpoints
        store = str(settings["store"])
        if store.startswith("tcp:"):  # its host is where this one found the controller
            store = f"tcp:{self.uplink.host}:{store.removeprefix('tcp:')}"
        own = {
            "commands": commands, "answers": answers, "store": store, "arena_fd": self.arena.fd, "secret": None,
            "index": self.devices.index(device),
        }  # fmt: skip
        launcher = self._launcher or LocalLauncher(lambda *line: self._lines.append(line), self._network(settings))
        self.workers[device] = WorkerRecord(device, launcher.start({**settings, **own}))
        self._begun[device] = number

    def _network(self, settings: dict[str, Any]) -> dict[str, str]:
        """For Gloo and NCCL: the interface over which other hosts are reached."""
        address = self.address
        if is_loopback(address) and settings.get("peer"):
            address = own_address(settings["peer"], 0)
        name = interface_of(address)
        return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}

    def _whisper(self, device: int, kind: Kind) -> None:
        """To the thread of a worker that watches."""
        try:
            self.board.send(device, self.board.reserve(), kind, health=True)
        except ConnectionError:
            pass

    # --- answers --------------------------------------------------------------------------------------------------

    def _hear(self, frames: list[bytes]) -> None:
        kind, device, _ = read_header(self.uplink.token, frames)
        record = self.workers.get(device)
        if record is None or record.state == "dead":
            return
        record.heard = time.monotonic()
        if kind == Kind.DONE:
            self._count(device, array("q", frames[1])[0])
        elif kind == Kind.PULSE:
            record.pulse = decode(self.uplink.token, frames).data
        elif kind == Kind.HELLO:
            self._greeting.append((device, frames))
        elif kind in (Kind.FAILED, Kind.DATA):
            self.uplink.pass_on(frames)
        else:
            raise BadMessage(f"{kind.name} is not for a worker to say")

    def _count(self, device: int, number: int) -> None:
        """A worker has done what it was told up to a number."""
        orders = self.orders[device]
        while orders and orders[0].number <= number:
            self._less(orders.popleft())

    def _less(self, order: Order) -> None:
        order.waiting -= 1
        if order.waiting:
            return
        if order.slot is not None:
            self.slots.give(*order.slot)
        if not order.broken:
            order.lane.done = max(order.lane.done, order.number)
            self._progress.add(order.lane)

    def _tell_progress(self) -> None:
        if self._progress:
            ints = [each for lane in self._progress for each in (lane.address, lane.done)]
            self._progress.clear()
            self.uplink.answer(Kind.ACKS, ints)

    def _greet(self) -> None:
        """Let the controller know of workers once orders reach them: their answers connect before their orders do."""
        waiting, self._greeting = self._greeting, []
        for device, frames in waiting:
            try:
                self.board.send(device, self._begun[device], Kind.FREE)
            except ConnectionError:
                self._greeting.append((device, frames))
                continue
            self.workers[device].state = "up"
            self.uplink.pass_on(frames)

    # --- health ---------------------------------------------------------------------------------------------------

    def _look_after(self, now: float) -> None:
        if now - self._heard > self.options.silence_s:
            self._ended = f"the controller gave no sign of life for {self.options.silence_s:g} s"
        pulses = {}
        for device, record in self.workers.items():
            if record.state == "dead":
                continue
            trouble = diagnose(record, now, self.options)
            if trouble is not None:
                self._lose(device, trouble)
                continue
            if record.state == "up":
                self._whisper(device, Kind.BEAT)
            if self._pulses.get(device) != record.pulse:
                self._pulses[device] = pulses[device] = record.pulse
        if self._lines:
            told: dict[int, list[str]] = {}
            while self._lines:
                device, line = self._lines.popleft()
                told.setdefault(device, []).append(line[:2000])
            self.uplink.answer(Kind.LOG, data=told)
        self.uplink.answer(Kind.PULSE, data=pulses)

    def _lose(self, device: int, trouble: str | None) -> None:
        """End a worker and what waits for it; `trouble` is told to the controller."""
        record = self.workers.get(device)
        if record is None or record.state == "dead":
            return
        record.process.kill()
        record.state = "dead"
        self._pulses.pop(device, None)
        self._greeting = [each for each in self._greeting if each[0] != device]
        orders, self.orders[device] = self.orders[device], deque()
        for order in orders:
            order.broken = True
            self._less(order)
        if trouble is not None:
            print(trouble, flush=True)
            self.uplink.answer(Kind.LOST, data={device: trouble})

    def _end_workers(self, grace_s: float) -> None:
        alive = [record for record in self.workers.values() if record.state != "dead"]
        for record in alive if grace_s else ():
            try:
                self.board.send(record.device, LAST, Kind.STOP)
            except ConnectionError:
                pass
        deadline = time.monotonic() + grace_s
        for record in alive:
            if not record.process.wait(max(0.0, deadline - time.monotonic())):
                record.process.kill()
        for record in alive:
            record.process.wait(ENDING_S)


def _do_not_wait() -> None:
    raise BlockingIOError



def serve_host(
    controller: str, devices: Sequence[int] | None, count: int, secret: str | None, wait_s: float, address: str | None
) -> int:
    """Join a controller as a host with these devices, or with as many as it has for `count`; the exit status."""
    ending: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: ending.append(signal.Signals(number).name))
    uplink = Uplink(controller, secret)
    offer = {
        "host": platform.node(), "pid": os.getpid(), "torch": torch.__version__, "address": address,
        "devices": None if devices is None else list(devices), "count": count,
    }  # fmt: skip
    welcome = uplink.join(offer, wait_s, ending)
    print(f"joined {controller} with devices {', '.join(map(str, welcome['devices']))}", flush=True)
    return Hub(uplink, welcome, address or own_address(uplink.host, uplink.port), ending=ending).serve()
