"""The weights of all loaded adapters, on the device that runs the graphs."""

from __future__ import annotations

from typing import Any

import numpy as np

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.adapters import Places, Weights
from seq2seq_serve.bundle.manifest import Manifest
from seq2seq_serve.kernels import write_to_cuda
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.runner.device import OnnxDevice
from seq2seq_serve.server.runner.sizing import Sizing


class Adapters:
    """One array of weights, with a row for each place of an adapter, and one of ranks.

    Owned by the runner. They are allocated once, so that graphs are bound to them by pointer. On the host the
    system gives memory only to the pages that loaded adapters use.
    """

    def __init__(self, manifest: Manifest, sizing: Sizing, device: OnnxDevice) -> None:
        self._device, self._max_rank = device, sizing.max_rank
        self._places = Places(manifest.adapted_maps)
        self._scales = manifest.variants[sizing.precision].adapter_scales
        shape = sizing.num_adapters, sizing.max_rank * self._places.num_units
        ranks = np.zeros((sizing.num_adapters, self._places.num_parts), np.int32)
        self._host: dict[str, Array] = {
            names.ADAPTERS: np.zeros(shape, np.float16),
            names.ADAPTER_RANKS: ranks,
        }
        self._values = {name: device.place(array) for name, array in self._host.items()}

    def write(self, place: int, weights: Weights) -> None:
        """Replace the adapter of a place; without weights the place becomes empty."""
        rows = adapter, ranks = self._host[names.ADAPTERS][place], self._host[names.ADAPTER_RANKS][place]
        self._places.write(weights, self._scales, adapter, ranks, self._max_rank)
        if self._device.is_host:
            return
        for row, (name, (value, pointer)) in zip(rows, self._values.items(), strict=True):
            if not write_to_cuda(pointer + place * row.nbytes, row):
                value.update_inplace(self._host[name])

    def bind_input(self, binding: Any, name: str) -> None:
        """Bind all weights, or all ranks, as a graph's input of that name."""
        array = self._host[name]
        self._device.bind_input(binding, name, array.dtype, array.shape, self._values[name][1])
