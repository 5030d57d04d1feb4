"""The sources that options name: the model, its text, and the run folder. Reads none of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.calibration.corpus import CorpusSource
from kvtuner.calibration.model_loading import DEMO, ModelShape, ModelSource
from kvtuner.errors import CorpusError, OptionError
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from kvtuner.pipeline.options import DataOptions, ModelOptions

SEQUENCE_LENGTH: Final = 2048
SEQUENCES: Final = (8, 8, 16)
# The demo model was trained on 512 tokens.
DEMO_SEQUENCE_LENGTH: Final = 512
DEMO_SEQUENCES: Final = (4, 12, 12)


def model_source(options: ModelOptions) -> ModelSource:
    """The model that options name; refuses options that name none."""
    if options.model is None:
        raise OptionError("a model is needed: a hub id, a folder, or demo")
    return ModelSource(**asdict(options))


def corpus_source(data: DataOptions, model: ModelOptions, shape: ModelShape, *, seed: int) -> CorpusSource:
    """The text that options name, cut for the model; refuses sequences that are longer than its context."""
    if data.sequence_length is not None and data.sequence_length > shape.context_length:
        raise CorpusError(
            f"--sequence-length {data.sequence_length} must fit the context of {shape.context_length} tokens;"
            " give a shorter one"
        )
    is_demo = model.model == DEMO
    length = data.sequence_length or min(DEMO_SEQUENCE_LENGTH if is_demo else SEQUENCE_LENGTH, shape.context_length)
    return CorpusSource(
        data=data.data or DEMO,
        data_config=data.data_config,
        data_split=data.data_split,
        text_field=data.text_field,
        sequence_length=length,
        num_sequences=data.sequences or (DEMO_SEQUENCES if is_demo else SEQUENCES),
        seed=seed,
        deduplicate=data.deduplicate,
    )


def run_folder(model: ModelOptions, out: str | None, name: str) -> RunFolder:
    """The folder that `out` names, or ``runs/<model>-<name>``."""
    return RunFolder(Path(out) if out else Path("runs") / f"{model_source(model).name.replace('/', '--')}-{name}")
