"""A model of four layers, and reading a file for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import ImportOptions, read
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.geometry import ModelGeometry

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.profile.profile import Profile

MODEL = ModelIdentity(
    id="owner/Tiny-3.1B", revision=None, config_sha256="sha256:" + 64 * "0", architecture="Tiny", dtype="bfloat16"
)


@pytest.fixture(scope="session")
def geometry() -> ModelGeometry:
    return ModelGeometry(4, 8, 2, 128, 64)


@pytest.fixture(scope="session")
def take(geometry: ModelGeometry) -> Callable[..., tuple[Profile, tuple[str, ...]]]:
    """Import bytes, text, or a document as JSON; returns the profile and the notes."""

    def call(source: Any, name: str, shape: ModelGeometry = geometry, **options: Any) -> Any:
        text = source if isinstance(source, str | bytes) else json.dumps(source)
        data = text.encode() if isinstance(text, str) else text
        return read(data, name, shape, MODEL, ImportOptions(**{"model": "owner/Tiny-3.1B", **options}))

    return call


@pytest.fixture(scope="session")
def refusal(take: Callable[..., Any]) -> Callable[..., str]:
    """The message that an import ends with, once it is known to be one printable line."""

    def call(source: Any, name: str, **options: Any) -> str:
        with pytest.raises(ProfileError) as refused:
            take(source, name, **options)
        message = str(refused.value)
        assert message.isprintable() and 15 < len(message) < 500, message
        return message

    return call
