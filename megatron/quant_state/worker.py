# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What every worker process does: read its job, write events, end with its parent.

A worker is started with two arguments: JOB, a folder with ``job.json``, and PART, its name there.
Events go to ``JOB/PART/events.jsonl``, one JSON object with the key ``event`` a line.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.quant_state.errors import InputError
from megatron.quant_state.model import error_to_json

__all__ = ["Write", "end_with_parent", "work"]


class Write(Protocol):
    """Writes events."""

    def __call__(self, event: str, /, **values: Any) -> None:
        """Write one event with its values, at once."""


def work(arguments: Sequence[str], do: Callable[[Path, str, dict[str, Any], Write], None]) -> int:
    """Do a worker's job.

    Args:
        arguments: JOB and PART.
        do: takes JOB, PART, the content of ``job.json``, and what writes events.

    Returns:
        int: 0 done; 2 the input cannot be used, with the error as the last event, ``refused``.
    """
    job, part = Path(arguments[0]), arguments[1]
    out = job / part
    out.mkdir()
    given = json.loads((job / "job.json").read_text())
    with (out / "events.jsonl").open("w", buffering=1) as events:

        def write(event: str, /, **values: Any) -> None:
            events.write(json.dumps({"event": event, **values}) + "\n")

        try:
            do(job, part, given, write)
        except InputError as error:
            write("refused", error=error_to_json(error))
            return 2
    return 0


def end_with_parent() -> None:
    """End this process when its stdin is closed, from now on: whoever wanted the answer is gone.

    The parent may be killed, which leaves it no time to end its workers.
    """
    threading.Thread(target=_end_with_stdin, daemon=True).start()


def _end_with_stdin() -> None:
    # Not sys.stdin, whose lock a process that ends by itself would then wait for.
    while os.read(0, 1):
        pass
    os._exit(1)
