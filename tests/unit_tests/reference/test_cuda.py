# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What stands in for the extension that Megatron compiles at the first replay of a region."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "transformer_engine.reference",
    reason="run as: python -m megatron.quant_state.reference -m pytest",
)

import torch
from megatron.core.tensor_parallel import random
from torch.utils import cpp_extension

from megatron.quant_state.build import initialize_single_process
from megatron.quant_state.reference.cuda import share_storage


def test_a_discarded_output_has_its_bytes_again() -> None:
    right = torch.randn(6, 4)
    output = right.clone()
    view = output.reshape(3, 8)[1:]
    seen = view.clone()
    version = output._version
    output.untyped_storage().resize_(0)
    share_storage(output, right)
    assert torch.equal(output, right)
    assert torch.equal(view, seen)
    assert output._version == version


@pytest.mark.skipif(not hasattr(random, "_get_share_storage"), reason="this Megatron compiles none")
def test_megatron_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(random, "_share_storage_ext", None)
    assert random._get_share_storage() is share_storage
    assert list(tmp_path.iterdir()) == []


def test_other_extensions_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cpp_extension, "_jit_compile", lambda name, *a, **k: asked.append(name))
    cpp_extension.load_inline("another_ext", cpp_sources="", functions=[])
    assert asked == ["another_ext"]


def test_gradients_of_a_replayed_region_are_those_without_it() -> None:
    initialize_single_process()

    def gradients(recompute: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(8, 16, requires_grad=True)
        first, last = (
            torch.randn(16, 16, requires_grad=True),
            torch.randn(16, 4, requires_grad=True),
        )

        def region(given: torch.Tensor) -> torch.Tensor:
            return torch.tanh(given @ first)

        if recompute:
            checkpoint = random.CheckpointWithoutOutput()
            hidden = checkpoint.checkpoint(region, x)
            out = hidden.reshape(4, 2, 16) @ last
            checkpoint.discard_output_and_register_recompute(out)
            assert hidden.untyped_storage().nbytes() == 0
        else:
            out = region(x).reshape(4, 2, 16) @ last
        out.square().sum().backward()
        return [t.grad for t in (x, first, last) if t.grad is not None]

    plain, replayed = gradients(False), gradients(True)
    assert len(plain) == len(replayed) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
