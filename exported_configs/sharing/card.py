"""The card of a repository of profiles: metadata for the hub's search, and a summary for a person.

Knows nothing of hubs and files. ``templates/card.txt`` has its text. It is shown as HTML, so every value is escaped.
"""

import shlex
from collections.abc import Sequence
from functools import cache
from typing import Final

from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvtuner.errors import HubError
from kvtuner.exported_configs.profile.evaluation_record import Cell, EvaluatedProfile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.sharing.serve_command import MODEL_FOLDER, asks_for_folder, page_flags, serve_command
from kvtuner.exported_configs.verdict import verdict_of

TAGS: Final = ("kv-cache", "kv-cache-quantization", "sglang", "kvtuner")
_SAFE: Final = str.maketrans({character: f"&#{ord(character)};" for character in "&<>|`[]*_"})


def card(repo: str, entries: Sequence[EvaluatedProfile], *, license_id: str, pictures: Sequence[str] = ()) -> str:
    """The README.md of a repository, with pictures by their paths there; `HubError` for profiles of several models.

    Entries have the names that their files have there, and the references by which those are read.
    """
    models = {entry.profile.model.id for entry in entries}
    if len(models) != 1:
        raise HubError(f"one repository is for one model, not for {', '.join(sorted(models))}; push them one by one")
    (model,) = models
    metadata = _metadata(model, [entry.profile for entry in entries], license_id)
    template = _environment().get_template("card.txt")
    return template.render(metadata=metadata, repo=repo, model=model, entries=entries, pictures=pictures)


def _metadata(model: str, profiles: Sequence[Profile], license_id: str) -> str:
    """The YAML that the hub reads."""
    corpora = {profile.provenance.calibration.corpus for profile in profiles if profile.provenance.calibration}
    datasets = sorted(name.partition("@")[0] for name in corpora if name.count("/") == 1)
    is_on_hub = "/" in model
    data = ModelCardData(
        base_model=model if is_on_hub else None,
        base_model_relation="quantized" if is_on_hub else None,
        library_name="kvtuner",
        license=license_id,
        tags=list(TAGS),
        datasets=datasets or None,
    )
    return str(data.to_yaml(line_break="\n")).rstrip("\n") + "\n"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvtuner.exported_configs.sharing"),
        autoescape=True,
        finalize=_escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(MODEL_FOLDER=MODEL_FOLDER)
    environment.tests.update(in_a_folder=asks_for_folder)
    environment.filters.update(
        as_is=Markup,
        code=lambda text: Markup("`" + text.replace("`", "'") + "`"),
        measure=_measure,
        verdict=verdict_of,
        shell=lambda text: Markup(shlex.quote(text)),
        serve_command=lambda entry: Markup(
            serve_command(entry.profile.model, entry.reference, *page_flags(entry.profile))
        ),
    )
    return environment


def _escape(value: object) -> Markup:
    """Text without markup and ends of cells."""
    return value if isinstance(value, Markup) else Markup(str(value).translate(_SAFE))


def _measure(cell: Cell) -> str:
    flag = f" ({cell.flag}: tells schemes not apart)" if cell.flag else ""
    return f"{cell.title}{flag}"
