# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Megatron's config dataclasses from a model description, and what Megatron refuses, located.

What one Megatron version has and another has not is found out from the dataclass itself.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megatron.quant_state.errors import InputError, Location
from megatron.quant_state.field_values import field_types, field_value
from megatron.quant_state.located_yaml import nearest, read_yaml
from megatron.quant_state.model import ModelDescription
from megatron.quant_state.twin import FUSED_KERNELS

__all__ = [
    "build_transformer_config",
    "check_model",
    "checked_fields",
    "load_recipe",
    "megatron_version",
    "refused",
]

#: Fields that came after 0.16, the release that had them first, and the value that means "off".
_NEWER_FIELDS: dict[str, tuple[str, Any]] = {
    "mtp_use_repeated_layer": ("0.17", False),
    "mla_down_proj_fusion": ("0.17", False),
    "fused_residual_rmsnorm": ("0.17", False),
    "use_mup": ("0.17", False),
    "mlp_chunks_for_training": ("0.18", 1),
    "fp8_output_proj": ("0.18", False),
    "use_transformer_engine_op_fuser": ("0.18", False),
    "use_grouped_gemm_for_dense_mlp": ("0.18", False),
    "mtp_detach_heads": ("0.19", False),
    "use_grouped_gemm_for_shared_expert": ("0.19", False),
}

# What Megatron raises for a configuration that it does not want. Anything else is a fault of ours.
_REFUSALS = (AssertionError, ValueError, NotImplementedError, ImportError, ZeroDivisionError)


def megatron_version() -> str:
    """Version of the megatron-core that is imported, such as ``0.19.2``."""
    from megatron.core.package_info import __version__ as version

    # Megatron appends the commit of whatever repository the working directory belongs to.
    return str(version).partition("+")[0]


