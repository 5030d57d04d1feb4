"""Run by test_windows.py in a process of its own: how a model that SGLang reads differs from transformers' reading.

The arguments are the folder of a model, and a flag of SGLang's that overrides its configuration with its value. The
output is JSON of the kinds of differences: by that flag alone (`differs`), and with another width too (`changed`).
"""

import json
import sys

from sglang.srt.configs.model_config import ModelConfig
from transformers import AutoConfig

from kvtuner.exported_configs.identity.mismatch import Policy, compare_models
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.runtime_loader.sglang.loaded_request import identity_of_model

folder, _, overrides = sys.argv[1:]
profiled = identity_of(AutoConfig.from_pretrained(folder), id=folder, revision=None, dtype="bfloat16", files=folder)


def differences(overridden: str) -> list[str]:
    served = identity_of_model(ModelConfig(folder, model_override_args=overridden, dtype="bfloat16"))
    return [mismatch.kind for mismatch in compare_models(profiled, served, Policy(False, False, "strict", "allow"))]


wider = json.dumps({**json.loads(overrides), "text_config": {"intermediate_size": 128}})
sys.stdout.write(json.dumps({"differs": differences(overrides), "changed": differences(wider)}) + "\n")
