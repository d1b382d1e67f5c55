"""How workers come to be: started here, or on hosts that join from elsewhere.

In: the settings of a worker. Out: a `Process` to watch. `LocalLauncher` starts one process a device on this machine;
`joining.JoinLauncher` waits for hosts (`dtorch worker`, by hand, torchrun, srun, Kubernetes) and has them start theirs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dtorch.options import logger
from dtorch.runtime.curve import SECRET_VARIABLE
from dtorch.runtime.transport import Switchboard, local_endpoints
from dtorch.runtime.worker_settings import ENVIRONMENT

LOG_LINES = 50  # of each worker, kept for the message when it ends


class Process(ABC):
    """One worker's process."""

    pid: int
    log: deque[str]

    @abstractmethod
    def ended(self) -> str | None:
        """How it ended ("exit code 1", "signal SIGKILL"), or None while it lives."""

    @abstractmethod
    def stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP, a debugger)."""

    @abstractmethod
    def kill(self) -> None:
        """End it now."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it has ended."""


class Launcher(ABC):
    """Brings workers to life, and says where they meet the controller and each other."""

    def open(self, folder: str, token: bytes) -> Switchboard:
        """The controller's sockets; `folder` is private to this user."""
        return Switchboard(*local_endpoints(folder), token)

    def store(self, folder: str) -> str:
        """Where members of a group meet: see WorkerSettings."""
        return f"file:{folder}/store"

    @abstractmethod
    def start(self, settings: Mapping[str, Any]) -> Process:
        """Start (or await) the worker of `settings["device"]`."""


class LocalProcess(Process):
    """A child of this process. `told` gets its output line by line, with the device."""

    def __init__(self, popen: subprocess.Popen[str], device: int, told: Callable[[int, str], None]) -> None:
        self._popen, self.pid, self.device, self._told = popen, popen.pid, device, told
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        threading.Thread(target=self._read, name=f"dtorch-log-{device}", daemon=True).start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self.log.append(line.rstrip("\n"))
            self._told(self.device, line.rstrip("\n"))

    def ended(self) -> str | None:
        """See Process."""
        code = self._popen.poll()
        if code is None:
            return None
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.Signals.__members__.values() else f"{-code}"
            return f"signal {name}" + (" (the kernel sends it when memory runs out)" if name == "SIGKILL" else "")
        return f"exit code {code}"

    def stopped(self) -> bool:
        """See Process."""
        try:
            with open(f"/proc/{self.pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] in ("T", "t")
        except OSError:
            return False

    def kill(self) -> None:
        """See Process."""
        if self._popen.poll() is None:
            self._popen.kill()

    def wait(self, timeout_s: float) -> bool:
        """See Process."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        return True


def log_line(device: int, line: str) -> None:
    """One line of a worker's output, into the log of this process."""
    logger("workers").info("device %d: %s", device, line)


class LocalLauncher(Launcher):
    """Starts `python -m dtorch.runtime.worker` on this machine; `extra` is added to its environment."""

    def __init__(self, told: Callable[[int, str], None] = log_line, extra: Mapping[str, str] | None = None) -> None:
        self._told, self._extra = told, dict(extra or {})

    def start(self, settings: Mapping[str, Any]) -> LocalProcess:
        """See Launcher."""
        environment = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_WORKERS}
        environment[ENVIRONMENT] = json.dumps({**settings, "stdin": True, "path": [p for p in sys.path if p]})
        environment["PYTHONUNBUFFERED"] = "1"
        environment.update(self._extra)
        keep = (settings["arena_fd"],) if settings.get("arena_fd") is not None else ()
        popen = subprocess.Popen(
            [sys.executable, "-m", "dtorch.runtime.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            pass_fds=keep,
            start_new_session=True,  # Ctrl-C reaches the controller alone
        )
        return LocalProcess(popen, settings["device"], self._told)


# A worker is no rank of a job that this process may be part of, and speaks with this machine only.
_NOT_FOR_WORKERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", SECRET_VARIABLE,
)  # fmt: skip
