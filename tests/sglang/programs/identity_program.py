"""Run by tests of layers in a process of its own: how a model that SGLang reads differs from transformers' reading.

The arguments are the folder of a model, and a flag of SGLang's that overrides its configuration with its value. The
output is JSON of the kinds of differences: by that flag alone (`differs`), and with another width too (`changed`).
"""

import json
import sys

from transformers import AutoConfig

from kvtuner.exported_configs.identity.mismatch import Policy, compare_models
from kvtuner.exported_configs.identity.model_identity import identity_of

folder, _, overrides = sys.argv[1:]
config = AutoConfig.from_pretrained(folder)  # before SGLang replaces the classes of some models
profiled = identity_of(config, id=folder, revision=None, dtype="bfloat16", files=folder)


def differences(overridden: str) -> list[str]:
    from sglang.srt.configs.model_config import ModelConfig

    from kvtuner.runtime_loader.sglang.loaded_request import identity_of_model

    served = identity_of_model(ModelConfig(folder, model_override_args=overridden, dtype="bfloat16"))
    return [mismatch.kind for mismatch in compare_models(profiled, served, Policy(False, False, "strict", "allow"))]


width = {"intermediate_size": 128}
wider = json.dumps({**json.loads(overrides), **({"text_config": width} if hasattr(config, "text_config") else width)})
sys.stdout.write(json.dumps({"differs": differences(overrides), "changed": differences(wider)}) + "\n")
