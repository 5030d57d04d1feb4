"""A model of engine.py with its 4-bit profile, and the ways to answer in this process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.model_loading import LoadedModel, ModelSource, load_model
from kvtuner.evaluation.scheme_registry import named_scheme
from kvtuner.exported_configs.profile.build import write_profile
from kvtuner.runtime_loader.engine.local_engine import LocalEngine
from serving_parts.answering import by_continuous_batching, by_engine, by_generate
from serving_parts.random_models import model_folder

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvtuner.exported_configs.profile.profile import Profile
    from serving_parts.answering import Answered, Asked

    Answerer = Callable[[Sequence[Asked]], Answered]

OWN: str = "engine"
PACKED: str = "engine, K4V4"


LENGTHS: Final = {"demo": (128, 64), "25M": (64, 32), "100M": (32, 16)}
"""The tokens of prompts and answers, so that a round of any model takes a minute or so."""


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """A prompt that begins like no other."""
    return [rng.randrange(2, 500) for _ in range(length)]


class Subject:
    """A model with its 4-bit profile, and the ways to answer in this process."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.path, self.num_parameters = model_folder(name, folder)
        self.loaded: LoadedModel = load_model(ModelSource(str(self.path), device="cpu", dtype="float32"))
        scheme = named_scheme("K4V4", self.loaded.shape)
        assert scheme.profile is not None
        self.profile: Profile = scheme.profile
        self.profile_file = folder / f"{name}-K4V4.json"
        write_profile(self.profile_file, self.profile)
        unquantized = named_scheme("bf16", self.loaded.shape)
        self.bytes_per_token = 2 * (unquantized.bytes_per_token or 0)  # in float32

    @contextlib.contextmanager
    def engine(self, profile: Profile | None, at_once: int, **options: Any) -> Iterator[LocalEngine]:
        """An engine of it."""
        loaded = self.loaded
        with LocalEngine(loaded.model, loaded.tokenizer, profile, max_requests=at_once, **options) as engine:
            yield engine

    def answerers(self, at_once: int, *, continuous: bool) -> dict[str, Answerer]:
        """The ways to answer requests, so many at once."""

        def of_engine(profile: Profile | None) -> Answerer:
            def answer(asked: Sequence[Asked]) -> Answered:
                with self.engine(profile, at_once, prefix_cache_tokens=0) as engine:
                    return by_engine(engine, asked)

            return answer

        def of_transformers(answer: Callable[[], Answered]) -> Answered:
            model = self.loaded.model
            model.set_attn_implementation("sdpa")
            return answer()

        model = self.loaded.model
        answerers = {
            OWN: of_engine(None),
            PACKED: of_engine(self.profile),
            "generate": lambda asked: of_transformers(lambda: by_generate(model, asked, at_once, self.bytes_per_token)),
        }
        if continuous:
            answerers["continuous batching"] = lambda asked: of_transformers(
                lambda: by_continuous_batching(model, asked, at_once)
            )
        return answerers
