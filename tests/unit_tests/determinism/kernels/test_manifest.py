# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The manifest names every source that touches Transformer Engine, and tests that exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit_tests.determinism.kernels.manifest import TESTS

ROOT = Path(__file__).resolve().parents[4]
PACKAGE = ROOT / "megatron" / "quant_state"
#: What only Transformer Engine's modules and Megatron's wrappers around them have.
OF_TE = {
    "_fp8_workspaces",
    "disable_parameter_transpose_cache",
    "is_first_microbatch",
    "quantize_",
    "prepare_forward",
    "fp8_meta",
    "will_execute_quantized",
}
LIBRARIES = ("transformer_engine", "megatron.core.extensions.transformer_engine")


def names(tree: ast.AST) -> Iterator[str]:
    """Modules that are imported, and attributes and whole strings that the code uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def touches_te(text: str) -> bool:
    return any(
        name in OF_TE or (name.startswith(LIBRARIES) and " " not in name)
        for name in names(ast.parse(text))
    )


def sources() -> list[str]:
    """Below the package, without the engine that stands in for TE."""
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return sorted(str(file) for file in files if file.parts[0] != "reference")


@pytest.mark.parametrize("source", sources())
def test_every_source_that_touches_te_is_in_the_manifest(source: str) -> None:
    assert touches_te((PACKAGE / source).read_text()) is (source in TESTS)


def test_the_manifest_names_no_source_that_is_gone() -> None:
    assert set(TESTS) <= set(sources())


@pytest.mark.parametrize("test", sorted({test for tests in TESTS.values() for test in tests}))
def test_the_tests_exist(test: str) -> None:
    file, *path = test.split("::")
    body: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for name in path:
        found = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        assert len(found) == 1, f"{file} has no {'::'.join(path)}"
        body = found[0].body


@pytest.mark.parametrize(
    ("text", "touches"),
    [
        ("import transformer_engine.pytorch as te", True),
        ("from megatron.core.extensions.transformer_engine import TELinear", True),
        ("def f(module):\n    module._fp8_workspaces.clear()", True),
        ("FLAG = 'is_first_microbatch'", True),
        ("'''transformer_engine is what this is about.'''", False),
        ("import torch\nlayer = torch.nn.Linear(2, 2)", False),
    ],
)
def test_what_counts_as_touching(text: str, touches: bool) -> None:
    assert touches_te(text) is touches
