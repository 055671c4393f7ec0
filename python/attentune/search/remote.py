"""Measuring on other machines: TVM's RPC tracker and servers, nothing of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from attentune.errors import InvalidParameters
from attentune.kernels.spec import KernelSpec
from attentune.problem import AttentionProblem
from attentune.search.inputs import random_inputs


@dataclass(frozen=True)
class Tracker:
    """Where servers wait for work: ``python -m tvm.exec.rpc_tracker``.

    Parameters
    ----------
    host : str
        The tracker's host.
    port : int
        Its port.
    key : str
        What the servers to be used registered as.

    Examples
    --------
    >>> import attentune
    >>> attentune.Tracker.parse("tracker.example:9190", "desk")
    Tracker(host='tracker.example', port=9190, key='desk')
    """

    host: str
    port: int
    key: str

    @classmethod
    def parse(cls, address: str, key: str) -> Tracker:
        """Return the tracker at ``HOST:PORT``.

        Raises
        ------
        InvalidParameters
            If the address is something else.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidParameters(f"The tracker is {address!r}; write it as HOST:PORT.")
        return cls(host, int(port), key)

    def connect(self, seconds: float) -> Any:
        """Return a session on one of the servers, which it keeps for that long at most."""
        from tvm import rpc

        tracker = rpc.connect_tracker(self.host, self.port)
        return tracker.request(self.key, session_timeout=int(max(seconds, 1)))


def runner(
    tracker: Tracker,
    spec: KernelSpec,
    problem: AttentionProblem,
    evaluator: Any,
    seconds: float,
) -> Any:
    """Return MetaSchedule's runner for a tracker's servers, with arguments of a problem."""
    from tvm.s_tir import meta_schedule as ms

    config = ms.runner.RPCConfig(
        tracker_host=tracker.host,
        tracker_port=tracker.port,
        tracker_key=tracker.key,
        session_timeout_sec=int(max(seconds, 1)),
    )
    return ms.runner.RPCRunner(
        rpc_config=config,
        evaluator_config=evaluator,
        f_alloc_argument=partial(allocate, spec, problem),
    )


def allocate(
    spec: KernelSpec, problem: AttentionProblem, _session: Any, device: Any, _info: Any, repeat: int
) -> list[list[Any]]:
    """Return arguments of a specialized kernel on a server."""
    inputs = random_inputs(problem)
    out = np.empty(
        (problem.batch, problem.q_heads, problem.seq_q, problem.value_dim), inputs["query"].dtype
    )
    return [tensors(spec, problem, inputs, out, device) for _ in range(repeat)]


def tensors(
    spec: KernelSpec, problem: AttentionProblem, values: Mapping[str, Any], out: Any, device: Any
) -> list[Any]:
    """Return a kernel's tensor arguments on a server: compact, nothing broadcast."""
    full = (problem.batch, problem.q_heads, problem.seq_q, problem.seq_kv)
    arrays = [values[name] for name in ("query", "key", "value")]
    arrays += [
        np.broadcast_to(values[name], full)
        for name, kind in (("mask", spec.mask), ("bias", spec.bias))
        if kind != "none"
    ]
    return [_upload(array, device) for array in (*arrays, out)]


def _upload(array: np.ndarray[Any, Any], device: Any) -> Any:
    import tvm

    tensor = tvm.runtime.empty(array.shape, array.dtype.name, device)
    tensor.copyfrom(np.ascontiguousarray(array))
    return tensor
