# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Which test holds each source that touches Transformer Engine to the bytes of its kernels.

A source touches TE when it imports it, or acts on what only TE's modules have. Sources are below
``megatron/quant_state/``, tests below the repository: a file, or a function in it.
"""

from __future__ import annotations

_WRAPPERS = "tests/unit_tests/determinism/kernels/test_te_wrappers.py"
_RECOMPUTE = "tests/gpu/test_recompute.py"
_TRAINING = "tests/gpu/test_training.py"
_REHEARSE = "tests/gpu/test_rehearse.py"

#: Source to its tests.
TESTS: dict[str, tuple[str, ...]] = {
    "first_microbatch.py": (
        f"{_WRAPPERS}::TestResolve::test_the_answer_is_what_the_call_does",
        f"{_WRAPPERS}::TestResolve::test_a_rule_decides_in_training_and_in_evaluation",
    ),
    "weight_cache.py": (
        f"{_WRAPPERS}::test_main_grad_exact",
        f"{_WRAPPERS}::test_delayed_wgrad_exact",
        f"{_WRAPPERS}::test_a_refresh_keeps_the_bytes_of_the_release",
        f"{_WRAPPERS}::test_a_captured_wrapper_exact",
        "tests/gpu/test_between_steps.py::test_evaluation_between_steps_exact",
        "tests/gpu/test_cuda_graphs.py::test_megatrons_graphs_exact",
        "tests/gpu/test_cuda_graphs.py::test_transformer_engines_graphs_exact",
        "tests/gpu/test_parallel.py::test_every_rank_exact",
    ),
    "install.py": (
        f"{_WRAPPERS}::test_main_grad_exact",
        "tests/gpu/test_between_steps.py::test_save_and_resume_exact",
        "tests/functional_tests/test_te_versions.py",
    ),
    "recompute.py": (f"{_RECOMPUTE}::test_a_recomputed_region_exact",),
    "recompute_probe.py": (f"{_RECOMPUTE}::test_a_recomputed_region_exact",),
    "te_probe.py": (
        f"{_TRAINING}::test_repeats_exact",
        f"{_TRAINING}::test_a_weight_is_quantized_once_a_step",
    ),
    "train.py": (f"{_REHEARSE}::test_the_verdicts_are_those_of_the_cpu",),
    "build.py": (f"{_TRAINING}::test_repeats_exact", "tests/gpu/test_parallel.py"),
    "megatron_config.py": (f"{_TRAINING}::test_repeats_exact",),
    # A plan asks the reference engine, and the real one for names alone; it runs no kernel.
    "plan.py": ("tests/unit_tests/test_plan.py",),
    "plan_lint.py": ("tests/unit_tests/test_plan.py",),
    "recipe_reader.py": ("tests/unit_tests/test_recipe.py",),
    "survey.py": ("tests/unit_tests/test_plan.py", "tests/unit_tests/test_real_names.py"),
    "twin_run.py": ("tests/unit_tests/test_plan.py",),
    "workers.py": ("tests/unit_tests/test_rehearse.py", "tests/unit_tests/test_plan.py"),
}
