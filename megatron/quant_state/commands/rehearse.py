# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``quant-state rehearse``: train a model's twin and compare its gradients with the truth."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.quant_state.commands.options import add_model_options, add_output_options
from megatron.quant_state.commands.output import check_writable, say, write_result

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Trains a scaled-down twin of MODEL with the real Megatron-Core, on the CPU or, with
--engine transformer-engine, on the real kernels of a GPU: as released, with
megatron.quant_state installed, and as it should be (never overwriting, checked against a run
without any weight cache). Every main_grad is compared byte for byte.
"""

_EPILOG = """\
exit code: 0 with quant_state the gradients are exact and every recomputed region is replayed in the
precision of its forward; 1 otherwise; 2 bad input, or no answer

examples:
  quant-state rehearse deepseek-v3-mtp2
  quant-state rehearse qwen3-30b-a3b --set mlp_chunks_for_training=4
  quant-state rehearse my_model.yaml --recipe recipe.yaml --format json --out result.json
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's parser."""
    from megatron.quant_state.model import shipped_models
    from megatron.quant_state.workers import ENGINES

    parser = subparsers.add_parser(
        "rehearse",
        help="train a model's twin and compare its gradients with the truth",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    models = ", ".join(shipped_models())
    parser.add_argument("model", metavar="MODEL", help=f"a YAML file, or one of {models}")
    add_model_options(parser)
    parser.add_argument(
        "--steps", type=_positive, default=3, metavar="N", help="optimizer steps (default 3)"
    )
    parser.add_argument(
        "--microbatches", type=_positive, metavar="N", help="microbatches a step, over the model's"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="reference: an emulation on the CPU (default); transformer-engine: a GPU's kernels",
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; the exit code."""
    from megatron.quant_state.model import load_model
    from megatron.quant_state.recipe_lint import check_recipe
    from megatron.quant_state.rehearse import rehearse
    from megatron.quant_state.reporters import html, json_report, table

    description = load_model(
        args.model, args.overrides, recipe=args.recipe, num_microbatches=args.microbatches
    )
    if description.recipe is not None:
        check_recipe(description.recipe)
    if args.out is not None:
        check_writable(args.out)
    with _progress(args.steps) as progress:
        rehearsal = rehearse(description, args.steps, progress, engine=args.engine)
    if args.format == "json":
        text = json_report.render_rehearsal(rehearsal)
    elif args.format == "html":
        text = html.render_rehearsal(rehearsal)
    else:
        color = args.out is None and sys.stdout.isatty()
        text = table.render_rehearsal(rehearsal, color=color)
    write_result(text, args.out)
    return 0 if rehearsal.verdict == "exact" else 1


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found '{text}'")
    return value


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str, int], None]]:
    """A bar a run on a terminal, a line a run elsewhere; on stderr, so that stdout pipes."""
    if not sys.stderr.isatty():
        start = time.monotonic()

        def line(run: str, step: int) -> None:
            if step in (0, steps):
                what = "built" if step == 0 else f"trained {steps} steps"
                say(f"[{time.monotonic() - start:5.1f} s] {run}: {what}")

        say("rehearse: starting")
        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        waiting = bars.add_task("starting", total=None)
        tasks: dict[str, Any] = {}

        def show(run: str, step: int) -> None:
            bars.update(waiting, visible=False)
            if run not in tasks:
                tasks[run] = bars.add_task(run, total=steps)
            bars.update(tasks[run], completed=step)

        yield show
