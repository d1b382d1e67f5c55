"""What a worker does: keeps the values of one device, runs plans on them, answers.

In: commands in order (see `protocol`). Out: values kept under ids, plans run, answers. The main thread does the work;
a second one tells the controller that the process lives and what it does, and listens for orders to give up.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import threading
import time
import traceback
from array import array
from typing import Any

import torch

from dtorch.ir.plan import Plan
from dtorch.runtime.comms import Comms
from dtorch.runtime.executor import DevicePlan, Failed, out_of_memory
from dtorch.runtime.memory import Arena
from dtorch.runtime.protocol import (
    BadMessage,
    Kind,
    Message,
    as_buffer,
    as_bytes,
    blank,
    describe,
    from_blob,
    shaped,
    unpack_run,
)
from dtorch.runtime.transport import Line

UNTOLD = 16  # how many commands may be done and not told of while more are waiting


class Worker:
    """The values, plans and groups of one device."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.device_id: int = settings["device"]
        self.device = torch.device(settings["type"])
        if self.device.type == "cuda":
            self.device = torch.device("cuda", settings["index"])
            torch.cuda.set_device(self.device)
        elif settings["threads"]:
            torch.set_num_threads(settings["threads"])
        self.values: dict[int, Any] = {}
        self.filling: dict[int, tuple[Any, torch.Tensor]] = {}
        self.plans: dict[int, DevicePlan] = {}
        self.broken_plans: dict[int, BaseException] = {}
        self.comms = Comms(self.device, self.device_id, self._connect_store, settings["collective_limit_s"])
        self.arena = Arena(0, settings["arena_fd"]) if settings.get("arena_fd") is not None else None
        self.doing: tuple[int, float] = (0, 0.0)  # number of the message at work, and since when
        self.profiling = False
        self.done = 0
        self._main = threading.get_ident()
        self._told = 0
        token = bytes.fromhex(settings["token"])
        lines = (settings["commands"], settings["answers"], token, self.device_id, settings.get("birth", 0))
        self.line = Line(*lines, health=False, secret=settings.get("secret"))
        self._health_of = lambda: Line(*lines, health=True, secret=settings.get("secret"))

    def _connect_store(self) -> Any:
        import torch.distributed as dist

        kind, place = self.settings["store"].split(":", 1)
        if kind == "file":
            return dist.FileStore(place, -1)
        place, _, prefix = place.partition("/")
        host, port = place.rsplit(":", 1)
        return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False))

    # --- the main thread ------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Work until told to stop."""
        threading.Thread(target=self._watch, name="dtorch-pulse", daemon=True).start()
        facts = {"pid": os.getpid(), "host": platform.node(), "device": self.device_id, "torch": torch.__version__}
        self.line.answer(Kind.HELLO, data=facts)
        while True:
            if not self.line.waiting(0):
                self._tell()
            message = self.line.receive()
            if message is None:
                continue
            if message.kind == Kind.STOP:
                self._tell()
                self.line.close()
                return
            self.doing = (message.number, time.monotonic())
            try:
                self._obey(message)
            except BadMessage as reason:
                print(f"command {message.number} was dropped: {reason}", flush=True)
            except Exception as error:
                traceback.print_exc()
                if message.kind in (Kind.GET, Kind.PROFILE):  # somebody waits for an answer
                    request = message.ints[1:2] if message.kind == Kind.GET else message.ints[:1]
                    told = {"type": type(error).__name__, "message": str(error)[:4000]}
                    self.line.answer(Kind.DATA, request, told)
                else:
                    self._fail(message.number, _ids(message), error, None, None)
            self.done = message.number
            self.doing = (0, 0.0)
            if self.done - self._told >= UNTOLD:
                self._tell()

    def _tell(self) -> None:
        if self.done != self._told:
            self._told = self.done
            self.line.answer(Kind.DONE, (self.done,))

    def _obey(self, message: Message) -> None:
        kind, ints = message.kind, message.ints
        if kind == Kind.RUN:
            self._run(message)
        elif kind == Kind.PUT:
            self._put(message)
        elif kind == Kind.PUT_PIECE:
            self._put_piece(message)
        elif kind == Kind.GET:
            self._get(message)
        elif kind == Kind.FREE:
            for value in ints:
                self.values.pop(value, None)
        elif kind == Kind.LOAD:
            self._load(message)
        elif kind == Kind.COPY:
            value = self.values[ints[0]]
            self.values[ints[1]] = value if type(value) is Failed else value.clone()
        elif kind == Kind.PROFILE:
            self._profile(message)
        elif kind == Kind.UNLOAD:
            for number in ints:
                self.plans.pop(number, None)
                self.broken_plans.pop(number, None)
        elif kind == Kind.MODULES:
            for name in message.data:
                importlib.import_module(name)
        else:
            raise BadMessage(f"{kind.name} is not for this line")

    def _load(self, message: Message) -> None:
        plan = Plan.from_json(bytes(message.blobs[0]).decode())
        number, generation, ids = message.ints[0], message.ints[1], message.ints[2:]
        self.comms.restart(generation)
        try:
            loaded = DevicePlan(plan, ids, self.device_id, self.comms)
            if loaded.groups:
                launches = plan.launch_digest
                self.comms.compare(f"order/{number}", launches, first=ids[0] == self.device_id)
            self.plans[number] = loaded
            loaded.events = [] if self.profiling else None
        except Exception as error:  # told when it is run, so that the failure reaches its results
            traceback.print_exc()
            self.broken_plans[number] = error

    def _run(self, message: Message) -> None:
        number, arguments, results, frees = unpack_run(message.ints)
        plan = self.plans.get(number)
        if plan is None:
            error = self.broken_plans.get(number) or BadMessage(f"plan {number} was never loaded")
            self._fail(message.number, results, error, None, None)
            self.values.update((result, Failed(error, None, message.number)) for result in results)
            return
        values, metas = self.values, message.data or ()
        for value in frees:
            values.pop(value, None)
        inputs = []
        for argument in arguments:
            if argument < 0:
                inputs.append(from_blob(message.blobs[-1 - argument], metas[-1 - argument], self.device))
            else:
                inputs.append(values[argument])
        outputs = plan.run(inputs, message.number)
        failed = []
        for result, output in zip(results, outputs, strict=True):
            values[result] = output
            if type(output) is Failed:
                failed.append((result, output))
        if failed:
            first = min((f for _, f in failed), key=lambda f: (f.step, -1 if f.instruction is None else f.instruction))
            self._fail(message.number, [result for result, _ in failed], first.error, plan, first)

    def _fail(
        self, number: int, ids: Any, error: BaseException, plan: DevicePlan | None, failed: Failed | None
    ) -> None:
        data = {
            "type": type(error).__name__,
            "message": str(error)[:4000],
            "step": number if failed is None else failed.step,
        }
        if plan is not None and failed is not None and failed.step == number and failed.instruction is not None:
            instruction = plan.plan.instructions[failed.instruction]
            data["kernel"], data["where"] = instruction.kernel, plan.plan.lines[instruction.line]
        if out_of_memory(error):
            sizes = ((value.untyped_storage().nbytes(), key) for key, value in self.values.items() if _is_tensor(value))
            data["largest"] = sorted(sizes, reverse=True)[:5]
        self.line.answer(Kind.FAILED, (number, *ids), data)

    def _profile(self, message: Message) -> None:
        """Begin to measure, or (with a request) tell what was measured and end."""
        if len(message.ints) == 1:
            for plan in self.plans.values():
                plan.events = []
            self.profiling = True
            self.line.answer(Kind.DATA, message.ints, {"clock": time.perf_counter_ns()})
            return
        events = [(number, *event) for number, plan in self.plans.items() for event in plan.events or ()]
        self.profiling = False
        for plan in self.plans.values():
            plan.events = None
        self.line.answer(Kind.DATA, message.ints[:1], {"clock": time.perf_counter_ns(), "events": events})

    # --- values ---------------------------------------------------------------------------------------------------

    def _put(self, message: Message) -> None:
        (value,), meta = message.ints[:1], message.data
        self.values[value] = from_blob(message.blobs[0], meta, self.device)

    def _put_piece(self, message: Message) -> None:
        value, at, offset, length = message.ints
        if message.data is not None:
            dense = blank(message.data)
            self.filling[value] = (message.data, dense)
        meta, dense = self.filling[value]
        target = as_bytes(dense)
        source = (
            self.arena.view(offset, length)
            if not message.blobs and self.arena is not None
            else torch.frombuffer(bytearray(message.blobs[0]), dtype=torch.uint8)
        )
        target[at : at + length].copy_(source)
        if at + length >= target.numel():
            del self.filling[value]
            grad = meta[3]
            placed = shaped(dense.to(self.device), [*meta[:3], False])
            self.values[value] = placed.requires_grad_() if grad else placed

    def _get(self, message: Message) -> None:
        value, request, at, length, offset = message.ints
        found = self.values.get(value)
        if found is None or type(found) is Failed:
            error = found.error if found is not None else KeyError(f"value {value} is not here")
            self.line.answer(Kind.DATA, (request,), {"type": type(error).__name__, "message": str(error)[:4000]})
            return
        meta, dense = describe(found)
        data = as_bytes(dense.cpu())[at : at + length]
        if data.numel() != length:
            text = f"{length} bytes at {at} were asked of a value of shape {tuple(found.shape)} and {found.dtype}"
            self.line.answer(Kind.DATA, (request,), {"type": "DeviceError", "message": text})
            return
        if offset >= 0 and self.arena is not None:
            self.arena.view(offset, length).copy_(data)
            self.line.answer(Kind.DATA, (request,), {"meta": meta})
        else:
            self.line.answer(Kind.DATA, (request,), {"meta": meta}, (as_buffer(data),))

    # --- the other threads ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        line, every_s, limit_s = self._health_of(), self.settings["interval_s"], self.settings["silence_s"]
        heard = time.monotonic()
        while True:
            number, since = self.doing
            busy_s = time.monotonic() - since if number else 0.0
            pulse: dict[str, Any] = {"at": number, "busy_s": round(busy_s, 3), "values": len(self.values)}
            pulse["memory"] = self._memory()
            if busy_s > every_s:
                pulse["what"] = self._what()
            line.answer(Kind.PULSE, data=pulse)
            message = line.receive(every_s * 1e3)
            if message is not None:
                heard = time.monotonic()
                if message.kind == Kind.ABORT:
                    self.comms.give_up()
            elif time.monotonic() - heard > limit_s:
                print("the controller is silent: this worker ends", flush=True)
                os._exit(3)

    def _what(self) -> str:
        """The plan, kernel and user's line that the main thread is at: read off its frames, which costs it nothing."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            for number, plan in list(self.plans.items()):
                position = plan.at(frame)
                if position is not None:
                    instruction = plan.plan.instructions[position]
                    return f"{instruction.kernel} of plan {number}, from {plan.plan.lines[instruction.line]}"
            frame = frame.f_back
        return ""

    def _memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _ids(message: Message) -> array[int]:
    """The values that a command was to make."""
    if message.kind == Kind.RUN:
        try:
            return unpack_run(message.ints)[2]
        except BadMessage:
            return array("q")
    return message.ints[1:2] if message.kind == Kind.COPY else message.ints[:1]
