# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Worker: a model description from a launch script's own flags, or from a function's model.

Started as ``python -m megatron.quant_state.reference -m megatron.quant_state.foreign_model JOB
PART``. JOB is a folder with ``job.json``; PART is ``flags`` or ``function``. The description's keys
are the event ``model`` in ``JOB/PART/events.jsonl``. The process ends when its stdin is closed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import importlib
import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron.quant_state.errors import InputError, Location
from megatron.quant_state.field_values import field_value
from megatron.quant_state.model_schema import PARALLEL_FIELDS
from megatron.quant_state.stages import on_device
from megatron.quant_state.worker import Write, end_with_parent, work

__all__ = ["FLAGS", "flag_of", "main"]

#: What messages call the flags as a whole.
FLAGS = "launch flags"

#: Config fields that a launch flag sets under another name.
_FLAG_OF = {
    "num_moe_experts": "num_experts",
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "fp8_param": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
    "recipe": "te_precision_config_file",
}

#: GPTModel's arguments: the description's key, the flag's name and the model's attribute.
_MODEL_FIELDS = (
    ("position_embedding_type", "position_embedding_type", "position_embedding_type"),
    ("rotary_percent", "rotary_percent", "rotary_percent"),
    ("rotary_base", "rotary_base", "rotary_base"),
)

# Fields that the plan's own build sets, and what a description cannot hold.
_OURS = ("init_model_with_meta_device", "perform_initialization", "use_cpu_initialization")


def flag_of(field_name: str) -> str:
    """The launch flag that sets a field, ``--num-experts`` for ``num_moe_experts``."""
    return "--" + _FLAG_OF.get(field_name, field_name).replace("_", "-")


def main(arguments: list[str]) -> int:
    """Describe.

    Args:
        arguments: the job's folder and ``flags`` or ``function``.

    Returns:
        int: 0 done; 2 the input cannot be used, with the error as the last event.
    """
    return work(arguments, _describe)


def _describe(job: Path, part: str, given: dict[str, Any], write: Write) -> None:
    raw = _from_flags(given["flags"]) if part == "flags" else _from_function(given["function"])
    write("model", raw=raw)


def _from_flags(flags: Sequence[str]) -> dict[str, Any]:
    try:
        from megatron.training import arguments
    except ImportError as error:
        message = f"megatron.training cannot be imported ({error}); describe the model in a file"
        raise InputError(message, Location(FLAGS)) from None
    with _as_command_line(flags):
        args = arguments.parse_args()
        args.world_size = max(args.world_size, _ranks(args))
        recipe, args.te_precision_config_file = args.te_precision_config_file, None
        try:
            arguments.validate_args(args)
            config = _constructor_arguments(arguments.core_transformer_config_from_args, args)
        except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"Megatron refuses the flags: {text}", Location(FLAGS)) from error
    raw = _description(*config)
    if recipe is not None:
        raw["recipe"] = recipe
    vocabulary = args.padded_vocab_size or args.vocab_size
    if vocabulary is not None:
        raw["vocab_size"] = vocabulary
    raw["seq_length"] = args.max_position_embeddings or args.seq_length
    for key, flag, _ in _MODEL_FIELDS:
        if hasattr(args, flag) and not (key != "position_embedding_type" and _is_mla(raw)):
            raw[key] = getattr(args, flag)
    raw["share_embeddings_and_output_weights"] = not args.untie_embeddings_and_output_weights
    raw["micro_batch_size"] = args.micro_batch_size
    per_step = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    raw["num_microbatches"] = max(1, per_step)
    return raw


def _ranks(args: argparse.Namespace) -> int:
    """The least number of ranks that the parallel sizes need."""
    pipeline = args.pipeline_model_parallel_size
    dense = args.tensor_model_parallel_size * pipeline * args.context_parallel_size
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return math.lcm(dense, args.expert_model_parallel_size * tensor * pipeline)


