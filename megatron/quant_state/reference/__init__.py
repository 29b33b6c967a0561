# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The CPU engine, seen from outside: start a process of its own and nothing else.

One process holds one ``transformer_engine``, and the stand-ins for CUDA are process-wide, so
whatever trains on the engine runs in a process that this package starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def importing_as_here(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with which a Python imports from where this process does."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return {**environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def start(arguments: Sequence[str], **popen: Any) -> subprocess.Popen[str]:
    """Start a process whose ``transformer_engine`` is the reference engine.

    It imports from where this process does. ``python -m`` alone would look in the working directory
    first, where users of Megatron keep a checkout of another version; Python 3.10, which cannot be
    told not to, still does.

    Args:
        arguments: What follows ``python``: ``["-m", "package.module", "--flag"]``, or a file and
            its arguments.
        **popen: Passed to ``subprocess.Popen``; pipes carry text, and PYTHONPATH and PYTHONSAFEPATH
            of ``env`` are replaced.

    Returns:
        The process; the caller waits for it.
    """
    popen.setdefault("text", True)
    popen["env"] = importing_as_here(os.environ if popen.get("env") is None else popen["env"])
    command = [sys.executable, "-m", "megatron.quant_state.reference", *arguments]
    return subprocess.Popen(command, **popen)
