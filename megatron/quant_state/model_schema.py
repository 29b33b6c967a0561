# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""The fixed part of a model description file: its keys, their types and defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from megatron.quant_state.errors import InputError, Location
from megatron.quant_state.located_yaml import KeyPath, nearest

__all__ = ["PARALLEL_FIELDS", "TOP_LEVEL_FIELDS", "ModelFile", "validate"]


def _read_exponent(value: Any) -> Any:
    # YAML 1.1 reads "1e6" as text, because it wants a dot in the mantissa.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


_Number = Annotated[float, BeforeValidator(_read_exponent)]
_PositiveNumber = Annotated[float, BeforeValidator(_read_exponent), Field(gt=0)]


class _Parallel(BaseModel):
    """Sizes and splits, under TransformerConfig's own names; its types, its defaults."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    pipeline_model_parallel_layout: str | list[Any] | None = None
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt | None = None
    sequence_parallel: bool = False


class ModelFile(BaseModel):
    """The fixed part of the file; what the sections hold is checked against Megatron itself."""

    model_config = ConfigDict(extra="forbid", strict=True)

    architecture: Literal["gpt"] = "gpt"
    transformer_config: dict[str, Any]
    vocab_size: PositiveInt
    seq_length: PositiveInt
    # Not GPTModel's own "yarn", whose settings only megatron.training puts on the config, nor
    # "mrope", which wants three positions a token. MLA takes yarn from its config's rope_type.
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    rotary_percent: _Number = 1.0
    rotary_base: _PositiveNumber = 10000
    rope_scaling: bool = False
    rope_scaling_factor: _Number = 8.0
    seq_len_interpolation_factor: _Number | None = None
    share_embeddings_and_output_weights: bool = False
    parallel: _Parallel = Field(default_factory=_Parallel)
    ddp: dict[str, Any] = Field(default_factory=dict)
    optimizer: dict[str, Any] = Field(default_factory=dict)
    num_microbatches: PositiveInt = 2
    micro_batch_size: PositiveInt = 1
    recipe: str | None = None


TOP_LEVEL_FIELDS = tuple(ModelFile.model_fields)
PARALLEL_FIELDS = tuple(_Parallel.model_fields)


def validate(
    raw: Mapping[str, Any], locations: Mapping[KeyPath, Location], file: Location
) -> ModelFile:
    """The file's values, checked.

    Args:
        raw: values as YAML gave them.
        locations: where each key stands.
        file: where a missing key would belong.

    Raises:
        InputError: an unknown key, a missing one or a value of a wrong type, at its place.
    """
    try:
        return ModelFile.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, locations, file) from None


def _explain(
    error: ValidationError, locations: Mapping[KeyPath, Location], file: Location
) -> InputError:
    """The first fault that pydantic found, in the words of a message, where the user wrote it."""
    fault = error.errors()[0]
    # Union members add their type's name to the path; the longest known prefix is the key.
    path = tuple(fault["loc"])
    while path and path not in locations:
        path = path[:-1]
    where = locations.get(path, file)
    name = ".".join(str(part) for part in fault["loc"][: max(len(path), 1)])
    value = fault["input"]
    if fault["type"] == "extra_forbidden":
        known = PARALLEL_FIELDS if len(path) == 2 else (*TOP_LEVEL_FIELDS, "extends")
        key = str(path[-1])
        close = nearest(key, known)
        hint = f"did you mean '{close}'?" if close else f"Known keys: {', '.join(known)}"
        return InputError(f"unknown key '{key}': {hint}", where)
    if fault["type"] == "missing":
        return InputError(f"'{name}' is missing; every model description needs it", file)
    expected = str(fault["msg"]).removeprefix("Input should be ")
    for pydantic_words, words in _WORDS:
        expected = expected.replace(pydantic_words, words)
    return InputError(f"{name}: expected {expected}, found {_shown(value)}", where)


_WORDS = (
    ("a valid dictionary or instance of _Parallel", "a mapping of fields"),
    ("a valid dictionary", "a mapping of fields"),
    ("a valid boolean", "true or false"),
    ("a valid ", "a "),
    ("a integer", "an integer"),
    ("greater than", "a number greater than"),
)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
