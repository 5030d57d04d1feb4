"""A small profile with every feature of the format, and an independent digest to reseal edited copies."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any

import profile_samples
import pytest
import torch

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile, dump_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.records import ModelIdentity, Provenance, QualityRecord
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ScaleLayout
from kvtuner.quant import Transform
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import MakeKeys
    from hub_server import LoopbackHub

    from kvtuner.exported_configs.profile.profile import Profile

HASH = "sha256:" + "0123456789abcdef" * 4
NUM_KV_HEADS, HEAD_DIM, V_HEAD_DIM = 3, 48, 32

MODEL = {
    "id": "owner/tiny-3.1",
    "revision": "c0ffee",
    "config_sha256": HASH,
    "architecture": "TinyForCausalLM",
    "dtype": "bfloat16",
}
QUALITY = {
    **profile_samples.QUALITY,
    "predicted_kl": 0.01234567,
    "baselines": [
        {"name": "K4V4", "mean_bits": 4.0, "effective_bits": 4.25, "kl_mean": 0.05, "kl_low": 0.04, "kl_high": 0.06}
    ],
}


@pytest.fixture(scope="session")
def make_transform() -> Callable[..., Transform]:
    """A transform by name with random constants; lambda touches both of its bounds."""

    def make(name: str, heads: int = NUM_KV_HEADS, head_dim: int = HEAD_DIM, seed: int = 0) -> Transform:
        generator = torch.Generator().manual_seed(seed)
        kind = TransformKind.parse(name)
        mu = torch.randn(heads, head_dim, generator=generator).to(torch.float16)
        lam = torch.exp2(12 * torch.rand(heads, head_dim, generator=generator) - 6).to(torch.float16)
        lam[0, 0], lam[-1, -1] = 1 / 64, 64
        return Transform(kind, mu if kind.centered else None, lam if kind.balanced else None)

    return make


@pytest.fixture(scope="session")
def choices(make_transform: Callable[..., Transform]) -> tuple[LayerQuantization, ...]:
    """Five layers: every width, five transforms, 16 bits on either side and on both."""
    rotated = make_transform("hadamard")
    return (
        LayerQuantization(8, 4),
        LayerQuantization(4, 2, make_transform("centered+balanced+hadamard"), rotated),
        LayerQuantization(16, 16),
        LayerQuantization(2, 8, rotated),
        LayerQuantization(4, 16, rotated),
    )


@pytest.fixture(scope="session")
def make_profile(choices: tuple[LayerQuantization, ...]) -> Callable[..., Profile]:
    """Build the small profile with some arguments of `build_profile` replaced."""

    def make(**changes: Any) -> Profile:
        layers = changes.get("layers", choices)
        arguments: dict[str, Any] = {
            "geometry": ModelGeometry(max(len(layers), 1), 6, NUM_KV_HEADS, HEAD_DIM, V_HEAD_DIM),
            "layers": layers,
            "k_layout": ScaleLayout(24),
            "v_layout": ScaleLayout(32),
            "symmetric": False,
            "model": ModelIdentity.model_validate(MODEL),
            "budget": AskedBudget("4bit", tp_size=3, pp_size=2),
            "quality": QualityRecord.model_validate(QUALITY),
            "provenance": Provenance.model_validate(profile_samples.PROVENANCE),
        }
        return build_profile(**{**arguments, **changes})

    return make


@pytest.fixture(scope="session")
def profile(make_profile: Callable[..., Profile]) -> Profile:
    return make_profile()


@pytest.fixture(scope="session")
def per_channel(make_profile: Callable[..., Profile], make_transform: Callable[..., Transform]) -> Profile:
    """Keys per channel in groups of 32 tokens, every width of keys, and a rotated value."""
    layers = [
        LayerQuantization(8, 4),
        LayerQuantization(4, 2, v_transform=make_transform("hadamard")),
        LayerQuantization(16, 16),
        LayerQuantization(2, 8),
        LayerQuantization(16, 8),
    ]
    return make_profile(layers=layers, k_layout=ScaleLayout(32, granularity="per_channel"))


@pytest.fixture(scope="session")
def pristine(profile: Profile) -> dict[str, Any]:
    """The small profile as plain JSON values; not to be changed."""
    document: dict[str, Any] = json.loads(dump_profile(profile))
    return document


@pytest.fixture
def document(pristine: dict[str, Any]) -> dict[str, Any]:
    """The small profile as plain JSON values, to be changed at will."""
    return copy.deepcopy(pristine)


@pytest.fixture(scope="session")
def reseal() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Give an edited document the digest that it should have, as whoever forges a profile would."""

    def expand(side: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in side.items() if value is not None}
        return {"bits": 16} if side["bits"] == 16 else {**defaults, **given}

    def seal(document: dict[str, Any]) -> dict[str, Any]:
        layers = [
            {
                "layer": entry["layer"],
                "k": expand(entry["k"], document["defaults"]["k"]),
                "v": expand(entry["v"], document["defaults"]["v"]),
            }
            for entry in document["layers"]
        ]
        window = {name: document[name] for name in ("residual_length", "sinks") if document.get(name)}
        content = {"layout": document["layout"], "geometry": document["geometry"], "layers": layers, **window}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return {**document, "digest": "sha256:" + hashlib.sha256(text.encode()).hexdigest()}

    return seal


