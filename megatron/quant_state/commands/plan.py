# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``quant-state plan``: what every module of a model will really run in, and what is wrong."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.quant_state.commands.options import add_model_options, add_output_options
from megatron.quant_state.commands.output import check_writable, say, write_result

__all__ = ["TAKES_LAUNCH_FLAGS", "add_parser", "run"]

#: What follows `--` is no option of ours.
TAKES_LAUNCH_FLAGS = True

_DESCRIPTION = """\
Builds every pipeline stage of MODEL with the real Megatron-Core, at full size on the meta device
and as a small twin that runs on the CPU, and says of every Transformer Engine linear which rule
decides, what it runs in, how often, and which flag TE gets; then what is wrong with the recipe.
"""

_EPILOG = """\
exit code: 0 clean, or warnings only; 1 an error was found, an expectation does not hold or the
plan differs from the other; 2 a file cannot be read or the model cannot be built

examples:
  quant-state plan deepseek-v3
  quant-state plan my_model.yaml --recipe recipe.yaml --stage pp=1
  quant-state plan qwen3-30b-a3b --set fp8_recipe=mxfp8 --format json --out plan.json
  quant-state plan --format json -- --num-layers 32 --hidden-size 4096 ... --fp8-format hybrid
  quant-state plan my_model.yaml --expect expect.yaml --same-as plan.json
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    from megatron.quant_state.model import shipped_models

    parser = subparsers.add_parser(
        "plan",
        help="say what every module will run in, and what is wrong with the recipe",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    models = ", ".join(shipped_models())
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a YAML file, one of {models}, package.module:function that returns a GPTModel, or "
        "-- and a launch script's own flags",
    )
    add_model_options(parser)
    parser.add_argument(
        "--stage",
        type=_stage,
        metavar="pp=I[,vp=J]",
        help="show the modules of one pipeline stage alone, counted from 0",
    )
    parser.add_argument(
        "--expect",
        metavar="FILE",
        help="patterns to precisions that must hold; a breach is an error",
    )
    parser.add_argument(
        "--same-as",
        metavar="PLAN",
        help="a plan of --format json that must decide the same; a difference is an error",
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; the exit code."""
    from megatron.quant_state.errors import InputError, Location
    from megatron.quant_state.expect import (
        check_expectations,
        check_same,
        read_expectations,
        read_plan,
    )
    from megatron.quant_state.findings import has_errors
    from megatron.quant_state.model import load_model
    from megatron.quant_state.model_input import is_function, model_of_flags, model_of_function
    from megatron.quant_state.plan import make_plan
    from megatron.quant_state.plan_lint import lint_plan
    from megatron.quant_state.recipe_lint import lint_recipe
    from megatron.quant_state.reporters import findings as findings_reporter
    from megatron.quant_state.reporters import plan_html, plan_json, plan_table

    if args.launch_flags is not None:
        description = model_of_flags(args.launch_flags, args.overrides, recipe=args.recipe)
    elif is_function(args.model):
        description = model_of_function(args.model, args.overrides, recipe=args.recipe)
    else:
        description = load_model(args.model, args.overrides, recipe=args.recipe)
    # Whatever cannot be read is said before the work is done.
    expected = read_expectations(args.expect) if args.expect is not None else None
    other = read_plan(args.same_as) if args.same_as is not None else None
    if args.out is not None:
        check_writable(args.out)
    linted = lint_recipe(description.recipe) if description.recipe is not None else None
    if linted is not None and linted.recipe is None:
        # Megatron would refuse it, so there is no model to plan.
        if args.format == "json":
            text = findings_reporter.render_json(linted.file, linted.findings)
        else:
            text = findings_reporter.render_table(linted.findings)
        write_result(text, args.out)
        return 1
    with _progress() as progress:
        plan = make_plan(description, linted.recipe if linted else None, progress)
    findings = list(lint_plan(plan, description, linted))
    if expected is not None:
        findings += check_expectations(plan, expected)
    if other is not None:
        findings += check_same(plan, args.same_as, other)
    if args.stage is not None and args.stage not in plan.stages:
        message = f"no stage '{args.stage}'; the model has {', '.join(plan.stages)}"
        raise InputError(message, Location("--stage"))
    if args.format == "json":
        text = plan_json.render_plan(plan, findings, stage=args.stage)
    elif args.format == "html":
        text = plan_html.render_plan(plan, findings, stage=args.stage)
    else:
        color = args.out is None and sys.stdout.isatty()
        text = plan_table.render_plan(plan, findings, stage=args.stage, color=color)
    write_result(text, args.out)
    return 1 if has_errors(findings) else 0


def _stage(text: str) -> str:
    """The name of a stage, ``pp1 vp0``, from ``pp=1,vp=0``."""
    match = re.fullmatch(r"pp=(\d+)(?:,vp=(\d+))?", text.replace(" ", ""))
    if match is None:
        raise argparse.ArgumentTypeError(f"expected pp=I or pp=I,vp=J, found '{text}'")
    pp, vp = match.groups()
    return f"pp{int(pp)}" + ("" if vp is None else f" vp{int(vp)}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal, a line for each event elsewhere; on stderr."""
    if not sys.stderr.isatty():
        start = time.monotonic()
        say("plan: starting")
        yield lambda what: say(f"[{time.monotonic() - start:5.1f} s] {what}")
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update
