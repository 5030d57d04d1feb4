"""A request with its profile at hand. Knows nothing of hooks, processes or pools."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtuner.cache_kind import refuse_other_caches
from kvtuner.errors import ServingError
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.catalogue import choose
from kvtuner.exported_configs.sharing.reference import FileReference, check_digest, parse_reference
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.model_check import check_model
from kvtuner.runtime_loader.sglang.compat.model import refuse_other_pools
from kvtuner.runtime_loader.sglang.profile_location import budget_of, is_auto, pin_of, pinned
from kvtuner.runtime_loader.sglang.request import PROFILE_VARIABLE, REQUEST_VARIABLE

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.evidence import ModelIdentity
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.runtime_loader.sglang.request import Attend, ServingRequest


@dataclass(frozen=True, slots=True)
class Serving:
    """A request with its profile at hand.

    Attributes:
        request: What the user asks for.
        loaded: The profile of a request that names one.
    """

    request: ServingRequest
    loaded: Profile | None

    @classmethod
    def of(cls, request: ServingRequest) -> Serving:
        """Read the profile that a request names; one that is built or chosen for the model is left for later.

        Raises:
            KVTunerError: The profile cannot be read, is another than its pin says, or is not signed as required.
        """
        if request.profile is None:
            return cls(request, None)
        if is_auto(request.profile):
            if request.signed_by is not None:
                raise ServingError(
                    f"--kvtuner-profile {request.profile} and a required signature exclude each other: the catalogue"
                    " comes with kvtuner and is not signed apart from it; drop one of them"
                )
            return cls(request, None)
        reference = parse_reference(request.profile)
        assert isinstance(reference, FileReference)  # by `locate`
        if request.signed_by is None:
            profile = load_profile(reference.path)
        else:
            from kvtuner.exported_configs.signing.signatures import SignerIdentity, load_verified

            profile = load_verified(reference.path, SignerIdentity.parse(request.signed_by))
        check_digest(profile.digest, reference.digest, str(reference.path))
        return cls(request, profile)

    @property
    def attend(self) -> Attend:
        """What a chunk reads of itself."""
        return self.request.attend

    def chosen_for(self, model_config: Any) -> Serving:
        """Return the same with the catalogue's profile for a model in place of ``auto``.

        The processes that this one starts find that profile in their environment.

        Raises:
            ProfileError: The catalogue has none, or not the one that was pinned.
        """
        name = self.request.profile
        if name is None or not is_auto(name):
            return self
        path = choose(identity_of_model(model_config), budget_of(name))
        profile = load_profile(path)
        check_digest(profile.digest, pin_of(name), name)
        location = pinned(str(path), profile.digest)
        request = replace(self.request, profile=location)
        if os.environ.get(REQUEST_VARIABLE):
            request.to_environment(os.environ)
        else:
            os.environ[PROFILE_VARIABLE] = location
        return Serving(request, profile)

    def profile(self, model_config: Any) -> Profile:
        """Return the profile to serve a model with, of the same geometry.

        Args:
            model_config: SGLang's ModelConfig.

        Raises:
            UnsupportedModelError: The model has no plain KV cache.
            ProfileError: The profile belongs to another model.
            PrecisionError: The uniform flags ask for what this model's heads cannot have.
        """
        config = model_config.hf_config
        refuse_other_caches(config, context_length=model_config.context_len)
        refuse_other_pools(model_config)
        if self.loaded is not None:
            check_model(self.loaded, config)
            return self.loaded
        uniform = self.request.uniform
        assert uniform is not None
        return uniform_profile(
            ModelGeometry.from_config(config),
            PrecisionPair(uniform.nbits_key, uniform.nbits_value),
            identity_of_model(model_config),
            k_group_size=uniform.q_group_size,
            v_group_size=uniform.q_group_size,
            symmetric=not uniform.asym,
        )


def identity_of_model(model_config: Any) -> ModelIdentity:
    """Return the identity of the model that SGLang serves."""
    return identity_of(
        model_config.hf_config,
        id=model_config.model_path,
        revision=model_config.revision,
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantized_by=model_config.quantization,
        files=model_config.model_path,
    )
