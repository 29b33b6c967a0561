# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The sequence `pin_then_next`: modules that rules pin to BF16 under global FP8, in turn."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

import torch
from megatron.core.quantization.quant_config import RecipeConfig
from transformer_engine import reference

from megatron.quant_state import Installation
from tests.unit_tests.wrappers import (
    HIDDEN,
    TOKENS,
    autocast,
    call,
    config_of,
    random,
    rule,
    wrapper_of,
)

FP8 = ("tensorwise", "blockwise", "delayed")
PINNED = ("linear_qkv", "linear_proj")


def attention_of(precision: str, rules: bool) -> dict[str, Any]:
    """linear_qkv, linear_proj and a linear_fc1 that no rule matches; equal weights every time."""
    torch.manual_seed(1)
    config = config_of(precision, quant_recipe=RecipeConfig([], {}))
    kinds = ("TELayerNormColumnParallelLinear", "TELinear", "TELinear")
    layers = {}
    for name, kind in zip((*PINNED, "linear_fc1"), kinds, strict=True):
        layer = wrapper_of(kind, config)
        if rules and name in PINNED:
            layer.finish_init(rule({}))
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
        layers[name] = layer
    return layers


def step(layers: dict[str, Any], precision: str, x: torch.Tensor) -> dict[str, str]:
    """Forward and backward under the global autocast; what each layer's calls ran in."""
    reference.calls.clear()
    reference.record_calls(True)
    with autocast(precision):
        for layer in layers.values():
            x = call(layer, x)
    x.sum().backward()
    reference.record_calls(False)
    names = {id(layer): name for name, layer in layers.items()}
    return {names[id(made.module)]: made.precision for made in reference.calls}


@pytest.mark.parametrize("precision", FP8)
def test_pinned_modules_run_in_bf16(installed: Installation, precision: str) -> None:
    x = random(TOKENS, HIDDEN, seed=3)
    ran = step(attention_of(precision, rules=True), precision, x)
    assert ran == {"linear_qkv": "bf16", "linear_proj": "bf16", "linear_fc1": precision}
    ran = step(attention_of(precision, rules=False), precision, x)
    assert ran == dict.fromkeys(ran, precision)


@pytest.mark.parametrize("precision", FP8)
def test_and_after_an_exception_in_the_first(installed: Installation, precision: str) -> None:
    """The step that is tried again leaves the bits of one that went well at once."""
    x = random(TOKENS, HIDDEN, seed=3)
    untroubled, troubled = attention_of(precision, rules=True), attention_of(precision, rules=True)
    with pytest.raises(RuntimeError), autocast(precision):
        call(troubled["linear_qkv"], random(TOKENS, HIDDEN + 1, seed=3))
    assert step(troubled, precision, x) == step(untroubled, precision, x)
    for name, layer in troubled.items():
        assert layer.is_first_microbatch is untroubled[name].is_first_microbatch
        for found, expected in zip(layer.parameters(), untroubled[name].parameters(), strict=True):
            assert torch.equal(found.main_grad, expected.main_grad)
    # A pinned module is untracked, so what it is owed stays: only the last has been disarmed.
    flags = {name: layer.is_first_microbatch for name, layer in troubled.items()}
    assert flags == {"linear_qkv": True, "linear_proj": True, "linear_fc1": False}
