"""``kvtuner validate``: schema, digest and inner consistency of profiles, and whether they are for a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtuner.errors import KVTunerError, ProfileError
from kvtuner.exported_configs.identity.mismatch import Policy, compare
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.pipeline.inputs import profiles_of
from kvtuner.report.formatting import printable

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping

    from kvtuner.exported_configs.identity.mismatch import Mismatch
    from kvtuner.exported_configs.profile.profile import Profile


def run(args: Namespace) -> int:
    """Run the sub-command: 1 where a profile is valid, but not for the model; 2 where one of several is not valid."""
    policy = _policy(args)
    results: list[dict[str, Any]] = []
    for name in args.file:
        try:
            for each in profiles_of(name):
                results.append(_result(str(each.path) if each.is_own else each.name, each.profile, args, policy))
        except KVTunerError as error:
            if len(args.file) == 1:
                raise
            results.append({"file": name, "valid": False, "error": " ".join(str(error).split())})
    print(json.dumps(results, indent=1) if args.json else "\n".join(line for each in results for line in _lines(each)))
    if not all(result["valid"] for result in results):
        return 2
    return int(any(result["fits"] is False for result in results))


def _result(name: str, profile: Profile, args: Namespace, policy: Policy) -> dict[str, Any]:
    found = mismatches(profile, args.model, policy) if args.model else []
    return {
        "file": name,
        "digest": profile.digest,
        "model": profile.model.id,
        "valid": True,
        "fits": all(each.severity != "error" for each in found) if args.model else None,
        "mismatches": [each._asdict() for each in found],
    }


def _policy(args: Namespace) -> Policy:
    policy = Policy(strict=args.strict, allow_derived=args.allow_derived)
    for is_given, flag in ((policy.strict, policy.strict_flag), (policy.allow_derived, policy.allow_flag)):
        if is_given and not args.model:
            raise ProfileError(f"{flag} is about the model that a profile is for; give --model too")
    return policy


def mismatches(profile: Profile, model: str, policy: Policy) -> list[Mismatch]:
    """What a profile has against a model, by its configuration and files alone.

    Raises:
        ProfileError: another geometry.
    """
    from kvtuner.calibration.model_loading import ModelSource, read_config
    from kvtuner.runtime_loader.model_check import calibrated_positions, check_model

    source = ModelSource(model)
    config = read_config(source)
    check_model(profile, config)
    found = identity_of(config, id=model, revision=None, dtype=profile.model.dtype, files=source.path)
    positions = calibrated_positions(profile)
    return compare(profile.model, found, policy, positions=positions, context_length=found.max_positions)


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    if not result["valid"]:
        yield f"{result['file']}: refused: {printable(result['error'])}"
        return
    yield f"{result['file']}: valid, {result['digest']}, for {printable(str(result['model']))}"
    for each in result["mismatches"]:
        yield f"  {each['severity']}: {printable(each['text'])}"
