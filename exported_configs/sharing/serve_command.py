"""The command that serves a profile with SGLang, as pages and cards print it. Knows nothing of who reads it."""

import shlex
from typing import Final

from kvtuner.exported_configs.identity.model_identity import DEMO, is_hub_id
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.profile.records import ModelIdentity

DEMO_CHECKPOINT: Final = "sha256:b09d0df60d07269ef8b02b5e8f7f05ff401e53987f60748a08625060d3d7e95c"
"""The `checkpoint_sha256` of the model that comes with kvtuner: a folder of another model may be called so too."""
MODEL_FOLDER: Final = "FOLDER_OF_THE_MODEL"
"""What stands for a folder that only the reader knows."""
_DEMO_FOLDER: Final = "\"$(python -c 'from kvtuner.calibration.model_loading import DEMO_MODEL as m; print(m)')\""


def page_flags(profile: Profile) -> tuple[str, ...]:
    """The flags of a server for the profile's pages: with keys per channel they are whole groups of tokens."""
    return ("--page-size", str(profile.defaults.k.group_size)) if profile.has_per_channel_keys else ()


def serve_command(model: ModelIdentity, reference: str, *flags: str) -> str:
    """The line for a shell that serves the profile that a reference names.

    A model of the hub is named by its id and commit, the demo model by the folder that it has where the command runs,
    and any other by `MODEL_FOLDER`, of which `asks_for_folder` tells.
    """
    if asks_for_folder(model):
        path = MODEL_FOLDER
    elif _is_demo(model):
        path = _DEMO_FOLDER
    else:
        path = shlex.join([model.id, *(["--revision", model.revision] if model.revision else [])])
    rest = shlex.join(["--kvtuner-profile", reference, *flags])
    return f"python -m sglang.launch_server --model-path {path} {rest}"


def asks_for_folder(model: ModelIdentity) -> bool:
    """Whether a model lay in a folder, so that its name alone finds it nowhere."""
    return model.revision is None and not _is_demo(model) and not is_hub_id(model.id)


def _is_demo(model: ModelIdentity) -> bool:
    return (model.id, model.revision, model.checkpoint_sha256) == (DEMO, None, DEMO_CHECKPOINT)
