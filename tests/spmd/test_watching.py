"""What workers tell: status, measured events, and what was in memory when none was left."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard


def on_two(tensor, placement):
    return dtorch.distribute_tensor(tensor, dtorch.init_device_mesh("cpu", (2,)), [placement])


def test_status_tells_what_each_worker_does_here_and_in_another_shell(workers):
    x = on_two(torch.randn(1500, 1500), Replicate())
    float(x[0, 0])
    entries = dtorch.status()
    assert [entry["worker"] for entry in entries] == ["cpu:0", "cpu:1"]
    assert all(entry["state"] in ("idle", "busy") and entry["heard_s"] < 5 and entry["pid"] for entry in entries)
    y = x
    for _ in range(12):
        y = y @ x
    future = y.to_torch_async()
    seen = set()
    while not future.is_ready():
        seen.update((entry["state"], entry["doing"].split(" ")[0]) for entry in dtorch.status())
        threading.Event().wait(0.02)
    assert ("busy", "aten.matmul.default") in seen
    threading.Event().wait(1.2)
    shown = subprocess.run([sys.executable, "-m", "dtorch", "status"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and "cpu:1" in shown.stdout and str(entries[0]["pid"]) in shown.stdout


def test_a_profile_has_the_kernels_of_all_devices_on_one_clock(workers, tmp_path):
    x = on_two(torch.randn(64, 64), Shard(0))
    float((x @ x.t()).sum())
    with dtorch.profile() as timeline:
        for _ in range(2):
            float((x @ x.t()).sum())
    kernels = {(event.device, event.kernel) for event in timeline.events}
    for device in ("cpu:0", "cpu:1"):
        assert (device, "aten.matmul.default") in kernels
        assert any(name.startswith("_c10d_functional") for owner, name in kernels if owner == device)
    assert all(0 <= event.begin_us <= event.end_us < 60e6 for event in timeline.events)
    assert any("test_watching.py" in event.line for event in timeline.events)
    assert {event.stream for event in timeline.events} > {"compute"}
    timeline.save(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"ph", "pid", "tid", "ts", "dur", "name", "args"} == set(rows[-1])
    count = len(timeline.events)
    float((x @ x.t()).sum())
    assert len(timeline.events) == count


def test_out_of_memory_names_the_largest_values_and_their_lines_and_work_goes_on(workers):
    x = on_two(torch.ones(1000, 1000), Replicate())
    large = x + 1
    float(large[0, 0])
    with pytest.raises(RuntimeError, match="can't allocate") as caught:
        float(x.view(-1)[:, None].expand(10**6, 10**9).contiguous()[0, 0])
    text = str(caught.value)
    assert "there was 3.8 MiB from" in text and "test_watching.py" in text and "large = x + 1" in text
    assert float(large.sum()) == 2e6
