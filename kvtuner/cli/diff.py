"""``kvtuner diff``: two profiles side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtuner.exported_configs.load import load_profile

if TYPE_CHECKING:
    from argparse import Namespace

    from kvtuner.exported_configs.profile import Profile


def run(args: Namespace) -> int:
    """Run the sub-command; 1 with ``--exit-code`` if the layers differ."""
    first, second = load_profile(Path(args.first)), load_profile(Path(args.second))
    difference = compare(first, second)
    if args.json:
        print(json.dumps(difference, indent=1))
    else:
        _print(difference)
    return int(bool(args.exit_code) and first.digest != second.digest)


def compare(first: Profile, second: Profile) -> dict[str, Any]:
    """Everything in which two profiles differ that a server or a user would notice."""
    geometry = {
        name: [value, second.to_geometry().as_dict()[name]]
        for name, value in first.to_geometry().as_dict().items()
        if value != second.to_geometry().as_dict()[name]
    }
    layers = []
    if not geometry:
        for layer in range(len(first.pairs)):
            before, after = _layer(first, layer), _layer(second, layer)
            if before != after:
                layers.append({"layer": layer, "first": before, "second": after})
    return {
        "same_digest": first.digest == second.digest,
        "digest": [first.digest, second.digest],
        "model": [first.model.id, second.model.id],
        "geometry": geometry,
        "defaults_differ": _storage(first) != _storage(second),
        "layers": layers,
        "mean_bits": [float(first.mean_bits), float(second.mean_bits)],
        "bytes_per_token": [first.bytes_per_token(), second.bytes_per_token()],
        "kl": [None if p.quality is None else p.quality.measured_kl.mean for p in (first, second)],
    }


def _storage(profile: Profile) -> list[tuple[int, bool]]:
    sides = (profile.defaults.k, profile.defaults.v)
    return [(side.group_size, side.symmetric) for side in sides]


def _layer(profile: Profile, layer: int) -> dict[str, Any]:
    pair, entry = profile.pairs[layer], profile.layers[layer]
    constants = [entry.k.mu, entry.k.lam]
    return {
        "pair": str(pair),
        "k_transform": profile.transform_name(layer, "k"),
        "v_transform": profile.transform_name(layer, "v"),
        "constants": [None if constant is None else constant.data for constant in constants],
    }


def _print(difference: dict[str, Any]) -> None:
    if difference["same_digest"]:
        print(f"the same layers: {difference['digest'][0]}")
    for name in ("model", "mean_bits", "bytes_per_token", "kl"):
        before, after = difference[name]
        print(f"{name:<16}{_text(before):>24}  {_text(after):>24}{'' if before == after else '  *'}")
    for name, (before, after) in difference["geometry"].items():
        print(f"{name:<16}{before:>24}  {after:>24}  *")
    if difference["defaults_differ"]:
        print("group size or symmetry differs")
    for row in difference["layers"]:
        before, after = row["first"], row["second"]
        note = "" if {**before, "constants": 0} != {**after, "constants": 0} else " (other constants)"
        print(f"layer {row['layer']:<10}{_side(before):>24}  {_side(after):>24}{note}")


def _side(row: dict[str, Any]) -> str:
    return f"{row['pair']} {row['k_transform']}/{row['v_transform']}"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
