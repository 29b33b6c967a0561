# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Layers in CUDA graphs, Megatron's own and Transformer Engine's, with several microbatches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.gpt import (
    MTP,
    REAL,
    Model,
    Step,
    build_trained,
    run_schedule,
    torch,
    train,
    wrong,
)

pytestmark = pytest.mark.skipif(not REAL, reason="needs CUDA graphs")

PRECISIONS = ("bf16", "tensorwise", "blockwise", "delayed", "recipe")
LOCAL = ("cuda_graph_impl=local",)
TE = ("cuda_graph_impl=transformer_engine", "cuda_graph_warmup_steps=1")


def delete_graphs() -> None:
    from megatron.core.transformer import cuda_graphs

    cuda_graphs.delete_cuda_graphs()
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()


def local(run: str, *overrides: str, **options: Any) -> tuple[list[Step], int]:
    """Four steps: the first is eager and recorded, the others replay; and the graphs there were."""
    graphs: list[int] = []

    def count(model: Model, step: int) -> None:
        from megatron.core.transformer.cuda_graphs import CudaGraphManager

        managers = [m for m in model.module.modules() if isinstance(m, CudaGraphManager)]
        runners = [runner for manager in managers for runner in manager.cudagraph_runners]
        graphs.append(sum(runner.fwd_graph is not None for runner in runners))

    try:
        steps = train(run, *LOCAL, *overrides, steps=4, between=count, **options)
    finally:
        delete_graphs()
    return steps, graphs[-1]


@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_megatrons_graphs_exact(precision: str, microbatches: int) -> None:
    check(local, f"num_microbatches={microbatches}", precision)


def check(graphs: Any, count: str, precision: str) -> None:
    found, captured = graphs("quant_state", count, precision=precision)
    assert captured > 0
    release, _ = graphs("release", count, precision=precision)
    if precision == "recipe":
        # There is no guard on the GPU, so what the release captured never sees new weights.
        assert wrong(release, found)[3] != set()
    else:
        # No module repeats, so the release in graphs is right.
        assert wrong(found, release) == [set()] * 4
    if precision != "delayed":
        # And like the model without graphs and without a cache.
        eager = train("no_cache", count, precision=precision, steps=4)
        assert wrong(found, eager) == [set()] * 4
    assert wrong([found[3]], [found[2]]) != [set()]


def te_graphs(run: str, *overrides: str, **options: Any) -> tuple[list[Step], int]:
    """Four steps, captured after the first as Megatron's training loop does."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    helpers: list[Any] = []

    def capture(model: Model, step: int) -> None:
        if step != 1:
            return
        description = model.description
        count = description.num_microbatches
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(0, None, count, 1, 1)
        helper = TECudaGraphHelper(
            model.chunks, model.module.config, description.seq_length, 1, [model.optimizer]
        )
        helper.create_cudagraphs()
        helpers.append(
            (helper, sum(len(layer.cuda_graphs) for layer in helper.flattened_callables))
        )

    try:
        steps = train(
            run, *TE, *overrides, steps=4, between=capture, build_it=on_a_side_stream, **options
        )
    finally:
        for helper, _ in helpers:
            helper.delete_cuda_graphs()
        torch.cuda.synchronize()
    return steps, helpers[0][1]


def on_a_side_stream(*arguments: Any, **options: Any) -> Model:
    """What accumulates gradients must not belong to the legacy default stream."""
    torch.cuda.set_stream(torch.cuda.Stream())
    return build_trained(*arguments, **options)


@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_transformer_engines_graphs_exact(precision: str, microbatches: int) -> None:
    check(te_graphs, f"num_microbatches={microbatches}", precision)


@pytest.mark.parametrize("graphs", [local, te_graphs])
def test_repeated_layers_beside_graphs_exact(graphs: Any) -> None:
    """The MTP layer repeats: what is eager of it is refreshed by the layer, the rest by graphs.

    Against the truth in the same graphs. A layer in graphs that runs twice sums its norm's two
    gradients in fp32 where eager autograd sums them in bf16; and Transformer Engine's graphs have
    one set of buffers a microbatch, which the layer's second call overwrites, in the release too.
    """
    right, _ = graphs("truth", *MTP, precision="tensorwise")
    found, captured = graphs("quant_state", *MTP, precision="tensorwise")
    assert captured > 0
    assert wrong(found, right) == [set()] * 4
    release, _ = graphs("release", *MTP, precision="tensorwise")
    assert wrong(release, right)[0] != set()


def test_an_evaluation_beside_graphs_exact() -> None:
    """Eager calls of captured modules refresh in place what the graphs read."""

    def trained(run: str, *overrides: str) -> tuple[list[Step], list[float]]:
        losses: list[float] = []

        def evaluate(model: Model, step: int) -> None:
            for chunk in model.chunks:
                chunk.eval()
            with torch.no_grad():
                losses.append(run_schedule(model, 100 + step, forward_only=True))
            for chunk in model.chunks:
                chunk.train()

        try:
            steps = train(run, *overrides, precision="tensorwise", steps=4, between=evaluate)
        finally:
            delete_graphs()
        return steps, losses

    right, right_losses = trained("no_cache")
    found, losses = trained("quant_state", *LOCAL)
    assert wrong(found, right) == [set()] * 4
    assert losses == right_losses


def test_weights_of_a_captured_layer_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the guard on the GPU pinned to "skip", a replay reads old weights."""
    from megatron.core.transformer import cuda_graphs

    right, _ = local("quant_state", precision="tensorwise")
    original = cuda_graphs._set_skip_fp8_weight_update_tensor
    monkeypatch.setattr(
        cuda_graphs, "_set_skip_fp8_weight_update_tensor", lambda skip: original(True)
    )
    stale, _ = local("quant_state", precision="tensorwise")
    assert wrong(stale, right)[3] != set()
