"""Which connections commands to a set of devices take, and how far what was sent on each of them is done.

In: devices, and which of them are behind a hub. Out: a `Route` of lanes: one for each worker with a line of its own,
one for each host's share of the devices. A hub tells a lane's progress in one number, so the work of a step here grows
with the hosts, not with the devices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dtorch.runtime.protocol import HUB
from dtorch.runtime.transport import identity


class Lane:
    """Devices behind one connection that get the same commands. `acked` of what was `sent` is done by all of them."""

    __slots__ = ("devices", "host", "to", "address", "sent", "acked", "told")

    def __init__(self, devices: tuple[int, ...], host: Any, number: int) -> None:
        self.devices, self.host = devices, host  # host: a `joining.Host`, or None for a worker with its own line
        self.to = identity(devices[0]) if host is None else host.identity
        self.address = devices[0] if host is None else HUB | number
        self.sent = self.acked = 0
        self.told = host is None  # whether the hub knows the lane's devices

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"device {self.devices[0]}" if self.host is None else f"host {self.host.name}"


@dataclass(frozen=True)
class Route:
    """How to reach some devices."""

    lanes: tuple[Lane, ...]
    related: set[Lane]  # all lanes that some of the devices are on
    near: tuple[int, ...]  # those that share memory with the controller
    far: tuple[int, ...]  # those behind a hub


class Lanes:
    """All lanes of a cluster."""

    def __init__(self, host_of: Callable[[int], Any]) -> None:
        self._host_of = host_of
        self._lock = threading.Lock()
        self._count = 0
        self.reset()

    def reset(self) -> None:
        """Forget all lanes and what is under way on them."""
        with self._lock:
            self._routes: dict[tuple[int, ...], Route] = {}
            self._lanes: dict[tuple[int, ...], Lane] = {}
            self._by_address: dict[int, Lane] = {}
            self._lanes_of: dict[int, list[Lane]] = {}
            self._routes_of: dict[int, list[Route]] = {}
            self._busy: set[Lane] = set()

    def route(self, devices: Sequence[int]) -> Route:
        """The route to these devices, all of which have been started."""
        key = tuple(devices)
        found = self._routes.get(key)
        if found is None:
            with self._lock:
                found = self._routes.get(key) or self._make(key)
        return found

    def _make(self, devices: tuple[int, ...]) -> Route:
        shares: dict[Any, list[int]] = {}
        for device in devices:
            host = self._host_of(device)
            shares.setdefault(("worker", device) if host is None else host, []).append(device)
        lanes = tuple(
            self._lane(tuple(share), None if isinstance(key, tuple) else key) for key, share in shares.items()
        )
        near = tuple(device for lane in lanes if lane.host is None for device in lane.devices)
        far = tuple(device for lane in lanes if lane.host is not None for device in lane.devices)
        route = Route(lanes, {lane for device in devices for lane in self._lanes_of[device]}, near, far)
        for device in devices:
            self._routes_of.setdefault(device, []).append(route)
        self._routes[devices] = route
        return route

    def _lane(self, devices: tuple[int, ...], host: Any) -> Lane:
        found = self._lanes.get(devices)
        if found is None:
            self._count += 1
            found = self._lanes[devices] = self._by_address[HUB | self._count] = Lane(devices, host, self._count)
            for device in devices:
                self._lanes_of.setdefault(device, []).append(found)
                for route in self._routes_of.get(device, ()):
                    route.related.add(found)
        return found

    # --- progress -------------------------------------------------------------------------------------------------

    def send(self, lane: Lane, number: int) -> None:
        """A command was sent on a lane."""
        with self._lock:
            lane.sent = number
            self._busy.add(lane)

    def done(self, lane: Lane, number: int) -> None:
        """Everything on a lane up to a number is done."""
        with self._lock:
            lane.acked = max(lane.acked, number)
            if lane.acked >= lane.sent:
                self._busy.discard(lane)

    def worker_done(self, device: int, number: int) -> None:
        """The same, for a worker with a line of its own."""
        for lane in self.route((device,)).lanes:
            if lane.host is None:
                self.done(lane, number)

    def hub_done(self, address: int, number: int) -> None:
        """The same, for a lane as its hub calls it; lanes that were forgotten meanwhile are passed over."""
        lane = self._by_address.get(address)
        if lane is not None and lane.host is not None:
            self.done(lane, number)

    def is_done(self, devices: Sequence[int], number: int) -> bool:
        """Whether these devices have done all commands up to a number that they were sent."""
        related = self.route(devices).related
        for lane in tuple(self._busy):
            if lane.acked < number and lane.acked < lane.sent and lane in related:
                return False
        return True

    def passed(self, devices: Sequence[int], number: int) -> bool:
        """Whether a command to exactly these devices is done, whatever others they share with lost ones."""
        return all(lane.acked >= number for lane in self.route(devices).lanes)

    def behind(self, devices: Sequence[int], number: int) -> int:
        """By how many commands the slowest of these devices is behind a number."""
        related = self.route(devices).related
        return max((number - lane.acked for lane in tuple(self._busy) if lane in related), default=0)

    def queued(self, device: int) -> int:
        """How many commands a device was sent and has not told to be done, at most."""
        lanes = self._lanes_of.get(device, ())
        return sum(max(0, lane.sent - lane.acked) for lane in lanes if lane in self._busy)
