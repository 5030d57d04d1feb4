"""The table of docs/models.md: ``python -m tools.make_models_table`` writes it anew from what is installed.

``--check`` writes nothing, and ends with status 1 and the rows that differ if the table is not what is installed.

A row is a kind of model that transformers loads as a decoder of text, alone or beside what reads images. Its cells are
found by code: the test that runs a tiny checkpoint of it, or why it is refused by its configuration, by a server's
check of SGLang's own reading of that too.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from difflib import unified_diff
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

ROOT: Final = Path(__file__).parents[1]
ON_A_PROCESSOR: Final = ROOT / "examples" / "sglang_on_cpu"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "fixtures"), str(ON_A_PROCESSOR)]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

PAGE: Final = ROOT / "docs" / "models.md"
BEGIN: Final = "<!-- made by python -m tools.make_models_table -->"
SERVERS: Final = (
    "test_agreement.py", "layers/test_windows.py", "layers/test_shared_layers.py", "layers/test_states.py",
    "layers/test_latents.py", "layers/test_indexed_latents.py",
)  # fmt: skip
"""The tests of tests/sglang/ that start a real server for each of their `FAMILIES`."""
NO_CACHE_OF_OURS: Final = ("minimax",)
NO_CHAIN: Final = {
    "zamba2": "refused: its attention says no layer",
    "longcat_flash": "refused: a layer that attends twice",
    **dict.fromkeys(("gemma3n", "perception_lm"), "refused: needs timm and torchvision, which no test installs"),
}


_WAYS_OUT: Final = (
    ";", ", which was tried", ", which is", ": a window", ": run", ", which reads", ": it is", ": is this", ": layers",
)  # fmt: skip
"""The marks behind which a refusal says more than its reason."""


@cache
def tested() -> dict[str, str]:
    """The name that tests have for a tiny checkpoint, by kind of model."""
    import transformers

    plain, models = import_module("conftest").FAMILIES, import_module("tiny.layered_models")
    families = {**plain, **models.LAYERED, **models.MULTIMODAL, **import_module("tiny.latent_models").LATENT}
    prefixes = {name: family[0] for name, family in families.items()}
    found: dict[str, str] = {}
    for name, prefix in prefixes.items():
        kind = prefix if name in models.MULTIMODAL else models.TEXT_CLASSES.get(prefix, prefix)
        found.setdefault(getattr(transformers, f"{kind}Config").model_type, name)
    return found


@cache
def served() -> dict[str, str]:
    """The name of the tiny checkpoint that tests serve by a real SGLang on a processor, by kind of model."""
    names = {name for file in SERVERS for name in _module(ROOT / "tests" / "sglang" / file).FAMILIES}
    return {kind: name for kind, name in tested().items() if name in names}


@cache
def pictured() -> dict[str, str]:
    """The name of the tiny checkpoint that tests serve so with images, by kind of model."""
    import transformers

    names = import_module("tiny.served_images").SERVED
    return {getattr(transformers, f"{name}Config").model_type: name for name in names}


@cache
def read() -> set[str]:
    """The kinds of models that tests calibrate on images."""
    import transformers

    readers = import_module("tiny.image_readers").READERS
    return {getattr(transformers, f"{prefix}Config").model_type for prefix in readers}


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """The kind of each model, and its cells: search, transformers host, SGLang on a processor, Triton."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tests = tested()
    classes = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    for name in sorted({*classes, *tests}):
        try:
            config = CONFIG_MAPPING[name]()
        except Exception:  # one that needs the configurations of its parts
            continue
        search = _search(name, config, tests)
        is_refused = search.startswith("refused")
        host = "refused: it takes its own cache alone" if name in NO_CACHE_OF_OURS else search
        search += ", images too" if name in read() else ""
        server = search if is_refused else _served(name, config, classes.get(name))
        triton = "-" if server.startswith(("refused", "fails")) else _triton(config)
        yield name, search, host, server, triton


