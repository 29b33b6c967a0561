# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What happens between training steps: evaluation, a checkpoint, inference, torch.compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.quant_state import install, weights_changed
from tests.gpu import gpt
from tests.gpu.gpt import (
    DEVICE,
    MTP,
    PRECISION,
    REAL,
    Model,
    Step,
    build_trained,
    describe,
    run_schedule,
    running,
    same_bits,
    torch,
    train,
    train_step,
    wrong,
)

QUANTIZED = ("tensorwise", "blockwise", "delayed")


def evaluate(model: Model, seed: int) -> float:
    """A forward-only schedule in evaluation mode, as Megatron's training loop runs it."""
    for chunk in model.chunks:
        chunk.eval()
    with torch.no_grad():
        loss = run_schedule(model, seed, forward_only=True)
    for chunk in model.chunks:
        chunk.train()
    return loss


@pytest.mark.parametrize("precision", ["bf16", *QUANTIZED])
@pytest.mark.parametrize("structure", [(), MTP], ids=["plain", "mtp"])
def test_evaluation_between_steps_exact(structure: tuple[str, ...], precision: str) -> None:
    evaluations: dict[str, list[float]] = {}

    def trained(run: str, **options: Any) -> list[Step]:
        seen: list[float] = []
        evaluations[run] = seen
        return train(
            run,
            *structure,
            precision=precision,
            steps=3,
            between=lambda model, step: seen.append(evaluate(model, 100 + step)),
            **options,
        )

    right = trained("truth")
    found = trained("quant_state")
    assert wrong(found, right) == [set(), set(), set()]
    assert evaluations["quant_state"] == evaluations["truth"]
    lost = wrong(trained("release", right=right), right)
    assert any(map(bool, lost)) is bool(structure)


@pytest.mark.parametrize("precision", ["bf16", *QUANTIZED])
def test_save_and_resume_exact(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Scales of delayed scaling are a pickle.
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    file = tmp_path / "checkpoint.pt"

    def save(model: Model, step: int) -> None:
        if step == 2:
            state = {"model": model.module.state_dict(), "optimizer": model.optimizer.state_dict()}
            torch.save(state, file)

    right = train("truth", *MTP, precision=precision, steps=3)
    whole = train("quant_state", *MTP, precision=precision, steps=3, between=save)
    assert wrong(whole, right) == [set(), set(), set()]

    def resumed(run: str) -> Step:
        with running(run):
            model = build_trained(describe(*MTP, *PRECISION[precision]))
            state = torch.load(file, weights_only=False)
            model.module.load_state_dict(state["model"])
            model.optimizer.load_state_dict(state["optimizer"])
            return train_step(model, 3)

    found = resumed("quant_state")
    assert wrong([found], right[2:]) == [set()]
    assert found.loss == right[2].loss
    # In BF16 too: the first step after a resume is a first step.
    assert wrong([resumed("release")], right[2:]) != [set()]


def logits(module: Any, length: int) -> torch.Tensor:
    """A forward that no schedule drives, over a number of tokens that FP8 cannot take as it is."""
    tokens = torch.randint(128, (1, length), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    positions = torch.arange(length, device=DEVICE)[None]
    with torch.no_grad():
        out: torch.Tensor = module(tokens, positions, None)
    return out.float()


@pytest.mark.parametrize("precision", ["tensorwise", "blockwise"])
def test_inference_padding_wrapper_exact(precision: str) -> None:
    """``prepare_model_for_fp8_inference`` captures each linear's bound forward."""
    from megatron.core.fp8_utils import prepare_model_for_fp8_inference

    def generated(run: str) -> tuple[torch.Tensor, torch.Tensor]:
        with running(run):
            model = build_trained(describe(*PRECISION[precision]))
            train_step(model, 1)
            module = model.module.eval()
            prepare_model_for_fp8_inference(module)
            if run == "quant_state":
                weights_changed(module)
            first = logits(module, 25)
            for layer in gpt.linears(module).values():
                layer.disable_parameter_transpose_cache = True
            return first, logits(module, 25)

    cached, current = generated("quant_state")
    assert same_bits(cached, current)
    stale, current = generated("release")
    assert not same_bits(stale, current)


@pytest.mark.skipif(not REAL, reason="the reference engine switches torch.compile off")
@pytest.mark.parametrize("precision", ["bf16", "tensorwise"])
def test_a_layer_under_torch_compile_exact(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this torch 2.11 fails on TE 2.20.2's own Float8Tensor, in the release as well.
    monkeypatch.setattr(torch._dynamo.config, "suppress_errors", True)

    def compiled(*arguments: Any, **options: Any) -> Model:
        torch._dynamo.reset()
        model = build_trained(*arguments, **options)
        for layer in [*model.module.decoder.layers, model.module.mtp.layers[0].mtp_model_layer]:
            layer.mlp.forward = torch.compile(layer.mlp.forward)
        return model

    right = train("truth", *MTP, precision=precision, build_it=compiled)
    found = train("quant_state", *MTP, precision=precision, build_it=compiled)
    assert wrong(found, right) == [set(), set()]
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    release = train("release", *MTP, precision=precision, right=right, build_it=compiled)
    assert wrong(release, right)[0] != set()


def test_a_forward_after_a_load_uses_what_was_loaded() -> None:
    with install():
        model = build_trained(describe(*PRECISION["tensorwise"]))
        before = model.module.state_dict()
        before = {k: v.clone() if torch.is_tensor(v) else v for k, v in before.items()}
        train_step(model, 1)
        module = model.module.eval()
        trained = logits(module, 32)
        module.load_state_dict(before)
        loaded = logits(module, 32)
        for layer in gpt.linears(module).values():
            layer.disable_parameter_transpose_cache = True
        assert same_bits(loaded, logits(module, 32))
        assert not same_bits(loaded, trained)
