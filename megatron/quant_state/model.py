# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A model description: what a YAML file, a shipped name and ``--set`` overrides say together.

A description names the fields of Megatron's own dataclasses, and knows where each came from. It
needs neither torch nor Megatron: whether a TransformerConfig field exists in the Megatron that is
installed, and takes the value given, is for ``build.py`` to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.quant_state.errors import InputError, Location
from megatron.quant_state.located_yaml import KeyPath, nearest, parse_yaml, read_text
from megatron.quant_state.model_schema import PARALLEL_FIELDS, TOP_LEVEL_FIELDS, validate

__all__ = [
    "SECTIONS",
    "ModelDescription",
    "describe_model",
    "error_from_json",
    "error_to_json",
    "load_model",
    "shipped_models",
]

_MODELS = Path(__file__).parent / "models"

#: Keys of a description that hold fields of a Megatron dataclass.
SECTIONS = ("transformer_config", "parallel", "ddp", "optimizer")

# Adam in fp32. The step moves weights, and is small enough that routers keep all experts in use,
# since an expert without tokens has no gradient to compare. The user's fields win.
_OPTIMIZER_DEFAULTS = {"optimizer": "adam", "lr": 1.0e-4}


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model as Megatron would build it, and where each field was said.

    Attributes:
        name: the shipped name, or the file's name without its suffix.
        source: the file, as the user named it.
        architecture: which Megatron model class; ``gpt`` is GPTModel.
        transformer_config: TransformerConfig or MLATransformerConfig fields that were given (MLA
            where ``multi_latent_attention`` is true), without those of ``parallel``.
        vocab_size, seq_length: sizes in tokens; the vocabulary is not padded.
        position_embedding_type, rotary_percent, rotary_base, rope_scaling, rope_scaling_factor,
            seq_len_interpolation_factor, share_embeddings_and_output_weights: GPTModel's arguments.
        parallel: the parallel sizes that were given, under TransformerConfig's names.
        ddp, optimizer: DistributedDataParallelConfig and OptimizerConfig fields.
        num_microbatches: microbatches of one step on one data-parallel rank.
        micro_batch_size: samples of one microbatch.
        recipe: path of a quantization recipe (``--te-precision-config-file``), or None.
        locations: ``vocab_size`` or ``transformer_config.num_layers`` to where it was said.
    """

    name: str
    source: str
    architecture: str = "gpt"
    transformer_config: Mapping[str, Any]
    vocab_size: int
    seq_length: int
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0
    rotary_base: float = 10000
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    share_embeddings_and_output_weights: bool = False
    parallel: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    num_microbatches: int = 2
    micro_batch_size: int = 1
    recipe: str | None = None
    locations: Mapping[str, Location] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in (*SECTIONS, "locations"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def multi_latent_attention(self) -> bool:
        """Whether the config is a MLATransformerConfig."""
        return self.transformer_config.get("multi_latent_attention") is True

    def location_of(self, field_name: str) -> Location | None:
        """Where a field was said: ``"ddp.bucket_size"``, or a bare name looked up everywhere."""
        for prefix in ("", *(f"{section}." for section in SECTIONS)):
            if prefix + field_name in self.locations:
                return self.locations[prefix + field_name]
        return None

    def error(self, message: str, field_name: str | None = None) -> InputError:
        """An InputError at the place where the field was said, else at the model's file."""
        location = self.location_of(field_name) if field_name else None
        return InputError(message, location or Location(self.source))

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; :meth:`from_dict` takes them back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in SECTIONS:
            values[name] = dict(values[name])
        values["locations"] = {key: asdict(where) for key, where in self.locations.items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelDescription:
        """The description that :meth:`to_dict` turned into ``values``; nothing is checked again."""
        locations = {key: Location(**where) for key, where in values["locations"].items()}
        return cls(**{**values, "locations": locations})


def shipped_models() -> tuple[str, ...]:
    """Names of the descriptions that come with the package."""
    return tuple(sorted(path.stem for path in _MODELS.glob("*.yaml")))


def load_model(
    name_or_path: str,
    overrides: Sequence[str] = (),
    *,
    recipe: str | None = None,
    num_microbatches: int | None = None,
) -> ModelDescription:
    """Read a model description.

    Args:
        name_or_path: a shipped name, or a YAML file.
        overrides: ``field=value`` texts of ``--set``, the value in YAML; later ones win.
        recipe: the file of ``--recipe``, relative to the working directory; wins over overrides.
        num_microbatches: the number of ``--microbatches``; wins over overrides.

    Raises:
        InputError: whatever is wrong with the input that can be told without Megatron.
    """
    path = _find(name_or_path, None)
    raw, locations = _read(path, (), None)
    return describe_model(
        raw, locations, path, overrides, recipe=recipe, num_microbatches=num_microbatches
    )


def describe_model(
    raw: dict[str, Any],
    locations: dict[KeyPath, Location],
    path: str,
    overrides: Sequence[str] = (),
    *,
    recipe: str | None = None,
    num_microbatches: int | None = None,
) -> ModelDescription:
    """A model description from the keys of a model file, wherever they come from.

    Args:
        raw: the keys and values; changed in place.
        locations: where each was said; changed in place.
        path: the source, for messages and for the model's name.
        overrides: texts of ``--set``.
        recipe: the file of ``--recipe``.
        num_microbatches: the number of ``--microbatches``.

    Raises:
        InputError: as :func:`load_model`.
    """
    for text in overrides:
        _override(raw, locations, text)
    options = (
        ("recipe", "--recipe", recipe),
        ("num_microbatches", "--microbatches", num_microbatches),
    )
    for key, option, value in options:
        if value is not None:
            raw[key] = value
            locations[(key,)] = Location(f"{option} {value}")
    return _describe(raw, locations, path)


def _find(name: str, said_at: Location | None) -> str:
    shipped = shipped_models()
    if name in shipped:
        return str(_MODELS / f"{name}.yaml")
    path = name if said_at is None else os.path.join(os.path.dirname(said_at.file), name)
    if name.endswith((".yaml", ".yml")) or os.sep in name or os.path.exists(path):
        return path
    close = nearest(name, shipped)
    hint = f"did you mean '{close}'? " if close else ""
    message = f"no model '{name}': {hint}Expected a YAML file or one of {', '.join(shipped)}"
    raise InputError(message, said_at)


def _read(
    path: str, parents: tuple[str, ...], said_at: Location | None
) -> tuple[dict[str, Any], dict[KeyPath, Location]]:
    """The file's keys over those of what it extends; sections are merged key by key."""
    document = parse_yaml(read_text(path, said_at), path)
    where = Location(path)
    if document.value is None:
        raise InputError("the file is empty; expected a model description", where)
    if not isinstance(document.value, dict):
        found = {list: "a list"}.get(type(document.value), "a single value")
        raise InputError(f"expected a mapping of model fields, found {found}", where)
    own, locations = dict(document.value), dict(document.locations)
    base_name = own.pop("extends", None)
    if base_name is None:
        return own, locations
    base_at = locations.pop(("extends",))
    if not isinstance(base_name, str):
        raise InputError(f"extends: expected a model name or a file, found {base_name!r}", base_at)
    base_path = _find(base_name, base_at)
    chain = (*parents, os.path.abspath(path))
    if os.path.abspath(base_path) in chain:
        raise InputError(f"extends: '{base_name}' extends this file in turn", base_at)
    merged, merged_locations = _read(base_path, chain, base_at)
    for key, value in own.items():
        if key in SECTIONS and isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    return merged, {**merged_locations, **locations}


def _override(raw: dict[str, Any], locations: dict[KeyPath, Location], text: str) -> None:
    where = Location(f"--set {text}")
    name, equals, value_text = text.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise InputError("expected FIELD=VALUE, e.g. num_layers=4 or ddp.bucket_size=null", where)
    if not value_text.strip():
        raise InputError(f"no value for {name}; write {name}=null for none", where)
    try:
        value = parse_yaml(value_text, where.file).value
    except InputError as error:
        raise InputError(error.message, where) from None
    if len(path) == 1:
        path = [*_section_of(path[0], raw), path[0]]
    if len(path) != 1 and (len(path) != 2 or path[0] not in SECTIONS):
        close = nearest(path[0], SECTIONS)
        hint = f"did you mean '{close}.{'.'.join(path[1:])}'? " if close else ""
        sections = ", ".join(SECTIONS)
        message = f"unknown field '{name}': {hint}What stands before the dot is one of {sections}"
        raise InputError(message, where)
    holder = raw
    if len(path) == 2:
        holder = raw[path[0]] = dict(raw.get(path[0]) or {})
    holder[path[-1]] = value
    locations[tuple(path)] = where


def _section_of(name: str, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The section that a bare name of ``--set`` belongs to; none for a key of the file itself."""
    config = raw.get("transformer_config")
    is_mla = isinstance(config, Mapping) and config.get("multi_latent_attention") is True
    if name in _MLA_ROTARY and is_mla:
        return ("transformer_config",)
    if name in TOP_LEVEL_FIELDS:
        return ()
    return ("parallel",) if name in PARALLEL_FIELDS else ("transformer_config",)


_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")

# Megatron divides by some of these before it looks at them.
_SIZES = (
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "mlp_chunks_for_training",
)

#: GPTModel's arguments that multi-latent attention takes from its config instead.
_MLA_ROTARY = ("rotary_base", "rotary_percent")


def _describe(
    raw: dict[str, Any], locations: Mapping[KeyPath, Location], path: str
) -> ModelDescription:
    file = Location(path)
    checked = validate(raw, locations, file)
    config = checked.transformer_config
    for name in config:
        if name in PARALLEL_FIELDS:
            where = locations.get(("transformer_config", name))
            raise InputError(f"'{name}' belongs under parallel:, not transformer_config:", where)
    for name in _NEEDED:
        if name not in config:
            where = locations.get(("transformer_config",), file)
            raise InputError(f"transformer_config lacks '{name}', which every model needs", where)
    for name in (*_NEEDED, *_SIZES):
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            where = locations.get(("transformer_config", name), file)
            raise InputError(f"{name}: expected at least 1, found {value}", where)
    if config.get("multi_latent_attention") is True:
        for name in _MLA_ROTARY:
            if (name,) in locations:
                message = f"multi-latent attention reads '{name}' from transformer_config: move it"
                raise InputError(message, locations[(name,)])
    values = {name: getattr(checked, name) for name in TOP_LEVEL_FIELDS}
    values["parallel"] = checked.parallel.model_dump(exclude_unset=True)
    values["optimizer"] = {**_OPTIMIZER_DEFAULTS, **checked.optimizer}
    values["recipe"] = _recipe_path(checked.recipe, locations.get(("recipe",)))
    dotted = {".".join(map(str, key)): where for key, where in locations.items() if len(key) <= 2}
    return ModelDescription(name=Path(path).stem, source=path, locations=dotted, **values)


def _recipe_path(recipe: str | None, where: Location | None) -> str | None:
    if recipe is None:
        return None
    # A file says it relative to itself, an option relative to the working directory.
    is_option = where is None or where.line is None
    path = (
        recipe if is_option or where is None else os.path.join(os.path.dirname(where.file), recipe)
    )
    read_text(path, where)
    return path


def error_to_json(error: InputError) -> dict[str, Any]:
    """An InputError as values for JSON, for a worker to hand to its parent."""
    location = asdict(error.location) if error.location else None
    return {"message": error.message, "location": location}


def error_from_json(values: Mapping[str, Any]) -> InputError:
    """The InputError that :func:`error_to_json` turned into ``values``."""
    location = values["location"]
    return InputError(values["message"], Location(**location) if location else None)