def _search(name: str, config: Any, tests: dict[str, str]) -> str:
    from kvtuner.errors import KVTunerError
    from kvtuner.supported_models import read_cache_geometry

    shrunk = import_module("tiny.shrunk_models")
    if name in NO_CHAIN:
        return NO_CHAIN[name]
    if name in shrunk.REFUSED:
        return f"refused: {shrunk.REASONS_WITHOUT_SIZES.get(name, shrunk.REFUSED[name])}"
    if name in tests:
        return f"tested as `{tests[name]}`"
    try:
        geometry = read_cache_geometry(config)
    except KVTunerError as error:
        return f"refused: {_short(str(error))}"
    kinds = [layer.kind.name for layer in geometry.layers]
    how = "tested, shrunk: " if name in shrunk.SHRUNK else "by its configuration: "
    return how + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _triton(config: Any) -> str:
    is_latent = getattr(config.get_text_config(decoder=True), "kv_lora_rank", None)
    return "kernels of latents; on no GPU" if is_latent else "kernels by rows; on an H200 without a server"


def _served(name: str, config: Any, model_class: str | tuple[str, ...] | None) -> str:
    """What a server does, by SGLang's own reading of a configuration as a checkpoint of that class has it."""
    if name in pictured():
        return f"tested as `{pictured()[name]}`, images too"
    if name in served():
        return f"tested as `{served()[name]}`"
    shrunk = import_module("tiny.shrunk_models")
    if name in shrunk.SERVED:
        return "tested, shrunk"
    if name in shrunk.FAILING:
        return f"fails in SGLang, without a profile too: {shrunk.FAILING[name]}"
    if name in shrunk.ANSWERED_OTHERWISE:
        return "answered otherwise by SGLang, without a profile too"
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.registry import ModelRegistry

    from kvtuner.errors import KVTunerError
    from kvtuner.runtime_loader.sglang.compat.model import keeps_states, refuse_other_pools
    from kvtuner.supported_models import read_served_geometry

    if model_class is None:
        return "refused: no class of transformers reads text alone"
    config.architectures = [model_class if isinstance(model_class, str) else model_class[0]]
    try:
        geometry = read_served_geometry(config)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            read = ModelConfig(folder)
            refuse_other_pools(read, geometry)
            has_states = keeps_states(read)
    except KVTunerError as error:
        return f"refused: {_short(str(error))}"
    except Exception as error:  # whatever SGLang raises of a configuration without weights
        return f"refused: SGLang does not read its configuration ({type(error).__name__})"
    if not ModelRegistry.is_arch_supported(config.architectures[0]):
        return "by transformers' code in SGLang, untested"
    if geometry.tuned().is_latent:
        return "latents in torch, untested"
    if has_states:
        return "states by SGLang's kernels, untested"
    has_windows = any(layer.kind.name == "window" for layer in geometry.layers)
    return "windows by SGLang's kernels, untested" if has_windows else "plain attention, untested"


def _module(path: Path) -> ModuleType:
    """The module of a file, whatever its folder is."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _short(text: str) -> str:
    """A refusal without the model's name and the way out, for a cell."""
    text = text.partition(" has ")[2] or text
    for end in _WAYS_OUT:
        text = text.partition(end)[0]
    return text.replace("|", "/")


def page(text: str) -> str:
    """The page with its table made anew."""
    releases = f"Made with transformers {version('transformers')} and SGLang {version('sglang')}."
    lines = [
        "",
        releases,
        "",
        "| model | search | transformers host | SGLang on a processor | Triton |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows()]
    return text.partition(BEGIN)[0] + BEGIN + "\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table is another one")
    check = parser.parse_args().check
    _module(ON_A_PROCESSOR / "sitecustomize.py")  # what SGLang needs where there is no GPU
    logging.disable(logging.WARNING)
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if not check:
        PAGE.write_text(after, encoding="utf-8")
    elif after != before:
        lines = unified_diff(before.splitlines(), after.splitlines(), "docs/models.md", "installed", lineterm="", n=0)
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
