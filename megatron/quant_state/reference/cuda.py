# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Stand-ins for CUDA, so that unmodified Megatron runs on the CPU. Process-wide, never undone.

Only what Megatron touches on the way through a training step is replaced, each with the site it
serves; ``torch.cuda.is_available()`` stays False.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.cpp_extension

_CPU = torch.device("cpu")


class Stream:
    """A stream on which everything has happened already.

    Serves ``token_dispatcher.py`` (device-to-host copies), ``shared_experts.py``,
    ``distributed_data_parallel.py`` and ``param_and_grad_buffer.py`` (overlapped reductions).
    """

    cuda_stream = 0
    stream_id = 0
    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return Event() if event is None else event


class Event:
    """An event that has happened. Serves ``transformer_layer.py`` and ``moe_layer.py``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing to mark."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds on the device: none."""
        return 0.0


_STREAM = Stream()


@contextmanager
def stream_context(stream: Any) -> Iterator[None]:
    """``torch.cuda.stream(...)``: there is one stream."""
    yield


class _Generator:
    """The device's generator is the CPU's.

    Serves ``_get_cuda_rng_state`` and ``_set_cuda_rng_state`` of ``tensor_parallel/random.py``.
    States are copies, of graph-safe calls too, so that a replay rewinds.
    """

    def get_state(self) -> torch.Tensor:
        """The state of the CPU's generator, uint8."""
        return torch.get_rng_state()

    def set_state(self, state: torch.Tensor) -> None:
        """Set it."""
        torch.set_rng_state(state)

    graphsafe_get_state = get_state
    graphsafe_set_state = set_state
    clone_state = get_state

    def manual_seed(self, seed: int) -> None:
        """Seed it."""
        torch.default_generator.manual_seed(seed)


class _Generators:
    """``torch.cuda.default_generators``, for any index: one device."""

    def __getitem__(self, index: Any) -> _Generator:
        return _Generator()


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """``tensor_parallel/random.py``: the state that checkpoints and trackers save."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Counterpart of ``get_rng_state``."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """``model_parallel_cuda_manual_seed``: seeds what each name of the tracker starts from."""
    torch.default_generator.manual_seed(seed)


def lazy_call(function: Callable[[], Any], **_: Any) -> None:
    """``_set_cuda_rng_state`` queues until CUDA is initialized, which it never is."""
    function()


def current_device() -> torch.device:
    """Names the CPU, for the sites that ignore ``use_cpu_initialization``.

    Among them ``rotary_pos_embedding.py``, ``yarn_rotary_pos_embedding.py``, ``router.py``,
    ``multi_token_prediction.py``, ``param_and_grad_buffer.py``, ``clip_grads.py``.
    """
    return _CPU


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Hopper's; ``megatron/training/arguments.py`` and ``token_dispatcher.py`` ask."""
    return (9, 0)


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """An H200's, as far as anything asks."""
    return SimpleNamespace(
        name="reference engine", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37
    )


def _constant(value: Any = None) -> Callable[..., Any]:
    """A function that does nothing and returns a value.

    A new one for each name: ``torch._dynamo`` refuses to be imported where two names of torch
    are one function.
    """

    def constant(*_: Any, **__: Any) -> Any:
        return value

    return constant


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory for which ``device="cuda"`` names the CPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type()``, which names a CUDA type.

    ``optimizer.py``, ``distrib_optimizer.py`` and ``clip_grads.py`` compare names to decide
    which parameters need an fp32 copy and which gradients can be clipped, and refuse the names of
    CPU types.
    """

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_name


def _not_about_cpu_state(record: logging.LogRecord) -> bool:
    """Drops what ``random.py`` says about each fork: here the CPU's state is the device's."""
    return "CPU RNG state changed within GPU RNG context" not in str(record.msg)


def share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Fills a discarded output's storage again, in place of the extension that aliases the two.

    Serves ``CheckpointWithoutOutput._recompute`` (``tensor_parallel/random.py``, 0.18 on), which
    compiles C++ at its first replay: a minute where nothing is cached, a compiler to have, and a
    lock file that the next process waits for without end when this one is killed meanwhile. A copy
    has the same bits, and like the original it is no change that autograd counts.
    """
    source = recomputed.untyped_storage()
    storage = output.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)


def _load_inline(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_inline(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "share_storage_ext":
            return SimpleNamespace(share_storage=share_storage)
        return original(name, *args, **kwargs)

    return load_inline


# Literals: ``pipeline_parallel/schedules.py`` (zeros), ``transformer/utils.py`` (ones),
# ``token_dispatcher.py`` (zeros), ``tensor_parallel/data.py`` and ``fp8_utils.py`` (tensor).
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")

_applied = False


def apply() -> None:
    """Install the stand-ins; again is harmless. Must run before Megatron is imported."""
    global _applied
    if _applied:
        return
    _applied = True
    replacements: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": _constant(_STREAM),
        "default_stream": _constant(_STREAM),
        "stream": stream_context,
        "current_device": current_device,
        "is_current_stream_capturing": _constant(False),
        "get_device_capability": get_device_capability,
        "get_device_properties": get_device_properties,
        "default_generators": _Generators(),
        "_lazy_call": lazy_call,
        # Memory statistics of ``megatron/training``: nothing is allocated on the device.
        "memory_stats": _constant({}),
    }
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        replacements[name] = globals()[name]
        setattr(torch.cuda.random, name, globals()[name])
    replacements["manual_seed_all"] = lambda seed: manual_seed(seed)
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        replacements[name] = _constant()
    replacements["_lazy_init"] = _constant()
    for name in ("memory_allocated", "memory_reserved"):
        replacements[name] = _constant(0)
        replacements[f"max_{name}"] = _constant(0)
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _constant())
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cpp_extension: Any = torch.utils.cpp_extension
    cpp_extension.load_inline = _load_inline(cpp_extension.load_inline)
    # ``language_module.py`` moves a tied embedding; ``moe_utils.py`` and ``shared_experts.py``
    # record streams.
    setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)  # noqa: B010
    setattr(torch.Tensor, "record_stream", _constant())  # noqa: B010
    setattr(torch.Tensor, "type", _tensor_type(torch.Tensor.type))  # noqa: B010
    setattr(torch.nn.Module, "cuda", lambda self, *_, **__: self)  # noqa: B010
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_cpu_state)
    # A host with a CUDA toolkit and no GPU is told so once; that is the point here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def initialize_distributed() -> None:
    """One rank of gloo, with a store in memory and no port; again is harmless.

    Megatron's ``parallel_state.initialize_model_parallel()`` is left to the caller.
    """
    if torch.distributed.is_initialized():
        return
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group(backend="gloo", store=store, rank=0, world_size=1)
