"""A schedule's trace, which a record keeps as TVM's JSON, as lines for a person."""

from __future__ import annotations

import json
from typing import Any


def trace_lines(trace: Any) -> list[str]:
    """Return a line for each instruction, with the decision it was given.

    Parameters
    ----------
    trace : JSON data
        ``[instructions, decisions]``, an instruction being ``[kind, inputs, attributes, outputs]``
        and a decision ``[index, value]``. Anything else is shown as it is.
    """
    try:
        instructions, decisions = trace
        chosen = dict(decisions)
        return [_line(one, chosen.get(index)) for index, one in enumerate(instructions)]
    except (TypeError, ValueError):
        return [json.dumps(trace)]


def _line(instruction: Any, decision: Any) -> str:
    kind, inputs, attributes, outputs = instruction
    arguments = ", ".join(_text(one) for one in [*inputs, *attributes])
    text = f"{kind}({arguments})"
    if outputs:
        text = f"{', '.join(map(str, outputs))} = {text}"
    return text if decision is None else f"{text}  # chose {json.dumps(decision)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