@contextmanager
def _as_command_line(flags: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` as the launch script has it; a bad flag is an InputError, not an exit."""

    def refuse(_: argparse.ArgumentParser, message: str) -> NoReturn:
        raise InputError(message, Location(FLAGS))

    argv, error = sys.argv, argparse.ArgumentParser.error
    parser: Any = argparse.ArgumentParser
    sys.argv, parser.error = ["launch", *flags], refuse
    try:
        # Megatron prints all of its arguments.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, parser.error = argv, error


class _Built(Exception):
    """Thrown by a config's constructor, with its class and arguments."""


def _constructor_arguments(build: Callable[[Any], Any], args: Any) -> tuple[type, dict[str, Any]]:
    """Class and arguments with which ``build`` makes a config, before the config derives others."""
    from megatron.core.transformer import transformer_config as module

    classes: list[Any] = [module.TransformerConfig, module.MLATransformerConfig]
    originals = [cls.__init__ for cls in classes]

    def caught(self: Any, **values: Any) -> None:
        raise _Built(type(self), values)

    try:
        for cls in classes:
            cls.__init__ = caught
        build(args)
    except _Built as built:
        return built.args[0], built.args[1]
    finally:
        for cls, original in zip(classes, originals, strict=True):
            cls.__init__ = original
    raise InputError("the flags make a config of an unknown kind", Location(FLAGS))


def _from_function(spec: str) -> dict[str, Any]:
    where = Location(spec)
    name, _, attribute = spec.partition(":")
    with _raised_by(f"importing {name}", where):
        try:
            build = getattr(importlib.import_module(name), attribute)
        except (ImportError, AttributeError) as error:
            message = f"{error}; expected package.module:function, on the path of this Python"
            raise InputError(message, where) from None
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron.quant_state.build import initialize_single_process

    initialize_single_process()
    with _raised_by("the function", where), on_device("meta"):
        model = build()
    chunks = model if isinstance(model, list) else [model]
    if len(chunks) != 1:
        raise InputError(f"the function returned {len(chunks)} model chunks; return one", where)
    model = chunks[0]
    while not isinstance(model, GPTModel) and hasattr(model, "module"):
        model = model.module
    if not isinstance(model, GPTModel):
        raise InputError(f"expected a GPTModel, found {type(model).__name__}", where)
    config = model.config
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    if given.pop("quant_recipe", None) is not None:
        # Its rules have no lines; the file that they came from is named by --recipe.
        given["quant_recipe"] = None
    raw = _description(type(config), given)
    raw["vocab_size"], raw["seq_length"] = model.vocab_size, model.max_sequence_length
    for key, _, attribute in _MODEL_FIELDS:
        if hasattr(model, attribute) and not (key != "position_embedding_type" and _is_mla(raw)):
            raw[key] = getattr(model, attribute)
    raw["share_embeddings_and_output_weights"] = model.share_embeddings_and_output_weights
    return raw


@contextmanager
def _raised_by(what: str, where: Location) -> Iterator[None]:
    """Turns what the user's own code raises into an InputError that says where."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{what} raised {text}{at}", where) from error


def _is_mla(raw: Mapping[str, Any]) -> bool:
    return raw["transformer_config"].get("multi_latent_attention") is True


def _description(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a description for the fields that differ from the class's defaults."""
    defaults = {f.name: f for f in dataclasses.fields(cls)}
    raw: dict[str, Any] = {"transformer_config": {}, "parallel": {}}
    if cls.__name__ == "MLATransformerConfig":
        # Its own default, by which a description tells the two kinds apart.
        raw["transformer_config"]["multi_latent_attention"] = True
    for name, value in given.items():
        field = defaults[name]
        if name in _OURS or name == "quant_recipe":
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if type(value) is type(default) and value == default:
            continue
        plain = _plain(value)
        try:
            field_value(cls, name, plain)
        except ValueError:
            # An initializer, a timer, a process group: nothing that a plan depends on.
            continue
        section = "parallel" if name in PARALLEL_FIELDS else "transformer_config"
        raw[section][name] = plain
    return raw


def _plain(value: Any) -> Any:
    """The value as a description file would write it."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value, str) else value.name
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # A pipeline layout that has been parsed keeps what it was parsed from.
    if hasattr(value, "input_data"):
        return _plain(value.input_data)
    text = str(getattr(value, "__name__", value)).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(text, text)


if __name__ == "__main__":
    end_with_parent()
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
