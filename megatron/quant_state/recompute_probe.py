# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Ask Megatron by behaviour whether its replay already sees the forward's quantization state."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from megatron.quant_state.errors import UnsupportedVersionError
from megatron.quant_state.recompute_state import RecomputeState

__all__ = ["megatron_restores_precision"]

_MISSING = object()


def megatron_restores_precision(te: RecomputeState) -> bool:
    """Run a region of one CPU tensor through ``tensor_parallel.checkpoint`` and look at its replay.

    No GPU is touched: the RNG states are stand-ins, and so are TE's checks of what the GPU
    supports. Nothing is quantized, since the region computes a product of a plain tensor. TE's
    state is restored afterwards, and no amax is reduced.

    Args:
        te: TE's state.

    Returns:
        bool: whether the replay ran under an autocast with the forward's recipe.

    Raises:
        UnsupportedVersionError: the region did not run forward and replay.
    """
    import torch
    from transformer_engine.common.recipe import Float8CurrentScaling

    random = importlib.import_module("megatron.core.tensor_parallel.random")
    manager = te.manager
    recipe = Float8CurrentScaling()
    seen: list[bool] = []

    def function(value: Any) -> Any:
        seen.append(bool(manager.is_fp8_enabled()) and manager.get_fp8_recipe() == recipe)
        return value * 1

    outer, firsts = te.save(), te.firsts.copy()
    # A depth above zero: leaving an autocast at depth zero reduces amaxes.
    inside = ((True, False, recipe, None, False, False), 1, False, False)
    outside = ((False, False, None, None, False, False), 1, False, False)
    try:
        with _stand_ins(random, manager), torch.inference_mode(False), torch.enable_grad():
            tensor = torch.zeros(1, requires_grad=True)
            te.restore(inside)
            result = random.checkpoint(function, False, tensor)
            te.restore(outside)
            result.backward()
    except Exception as error:
        raise _cannot_tell(f"raised {type(error).__name__}: {error}") from error
    finally:
        te.restore(outer)
        te.firsts[:] = firsts
    if len(seen) != 2 or not seen[0]:
        raise _cannot_tell(f"called its function {len(seen)} times, not in forward and replay")
    return seen[1]


def _cannot_tell(what: str) -> UnsupportedVersionError:
    return UnsupportedVersionError(
        "cannot tell whether this megatron-core restores the FP8 state of a recomputed region: a "
        f"probe of megatron.core.tensor_parallel.random.checkpoint {what}. Nothing was patched."
    )


@contextmanager
def _stand_ins(random: Any, manager: Any) -> Iterator[None]:
    """Replace what would need a GPU, where it exists, and put it back."""
    quantization = importlib.import_module(manager.__module__)

    def supported(*_: Any, **__: Any) -> tuple[bool, str]:
        return True, ""

    stand_ins: list[tuple[Any, str, Callable[..., Any]]] = [
        (random, "_get_all_rng_states", tuple),
        (random, "_set_all_rng_states", lambda *_: None),
        (random, "_fork_rng", nullcontext),
        (quantization, "check_recipe_support", lambda *_: None),
        (manager, "is_fp8_available", supported),
    ]
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in stand_ins]
    try:
        for owner, name, stand_in in stand_ins:
            if name in vars(owner):
                setattr(owner, name, stand_in)
        yield
    finally:
        for owner, name, value in before:
            if value is not _MISSING:
                setattr(owner, name, value)
