"""A request with its profile at hand: found by its name, or chosen for the model. Knows nothing of hooks or pools."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.catalogue import choose
from kvtuner.exported_configs.sharing.reference import FileReference, check_digest, find_profile, parse_reference
from kvtuner.precision import ExactWindow, PrecisionPair, ScaleLayout
from kvtuner.runtime_loader.model_check import check_model, check_token_groups
from kvtuner.runtime_loader.sglang.compat.model import configuration_of, refuse_other_pools
from kvtuner.runtime_loader.sglang.request import PROFILE_VARIABLE, REQUEST_VARIABLE
from kvtuner.supported_models import read_served_geometry, refuse_other_caches

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import ModelIdentity
    from kvtuner.runtime_loader.sglang.request import ServingRequest

_AUTO: Final = re.compile(r"auto(?::(?P<budget>[^#]*))?(?:#.*)?", re.DOTALL)
"""The name by which the catalogue is asked for the model's profile: ``auto``, or ``auto:BUDGET``, and a pin."""

logger: Final = logging.getLogger("kvtuner")


def located(request: ServingRequest) -> ServingRequest:
    """Return the request with its profile's path, fetched from the hub if need be, and the digest as a pin.

    Every process that this one starts reads the file at that path, and refuses another profile in it. ``auto`` stays
    as it is until the model is known.
    """
    if request.profile is None or _AUTO.fullmatch(request.profile):
        return request
    location = find_profile(request.profile)
    for note in location.notes:
        logger.warning("kvtuner: %s", note)
    return replace(request, profile=f"{os.path.abspath(location.path)}#{location.profile.digest}")


@dataclass(frozen=True, slots=True)
class LoadedRequest:
    """A request with its profile, if it names one."""

    request: ServingRequest
    named_profile: Profile | None

    @classmethod
    def of(cls, request: ServingRequest) -> LoadedRequest:
        """Read the profile that a request names; one that is built or chosen for the model is left for later."""
        if request.profile is None:
            return cls(request, None)
        if _AUTO.fullmatch(request.profile):
            if request.signed_by is not None:
                raise ServingError(
                    f"--kvtuner-profile {request.profile} and a required signature exclude each other: the catalogue"
                    " comes with kvtuner and is not signed apart from it; drop one of them"
                )
            return cls(request, None)
        reference = parse_reference(request.profile)
        assert isinstance(reference, FileReference)  # by `located`
        if request.signed_by is None:
            profile = load_profile(reference.path)
        else:
            from kvtuner.exported_configs.signing.profile_signature import verify_profile
            from kvtuner.exported_configs.signing.signer import SignerIdentity

            profile = verify_profile(reference.path, SignerIdentity.parse(request.signed_by)).profile
        check_digest(profile.digest, reference.digest, str(reference.path))
        return cls(request, profile)

    def chosen_for(self, model_config: Any) -> LoadedRequest:
        """Return the same with the catalogue's profile for a model in place of ``auto``."""
        name = self.request.profile
        auto = name and _AUTO.fullmatch(name)
        if not name or not auto:
            return self
        path = choose(identity_of_model(model_config), auto["budget"] or None)
        profile = load_profile(path)
        check_digest(profile.digest, parse_reference(name).digest, name)
        location = f"{path}#{profile.digest}"
        # The processes that this one starts find that profile in their environment.
        request = replace(self.request, profile=location)
        if os.environ.get(REQUEST_VARIABLE):
            request.to_environment(os.environ)
        else:
            os.environ[PROFILE_VARIABLE] = location
        return LoadedRequest(request, profile)

    def profile(self, model_config: Any) -> Profile:
        """Return the profile to serve a model of SGLang's ModelConfig with, or refuse the model."""
        config, context_length = configuration_of(model_config), model_config.context_len
        geometry = read_served_geometry(config, context_length=context_length)
        refuse_other_pools(model_config, geometry)
        if self.named_profile is not None:
            if not self.named_profile.geometry.is_by_layer and any(
                layer.kind.name == "window" for layer in geometry.layers
            ):
                refuse_other_caches(config, context_length=context_length)  # which says how to serve without windows
            check_model(self.named_profile, config, context_length=context_length)
            return self.named_profile
        uniform = self.request.uniform
        assert uniform is not None
        profile = uniform_profile(
            geometry,
            PrecisionPair(uniform.nbits_key, uniform.nbits_value),
            identity_of_model(model_config),
            k_layout=ScaleLayout(uniform.q_group_size, granularity=uniform.k_granularity),
            v_layout=ScaleLayout(uniform.q_group_size),
            symmetric=not uniform.asym,
            window=ExactWindow(uniform.residual_length, uniform.sinks),
        )
        check_token_groups(profile)
        return profile


def identity_of_model(model_config: Any) -> ModelIdentity:
    """Return the identity of the model that SGLang serves."""
    return identity_of(
        configuration_of(model_config),
        id=model_config.model_path,
        revision=model_config.revision,
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantized_by=model_config.quantization,
        files=model_config.model_path,
    )
