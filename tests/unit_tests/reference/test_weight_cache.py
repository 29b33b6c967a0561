# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``is_first_microbatch`` and the cached quantized weight: made, refreshed, reused, left alone."""

from __future__ import annotations

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

INPUT = {"seed": 3}


def fresh(kind: str, name: str, *, changed: bool) -> torch.Tensor:
    """What a layer without any cache answers, with the first or with the changed weights."""
    layer = Layer(kind)
    if changed:
        layer.change_weights()
    with quantized(name):
        out: torch.Tensor = layer(random(TOKENS, FEATURES, **INPUT), None)
    assert layer.workspaces == {}
    return out


@pytest.fixture(params=KINDS)
def kind(request: Any) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", NAMES)
class TestCache:
    def test_none_neither_keeps_nor_uses_nor_evicts(self, kind: str, name: str) -> None:
        layer, inp = Layer(kind), random(TOKENS, FEATURES, **INPUT)
        with quantized(name):
            old = layer(inp, True)
            kept = dict(layer.workspaces)
            layer.change_weights()
            new = layer(inp, None)
            reused = layer(inp, False)
        assert torch.equal(new, fresh(kind, name, changed=True))
        assert not torch.equal(new, old)
        assert all(layer.workspaces[key] is kept[key] for key in layer.names)
        assert torch.equal(reused, old)

    def test_true_quantizes_anew_in_place(self, kind: str, name: str) -> None:
        layer, inp = Layer(kind), random(TOKENS, FEATURES, **INPUT)
        with quantized(name):
            old = layer(inp, True)
            kept = dict(layer.workspaces)
            layer.change_weights()
            new = layer(inp, True)
            reused = layer(inp, False)
        assert torch.equal(old, fresh(kind, name, changed=False))
        assert torch.equal(new, fresh(kind, name, changed=True))
        assert torch.equal(reused, new)
        assert all(layer.workspaces[key] is kept[key] for key in layer.names)

    def test_false_makes_what_is_missing_and_keeps_it(self, kind: str, name: str) -> None:
        layer, inp = Layer(kind), random(TOKENS, FEATURES, **INPUT)
        with quantized(name):
            first = layer(inp, False)
            assert set(layer.workspaces) == set(layer.names)
            layer.change_weights()
            second = layer(inp, False)
            layer.workspaces.clear()
            third = layer(inp, False)
        assert torch.equal(first, fresh(kind, name, changed=False))
        assert torch.equal(second, first)
        assert torch.equal(third, fresh(kind, name, changed=True))

    def test_one_dropped_entry_is_made_anew(self, name: str) -> None:
        layer, inp = Layer("GroupedLinear"), random(TOKENS, FEATURES, **INPUT)
        with quantized(name):
            old = layer(inp, True)
            layer.change_weights()
            del layer.workspaces["weight1"]
            mixed = layer(inp, False)
        rows = layer.splits[0]
        new = fresh("GroupedLinear", name, changed=True)
        assert torch.equal(mixed[:rows], old[:rows])
        assert torch.equal(mixed[rows:], new[rows:])
        assert not torch.equal(old[rows:], new[rows:])

    def test_quantized_parameters_have_no_workspace(self, kind: str, name: str) -> None:
        with te.quantized_model_init(enabled=True, recipe=recipe_of(name)):
            layer = Layer(kind)
        inp = random(TOKENS, FEATURES, **INPUT)
        with quantized(name):
            outs = [layer(inp, flag) for flag in (True, False, None)]
        assert layer.workspaces == {}
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])
        layer.change_weights()
        with quantized(name):
            assert not torch.equal(layer(inp, False), outs[0])


@pytest.mark.parametrize("flag", [None, True, False])
def test_without_autocast_nothing_is_cached(kind: str, flag: bool | None) -> None:
    layer, inp = Layer(kind), random(TOKENS, FEATURES, **INPUT)
    old = layer(inp, flag)
    layer.change_weights()
    new = layer(inp, flag)
    assert layer.workspaces == {}
    assert not torch.equal(old, new)
    assert torch.equal(new, fresh(kind, "bf16", changed=True))


def test_a_recipe_of_another_class_clears_the_cache() -> None:
    layer, inp = Layer(), random(TOKENS, FEATURES, **INPUT)
    with quantized("tensorwise"):
        layer(inp, True)
    kept = layer.workspaces["weight"]
    with quantized("blockwise"), pytest.warns(UserWarning, match="Recipe type changed"):
        out = layer(inp, False)
    assert layer.workspaces["weight"] is not kept
    assert torch.equal(out, fresh("Linear", "blockwise", changed=False))


def test_a_recipe_of_other_parameters_does_not() -> None:
    layer, inp = Layer(), random(TOKENS, FEATURES, **INPUT)
    with quantized("tensorwise"):
        old = layer(inp, True)
    kept = layer.workspaces["weight"]
    other = recipe_of("tensorwise")
    other.use_power_2_scales = True
    layer.change_weights()
    with te.autocast(enabled=True, recipe=other):
        out = layer(inp, False)
    assert layer.workspaces["weight"] is kept
    assert torch.equal(out, old)


def test_a_quantized_parameter_of_another_recipe_is_refused() -> None:
    with te.quantized_model_init(enabled=True, recipe=recipe_of("tensorwise")):
        layer = Layer()
    with quantized("blockwise"), pytest.raises(RuntimeError, match="Recipe mismatch"):
        layer(random(TOKENS, FEATURES), None)


class TestCapture:
    """What a captured region does, without a graph: ``_graph=True`` and the skip tensor."""

    @pytest.mark.parametrize("skip", [False, True])
    @pytest.mark.parametrize("flag", [True, False])
    @pytest.mark.parametrize("name", NAMES)
    def test_the_skip_tensor_decides_not_the_flag(self, name: str, flag: bool, skip: bool) -> None:
        layer, inp = Layer(), random(TOKENS, FEATURES, **INPUT)
        with quantized(name):
            old = layer(inp, True)
        FP8GlobalStateManager.reset()
        layer.change_weights()
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(skip)
        recipe = recipe_of(name)
        scales = layer.module.fp8_meta["scaling_fwd"]
        if name == "delayed":
            # The first region has moved the scales, which is not what is looked at.
            scales.scale.fill_(1.0)
        with te.autocast(enabled=True, recipe=recipe, _graph=True):
            out = layer(inp, flag)
        expected = old if skip else fresh("Linear", name, changed=True)
        assert torch.equal(out, expected)

    def test_without_a_skip_tensor_the_flag_decides(self) -> None:
        layer, inp = Layer(), random(TOKENS, FEATURES, **INPUT)
        region = te.autocast(enabled=True, recipe=recipe_of("tensorwise"), _graph=True)
        with region:
            old = layer(inp, True)
            layer.change_weights()
            assert torch.equal(layer(inp, False), old)
            assert torch.equal(layer(inp, True), fresh("Linear", "tensorwise", changed=True))

    def test_true_accumulates_under_a_skip_tensor(self) -> None:
        layer = Layer()
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
        gradients = []
        for start in (0.0, 1.0):
            layer.fill(start)
            inp = random(TOKENS, FEATURES).requires_grad_()
            with te.autocast(enabled=True, recipe=recipe_of("tensorwise"), _graph=True):
                out = layer(inp, True)
            out.backward(random(TOKENS, FEATURES, seed=2))
            gradients.append(layer.main_grads)
        torch.testing.assert_close(gradients[1], gradients[0] + 1.0, rtol=1e-5, atol=1e-5)
