# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Phases of activation recompute, faults included, and TE's own checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit_tests.reference.engine import (
    FEATURES,
    KINDS,
    NAMES,
    TOKENS,
    FP8GlobalStateManager,
    Layer,
    quantized,
    random,
    recipe_of,
    te,
    torch,
)

distributed = pytest.importorskip("transformer_engine.pytorch.distributed")
region = distributed.activation_recompute_forward


def phase() -> tuple[bool, bool]:
    """The two globals by their behaviour, for their names differ by version: inside, replaying."""
    with quantized("tensorwise"):
        enabled = distributed.is_fp8_activation_recompute_enabled()
    return bool(enabled), bool(distributed.in_fp8_activation_recompute_phase())


class TestPhases:
    def test_a_forward_and_its_replay(self) -> None:
        assert phase() == (False, False)
        with region(activation_recompute=True, recompute_phase=False):
            assert phase() == (True, False)
        assert phase() == (False, False)
        with region(activation_recompute=True, recompute_phase=True):
            assert phase() == (True, True)
        assert phase() == (False, False)

    def test_outside_fp8_a_region_is_not_enabled(self) -> None:
        with region(activation_recompute=True, recompute_phase=False):
            assert distributed.is_fp8_activation_recompute_enabled() is False

    def test_leaving_an_inner_region_ends_the_outer_phase(self) -> None:
        state = FP8GlobalStateManager.quantization_state
        with region(activation_recompute=True, recompute_phase=False):
            pass
        with region(activation_recompute=True, recompute_phase=True):
            with region(activation_recompute=True, recompute_phase=False):
                pass
            assert phase() == (False, False)
        assert state.is_first_fp8_module is False

    def test_first_modules_are_first_in_first_out(self) -> None:
        state = FP8GlobalStateManager.quantization_state
        for first in (True, False):
            state.is_first_fp8_module = first
            with region(activation_recompute=True, recompute_phase=False):
                pass
        # Backward replays the second region first, and is given the first one's flag.
        got = []
        for _ in range(2):
            with region(activation_recompute=True, recompute_phase=True):
                got.append(state.is_first_fp8_module)
        assert got == [True, False]

    def test_a_replay_without_a_forward_raises_and_leaves_the_phase_set(self) -> None:
        with (
            pytest.raises(IndexError),
            region(activation_recompute=True, recompute_phase=True),
        ):
            pytest.fail("the region was entered")
        assert phase() == (True, True)


def gradients(layer: Layer, inp: torch.Tensor, run: Callable[..., Any], name: str) -> Any:
    """Output, input gradient and main_grad of one forward and backward."""
    inp = inp.detach().clone().requires_grad_()
    with quantized(name):
        out = run(layer, inp)
    out.backward(random(TOKENS, FEATURES, seed=5))
    return out.detach(), inp.grad, layer.main_grads


def plain(layer: Layer, inp: torch.Tensor) -> Any:
    return layer(inp, None)


def checkpointed(layer: Layer, inp: torch.Tensor, **options: Any) -> Any:
    return te.checkpoint(lambda value: layer(value, None), inp, **options)


def phase_only(layer: Layer, inp: torch.Tensor) -> Any:
    """Recompute without autocast: what Megatron's ``tensor_parallel.checkpoint`` does."""
    return torch.utils.checkpoint.checkpoint(
        lambda value: layer(value, None),
        inp,
        use_reentrant=True,
    )


class TestCheckpoint:
    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("name", ["bf16", *NAMES])
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_changes_nothing(self, kind: str, name: str, reentrant: bool) -> None:
        inp = random(TOKENS, FEATURES)

        def run(layer: Layer, value: torch.Tensor) -> Any:
            return checkpointed(layer, value, use_reentrant=reentrant)

        expected = gradients(Layer(kind), inp, plain, name)
        found = gradients(Layer(kind), inp, run, name)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    @pytest.mark.parametrize("name", NAMES)
    def test_a_checkpoint_that_forgets_the_autocast_does(self, name: str) -> None:
        """Negative control: the replay runs in BF16, and the gradient shows it."""
        inp = random(TOKENS, FEATURES)
        expected = gradients(Layer(), inp, plain, name)
        found = gradients(Layer(), inp, phase_only, name)
        assert torch.equal(found[0], expected[0])
        assert not torch.equal(found[2], expected[2])

    def test_a_replay_takes_the_scales_of_its_forward(self) -> None:
        """Delayed scaling: scales move at the end of the region, before the backward."""
        inp = random(TOKENS, FEATURES)
        layers = [Layer(), Layer()]
        for layer in layers:
            gradients(layer, inp, plain, "delayed")
            layer.fill(0.0)
        moved = 3 * inp
        before = layers[0].module.fp8_meta["scaling_fwd"].scale.clone()
        expected = gradients(layers[0], moved, plain, "delayed")
        found = gradients(layers[1], moved, checkpointed, "delayed")
        scale = layers[0].module.fp8_meta["scaling_fwd"].scale
        assert scale[0] != before[0]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    def test_no_grad_runs_the_function_alone(self) -> None:
        layer, inp = Layer(), random(TOKENS, FEATURES)
        with torch.no_grad(), quantized("delayed"):
            out = checkpointed(layer, inp)
        assert region._is_first_fp8_module == []
        with quantized("delayed"):
            assert torch.equal(out, layer(inp, None))

    def test_a_region_leaves_the_list_empty(self) -> None:
        layer, inp = Layer(), random(TOKENS, FEATURES).requires_grad_()
        with quantized("tensorwise"):
            out = checkpointed(layer, inp)
        assert len(region._is_first_fp8_module) == 1
        out.sum().backward()
        assert region._is_first_fp8_module == []
        assert phase() == (False, False)


class TestStaleModule:
    """Phase True with ``module.fp8`` set skips the ambient autocast."""

    def test_a_replay_keeps_the_modules_precision(self) -> None:
        layer, inp = Layer(), random(TOKENS, FEATURES)
        with quantized("tensorwise"), region(activation_recompute=True, recompute_phase=False):
            rounded = layer(inp, None)
        with region(activation_recompute=True, recompute_phase=True):
            replayed = layer(inp, None)
        assert torch.equal(replayed, rounded)
        assert not torch.equal(layer(inp, None), rounded)

    def test_a_module_that_was_unquantized_asks_the_autocast(self) -> None:
        layer, inp = Layer(), random(TOKENS, FEATURES)
        unquantized = layer(inp, None)
        with region(activation_recompute=True, recompute_phase=False):
            pass
        with region(activation_recompute=True, recompute_phase=True), quantized("tensorwise"):
            assert not torch.equal(layer(inp, None), unquantized)
        assert layer.module.fp8 is True

    def test_a_replay_without_a_stash_is_a_key_error(self) -> None:
        """Delayed scaling needs the forward's scales, which only a marked forward leaves."""
        layer, inp = Layer(), random(TOKENS, FEATURES)
        with te.autocast(enabled=True, recipe=recipe_of("delayed")):
            layer(inp, None)
        with region(activation_recompute=True, recompute_phase=False):
            pass
        with (
            region(activation_recompute=True, recompute_phase=True),
            pytest.raises(KeyError, match="global_fp8_buffer_pos_fwd_recompute"),
        ):
            layer(inp, None)
