"""A stored page is believed only when it is what was asked for, to the last bit."""

from __future__ import annotations

import pytest
import torch

from kvtuner.runtime_loader.host_tier.stored_page import FAULTS, HEADER_BYTES, fault_of, identity_digest, seal

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
