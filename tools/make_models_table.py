"""The table of docs/models.md: ``python -m tools.make_models_table`` writes it anew from what is installed.

A row is a kind of model that transformers loads as a decoder of text, alone or beside what reads images. Its cells are
found by code: the test that runs a tiny checkpoint of it, or why it is refused by its configuration.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "fixtures"))
sys.path.insert(0, str(ROOT / "tests"))

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = ROOT / "docs" / "models.md"
BEGIN: Final = "<!-- made by python -m tools.make_models_table -->"
SERVED: Final = ("llama", "qwen2", "qwen2_vl", "qwen2_5_vl")
"""The kinds of which tests start a real SGLang server on a processor."""
CHAINS: Final = ("Cohere", "Granite", "StableLm", "Olmo2", "GPTNeoX", "OPT", "GPT2")
"""The prefixes of models that tests run layer by layer alone."""
NO_CACHE_OF_OURS: Final = ("minimax",)
NO_CHAIN: Final = {
    "zamba2": "refused: its attention says no layer",
    "longcat_flash": "refused: a layer that attends twice",
}


def tested() -> dict[str, str]:
    """The name that tests have for a tiny checkpoint, by kind of model."""
    import transformers

    plain, models = import_module("conftest").FAMILIES, import_module("tiny.layered_models")
    families = {**plain, **models.LAYERED, **models.MULTIMODAL, **import_module("tiny.latent_models").LATENT}
    prefixes = {name: family[0] for name, family in families.items()} | {name: name for name in CHAINS}
    found: dict[str, str] = {}
    for name, prefix in prefixes.items():
        kind = prefix if name in models.MULTIMODAL else models.TEXT_CLASSES.get(prefix, prefix)
        found.setdefault(getattr(transformers, f"{kind}Config").model_type, name)
    return found


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """The kind of each model, and its cells: search, transformers host, SGLang on a processor, Triton."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tests = tested()
    names = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *tests,
    }
    for name in sorted(names):
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # one that needs the configurations of its parts
            continue
        search = _search(name, config, tests)
        is_refused = search.startswith("refused")
        host = "refused: it takes its own cache alone" if name in NO_CACHE_OF_OURS else search
        if tests.get(name) in CHAINS:
            host = "by its configuration"
        server = search if is_refused else _served(name, config)
        triton = server if server.startswith("refused") else "kernels by rows, interpreted; no GPU yet"
        yield name, search, host, server, triton


def _search(name: str, config: Any, tests: dict[str, str]) -> str:
    from kvtuner.errors import KVTunerError
    from kvtuner.supported_models import read_cache_geometry

    if name in NO_CHAIN:
        return NO_CHAIN[name]
    if name in tests:
        return f"tested as `{tests[name]}`"
    try:
        geometry = read_cache_geometry(config)
    except KVTunerError as error:
        return f"refused: {_short(str(error))}"
    kinds = [layer.kind.name for layer in geometry.layers]
    return "by its configuration: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _served(name: str, config: Any) -> str:
    from kvtuner.errors import KVTunerError
    from kvtuner.supported_models import refuse_other_caches

    try:
        refuse_other_caches(config)
    except KVTunerError as error:
        return f"refused: {_short(str(error))}"
    return "tested" if name in SERVED else "plain attention, untested"


def _short(text: str) -> str:
    """A refusal without the model's name and the way out, for a cell."""
    text = text.partition(" has ")[2] or text
    for end in (";", ": a window", ": run", ", which reads", ": it is", ": is this"):
        text = text.partition(end)[0]
    return text.replace("|", "/")


def page(text: str) -> str:
    """The page with its table made anew."""
    lines = ["", "| model | search | transformers host | SGLang on a processor | Triton |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows()]
    return text.partition(BEGIN)[0] + BEGIN + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    logging.disable(logging.WARNING)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
