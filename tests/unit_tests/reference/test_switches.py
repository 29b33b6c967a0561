# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What only the reference engine has: counters, recorded calls, its switch, its NaN dummies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch  # First: it loads libraries that Transformer Engine links to.

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

from transformer_engine import reference

from tests.unit_tests.reference.engine import (
    BLACKWELL,
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
)

counters = reference.counters


@pytest.fixture(autouse=True)
def _fresh_counters() -> Iterator[None]:
    counters.reset()
    yield
    reference.never_overwrite(False)
    reference.record_calls(False)
    counters.reset()


@pytest.mark.parametrize("name", [*NAMES, *BLACKWELL])
@pytest.mark.parametrize("kind", KINDS)
class TestCounters:
    def test_quantizations_of_each_flag(self, kind: str, name: str) -> None:
        layer, inp = Layer(kind), random(TOKENS, FEATURES)
        count = len(layer.names)
        seen = []
        with quantized(name):
            for flag in (None, None, True, False, True, False):
                layer(inp, flag)
                seen.append(counters.weight_quantizations // count)
        assert seen == [1, 2, 3, 3, 4, 4]
        assert counters.weights_used == {id(weight) for weight in layer.weights}
        assert counters.stale_reads == counters.empty_reads == 0

    def test_a_stale_read(self, kind: str, name: str) -> None:
        layer, inp = Layer(kind), random(TOKENS, FEATURES)
        with quantized(name):
            layer(inp, True)
            layer(inp, False)
            assert counters.stale_reads == 0
            layer.change_weights()
            layer(inp, None)
            assert counters.stale_reads == 0
            layer(inp, False)
            assert counters.stale_reads == len(layer.names)
            layer(inp, True)
            layer(inp, False)
        assert counters.stale_reads == len(layer.names)

    def test_an_empty_read(self, kind: str, name: str) -> None:
        """A workspace that was allocated and not filled, which a skipped update leaves."""
        layer, inp = Layer(kind), random(TOKENS, FEATURES)
        with quantized(name):
            layer(inp, True)
            counters.reset()
            for key, workspace in layer.workspaces.items():
                shape, quantizer = workspace.shape, workspace._get_quantizer()
                layer.workspaces[key] = quantizer.make_empty(shape, dtype=workspace.dtype)
            out = layer(inp, False)
        assert counters.empty_reads == len(layer.names)
        assert torch.isnan(out).any()

    def test_unquantized_calls_count_nothing(self, kind: str, name: str) -> None:
        layer = Layer(kind)
        with quantized(name), te.autocast(enabled=False):
            layer(random(TOKENS, FEATURES), True)
        assert counters.weight_quantizations == 0
        assert counters.weights_used == set()


def test_a_skipped_update_is_no_quantization() -> None:
    layer, inp = Layer(), random(TOKENS, FEATURES)
    for skip, expected in ((False, 1), (False, 2), (True, 2), (False, 3)):
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(skip)
        with te.autocast(enabled=True, recipe=recipe_of("tensorwise"), _graph=True):
            layer(inp, True)
        assert counters.weight_quantizations == expected


def test_an_in_place_refresh_is_a_quantization() -> None:
    layer, inp = Layer(), random(TOKENS, FEATURES)
    with quantized("blockwise"):
        layer(inp, True)
        layer.change_weights()
        layer.workspaces["weight"].quantize_(layer.module.weight)
        layer(inp, False)
    assert counters.weight_quantizations == 2
    assert counters.stale_reads == 0


def test_writing_a_quantized_parameter_is_a_quantization() -> None:
    with te.quantized_model_init(enabled=True, recipe=recipe_of("blockwise")):
        layer = Layer()
    counters.reset()
    layer.change_weights()
    assert counters.weight_quantizations == 1
    with quantized("blockwise"):
        layer(random(TOKENS, FEATURES), True)
    assert counters.weight_quantizations == 1
    assert len(counters.weights_used) == 1


class TestNeverOverwrite:
    @pytest.mark.parametrize("name", ["bf16", *NAMES])
    @pytest.mark.parametrize("kind", KINDS)
    def test_true_accumulates_and_the_cache_is_the_release(self, kind: str, name: str) -> None:
        gradients, used = [], []
        for enabled, flags in ((True, (True, False)), (False, (False, False))):
            reference.never_overwrite(enabled)
            counters.reset()
            layer = Layer(kind)
            layer.step(name, *flags)
            gradients.append(layer.main_grads)
            used.append(counters.weight_quantizations)
        assert torch.equal(*gradients)
        assert used[0] == used[1]
        reference.never_overwrite(False)
        layer = Layer(kind)
        layer.step(name, True, False)
        assert not torch.equal(layer.main_grads, gradients[0])

    def test_it_reaches_overwrite_main_grad(self) -> None:
        reference.never_overwrite(True)
        layer = Layer()
        layer.fill(1.0)
        layer.module.weight.overwrite_main_grad = True
        layer.step("bf16", True)
        clean = Layer()
        clean.step("bf16", False)
        torch.testing.assert_close(layer.main_grads, clean.main_grads + 1.0)


class TestCalls:
    @pytest.mark.parametrize("name", ["bf16", *NAMES, *BLACKWELL])
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_call_says_what_it_was(self, kind: str, name: str) -> None:
        layer, inp = Layer(kind), random(TOKENS, FEATURES)
        reference.record_calls(True)
        with quantized(name):
            layer(inp, True)
            layer.module.eval()
            with torch.no_grad():
                layer(inp, None)
        first, second = reference.calls
        module = layer.module
        assert first == reference.Call(module, name, True, False, True, True)
        assert second == reference.Call(module, name, None, False, False, False)

    def test_a_replay_is_marked(self) -> None:
        layer, inp = Layer(), random(TOKENS, FEATURES).requires_grad_()
        reference.record_calls(True)
        with quantized("tensorwise"):
            out = te.checkpoint(lambda value: layer(value, False), inp)
        out.sum().backward()
        assert [call.recompute_phase for call in reference.calls] == [False, True]
        assert [call.grad_enabled for call in reference.calls] == [False, True]
        assert [call.in_backward for call in reference.calls] == [False, True]
        assert {call.precision for call in reference.calls} == {"tensorwise"}

    def test_off_it_keeps_the_list_and_on_it_starts_anew(self) -> None:
        layer, inp = Layer(), random(TOKENS, FEATURES)
        reference.record_calls(True)
        layer(inp, None)
        reference.record_calls(False)
        layer(inp, None)
        assert len(reference.calls) == 1
        reference.record_calls(True)
        assert reference.calls == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_dummy_is_nan(kind: str) -> None:
    layer = Layer(kind)
    for weight in layer.weights:
        weight.grad_added_to_main_grad = False
    layer.step("bf16", True)
    assert all(torch.isnan(weight.grad).all() for weight in layer.weights)


def test_a_pending_dummy_of_zeros_survives_a_nan_dummy_of_its_shape() -> None:
    """A tied embedding's zeros wait in autograd while other layers of the shape run backward."""
    from transformer_engine.pytorch.module.base import get_dummy_wgrad

    zeros = get_dummy_wgrad([4, 4], torch.float32, zero=True)
    assert torch.isnan(get_dummy_wgrad([4, 4], torch.float32)).all()
    assert not zeros.any()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", [*NAMES, *BLACKWELL])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_a_cache_of_its_own(kind: str, name: str, how: str) -> None:
    layer, inp = Layer(kind), random(TOKENS, FEATURES)
    with quantized(name):
        old = layer(inp, True)
        twin = Layer(kind)
        original = layer.module
        twin.module = (
            copy.deepcopy(original) if how == "deepcopy" else pickle.loads(pickle.dumps(original))
        )
        twin.change_weights()
        assert torch.equal(twin(inp, False), old)
        assert not torch.equal(twin(inp, True), old)
        assert torch.equal(layer(inp, False), old)
        assert all(twin.workspaces[key] is not layer.workspaces[key] for key in layer.names)
