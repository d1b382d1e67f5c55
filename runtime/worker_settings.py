"""What a worker is told when it starts: one JSON object in its environment (never on its command line).

In: nothing. Out: the variable's name and the meaning of each entry.
"""

from __future__ import annotations

from typing import TypedDict

ENVIRONMENT = "DTORCH_WORKER_SETTINGS"


class WorkerSettings(TypedDict, total=False):
    """Settings of one worker."""

    device: int  # its id in meshes
    birth: int  # how many workers the device had before this one
    type: str  # "cpu" or "cuda"
    index: int  # of the GPU on its host
    threads: int  # of torch on CPU; 0: torch's default
    token: str  # of the cluster, in hex
    secret: str | None  # for CURVE, where control traffic leaves the machine
    commands: str  # ZeroMQ addresses
    answers: str
    store: str  # "file:<path>" or "tcp:<host>:<port>/<prefix of keys>": where members of a group meet
    arena_fd: int | None  # the shared memory of workers on the controller's machine
    interval_s: float  # between signs of life
    silence_s: float  # after which the controller counts as gone
    collective_limit_s: float
    stdin: bool  # end when standard input does
    path: list[str]  # where the controller imports from
