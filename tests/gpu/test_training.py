# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A real GPT, step after step: the layer's gradients are the truth's, the release's are not."""

from __future__ import annotations

import pytest

from tests.gpu import gpt
from tests.gpu.gpt import CHUNKS, DISTRIBUTED, FULL, MOE, MTP, SELECTIVE, Step, train, wrong

#: Structure and precision, and in which of two steps the release is wrong.
ROWS: dict[str, tuple[tuple[str, ...], str, list[bool]]] = {
    "mtp-bf16": (MTP, "bf16", [True, False]),
    "mtp-tensorwise": (MTP, "tensorwise", [True, True]),
    "mtp-blockwise": (MTP, "blockwise", [True, True]),
    "mtp-recipe": (MTP, "recipe", [True, True]),
    "mtp-fp8_param": (MTP, "fp8_param", [True, True]),
    "mtp-delayed": (MTP, "delayed", [True, True]),
    "chunks-bf16": (CHUNKS, "bf16", [True, False]),
    "chunks-tensorwise": (CHUNKS, "tensorwise", [True, True]),
    "chunks-delayed": (CHUNKS, "delayed", [True, True]),
    "mtp-selective-tensorwise": ((*MTP, *SELECTIVE), "tensorwise", [True, True]),
    # The replay reads the flag as False.
    "mtp-full-tensorwise": ((*MTP, *FULL), "tensorwise", [False, False]),
    "moe-mtp-bf16": ((*MOE, *MTP), "bf16", [True, False]),
    "moe-mtp-tensorwise": ((*MOE, *MTP), "tensorwise", [True, True]),
    "moe-mtp-blockwise": ((*MOE, *MTP), "blockwise", [True, True]),
    "moe-mtp-delayed": ((*MOE, *MTP), "delayed", [True, True]),
    "distributed-mtp-tensorwise": ((*DISTRIBUTED, *MTP), "tensorwise", [True, True]),
    "distributed-mtp-fp8_param": ((*DISTRIBUTED, *MTP), "fp8_param", [True, True]),
    "microbatches-mtp-tensorwise": ((*MTP, "num_microbatches=4"), "tensorwise", [True, True]),
}


def losses(steps: list[Step]) -> list[float]:
    return [step.loss for step in steps]


@pytest.mark.parametrize("row", ROWS)
def test_repeats_exact(row: str) -> None:
    overrides, precision, release_is_wrong = ROWS[row]
    right = train("truth", *overrides, precision=precision)
    assert wrong(train("truth", *overrides, precision=precision), right) == [set(), set()]
    found = train("quant_state", *overrides, precision=precision)
    assert wrong(found, right) == [set(), set()]
    assert losses(found) == losses(right)
    if precision != "delayed":
        # The other truth; under delayed scaling it is another computation.
        no_cache = train("no_cache", *overrides, precision=precision)
        assert wrong(no_cache, right) == [set(), set()]
    release = train("release", *overrides, precision=precision, right=right)
    lost = wrong(release, right)
    assert [bool(names) for names in lost] == release_is_wrong
    part = "mlp." if CHUNKS[0] in overrides else "mtp."
    errors = [
        gpt.relative_error(step.main_grads[name], expected.main_grads[name])
        for step, expected, names in zip(release, right, lost, strict=True)
        for name in names
        if expected.main_grads[name].any()
    ]
    assert all(part in name for names in lost for name in names)
    if any(release_is_wrong):
        # Not rounding: a whole call is missing.
        assert max(errors) > 0.2
    if precision not in ("bf16", "fp8_param"):
        counts = [step.quantizations for step in found]
        assert counts == [step.quantizations for step in release]
        # Where a layer is recomputed, TE's LayerNormLinear makes its first copy without the half
        # that the replay reads, so the replay makes another one, in the first step alone.
        first = 1 if "recompute_granularity" in "".join(overrides) else 0
        assert counts[first:] == [step.least for step in found[first:]]
        assert found[0].least > 0


@pytest.mark.parametrize("structure", [(), MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("precision", ["bf16", "tensorwise", "blockwise", "delayed", "fp8_param"])
def test_without_repeats_it_is_the_release(precision: str, structure: tuple[str, ...]) -> None:
    """While weights move between steps, for every recipe; scales move with them under delayed."""
    release = train("release", *structure, precision=precision, steps=3)
    found = train("quant_state", *structure, precision=precision, steps=3)
    assert wrong(found, release) == [set(), set(), set()]
    assert losses(found) == losses(release)
    assert [s.quantizations for s in found] == [s.quantizations for s in release]
    assert wrong([release[0]], [release[1]]) != [set()]


@pytest.mark.parametrize("structure", [MTP, CHUNKS], ids=["mtp", "chunks"])
def test_delayed_against_the_unfused_gradient_reference(structure: tuple[str, ...]) -> None:
    """Where nothing is accumulated in place, within bf16 rounding of each call's gradient."""
    unfused = train(
        "release",
        *structure,
        "gradient_accumulation_fusion=false",
        precision="delayed",
        steps=1,
    )
    found = train("quant_state", *structure, precision="delayed", steps=1)
    release = train("release", *structure, precision="delayed", steps=1)
    errors, lost = [], []
    for name, right in unfused[0].main_grads.items():
        if right.any():
            errors.append(gpt.relative_error(found[0].main_grads[name], right))
            lost.append(gpt.relative_error(release[0].main_grads[name], right))
    # bf16 keeps 8 bits of the mantissa.
    assert max(errors) < 2**-7
    assert max(lost) > 0.2


def test_a_weight_is_quantized_once_a_step() -> None:
    """The release's cache does that too; without a cache it is once a call."""
    for run, expected in (("quant_state", 1), ("release", 1), ("no_cache", 2)):
        for step in train(run, precision="tensorwise"):
            assert step.quantizations == expected * step.least > 0
