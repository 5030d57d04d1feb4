"""The identity of a stored page: it must have been made by this profile, model, weights and rank."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.host_tier.stored_page import identity_digest, weights_fingerprint
from kvtuner.runtime_loader.sglang.compat.parallel import post, posted, tell_all

if TYPE_CHECKING:
    from torch.nn import Module

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.read_plan_names import Attend
    from kvtuner.runtime_loader.host_tier.transfer import MakeMover
    from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks

# What differs in the configurations of equal models.
_NOT_OF_THE_MODEL: Final = ("_name_or_path", "transformers_version")

logger: Final = logging.getLogger("kvtuner")


@dataclass(frozen=True, slots=True)
class PageSource:
    """The profile and model that this rank serves, as far as the tiers below its device depend on them.

    Attributes:
        profile: The profile of the whole model.
        packed: Whether the device pool holds packed rows; otherwise they are made on their way down.
        model: The loaded part of the model on this rank.
        config: The ModelConfig of SGLang.
        agreement_s: The seconds that ranks wait for one another.
    """

    profile: Profile
    attend: Attend
    packed: bool
    model: Module
    config: Any
    make_mover: MakeMover
    agreement_s: float


class PageIdentity:
    """The identity that a stored page must have to be read by this rank."""

    def __init__(self, source: PageSource, here: ParallelRanks, layers: range, page_size: int) -> None:
        settings = json.loads(source.config.hf_config.to_json_string(use_diff=False))
        self._model = source.model
        self._fields = {
            "profile": source.profile.digest,
            "layout": source.profile.layout,
            # Above an exact device pool every chunk reads exact keys, whatever the profile's reading is.
            "attend": source.attend if source.packed else "device",
            "model": {key: value for key, value in settings.items() if key not in _NOT_OF_THE_MODEL},
            "dtype": str(source.config.dtype),
            "page_size": page_size,
            "layers": [layers.start, layers.stop],
            "tp": [here.tp_rank, here.tp_size],
            "stage": here.pp_rank,
        }
        self._generation, self._in_session = 0, False
        # A rank's keys and values depend on the weights of all ranks: those before it in the pipeline, and those that
        # share its layers.
        words = tell_all(self._key, self._weights(), source.agreement_s)
        weights = [word for _, word in sorted(words.items()) if word is not None]
        if len(weights) < len(words):
            raise ServingError("another rank does not say which weights it serves; start all nodes with the same flags")
        # None from a change of weights on, until every rank posted its new weights' fingerprint. A fingerprint that is
        # empty says that a rank cannot read its weights: the digest then stays None until the weights change again.
        self._digest: bytes | None = self._of(weights)
        self._is_posted = False

    @property
    def digest(self) -> bytes | None:
        """The digest in every key and header; None while nobody knows which weights made what the cache holds."""
        if self._digest is None and self._is_posted:
            weights = posted(self._key)
            self._digest = None if weights is None or "" in weights else self._of(weights)
        return self._digest

    def suspend(self, *, session: bool | None = None) -> None:
        """Weights are about to change: storages are left alone until the cache is flushed.

        In a session more changes follow (True), or these were the last (False); None is for a change by itself.
        """
        if self._digest is not None or self._is_posted:
            logger.warning("kvtuner: weights change; storage is not used until the cache is flushed (/flush_cache)")
            # A key is used once: words about earlier weights must not be taken for these.
            self._generation += 1
        self._digest, self._is_posted = None, False
        self._in_session = self._in_session if session is None else session

    def refresh(self) -> None:
        """The cache is empty: what it will hold is made by the weights as they are."""
        if self._digest is not None or self._is_posted or self._in_session:
            return
        try:
            word = self._weights()
        except ServingError as error:
            logger.error("kvtuner: storage is not used any more: %s", error)
            word = ""
        # An empty word too: the other ranks must learn that nobody will know.
        post(self._key, word)
        self._is_posted = True

    @property
    def _key(self) -> str:
        return f"kvtuner/weights/{self._generation}"

    def _weights(self) -> str:
        try:
            return weights_fingerprint(self._model.state_dict().items())
        except (RuntimeError, TypeError, AttributeError) as error:  # tensors of kinds that have no bytes to read
            raise ServingError(f"this model's weights cannot be told from others: {error}") from error

    def _of(self, weights: list[str]) -> bytes:
        return identity_digest({**self._fields, "weights": weights})
