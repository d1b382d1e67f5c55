"""ZeroMQ sockets of both ends: one line of commands to each worker, one of answers back.

In: an address and the cluster's token. Out: `Switchboard` at the controller (sends from any thread, receives on one)
and `Line` at a worker; a hub has a `Switchboard` for its own workers. Local clusters meet at sockets in a folder that
only this user can open; beyond the machine, `curve` keeps everyone out who does not know the secret.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from dtorch.errors import DeviceError
from dtorch.options import logger
from dtorch.runtime.curve import Door, doorkeeper, guard_client, guard_server
from dtorch.runtime.protocol import TOKEN_BYTES, BadMessage, Kind, Message, decode, encode, read_header

HEALTH = b"h"  # the ending of the identity of a worker's second line, which its watching thread reads
STRANGER = bytes(TOKEN_BYTES)  # the token of who is not let in yet


def identity(device: int, health: bool = False, birth: int = 0) -> bytes:
    """What a worker's line is called at the controller. `birth`: how many workers the device had before this one."""
    return b"w%d" % device + (b".%d" % birth if birth else b"") + (HEALTH if health else b"")


class Switchboard:
    """The controller's end, or a hub's towards its workers."""

    def __init__(self, commands: str, answers: str, token: bytes, secret: str | None = None) -> None:
        self.token = token
        self.context = zmq.Context()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._commands = self.context.socket(zmq.ROUTER)
        self._answers = self.context.socket(zmq.PULL)
        for socket in (self._commands, self._answers):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, 1 << 30)
            if secret is not None:
                guard_server(socket, secret)
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._names: dict[bytes, bytes] = {}  # of the lines of workers that were restarted: what they are called now
        self._authenticator = None if secret is None else doorkeeper(self.context, secret)
        self._doors: list[Door] = []
        for socket, address in ((self._commands, commands), (self._answers, answers)):
            if not address.startswith("ipc:"):
                self._doors.append(Door(socket, address))
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self.close()
                raise DeviceError(f"{address} cannot be used: {error}. Choose another port?") from error
        self._last: dict[int, int] = {}  # by worker and line, the highest number seen
        self.sent_messages = self.sent_bytes = 0

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where workers connect: commands, answers."""
        commands, answers = (bytes(s.getsockopt(zmq.LAST_ENDPOINT)) for s in (self._commands, self._answers))
        return commands.decode(), answers.decode()

    def reserve(self) -> int:
        """The number of the next message."""
        return next(self._numbers)

    @property
    def sending(self) -> Any:
        """Held while the messages of one step are sent to all workers, so that all get steps in the same order."""
        return self._lock

    def send(
        self,
        device: int,
        number: int,
        kind: Kind,
        ints: Sequence[int] = (),
        data: Any = None,
        blobs: Sequence[Any] = (),
        health: bool = False,
    ) -> None:
        """Send to a worker; hold `sending`. Raises ConnectionError where its line is gone."""
        frames = encode(self.token, kind, device, number, ints, data, blobs)
        self.send_frames(identity(device, health), frames, f"device {device}")

    def send_frames(self, to: bytes, frames: list[Any], name: str) -> None:
        """Send frames made by `encode` to a line; hold `sending`. Raises ConnectionError where it is gone."""
        self.sent_messages += 1
        self.sent_bytes += sum(len(frame) for frame in frames)
        try:
            self._commands.send_multipart([self._names.get(to, to), *frames], zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            raise ConnectionError(f"{name} has no connection: {error}") from error

    def callers(self) -> list[tuple[bytes, Message]]:
        """Who asks to be let in: the names of their lines, and what they say."""
        found: list[tuple[bytes, Message]] = []
        for door in self._doors:
            door.look()
        while True:
            with self._lock:
                try:
                    to, *frames = self._commands.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return found
            try:
                message = decode(STRANGER, frames)
                if message.kind != Kind.JOIN:
                    raise BadMessage("it does not ask to join")
                found.append((to, message))
            except BadMessage as reason:
                logger("workers").warning("a message to the controller was dropped: %s", reason)

    def forget(self, sender: int, birth: int = 0) -> None:
        """A worker was replaced: its successor counts from one again, and its lines have names of their own.

        ZeroMQ may drop the new connection with the old one where both have one name.
        """
        for health in (False, True):
            self._names[identity(sender, health)] = identity(sender, health, birth)
        for line in (sender << 1, sender << 1 | 1):
            self._last.pop(line, None)

    def receive(self, timeout_ms: float) -> Message | None:
        """The next good message, or None when there is none in time; what is not ours is logged and dropped."""
        return self._next(timeout_ms, lambda frames: decode(self.token, frames)) or None

    def take(self, timeout_ms: float) -> list[bytes] | None:
        """The frames of the next message, its header checked, to be passed on unread; [] for one that was dropped."""
        return self._next(timeout_ms, lambda frames: frames)

    def _next(self, timeout_ms: float, read: Callable[[list[bytes]], Any]) -> Any:
        if timeout_ms and not self._answers.poll(int(timeout_ms)):
            return None
        try:
            frames = self._answers.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            kind, sender, number = read_header(self.token, frames)
            line = sender << 1 | (kind in (Kind.PULSE, Kind.LOG))
            if kind < Kind.HELLO:
                raise BadMessage("it is a command")
            if number <= self._last.get(line, 0):
                raise BadMessage(f"its number {number} was used before")
            found = read(frames)
            self._last[line] = number  # not before: what cannot be read must not shut out what comes after it
            return found
        except BadMessage as reason:
            logger("workers").warning("a message to the controller was dropped: %s", reason)
            return []

    @property
    def inlet(self) -> Any:
        """The socket of answers, to be polled with others."""
        return self._answers

    def close(self) -> None:
        """Close the sockets; nothing that was not sent yet will be."""
        with self._lock:
            for door in self._doors:
                door.close()
            self._commands.close(0)
            self._answers.close(0)
            if self._authenticator is not None:
                self._authenticator.stop()
        self.context.term()


class Line:
    """A worker's end: `receive` gives commands, `answer` sends; used by one thread each."""

    def __init__(
        self, commands: str, answers: str, token: bytes, device: int, birth: int, health: bool, secret: str | None
    ) -> None:
        self.token, self.device = token, device
        self.context: Any = zmq.Context.instance()
        self._commands = self.context.socket(zmq.DEALER)
        self._answers = self.context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.IDENTITY, identity(device, health, birth))
        for socket in (self._commands, self._answers):
            socket.setsockopt(zmq.LINGER, 500)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, 1 << 30)
            if secret is not None:
                guard_client(socket, secret)
        self._commands.connect(commands)
        self._answers.connect(answers)
        self._sent = itertools.count(1)
        self._last = 0

    def waiting(self, timeout_ms: float = 0) -> bool:
        """Whether a command is there."""
        return bool(self._commands.poll(timeout_ms))

    def receive(self, timeout_ms: float | None = None) -> Message | None:
        """The next good command, or None if there is none in time (or it was dropped)."""
        if timeout_ms is not None and not self._commands.poll(timeout_ms):
            return None
        frames = self._commands.recv_multipart(copy=True)
        try:
            message = decode(self.token, frames, self._last + 1)
            if message.kind >= Kind.HELLO or message.sender != self.device:
                raise BadMessage("it is not a command for this device")
            self._last = message.number
            return message
        except BadMessage as reason:
            print(f"a message was dropped: {reason}", flush=True)
            return None

    def answer(self, kind: Kind, ints: Sequence[int] = (), data: Any = None, blobs: Sequence[Any] = ()) -> None:
        """Send to the controller."""
        self._answers.send_multipart(encode(self.token, kind, self.device, next(self._sent), ints, data, blobs))

    def close(self) -> None:
        """Send what is under way, for half a second at most."""
        self._commands.close(0)
        self._answers.close(500)


def local_endpoints(folder: str) -> tuple[str, str]:
    """Addresses for a cluster on this machine."""
    return f"ipc://{os.path.join(folder, 'commands')}", f"ipc://{os.path.join(folder, 'answers')}"