def build_transformer_config(description: ModelDescription, *, device: str = "cpu") -> Any:
    """The TransformerConfig, or MLATransformerConfig, that the description stands for.

    ``params_dtype`` follows ``bf16`` and ``fp16``, and ``pipeline_dtype`` follows it, as
    ``megatron.training`` does; the recipe is loaded into ``quant_recipe``.

    Args:
        description: the full model or its twin.
        device: where the model will be built: ``cpu``, ``cuda`` or ``meta``.

    Raises:
        InputError: a field that this Megatron has not, a value of a wrong type, or a combination
            that Megatron refuses.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    cls = MLATransformerConfig if description.multi_latent_attention else TransformerConfig
    values: dict[str, Any] = {}
    for section in ("transformer_config", "parallel"):
        values.update(checked_fields(description, section, cls))
    derived = _derived_fields(values, device)
    if description.recipe is not None:
        derived["quant_recipe"] = load_recipe(description)
    try:
        with _quiet():
            config = cls(**{**derived, **values})
        _check_layer_pattern(description, config)
        return config
    except InputError:
        raise
    except (*_REFUSALS, TypeError) as error:

        def accepts(without: str) -> bool:
            kept = {name: value for name, value in values.items() if name != without}
            try:
                with _quiet():
                    cls(**{**_derived_fields(kept, device), **kept})
            except (*_REFUSALS, TypeError):
                return False
            return True

        raise _refusal(description, error, accepts) from error


def _check_layer_pattern(description: ModelDescription, config: Any) -> None:
    pattern, layers = config.moe_layer_freq, config.num_layers
    if config.num_moe_experts is not None and isinstance(pattern, list) and len(pattern) != layers:
        message = f"moe_layer_freq: a pattern of {len(pattern)} layers, but num_layers is {layers}"
        raise description.error(message, "moe_layer_freq")


def check_model(description: ModelDescription) -> None:
    """Raise InputError where Megatron would refuse the full model, its parallel sizes included.

    The twin runs in one process, so that it cannot show this. Kernels are not asked for.
    """
    given = {k: v for k, v in description.transformer_config.items() if k not in FUSED_KERNELS}
    config = build_transformer_config(replace(description, transformer_config=given))
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    with refused(description):
        if config.pipeline_model_parallel_layout is None:
            get_num_layers_to_build(config, vp_stage=0, pp_rank=0)
    experts, ranks = config.num_moe_experts, config.expert_model_parallel_size
    if experts is not None and experts % ranks != 0:
        message = f"num_moe_experts ({experts}) must be a multiple of expert_model_parallel_size"
        name = "expert_model_parallel_size"
        raise description.error(f"{message} ({ranks})", name)


def load_recipe(description: ModelDescription) -> Any:
    """Megatron's RecipeConfig of the description's recipe file.

    Raises:
        InputError: malformed YAML, or a recipe that Megatron's own parser refuses.
    """
    from megatron.core.extensions.transformer_engine import TEQuantizationParams
    from megatron.core.quantization.quant_config import MatchContext, QuantizationConfig
    from megatron.core.quantization.utils import load_quantization_recipe

    path = str(description.recipe)
    document = read_yaml(path)
    if not isinstance(document.value, dict):
        raise InputError("expected a mapping with configs: and matchers:", Location(path))
    try:
        recipe = load_quantization_recipe(path)
    except (*_REFUSALS, AttributeError, TypeError) as error:
        where = document.locations.get(("matchers",), Location(path))
        raise InputError(_said(error), where) from error
    configs = recipe.configs if isinstance(recipe.configs, dict) else {}
    for matcher in recipe.matchers:
        if matcher.config_key not in configs:
            message = f"no config '{matcher.config_key}' for the pattern '{matcher.pattern}'"
            raise InputError(message, document.locations.get(("matchers",), Location(path)))
    for key, values in configs.items():
        try:
            context = MatchContext(module_path="", layer_number=None)
            TEQuantizationParams.parse_from_config(QuantizationConfig(values, context, key))
        except (*_REFUSALS, AttributeError, TypeError) as error:
            where = document.locations.get(("configs", key), Location(path))
            raise InputError(f"config '{key}': {_said(error)}", where) from error
    return recipe


def checked_fields(description: ModelDescription, section: str, cls: type) -> dict[str, Any]:
    """Fields of one section as the dataclass wants them; InputError for what it does not know."""
    given: Mapping[str, Any] = getattr(description, section)
    known = field_types(cls)
    values: dict[str, Any] = {}
    for name, value in given.items():
        where = f"{section}.{name}"
        if name not in known:
            newer = _NEWER_FIELDS.get(name)
            if newer is not None and newer[1] == value and type(newer[1]) is type(value):
                continue
            raise description.error(_unknown(name, section, cls, newer), where)
        if name == "quant_recipe":
            raise description.error("quant_recipe: name the recipe's file as recipe:", where)
        try:
            values[name] = field_value(cls, name, value)
        except ValueError as error:
            raise description.error(f"{name}: {error}", where) from None
    return values


def _unknown(name: str, section: str, cls: type, newer: tuple[str, Any] | None) -> str:
    version = megatron_version()
    if newer is not None:
        return f"{name}: megatron-core {version} has no such field; it came with {newer[0]}"
    if section == "transformer_config":
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        if name in field_types(MLATransformerConfig):
            return f"{name}: belongs to multi-latent attention; set multi_latent_attention: true"
    top_level = [f.name for f in dataclasses.fields(ModelDescription) if f.name != "locations"]
    close = nearest(name, [*field_types(cls), *top_level])
    hint = f"; did you mean '{close}'?" if close else ""
    return f"unknown field '{name}': {cls.__name__} of megatron-core {version} has none such{hint}"


def _derived_fields(values: Mapping[str, Any], device: str) -> dict[str, Any]:
    import torch

    dtype = torch.float32
    if values.get("bf16") is True or values.get("fp16") is True:
        dtype = torch.bfloat16 if values.get("bf16") is True else torch.float16
    derived: dict[str, Any] = {"params_dtype": values.get("params_dtype", dtype)}
    derived["pipeline_dtype"] = derived["params_dtype"]
    if device == "cpu":
        derived["use_cpu_initialization"] = True
    if device == "meta":
        derived["init_model_with_meta_device"] = True
        derived["perform_initialization"] = False
    return derived


@contextmanager
def _quiet() -> Iterator[None]:
    # Advice about kernels and deprecations that a description's reader cannot act on.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def refused(description: ModelDescription) -> Iterator[None]:
    """Turns what Megatron refuses into an InputError; a fault of another kind passes."""
    try:
        with _quiet():
            yield
    except InputError:
        raise
    except Exception as error:
        # An unknown optimizer is a plain Exception.
        if not isinstance(error, _REFUSALS) and type(error) is not Exception:
            raise
        if isinstance(error, ModuleNotFoundError) and "transformer_engine" in str(error.name):
            raise
        raise _refusal(description, error, None) from error


def _refusal(
    description: ModelDescription, error: Exception, accepts: Callable[[str], bool] | None
) -> InputError:
    """Megatron's own words, at the field that they are about.

    That is a field which the words name, one given on the command line first; or else, one
    without which (``accepts``) Megatron has nothing to refuse. Another such field is the other
    half of a contradiction, and is named too.
    """
    given = [*description.transformer_config, *description.parallel]
    words = re.findall(r"[a-z][a-z0-9_]+", str(error).replace("-", "_"))
    about = [name for name in dict.fromkeys(words) if name in given]
    culprits = [name for name in given if accepts(name)] if accepts is not None else []

    def is_option(name: str) -> bool:
        where = description.location_of(name)
        return where is not None and where.line is None

    about = sorted(about or culprits, key=lambda name: not is_option(name))
    if not about:
        return description.error(f"megatron-core {megatron_version()} refuses: {_said(error)}")
    message = f"{about[0]}: megatron-core {megatron_version()} refuses this: {_said(error)}"
    other = next((name for name in culprits if name != about[0]), None)
    if other is not None and description.location_of(other) is not None:
        message += f" (see also {other}, {description.location_of(other)})"
    return description.error(message, about[0])


def _said(error: Exception) -> str:
    """The exception's text on one line, the same in every process."""
    # A set's order changes with the process's hash seed.
    text = re.sub(
        r"\{('[^{}:]*')\}",
        lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}",
        " ".join(str(error).split()),
    )
    if not isinstance(error, (AssertionError, ValueError)) or not text:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else f"{text[:297]}..."
