"""The hash of all weights: every element counts, and where the tensors lie or how they are cut does not."""

from __future__ import annotations

import pytest
import torch

from kvtuner.calibration import weights_hash as fingerprint_module
from kvtuner.calibration.weights_hash import fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_every_single_element_counts(dtype: torch.dtype) -> None:
    weights = torch.zeros(12, 10).to(dtype)
    seen = {fingerprint({"w": weights})}
    for index in range(120):
        changed = weights.clone()
        changed.view(-1)[index] = 1
        seen.add(fingerprint({"w": changed}))
    assert len(seen) == 121


def test_the_smallest_change_and_a_swap_count() -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    nudged, swapped = weights.clone(), weights.clone()
    nudged[501] = torch.nextafter(weights[501], torch.tensor(torch.inf))
    swapped[[501, 700]] = weights[[700, 501]]
    assert len({fingerprint({"w": w}) for w in (weights, nudged, swapped)}) == 3


def test_names_shapes_and_dtypes_count() -> None:
    weights = torch.zeros(4, 4)
    variants = [{"a": weights}, {"b": weights}, {"a": weights.view(2, 8)}, {"a": weights.int()}, {}]
    assert len({fingerprint(tensors) for tensors in variants}) == 5


def test_strides_and_blocks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": torch.arange(60.0).view(6, 10), "scalar": torch.tensor(2.0), "nothing": torch.zeros(0, 3)}
    first = fingerprint(weights)
    monkeypatch.setattr(fingerprint_module, "BLOCK_BYTES", 7)
    assert fingerprint(weights) == first
    assert fingerprint({**weights, "w": weights["w"].T.contiguous().T}) == first


def test_an_offloaded_tensor_counts_by_name_and_shape() -> None:
    offloaded = [{"w": torch.zeros(shape, device="meta")} for shape in ((2, 3), (3, 2))]
    assert fingerprint(offloaded[0]) == fingerprint(offloaded[0]) != fingerprint(offloaded[1])
