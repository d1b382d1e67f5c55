"""Hosts that join from elsewhere: the controller's side. It waits for them, gives them devices and orders.

In: an address to bind, the shared secret, the devices that are wanted. Out: `JoinLauncher`, whose processes are
workers that a host's hub (`hub`) starts and watches. Who does not know the secret is refused by the sockets already.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch.errors import DeviceError
from dtorch.options import current, logger
from dtorch.runtime.curve import SECRET_VARIABLE, address_host, address_port, is_loopback, refuse_open_door
from dtorch.runtime.launch import LOG_LINES, Launcher, Process
from dtorch.runtime.protocol import HUB, Kind, encode
from dtorch.runtime.transport import STRANGER, Switchboard

WAIT_S = 300.0  # how long `init` waits for devices, unless it is told
ANYWHERE = ("0.0.0.0", "*", "[::]")


@dataclass(eq=False)
class Host:
    """One hub, as the controller sees it."""

    number: int
    identity: bytes  # of its line
    devices: tuple[int, ...]
    facts: dict[str, Any]  # host, pid, address as the hub told them
    heard: float = field(default_factory=time.monotonic)
    alive: bool = True

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.facts['host']} (hub pid {self.facts['pid']})"


class RemoteProcess(Process):
    """A worker on a host. Its hub watches it and tells when it ended."""

    def __init__(self, host: Host, device: int, launcher: JoinLauncher) -> None:
        self.host, self.device, self._launcher = host, device, launcher
        self.pid = 0  # until it says hello
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.end: str | None = None

    def ended(self) -> str | None:
        """See Process."""
        return self.end if self.host.alive else self.end or "its host"

    def stopped(self) -> bool:
        """Its hub looks after that."""
        return False

    def kill(self) -> None:
        """See Process."""
        if self.ended() is None:
            self._launcher.order(self.host, Kind.KILL, ints=(self.device,))
            self.end = "KILL"

    def wait(self, timeout_s: float) -> bool:
        """Orders are obeyed in turn: one that was told to end has ended before its successor starts."""
        return self.ended() is not None


class JoinLauncher(Launcher):
    """Waits for hosts that offer the wanted devices."""

    def __init__(
        self, address: str, devices: Sequence[int], secret: str | None, device_type: str, wait_s: float = WAIT_S
    ) -> None:
        refuse_open_door(address, secret)
        self.address, self.wanted, self.device_type, self.wait_s = address, tuple(devices), device_type, wait_s
        self._secret = secret
        self.hosts: list[Host] = []
        self._changed = threading.Condition()
        self._prefix = secrets.token_hex(8)
        self._token = b""
        self._board: Switchboard
        self._store: Any = None

    # --- where everybody meets ------------------------------------------------------------------------------------

    def open(self, folder: str, token: bytes) -> Switchboard:
        """Bind PORT for orders, PORT + 1 for answers; PORT + 2 is the store's. Port 0: whatever is free."""
        self._token = token
        host, port = address_host(self.address), address_port(self.address)
        answers = f"tcp://{host}:{port + 1 if port else 0}"
        self._board = Switchboard(self.address, answers, token, self._secret)
        self.port = address_port(self._board.endpoints[0])
        return self._board

    def store(self, folder: str) -> str:
        """The store is in this process; its keys have a prefix that only let-in hosts are told."""
        import torch.distributed as dist

        if self._store is None:
            host, port = address_host(self.address), address_port(self.address)
            host = "0.0.0.0" if host in ANYWHERE else host
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((host, port + 2 if port else 0))
                listening.listen(1024)
            except OSError as error:
                listening.close()
                raise DeviceError(f"port {port + 2} of {host} (the groups' store) cannot be used: {error}") from error
            place = ("127.0.0.1" if host == "0.0.0.0" else host, listening.getsockname()[1])
            self._store = dist.TCPStore(
                *place, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        return f"tcp:{self._store.port}/{self._prefix}"

    @property
    def command(self) -> str:
        """What to type on a host, but for its devices."""
        host = address_host(self.address)
        if host in ANYWHERE:
            host = _outward()
        secret = f"{SECRET_VARIABLE}=<the secret> " if self._secret is not None else ""
        return f"{secret}dtorch worker --controller tcp://{host}:{self.port}"

    # --- hosts ----------------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """Answer those who ask to join; called by the thread that listens."""
        for identity, message in self._board.callers():
            try:
                host = self._admit(identity, message.data)
            except (ValueError, TypeError, KeyError, AttributeError) as reason:
                logger("workers").warning("a host was not let in: %s", reason)
                self._reply(identity, Kind.REFUSED, str(reason))
                continue
            options = current()
            welcome = {
                "token": self._token.hex(), "number": host.number, "devices": host.devices, "type": self.device_type,
                "answers": address_port(self._board.endpoints[1]), "interval_s": options.heartbeat_s,
                "silence_s": options.silence_s, "step_limit_s": options.step_limit_s,
                "arena_bytes": options.arena_bytes,
            }  # fmt: skip
            if not self._reply(identity, Kind.WELCOME, welcome):
                continue
            logger("workers").info("%s joined with devices %s", host.name, _listed(host.devices))
            with self._changed:
                self.hosts.append(host)
                self._changed.notify_all()

    def _admit(self, identity: bytes, offer: Any) -> Host:
        """The host with its devices; ValueError where they do not fit."""
        facts = {"host": str(offer["host"])[:200], "pid": int(offer["pid"]), "address": str(offer["address"])[:200]}
        missing = self.missing()
        if offer["devices"] is not None:
            devices = tuple(int(device) for device in offer["devices"])
            if not devices or len(set(devices)) < len(devices) or not set(devices) <= set(missing):
                raise ValueError(
                    f"{facts['host']} offers devices {_listed(devices)}, and the program waits for {_listed(missing)}"
                )
        else:
            devices = missing[: int(offer["count"])]
            if not devices:
                raise ValueError(f"{facts['host']} is not needed: the program waits for no more devices")
        here, there = torch.__version__, offer["torch"]
        if here != there:
            logger("workers").warning("%s has torch %s, this process %s: bits may differ", facts["host"], there, here)
        return Host(len(self.hosts) + 1, identity, devices, facts)

    def missing(self) -> tuple[int, ...]:
        """Wanted devices that no host serves now."""
        served = {device for host in self.hosts if host.alive for device in host.devices}
        return tuple(device for device in self.wanted if device not in served)

    def numbered(self, number: int) -> Host | None:
        """The host with this number, if it is there."""
        host = self.hosts[number - 1] if 0 < number <= len(self.hosts) else None
        return host if host is not None and host.alive else None

    def host_of(self, device: int) -> Host | None:
        """Who serves a device now."""
        return next((host for host in self.hosts if host.alive and device in host.devices), None)

    # --- Launcher -------------------------------------------------------------------------------------------------

    def start(self, settings: Mapping[str, Any]) -> RemoteProcess:
        """Wait until all wanted devices have hosts, then have this one's worker started."""
        device = settings["device"]
        if device not in self.wanted:
            raise DeviceError(
                f"device {device} is not one of those that dtorch.init was told of: {_listed(self.wanted)}. Shut down "
                "and init again with all devices of your meshes."
            )
        self._await()
        host = self.host_of(device)
        assert host is not None
        reachable = [each.facts["address"] for each in self.hosts if each.alive]
        peer = next((address for address in reachable if not is_loopback(address)), None)
        self.order(host, Kind.START, data={**settings, "peer": peer})
        return RemoteProcess(host, device, self)

    def _await(self) -> None:
        deadline = time.monotonic() + self.wait_s
        with self._changed:
            if self.missing():
                logger("workers").info(
                    "waiting for devices %s: %s --devices …", _listed(self.missing()), self.command
                )
            while self.missing():
                left = deadline - time.monotonic()
                if left <= 0:
                    there = ", ".join(f"{_listed(h.devices)} from {h.name}" for h in self.hosts if h.alive) or "none"
                    raise DeviceError(
                        f"devices {_listed(self.missing())} have not joined within {self.wait_s:g} s (there are: "
                        f"{there}). On the machine that has them, type:\n  {self.command} "
                        f"--devices {','.join(map(str, self.missing()))}"
                    )
                self._changed.wait(min(left, 0.5))

    def order(self, host: Host, kind: Kind, ints: Sequence[int] = (), data: Any = None) -> None:
        """Tell a hub something; nothing where its line is gone, which is noticed elsewhere."""
        if host.alive:
            try:
                self._send(host.identity, kind, ints, data)
            except ConnectionError:
                pass

    def _send(
        self, identity: bytes, kind: Kind, ints: Sequence[int] = (), data: Any = None, token: bytes | None = None
    ) -> None:
        with self._board.sending:
            frames = encode(token or self._token, kind, HUB, self._board.reserve(), ints, data)
            self._board.send_frames(identity, frames, "the host")

    def _reply(self, identity: bytes, kind: Kind, data: Any) -> bool:
        """Answer somebody who has no token yet; whether the line was still there."""
        try:
            self._send(identity, kind, data=data, token=STRANGER)
        except ConnectionError:
            return False
        return True

    def beat(self, host: Host, now: float, silence_s: float) -> str | None:
        """Give a host a sign of life. What became of it, if it is gone."""
        try:
            self._send(host.identity, Kind.BEAT)
        except ConnectionError:
            return f"host {host.name} is gone: its connection closed"
        if now - host.heard > silence_s:
            return f"host {host.name} gave no sign of life for {silence_s:g} s"
        return None

    def end(self, grace_s: float) -> None:
        """Have all hosts end their workers and themselves, and wait for that."""
        waited = [host for host in self.hosts if host.alive]
        for host in waited:
            self.order(host, Kind.STOP)
        deadline = time.monotonic() + grace_s
        while waited and time.monotonic() < deadline:
            message = self._board.receive(50)
            if message is not None and message.kind == Kind.BYE:
                waited = [host for host in waited if HUB | host.number != message.sender]
        for host in self.hosts:
            host.alive = False


def _outward() -> str:
    """This machine's address as others may see it, or its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for examples: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _listed(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices)) or "none"
