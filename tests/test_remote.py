"""Measuring through TVM's RPC tracker, on loopback, with servers that die."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from tvm import rpc

from attentune import AttentionProblem, Database, Tracker, tune
from attentune.errors import InvalidParameters

KEY = "attentune-test"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address(port):
    return ("--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1))


def start(*arguments):
    environment = {**os.environ, "TVM_NUM_THREADS": "1", "TVM_BIND_THREADS": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(RuntimeError, OSError):
            if condition():
                return
        time.sleep(0.2)
    pytest.fail("the tracker and its servers did not come up")


def free_servers(port):
    summary = rpc.connect_tracker("127.0.0.1", port).summary()["queue_info"]
    return summary.get(KEY, {}).get("free", 0)


@pytest.fixture
def cluster():
    """A tracker with two servers, as (tracker, server processes)."""
    port = free_port()
    processes = [start("tvm.exec.rpc_tracker", *address(port))]
    try:
        wait_until(lambda: rpc.connect_tracker("127.0.0.1", port).summary() is not None)
        servers = [
            start(
                "tvm.exec.rpc_server", *address(free_port()),
                "--tracker", f"127.0.0.1:{port}", "--key", KEY,
            )
            for _ in range(2)
        ]  # fmt: skip
        processes += servers
        wait_until(lambda: free_servers(port) == 2)
        yield Tracker("127.0.0.1", port, KEY), servers
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["1,2,2,64,64,32,32:float32:mask=padding:bias:causal"])
def test_tuning_on_servers(cluster, text, tmp_path):
    tracker, _ = cluster
    with Database(tmp_path / "records.sqlite") as database:
        (record,) = tune(text, database=database, trials=8, runner=tracker)
        assert database.get(record.key, record.target) == record
    assert record.seconds > 0
    assert {loser.outcome for loser in record.losers} <= {"slower", "unsupported"}


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle_ends_nothing(cluster):
    tracker, servers = cluster
    measured = []

    def kill_one(event):
        if event["event"] == "measured":
            measured.append(event)
            if len(measured) == 3:
                threading.Thread(target=lambda: os.killpg(servers[0].pid, 9)).start()

    problem = AttentionProblem.parse("1,2,2,64,64,32,32:float32")
    (record,) = tune(problem, trials=16, runner=tracker, on_event=kill_one)
    assert len(measured) > 3
    assert record.seconds > 0


@pytest.mark.parametrize("address", ["", "9190", "host:", "host:port", ":9190"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(InvalidParameters, match="HOST:PORT"):
        Tracker.parse(address, KEY)


def test_an_address_is_parsed():
    assert Tracker.parse("127.0.0.1:9190", KEY) == Tracker("127.0.0.1", 9190, KEY)
