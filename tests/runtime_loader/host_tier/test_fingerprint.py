"""Two models have two fingerprints, whatever the difference, and one model has one."""

from __future__ import annotations

import pytest
import torch

from kvtuner.runtime_loader.host_tier.fingerprint import weights_fingerprint


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