@pytest.fixture(scope="session")
def put() -> Callable[[dict[str, Any], tuple[str | int, ...], Any], dict[str, Any]]:
    """A copy of a document with the value at one place replaced."""

    def put_value(document: dict[str, Any], steps: tuple[str | int, ...], value: Any) -> dict[str, Any]:
        copied = copy.deepcopy(document)
        node: Any = copied
        for step in steps[:-1]:
            node = node[step]
        node[steps[-1]] = value
        return copied

    return put_value


@pytest.fixture(scope="session")
def refusal() -> Callable[[bytes | Path], str]:
    """The message that loading ends with, once it is known to be one printable line."""

    def load_in_vain(source: bytes | Path) -> str:
        with pytest.raises(ProfileError) as refused:
            load_profile(source)
        message = str(refused.value)
        assert message.isprintable() and 20 < len(message) < 500
        return message

    return load_in_vain


@pytest.fixture
def file(tmp_path: Path, profile: Profile) -> Path:
    """The small profile's file."""
    path = tmp_path / "profile.json"
    path.write_bytes(dump_profile(profile))
    return path


@pytest.fixture
def signed(file: Path, keys: Callable[..., tuple[Path, Path]]) -> Path:
    """The small profile's file, signed by a key."""
    from kvtuner.exported_configs.signing.profile_signature import sign_profile
    from kvtuner.exported_configs.signing.signer import Signer

    sign_profile(file, Signer(keys()[0]))
    return file


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own waits and retries, shortened."""
    import huggingface_hub.file_download
    import huggingface_hub.utils._http
    from huggingface_hub import constants

    from kvtuner.exported_configs.sharing import hub_client

    monkeypatch.setattr(hub_client, "ANSWER_S", 1.0)
    for module in (huggingface_hub.file_download, huggingface_hub.utils._http):
        monkeypatch.setattr(module.time, "sleep", lambda _: None)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)


@pytest.fixture
def check_message() -> Callable[..., None]:
    """A refusal is one short line, and neither it nor a log holds the token."""

    def check(message: str, hub: LoopbackHub, caplog: pytest.LogCaptureFixture) -> None:
        assert "\n" not in message and len(message) < 400
        assert hub.token not in message and hub.token not in caplog.text

    return check


@pytest.fixture
def data(profile: Profile) -> bytes:
    """The small profile's bytes."""
    return dump_profile(profile)


@pytest.fixture
def versions(make_profile: Callable[..., Profile]) -> list[bytes]:
    """Profiles of other layers, in no order of their digests."""
    return [
        dump_profile(make_profile(layers=[LayerQuantization(*bits)] * 5)) for bits in ((8, 8), (4, 8), (8, 4), (16, 8))
    ]


@pytest.fixture
def signature(profile: Profile, keys: MakeKeys, tmp_path: Path) -> bytes:
    """A signature of the small profile by a key."""
    from kvtuner.exported_configs.signing.profile_signature import sign_profile
    from kvtuner.exported_configs.signing.signer import Signer

    path = tmp_path / "profile.json"
    path.write_bytes(dump_profile(profile))
    return sign_profile(path, Signer(keys("mine")[0])).read_bytes()
