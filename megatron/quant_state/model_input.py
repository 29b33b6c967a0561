# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Models that only Megatron itself can describe: launch flags, and functions that build one."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.quant_state.errors import Location
from megatron.quant_state.foreign_model import FLAGS, flag_of
from megatron.quant_state.located_yaml import KeyPath
from megatron.quant_state.model import ModelDescription, describe_model
from megatron.quant_state.workers import run_workers

__all__ = ["is_function", "model_of_flags", "model_of_function"]


def is_function(name: str) -> bool:
    """Whether a model is named as ``package.module:function``."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def model_of_flags(
    flags: Sequence[str], overrides: Sequence[str] = (), *, recipe: str | None = None
) -> ModelDescription:
    """The model that ``megatron.training.arguments`` makes of a launch script's flags.

    Args:
        flags: what follows the script's name.
        overrides: texts of ``--set``.
        recipe: the file of ``--recipe``; wins over the flags' own.

    Raises:
        InputError: a flag that Megatron has not, or a combination that it refuses.
    """
    raw = _ask("flags", list(flags))
    said = {flag.partition("=")[0] for flag in flags}
    locations: dict[KeyPath, Location] = {}
    for section, values in raw.items():
        names = values if isinstance(values, dict) else (section,)
        for name in names:
            flag = flag_of(name)
            key = (section, name) if isinstance(values, dict) else (section,)
            locations[key] = Location(flag if flag in said else FLAGS)
    return describe_model(raw, locations, FLAGS, overrides, recipe=recipe)


def model_of_function(
    spec: str, overrides: Sequence[str] = (), *, recipe: str | None = None
) -> ModelDescription:
    """The model that ``package.module:function`` builds; it is called on the meta device.

    Args:
        spec: the function; it takes nothing and returns a GPTModel, or one inside wrappers.
        overrides: texts of ``--set``.
        recipe: the file of ``--recipe``.

    Raises:
        InputError: there is no such function, or it returns something else.
    """
    raw = _ask("function", spec)
    return describe_model(raw, {}, spec, overrides, recipe=recipe)


def _ask(part: str, given: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="quant-state-") as folder:
        job = Path(folder)
        (job / "job.json").write_text(json.dumps({part: given}))
        arguments = ["-m", "megatron.quant_state.foreign_model", str(job), part]
        events: Mapping[str, Any] = run_workers(job, {part: arguments}, lambda name, event: None)
    raw: dict[str, Any] = events[part][-1]["raw"]
    return raw
