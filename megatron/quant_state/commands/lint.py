# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``quant-state lint``: what is wrong with a quantization recipe, without a model."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.quant_state.commands.output import write_result

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Reads a per-module quantization recipe (Megatron's --te-precision-config-file) and says what is
wrong with it, as far as no model is needed: Megatron itself applies most faulty recipes without
a word. `quant-state plan` does the same against a model.
"""

_EPILOG = """\
exit code: 0 clean, or warnings only; 1 an error was found; 2 the file cannot be read

examples:
  quant-state lint recipe.yaml
  quant-state lint recipe.yaml --format json
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "lint",
        help="say what is wrong with a quantization recipe",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, as Megatron takes it")
    parser.add_argument("--format", choices=("table", "json"), default="table")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; the exit code."""
    from megatron.quant_state.findings import has_errors
    from megatron.quant_state.recipe_lint import lint_recipe
    from megatron.quant_state.reporters import findings as reporter

    findings = lint_recipe(args.recipe).findings
    if args.format == "json":
        text = reporter.render_json(args.recipe, findings)
    else:
        text = reporter.render_table(findings)
    write_result(text, None)
    return 1 if has_errors(findings) else 0
