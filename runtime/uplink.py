"""A hub's connection to its controller: joining, orders one way, answers the other, and the news that it broke.

In: tcp://HOST:PORT and the secret. Out: `Uplink`, whose `join` gives what the controller tells a host that it lets in.
A connection that closed once is lost for good: messages may have gone with it.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dtorch.errors import DeviceError
from dtorch.runtime.curve import SECRET_VARIABLE, address_host, address_port, guard_client, refuse_open_door
from dtorch.runtime.protocol import HUB, BadMessage, Kind, decode, encode, read_header
from dtorch.runtime.transport import STRANGER

REFUSALS = 3  # connections that close before the secret is proven, after which it is taken to be wrong
ANSWERS_S = 10.0
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Uplink:
    """The hub's end. Used by one thread."""

    def __init__(self, controller: str, secret: str | None) -> None:
        self.host, self.port = address_host(controller), address_port(controller)
        refuse_open_door(controller, secret)
        self.controller, self._secret = controller, secret
        self.context = zmq.Context()
        self.commands, self._watch_commands = self._socket(zmq.DEALER)
        self.commands.setsockopt(zmq.IDENTITY, b"host-" + os.urandom(8).hex().encode())
        self.answers, self._watch_answers = self._socket(zmq.PUSH)
        self.token, self.sender = STRANGER, HUB
        self.broken = False
        self._sent = itertools.count(1)
        self._last = 0

    def _socket(self, kind: int) -> tuple[Any, Any]:
        made = self.context.socket(kind)
        for option, value in (
            (zmq.LINGER, 500), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, 1 << 30), (zmq.RECONNECT_IVL, 200),
        ):  # fmt: skip
            made.setsockopt(option, value)
        if self._secret is not None:
            guard_client(made, self._secret)
        return made, made.get_monitor_socket(_EVENTS)

    @property
    def sockets(self) -> list[Any]:
        """What to poll."""
        return [self.commands, self._watch_commands, self._watch_answers]

    # --- joining --------------------------------------------------------------------------------------------------

    def join(self, offer: dict[str, Any], wait_s: float, ending: Sequence[str] = ()) -> dict[str, Any]:
        """Offer devices; what the controller tells its new host. Raises DeviceError saying why there is none.

        `ending` gets the name of a signal that asks for an end.
        """
        self.commands.connect(self.controller)
        deadline, refusals, proven, said = time.monotonic() + wait_s, 0, False, False
        while True:
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"nobody answered at {self.controller} within {wait_s:g} s: is the program there, did it call "
                    'dtorch.init(cluster="external"), and is the port open?'
                )
            self.commands.poll(20)
            if ending:
                raise DeviceError(f"this host was told to end ({ending[0]}) before it joined")
            for event in _news(self._watch_commands):
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    proven = True
                    offer = {**offer, "address": offer["address"] or own_address(self.host, self.port)}
                    self.commands.send_multipart(encode(STRANGER, Kind.JOIN, HUB, next(self._sent), data=offer))
                elif proven:
                    proven = False  # it ended, and perhaps comes back
                else:
                    refusals += 1
            if refusals >= REFUSALS:
                raise DeviceError(
                    f"{self.controller} does not let this host in: {SECRET_VARIABLE} is not the same there and here"
                    + (" (here is none)" if self._secret is None else "")
                    + ", or it is no DTorch program."
                )
            if not said and time.monotonic() > deadline - wait_s + 2:
                print(f"waiting for a program at {self.controller}", flush=True)
                said = True
            while self.commands.poll(0):
                message = decode(STRANGER, self.commands.recv_multipart())
                if message.kind == Kind.REFUSED:
                    raise DeviceError(f"the controller does not take this host: {message.data}")
                if message.kind == Kind.WELCOME:
                    self._settle(message.data, message.number)
                    return dict(message.data)

    def _settle(self, welcome: dict[str, Any], number: int) -> None:
        self.token, self.sender = bytes.fromhex(welcome["token"]), HUB | int(welcome["number"])
        self._last = number
        address = f"tcp://{self.host}:{int(welcome['answers'])}"
        self.answers.connect(address)
        deadline = time.monotonic() + ANSWERS_S
        while zmq.EVENT_HANDSHAKE_SUCCEEDED not in _news(self._watch_answers):
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"{self.controller} was reached, and {address} was not: the ports PORT, PORT + 1 and PORT + 2 of "
                    "the address must be open"
                )
            self._watch_answers.poll(50)

    # --- afterwards -----------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Whether the connection is still the one it was."""
        if _news(self._watch_commands) or _news(self._watch_answers):
            self.broken = True
        return not self.broken

    def take(self) -> tuple[Kind, int, int, list[bytes]] | None:
        """The next order, if there is one: kind, address, number, frames. What is not an order is dropped."""
        while True:
            try:
                frames = self.commands.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                kind, address, number = read_header(self.token, frames, self._last + 1)
                if kind >= Kind.HELLO or not address & HUB:
                    raise BadMessage("it is not an order for a host")
                if kind != Kind.LANE:  # it shares the number of the message that it goes before
                    self._last = number
                return kind, address, number, frames
            except BadMessage as reason:
                print(f"a message was dropped: {reason}", flush=True)

    def answer(self, kind: Kind, ints: Sequence[int] = (), data: Any = None) -> None:
        """Say something of the hub's own."""
        self.answers.send_multipart(encode(self.token, kind, self.sender, next(self._sent), ints, data))

    def pass_on(self, frames: list[bytes]) -> None:
        """What a worker said, unchanged."""
        self.answers.send_multipart(frames)

    def close(self) -> None:
        """Send what is under way, for half a second at most."""
        for made, linger in ((self.commands, 0), (self.answers, 0 if self.broken else 500)):
            made.disable_monitor()
            made.close(linger)
        self._watch_commands.close(0)
        self._watch_answers.close(0)
        self.context.term()


def _news(monitor: Any) -> list[int]:
    found = []
    while monitor.poll(0):
        found.append(recv_monitor_message(monitor)["event"])
    return found


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 9))  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface with an address, which Gloo and NCCL want to know."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                asked = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), 0x8915, asked)  # SIOCGIFADDR
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
