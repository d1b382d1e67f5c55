"""Hosts that join over the network: one hub each, who is let in, what happens when one is lost."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import zmq

import dtorch
from dtorch import Replicate, Shard, options
from dtorch.errors import DeviceError, OptionError
from dtorch.runtime.curve import guard_client
from dtorch.runtime.placing import share_of
from dtorch.runtime.protocol import HUB, Kind, encode
from dtorch.runtime.session import SESSION
from dtorch.runtime.transport import STRANGER

SECRET = "a secret of the tests"


def free_port():
    """The first of three ports that are free now."""
    while True:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
                third.bind(("127.0.0.1", port + 2))
                return port
            except (OSError, OverflowError):
                continue


def host(port, *arguments, secret=SECRET, address="127.0.0.1", command=(sys.executable, "-m")):
    """`dtorch worker` on this machine; its output goes to `.stdout`."""
    environment = {key: value for key, value in os.environ.items() if key != "DTORCH_SECRET"}
    if secret is not None:
        environment["DTORCH_SECRET"] = secret
    return subprocess.Popen(
        [*command, "dtorch", "worker", "--controller", f"tcp://{address}:{port}", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture
def two_hosts():
    """Four devices on two hosts; (the hosts' processes, the cluster)."""
    dtorch.shutdown()
    port = free_port()
    hosts = [host(port, "--devices", "0,1"), host(port, "--devices", "2,3")]
    try:
        dtorch.init(cluster="external", devices=4, address=f"tcp://127.0.0.1:{port}", secret=SECRET, wait_s=60)
        yield hosts, SESSION.cluster("cpu")
    finally:
        dtorch.shutdown()
        for each in hosts:
            each.kill()
            each.communicate()


def mesh():
    return dtorch.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def reduced(x):
    return (x @ x.t()).sum(0).redistribute(placements=[Replicate()])


def gone(pids, within_s):
    end = time.monotonic() + within_s
    while any(os.path.exists(f"/proc/{pid}") and not zombie(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(os.path.exists(f"/proc/{pid}") and not zombie(pid) for pid in pids)


def zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def pids(cluster):
    return [record.process.pid for record in cluster.workers.values()]


# --- work -----------------------------------------------------------------------------------------------------------


def test_hosts_compute_together_get_each_command_once_and_end_with_the_program(two_hosts):
    hosts, cluster = two_hosts
    values = torch.arange(32.0).reshape(8, 4)
    x = dtorch.distribute_tensor(values, mesh(), [Shard(0)])
    assert torch.equal(reduced(x).full_tensor(), (values @ values.t()).sum(0))
    large = torch.randn(1200, 1300)  # in pieces, through the memory of each host
    for placement in (Replicate(), Shard(1)):
        there = dtorch.distribute_tensor(large, mesh(), [placement])
        assert torch.equal(there.full_tensor(), large)
    reduced(x).full_tensor()
    time.sleep(0.1)
    sent = cluster.board.sent_messages
    futures = [reduced(x).to_torch_async() for _ in range(10)]
    assert all(torch.equal(future.get(), (values @ values.t()).sum(0)) for future in futures)
    assert cluster.board.sent_messages - sent < 10 * 4 + 20  # 2 for a step, 1 to fetch, some beats
    assert {entry["device"] for entry in dtorch.status()} == {0, 1, 2, 3}
    ids = pids(cluster)
    dtorch.shutdown()
    assert [each.wait(5) for each in hosts] == [0, 0] and gone(ids, 1)


def test_an_error_on_a_host_names_kernel_and_line_and_the_next_step_works(two_hosts):
    x = dtorch.distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh(), [Replicate()])
    wrong = x[dtorch.distribute_tensor(torch.tensor([0, 9]), mesh(), [Replicate()])]
    with pytest.raises(IndexError, match="test_hosts.py"):
        wrong.full_tensor()
    assert float(x.sum().full_tensor()) == 66


# --- losses ---------------------------------------------------------------------------------------------------------


def test_a_worker_killed_on_a_host_is_told_with_its_signal_and_started_again(two_hosts):
    hosts, cluster = two_hosts
    x = dtorch.distribute_tensor(torch.ones(8, 4), mesh(), [Replicate()])
    assert float(x.sum().full_tensor()) == 32
    os.kill(pids(cluster)[3], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(DeviceError, match=r"device 3 \(pid \d+\) ended with signal SIGKILL(.|\n)*on host"):
        while time.monotonic() - began < 5:
            (x + 1).sum().full_tensor()
    assert time.monotonic() - began < 1.5
    assert dtorch.recover()["workers"] == 1
    y = dtorch.distribute_tensor(torch.ones(8, 4), mesh(), [Shard(0)])
    assert torch.equal(reduced(y).full_tensor(), torch.full((8,), 32.0)) and float(x.sum().full_tensor()) == 32


def test_a_hub_that_is_killed_takes_its_devices_with_it_and_another_host_may_come(two_hosts):
    hosts, cluster = two_hosts
    ids = pids(cluster)
    x = dtorch.distribute_tensor(torch.ones(8, 4), mesh(), [Replicate()])
    assert float(x.sum().full_tensor()) == 32
    futures = [reduced(x + step).to_torch_async() for step in range(3)]
    hosts[1].kill()
    began = time.monotonic()
    with pytest.raises(DeviceError, match="its connection closed; devices 2, 3 went with it"):
        while time.monotonic() - began < 5:
            (x + 1).sum().full_tensor()
    assert time.monotonic() - began < 1.5
    for future in futures:  # done before, or lost: none waits
        try:
            future.get()
        except DeviceError:
            pass
    assert gone(ids[2:], 2)
    hosts.append(host(cluster.joining.port, "--devices", "2,3"))
    assert dtorch.recover()["workers"] == 2
    assert float(x.sum().full_tensor()) == 32


def test_when_the_program_is_killed_hubs_and_workers_are_gone_within_two_seconds():
    port = free_port()
    program = subprocess.Popen(
        [
            sys.executable, "-c", textwrap.dedent(f"""
                import time, dtorch
                from dtorch.runtime.session import SESSION
                dtorch.init(cluster="external", devices=2, address="tcp://127.0.0.1:{port}", secret="{SECRET}")
                print(*(r.process.pid for r in SESSION.cluster("cpu").workers.values()), flush=True)
                time.sleep(60)
            """),
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    there = host(port, "--count", "2")
    try:
        ids = [int(each) for each in program.stdout.readline().split()]
        assert len(ids) == 2 and not gone(ids, 0)
        program.kill()
        assert gone([*ids, there.pid], 2)
        assert there.wait(1) == 3 and "connection to the controller closed" in there.stdout.read()
    finally:
        for each in (program, there):
            each.kill()
            each.communicate()


# --- who starts hosts -----------------------------------------------------------------------------------------------


def test_torchrun_starts_a_host_whose_first_rank_serves_all_ranks():
    dtorch.shutdown()
    port = free_port()
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port + 3}", "-m")
    there = host(port, command=torchrun)
    try:
        dtorch.init(cluster="external", devices=2, address=f"tcp://127.0.0.1:{port}", secret=SECRET, wait_s=60)
        x = dtorch.distribute_tensor(torch.arange(4.0), dtorch.init_device_mesh("cpu", (2,)), [Shard(0)])
        assert float(x.sum().full_tensor()) == 6
        assert [len(each.devices) for each in SESSION.cluster("cpu").joining.hosts] == [2]
        dtorch.shutdown()
        assert there.wait(10) == 0
    finally:
        dtorch.shutdown()
        there.terminate()
        there.communicate()


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, (None, 1)),
        ({"RANK": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, ([4, 5, 6, 7], 4)),
        ({"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, None),
        (
            {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3,2"},
            ([3, 4], 2),
        ),
        ({"SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "3,2"}, None),
        ({"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, (None, 1)),
        (
            {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
             "SLURM_DISTRIBUTION": "cyclic"},
            (None, 2),
        ),
    ],
)  # fmt: skip
def test_a_task_of_a_launcher_knows_which_devices_it_serves(environment, share):
    if share == (None, 1) and torch.cuda.is_available():
        share = (None, torch.cuda.device_count())
    assert share_of(environment) == share


def test_devices_that_do_not_join_are_named_with_the_command_to_type():
    dtorch.shutdown()
    port = free_port()
    there = host(port, "--devices", "1")
    try:
        with pytest.raises(DeviceError) as caught:
            dtorch.init(cluster="external", devices=3, address=f"tcp://127.0.0.1:{port}", secret=SECRET, wait_s=5)
        said = str(caught.value)
        assert "devices 0, 2 have not joined within 5 s" in said and "1 from " in said
        assert f"dtorch worker --controller tcp://127.0.0.1:{port} --devices 0,2" in said and SECRET not in said
        assert there.wait(5) == 0
    finally:
        there.kill()
        there.communicate()


# --- who is let in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:7077", "tcp://*:7077", "tcp://10.0.0.1:7077", "tcp://somewhere:7077"])
def test_an_address_that_others_reach_is_not_bound_without_a_secret(address):
    with pytest.raises(OptionError, match="no secret was given"):
        dtorch.init(cluster="external", devices=1, address=address)


def test_short_secrets_and_wrong_addresses_are_refused():
    with pytest.raises(OptionError, match="at least 16"):
        dtorch.init(cluster="external", devices=1, address="tcp://127.0.0.1:7077", secret="short")
    with pytest.raises(OptionError, match="use tcp://HOST:PORT"):
        dtorch.init(cluster="external", devices=1, address="127.0.0.1:7077")


def test_who_does_not_know_the_secret_is_refused_with_a_log_line_and_the_program_goes_on(two_hosts, caplog):
    _, cluster = two_hosts
    port = cluster.joining.port
    x = dtorch.distribute_tensor(torch.ones(4), mesh(), [Shard(0)])
    wrong, none = host(port, "--devices", "0", secret="another secret of the tests"), host(port, secret=None)
    heard = len(cluster.joining.hosts)
    context = zmq.Context()
    with caplog.at_level(logging.WARNING, "dtorch.workers"):
        for target in (port, port + 1):
            for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 300, os.urandom(3000), b""):
                with socket.create_connection(("127.0.0.1", target)) as raw:
                    raw.sendall(rubbish)
            for secret in (None, "not the secret at all"):
                sender = context.socket(zmq.PUSH if target > port else zmq.DEALER)
                sender.linger = 0
                if secret is not None:
                    guard_client(sender, secret)
                sender.connect(f"tcp://127.0.0.1:{target}")
                offer = {"host": "x", "pid": 1, "address": "", "devices": [0], "count": 0, "torch": ""}
                sender.send_multipart(encode(STRANGER, Kind.JOIN, HUB, 1, data=offer))
                sender.send_multipart(encode(cluster.token, Kind.LOST, HUB | 1, 10**9, data={"0": "gone"}))
        assert wrong.wait(60) == 1
    assert "does not let this host in" in wrong.communicate()[0]
    none.kill()  # after such rubbish ZeroMQ may leave a plain client hanging, which then ends at its own limit
    assert "joined" not in none.communicate()[0]
    context.destroy(0)
    assert any("was refused" in record.message for record in caplog.records)
    assert len(cluster.joining.hosts) == heard and cluster.failure is None
    assert float((x + 1).sum().full_tensor()) == 8


def test_a_host_that_offers_what_is_not_wanted_is_told_why(two_hosts):
    _, cluster = two_hosts
    late = host(cluster.joining.port, "--devices", "7")
    assert late.wait(15) == 1
    assert "offers devices 7, and the program waits for none" in late.communicate()[0]
    with options.override(), pytest.raises(DeviceError, match="device 7 is not one of those"):
        cluster.start([7])


# --- two machines ---------------------------------------------------------------------------------------------------

NETWORK = """
set -e
ip link set lo up
ip link add bridge0 type bridge && ip address add 10.77.0.1/24 dev bridge0 && ip link set bridge0 up
for i in 1 2; do
  unshare -n sleep 60 & echo $! > "$DIRECTORY/pid$i"
  sleep 0.2
  ip link add here$i type veth peer name there$i netns $(cat "$DIRECTORY/pid$i")
  ip link set here$i master bridge0 up
  run="nsenter -t $(cat "$DIRECTORY/pid$i") -n"
  $run ip link set lo up
  $run ip address add 10.77.0.1$i/24 dev there$i
  $run ip link set there$i up
done
"""

PROGRAM = """
import torch, dtorch
from dtorch import Replicate, Shard
torch.set_num_threads(1)
dtorch.init(cluster="external", devices=2, address="tcp://0.0.0.0:7077", wait_s=40)
mesh = dtorch.init_device_mesh("cpu", (2,))
x = dtorch.distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
y = (x @ x.t()).sum(0).redistribute(placements=[Replicate()]).full_tensor()
assert torch.equal(y, (torch.arange(12.0).reshape(4, 3) @ torch.arange(12.0).reshape(4, 3).t()).sum(0)), y
from dtorch.runtime.session import SESSION
print(sorted(host.facts["address"] for host in SESSION.cluster("cpu").joining.hosts))
dtorch.shutdown()
"""


def test_two_hosts_with_networks_of_their_own_compute_together(tmp_path):
    isolate = ["unshare", "-n"] if os.getuid() == 0 else ["unshare", "-rn"]
    try:
        bridge = ["ip", "link", "add", "bridge0", "type", "bridge"]
        tried = subprocess.run([*isolate, *bridge], capture_output=True, text=True)
    except FileNotFoundError as missing:
        pytest.skip(f"needs {missing.filename}")
    if tried.returncode:
        pytest.skip(f"network namespaces are not permitted here: {tried.stderr.strip()}")
    (tmp_path / "program.py").write_text(PROGRAM)
    worker = f'"{sys.executable}" -m dtorch worker --controller tcp://10.77.0.1:7077 --devices'
    script = NETWORK + "\n".join(
        [
            *(f'nsenter -t $(cat "$DIRECTORY/pid{i}") -n {worker} {i - 1} & host{i}=$!' for i in (1, 2)),
            f'"{sys.executable}" "$DIRECTORY/program.py"',
            "wait $host1 $host2",
            'kill $(cat "$DIRECTORY"/pid*)',
        ]
    )
    environment = {**os.environ, "DIRECTORY": str(tmp_path), "DTORCH_SECRET": SECRET}
    ran = subprocess.Popen(
        [*isolate, "bash", "-c", script], env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = ran.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(ran.pid, signal.SIGKILL)
        said, _ = ran.communicate()
    assert ran.returncode == 0, said
    assert "['10.77.0.11', '10.77.0.12']" in said
