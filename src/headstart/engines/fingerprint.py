"""Which weights computed a block: a fingerprint that is stable across processes and machines.

It covers every parameter and every buffer with name, shape, dtype and 4 KiB of its elements, and
the model's configuration, since that changes KV as well (rotary base, norm epsilon). The sampled
elements are spread over the whole tensor by a golden-ratio sequence, so that no structure of the
tensor lines up with them. Training changes nearly every element; an edit of a few chosen ones may
escape the sample, which is why `WeightsGuard` watches the tensors for changes inside the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain

import torch
from transformers import PreTrainedConfig

from headstart.errors import UnsupportedModelError

SAMPLE_NBYTES = 4096
_PROBE_ELEMENTS = 16
_GOLDEN_RATIO = 0.6180339887498949
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VOLATILE = ("_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype")


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Hex digest of a torch module's weights and configuration.

    Takes milliseconds to tens of milliseconds, and one transfer from each device.
    Raises UnsupportedModelError for tensors that are not in memory or have no plain bytes.
    """
    digest = blake2b(digest_size=32)
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        samples.setdefault(tensor.device, []).append(_sample(_bits(name, tensor)))
    for tensors in samples.values():
        digest.update(_to_bytes(tensors))
    digest.update(_config_json(model).encode())
    return digest.hexdigest()


class WeightsGuard:
    """Notices when a model's weights are changed inside this process, in about a millisecond.

    Assignments and in-place operations are seen by torch's own version counters, changes that
    bypass them (`parameter.data.add_()`) by a few elements of every tensor.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.fingerprint = ""
        self.refresh()

    def refresh(self) -> None:
        """Take the weights as they are now."""
        self.fingerprint = weights_fingerprint(self._model)
        self._probes: dict[torch.device, list[torch.Tensor]] = {}
        for name, tensor in _tensors(self._model):
            bits = _bits(name, tensor)
            middle = max(0, bits.numel() // 2 - _PROBE_ELEMENTS // 2)
            probe = bits[middle : middle + _PROBE_ELEMENTS]
            self._probes.setdefault(tensor.device, []).append(probe.view(torch.uint8))
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether any weight was changed since the last `refresh()`."""
        return self._look() != self._seen

    def _look(self) -> tuple[object, ...]:
        stamps = tuple(
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for _, tensor in _tensors(self._model)
        )
        return stamps, *(
            torch.cat(probes).cpu().numpy().tobytes() for probes in self._probes.values()
        )


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, shared ones once, in the order of the module tree."""
    return chain(model.named_parameters(), model.named_buffers())


def _bits(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor as a flat tensor of integers, without a copy where possible."""
    if tensor.is_meta:
        raise UnsupportedModelError(
            f"weight {name!r} is not in memory (offloaded to disk?), so this model's blocks cannot "
            "be told from another's; load it without offloading"
        )
    try:
        return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    except (KeyError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"weight {name!r} of type {tensor.dtype} has no plain bytes, so this model's blocks "
            "cannot be told from another's"
        ) from error


def _sample(bits: torch.Tensor) -> torch.Tensor:
    """`SAMPLE_NBYTES` bytes of a flat tensor, or all of it if it is smaller."""
    length, count = bits.numel(), SAMPLE_NBYTES // bits.element_size()
    if length > count:
        step = int(length * _GOLDEN_RATIO) | 1
        bits = bits[torch.arange(count, device=bits.device) * step % length]
    return bits.view(torch.uint8)


def _to_bytes(samples: list[torch.Tensor]) -> bytes:
    joined: bytes = torch.cat(samples).cpu().numpy().tobytes()
    return joined


def _config_json(model: torch.nn.Module) -> str:
    config = getattr(model, "config", None)
    fields = {} if not isinstance(config, PreTrainedConfig) else config.to_dict()
    kept = {name: value for name, value in fields.items() if name not in _VOLATILE}
    return json.dumps(kept, sort_keys=True, default=str)
