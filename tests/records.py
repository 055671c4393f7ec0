"""Records for tests that need some."""

from attentune import AttentionKey, AttentionProblem, Record
from attentune.record import Loser


def a_record(number=0, **changes):
    """Return a record; each number has a key of its own."""
    problem = AttentionProblem(1, 1, 1, 64, 64, 1 + number, 32, "float32")
    fields = {
        "key": AttentionKey.from_problem(problem),
        "target": '{"kind":"llvm"}',
        "variant": "flash_unit",
        "parameters": {"block_q": 64, "block_kv": 128},
        "seconds_all": (3e-3, 1e-3, 2e-3),
        "score": 1.25e-3,
        "losers": (
            Loser("fallback", {}, "unsupported", "no schedule"),
            Loser("flash_unit", {"block_q": 32}, "slower", "1.1 times the winner's", 2e-3),
        ),
        "versions": {"attentune": "0.1.0", "tvm": "0.27.0.post1", "llvm": "22"},
        "fingerprint": "abc",
        "created": "2026-01-01T00:00:00Z",
        "machine": "x86_64",
        "batch": ("fallback", "flash_unit"),
        "trace": [["inst", 1, 0.5, None, True]],
        "workspace_bytes": 1024,
    }
    return Record(**{**fields, **changes})
