"""Who may speak with whom beyond a machine: CURVE keys made from a shared secret, and the log of who was kept out.

In: a secret that all hosts of a program know. Out: sockets that take and make connections with it and no others, with
everything encrypted; `refuse_open_door` for addresses that would be open without one.
"""

from __future__ import annotations

import hashlib
import ipaddress
import time
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from dtorch.errors import OptionError
from dtorch.options import logger

SECRET_VARIABLE = "DTORCH_SECRET"
LEAST_SECRET = 16  # characters
MAKE_ONE = 'python -c "import secrets; print(secrets.token_hex(32))"'
REPEAT_S = 1.0  # one line of the log at most in this time
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def secret_keys(secret: str) -> tuple[bytes, bytes]:
    """The CURVE key pair (public, secret) that everybody who knows the secret can make."""
    private = hashlib.blake2b(secret.encode(), digest_size=32, person=b"dtorch-curve").digest()
    encoded = z85.encode(private)
    return zmq.curve_public(encoded), encoded


def refuse_open_door(address: str, secret: str | None) -> None:
    """Raises OptionError for an address that others can reach without a secret, and for a secret that is short."""
    if secret is not None and len(secret) < LEAST_SECRET:
        raise OptionError(f"the secret has {len(secret)} characters; use at least {LEAST_SECRET}: {MAKE_ONE}")
    if secret is None and not address.startswith("ipc:") and not is_loopback(address_host(address)):
        raise OptionError(
            f"{address} can be reached from other machines, and no secret was given: whoever reaches it could give "
            f"workers orders. Set {SECRET_VARIABLE} (or secret=) to the same text here and on each host; {MAKE_ONE} "
            "makes one. On one machine, tcp://127.0.0.1:PORT needs none."
        )


def address_host(address: str) -> str:
    """HOST of tcp://HOST:PORT. Raises OptionError where it is none."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise OptionError(f"{address!r} is no address: use tcp://HOST:PORT, such as tcp://0.0.0.0:7077")
    return host


def address_port(address: str) -> int:
    """PORT of tcp://HOST:PORT."""
    address_host(address)
    return int(address.rpartition(":")[2])


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine only. Of names, only "localhost" is known to be."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def guard_server(socket: Any, secret: str) -> None:
    """Let a socket that will be bound take only encrypted connections of those who know the secret."""
    public, private = secret_keys(secret)
    socket.curve_server = True
    socket.curve_secretkey, socket.curve_publickey = private, public


def guard_client(socket: Any, secret: str) -> None:
    """Let a socket that will connect speak only with a server that knows the secret."""
    public, private = secret_keys(secret)
    socket.curve_serverkey = public
    socket.curve_secretkey, socket.curve_publickey = private, public


def doorkeeper(context: Any, secret: str) -> Any:
    """A thread that lets in who has the secret's key, and nobody else, at all guarded sockets of a context."""
    from zmq.auth.thread import ThreadAuthenticator

    public = secret_keys(secret)[0]

    class _Provider:
        def callback(self, domain: str, key: bytes) -> bool:
            return key == public

    keeper = ThreadAuthenticator(context)
    keeper.start()
    keeper.configure_curve_callback(domain="*", credentials_provider=_Provider())
    return keeper


class Door:
    """Watches the connections of a bound socket, and logs those that were not let in."""

    def __init__(self, socket: Any, name: str) -> None:
        self.name = name
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED
        self._socket, self._monitor = socket, socket.get_monitor_socket(events)
        self._unproven: list[int] = []  # connections that have not shown the secret yet
        self.refused = 0
        self._told = 0.0

    def look(self) -> None:
        """Log what happened since the last look."""
        refused = 0
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            kind, value = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._unproven.append(value)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._unproven:
                self._unproven.pop(0)
            elif kind == zmq.EVENT_DISCONNECTED and value in self._unproven:
                self._unproven.remove(value)
                refused += 1
        self.refused += refused
        if refused and time.monotonic() - self._told > REPEAT_S:
            self._told = time.monotonic()
            logger("workers").warning(
                "a connection to %s was refused: it does not know the secret, or is not DTorch's", self.name
            )

    def close(self) -> None:
        """Watch no more."""
        self._socket.disable_monitor()
        self._monitor.close(0)
