"""A stored page is believed only when it is what was asked for, to the last bit; two models have two fingerprints."""

from __future__ import annotations

import pytest
import torch

from kvtuner.runtime_loader.host_tier.stored_page import (
    FAULTS,
    HEADER_BYTES,
    fault_of,
    identity_digest,
    seal,
    weights_fingerprint,
)

PAGE_BYTES = 48
KEY = "ab" * 32
MINE = identity_digest({"profile": "sha256:1", "tp": [0, 2]})
OTHER = identity_digest({"profile": "sha256:1", "tp": [1, 2]})


def sealed(seed: int = 0, key: str = KEY, identity: bytes = MINE) -> torch.Tensor:
    stored = torch.zeros(HEADER_BYTES + PAGE_BYTES, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    stored[HEADER_BYTES:] = torch.randint(256, (PAGE_BYTES,), dtype=torch.uint8, generator=generator)
    seal(stored, identity, key)
    return stored


def test_a_page_is_believed_and_left_as_it_is() -> None:
    stored = sealed()
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(stored[HEADER_BYTES:], torch.randint(256, (PAGE_BYTES,), dtype=torch.uint8, generator=generator))
    assert fault_of(stored, MINE, KEY) is None
    assert torch.equal(stored, sealed())


def test_every_flipped_bit_is_found() -> None:
    right = sealed()
    found = set()
    for position in range(len(right)):
        for bit in range(8):
            stored = right.clone()
            stored[position] ^= 1 << bit
            fault = fault_of(stored, MINE, KEY)
            assert fault is not None, (position, bit)
            found.add(fault)
    assert found == {"magic", "version", "length", "identity", "key", "checksum"}


def test_every_truncated_page_is_found_and_so_is_a_longer_one() -> None:
    right = sealed()
    for size in range(len(right)):
        assert fault_of(right[:size].clone(), MINE, KEY) in ("truncated", "length"), size
    assert fault_of(torch.cat((right, right[:1])), MINE, KEY) == "length"


@pytest.mark.parametrize(
    ("stored", "fault"),
    [
        (sealed(identity=OTHER), "identity"),
        (sealed(key="cd" * 32), "key"),
        (torch.zeros(HEADER_BYTES + PAGE_BYTES, dtype=torch.uint8), "magic"),
        (torch.cat((sealed()[:HEADER_BYTES], sealed(seed=1)[HEADER_BYTES:])), "checksum"),
        (torch.empty(0, dtype=torch.uint8), "truncated"),
    ],
    ids=["another's", "under another key", "zeros", "another's bytes", "empty"],
)
def test_a_foreign_page_is_named(stored: torch.Tensor, fault: str) -> None:
    assert fault_of(stored, MINE, KEY) == fault
    assert fault in FAULTS


def test_an_identity_is_every_field() -> None:
    fields = {"profile": "a", "page_size": 16, "layers": [0, 4]}
    digests = {identity_digest(fields)}
    for name, value in (("profile", "b"), ("page_size", 64), ("layers", [4, 8])):
        digests.add(identity_digest({**fields, name: value}))
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {32}


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(7, 5, generator=generator).bfloat16(),
        "scale": torch.randn((), generator=generator),
        "packed": torch.randint(256, (3, 11), dtype=torch.uint8, generator=generator),
        "fp8": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "turned": torch.randn(6, 4, generator=generator).t(),
    }


def test_the_same_weights_have_the_same_fingerprint_wherever_they_lie() -> None:
    again = {name: tensor.clone() for name, tensor in weights().items()}
    assert weights_fingerprint(weights().items()) == weights_fingerprint(again.items())


@pytest.mark.parametrize("name", ["embed", "scale", "packed", "fp8", "turned"])
def test_one_bit_of_one_weight_is_another_model(name: str) -> None:
    changed = weights()
    flat = changed[name].contiguous().view(-1).view(torch.uint8)
    flat[-1] ^= 1
    changed[name] = flat.view(changed[name].dtype).view(changed[name].shape)
    assert weights_fingerprint(changed.items()) != weights_fingerprint(weights().items())


def test_a_view_at_an_odd_place_is_read_as_any_other() -> None:
    whole = torch.arange(64, dtype=torch.uint8)
    assert weights_fingerprint([("a", whole[3:43])]) == weights_fingerprint([("a", whole[3:43].clone())])


def test_names_shapes_order_and_traded_values_count() -> None:
    whole = weights_fingerprint(weights().items())
    renamed = {("other" if name == "embed" else name): tensor for name, tensor in weights().items()}
    reshaped = {**weights(), "embed": weights()["embed"].reshape(5, 7)}
    traded = weights()
    traded["packed"][0, 0] += 1
    traded["packed"][0, 1] -= 1
    reordered = {**weights(), "embed": weights()["embed"].flip(0)}
    for other in (renamed, reshaped, traded, reordered):
        assert weights_fingerprint(other.items()) != whole
