# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A Megatron that restores the FP8 state by itself is recognised by what it does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron.quant_state import install
from megatron.quant_state.errors import UnsupportedVersionError
from megatron.quant_state.install import MEGATRON_PATCHES, TE_PATCHES, _recompute_state
from megatron.quant_state.recompute_probe import megatron_restores_precision
from tests.unit_tests.tensor_parallel import regions
from tests.unit_tests.tensor_parallel.regions import (
    FP8GlobalStateManager,
    Layers,
    Precision,
    fp8_autocast,
    te_state,
    tensor_parallel,
    torch,
)

random = tensor_parallel.random


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    with regions.fresh_state():
        yield


def restoring(run_function: Callable[..., Any]) -> Callable[..., Any]:
    """What a later Megatron may do: the replay runs under the forward's recipe."""
    enabled = FP8GlobalStateManager.is_fp8_enabled()
    recipe = FP8GlobalStateManager.get_fp8_recipe() if enabled else None

    @functools.wraps(run_function)
    def function(*args: Any) -> Any:
        with fp8_autocast(enabled=enabled, fp8_recipe=recipe):
            return run_function(*args)

    return function


def in_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    below = random.CheckpointFunction.forward

    def forward(ctx: Any, run_function: Any, distribute: bool, *args: Any) -> Any:
        return below(ctx, restoring(run_function), distribute, *args)

    monkeypatch.setattr(random.CheckpointFunction, "forward", staticmethod(forward))


def in_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    below = random.checkpoint

    def checkpoint(function: Any, distribute: bool, *args: Any) -> Any:
        return below(restoring(function), distribute, *args)

    monkeypatch.setattr(random, "checkpoint", checkpoint)


def in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = random.CheckpointFunction.forward, random.CheckpointFunction.backward

    def recording(ctx: Any, *args: Any) -> Any:
        ctx.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        ctx.recipe = FP8GlobalStateManager.get_fp8_recipe()
        return forward(ctx, *args)

    def replaying(ctx: Any, *grads: Any) -> Any:
        with fp8_autocast(enabled=ctx.fp8, fp8_recipe=ctx.recipe):
            return backward(ctx, *grads)

    monkeypatch.setattr(random.CheckpointFunction, "forward", staticmethod(recording))
    monkeypatch.setattr(random.CheckpointFunction, "backward", staticmethod(replaying))


@pytest.mark.parametrize("way", [in_the_function, in_checkpoint, in_backward])
def test_a_megatron_that_restores_is_left_alone(
    way: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    way(monkeypatch)
    before = random.CheckpointFunction.__dict__["forward"]
    with install() as installation:
        assert random.CheckpointFunction.__dict__["forward"] is before
        patches = tuple(item.patch for item in installation.patches)
        assert patches == MEGATRON_PATCHES + TE_PATCHES
        (sentence,) = installation.left_alone
    assert "Megatron restores the FP8 state of a recomputed region by itself" in sentence
    (record,) = caplog.records
    assert f"  {sentence}" in record.getMessage().splitlines()


def test_the_release_does_not_restore_and_the_layer_does() -> None:
    te = _recompute_state()
    assert not megatron_restores_precision(te)
    with install() as installation:
        assert installation.left_alone == ()
        assert megatron_restores_precision(te)
    assert not megatron_restores_precision(te)


def test_a_default_recipe_is_not_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    below = random.checkpoint

    def checkpoint(function: Any, distribute: bool, *args: Any) -> Any:
        calls: list[None] = []

        def replayed(*args: Any) -> Any:
            calls.append(None)
            if len(calls) == 1:
                return function(*args)
            with fp8_autocast(enabled=True):
                return function(*args)

        return below(replayed, distribute, *args)

    monkeypatch.setattr(random, "checkpoint", checkpoint)
    assert not megatron_restores_precision(_recompute_state())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("way", [None, in_backward])
def test_it_leaves_everything_as_it_was(
    way: Any, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where amaxes wait to be reduced and an autocast is on; no GPU's generator is read."""
    if way is not None:
        way(monkeypatch)
    layers = Layers(Precision("delayed"), ("TELinear",))
    x = regions.random(regions.TOKENS, regions.HIDDEN, seed=1)

    def forbidden(*_: Any) -> None:
        pytest.fail("the probe used a generator's state")

    for name in ("_get_all_rng_states", "_set_all_rng_states", "_fork_rng"):
        monkeypatch.setattr(random, name, forbidden)
    functions = {name: value for name, value in vars(random).items() if callable(value)}
    with mode(), Precision("delayed").autocast():
        layers.run(x)
        before, scales, generator = te_state(), layers.scales(), torch.get_rng_state()
        megatron_restores_precision(_recompute_state())
        assert te_state() == before
        regions.check_same([layers.scales()], [scales])
        assert torch.equal(torch.get_rng_state(), generator)
    assert {name: value for name, value in vars(random).items() if callable(value)} == functions


def test_a_region_that_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = te_state()
    patched = random.CheckpointFunction.__dict__["forward"]

    def checkpoint(function: Any, distribute: bool, *args: Any, mode: str) -> Any:
        return None

    monkeypatch.setattr(random, "checkpoint", checkpoint)
    with pytest.raises(UnsupportedVersionError, match=r"raised TypeError.*Nothing was patched"):
        install()
    monkeypatch.setattr(random, "checkpoint", lambda function, distribute, *args: function(*args))
    with pytest.raises(UnsupportedVersionError, match="called its function 1 times"):
        install()
    assert te_state() == before
    assert random.CheckpointFunction.__dict__["forward"] is patched


def test_a_region_that_the_patch_does_not_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.utils.checkpoint as torchs

    def checkpoint(function: Any, distribute: bool, *args: Any) -> Any:
        return torchs.checkpoint(function, *args, use_reentrant=True, preserve_rng_state=False)

    monkeypatch.setattr(random, "checkpoint", checkpoint)
    patched = random.CheckpointFunction.__dict__["forward"]
    with pytest.raises(UnsupportedVersionError, match="something has replaced"):
        install()
    assert random.CheckpointFunction.__dict__["forward"] is patched
