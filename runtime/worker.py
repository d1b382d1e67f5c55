"""A worker's process: `python -m dtorch.runtime.worker`, started by the controller, one for each device.

In: settings in the environment. Out: a `device.Worker` at work. Before torch is imported, which takes seconds on a busy
machine, a thread watches standard input: when whoever started this process is gone, it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from dtorch.runtime.worker_settings import ENVIRONMENT


def end_with_controller() -> None:
    """End this process as soon as whoever started it is gone: its standard input then ends."""

    def watch() -> None:
        try:
            while os.read(0, 1024):
                pass
        finally:
            os._exit(4)

    threading.Thread(target=watch, name="dtorch-parent", daemon=True).start()


def main() -> None:
    """Run a worker with the settings in the environment."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
    settings = json.loads(os.environ.pop(ENVIRONMENT))
    sys.path[:0] = [folder for folder in settings.get("path", ()) if folder not in sys.path]
    if settings.get("stdin"):
        end_with_controller()
    from dtorch.runtime.device import Worker

    Worker(settings).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # groups whose members are gone would hang in their destructors


if __name__ == "__main__":
    main()
