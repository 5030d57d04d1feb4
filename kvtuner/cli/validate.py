"""``kvtuner validate``: schema, digest and inner consistency of profiles, with no model at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.cli.profile_text import printable
from kvtuner.exported_configs.load import load_profile

if TYPE_CHECKING:
    from argparse import Namespace


def run(args: Namespace) -> int:
    """Run the sub-command."""
    results = []
    for name in args.file:
        profile = load_profile(Path(name))
        if args.model:
            from kvtuner.calibration.model import ModelSource, read_config
            from kvtuner.runtime_loader.model_check import check_model

            check_model(profile, read_config(ModelSource(args.model)))
        results.append({"file": name, "digest": profile.digest, "model": profile.model.id, "valid": True})
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        for result in results:
            print(f"{result['file']}: valid, {result['digest']}, for {printable(str(result['model']))}")
    return 0
