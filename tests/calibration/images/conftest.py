from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tiny.image_models import make_reader
from tiny.image_readers import READERS, make_processor, write_image_data

from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.calibration.model_loading import ModelSource, load_model
from kvtuner.calibration.workbench import CalibrationOptions, Workbench

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import MakeTokenizer

    from kvtuner.calibration.corpus import Corpus

LENGTH = 96
SEQUENCES = (3, 2, 3)


@pytest.fixture(scope="session")
def image_data(tmp_path_factory: pytest.TempPathFactory, sentences: Callable[..., list[str]]) -> Path:
    """JSONL with conversations about images, texts with images, and texts, and the images beside it."""
    return write_image_data(tmp_path_factory.mktemp("images"), sentences(200, seed=5))


@pytest.fixture(scope="session")
def processor_of(make_tokenizer: MakeTokenizer) -> Callable[[str], Any]:
    """`processor_of(kind)`: a kind's processor."""
    return lambda kind: make_processor(kind, make_tokenizer())


@pytest.fixture(scope="session")
def corpus_of(processor_of: Callable[[str], Any], image_data: Path) -> Callable[..., Corpus]:
    """`corpus_of(kind, **source)`: the data as a kind reads them."""

    def make(kind: str, **source: Any) -> Corpus:
        processor = processor_of(kind)
        data = {"data": str(image_data), "sequence_length": LENGTH, "num_sequences": SEQUENCES, **source}
        return load_corpus(CorpusSource(**data), processor.tokenizer, lambda: processor)

    return make


@pytest.fixture(scope="session")
def reader_folder(
    tmp_path_factory: pytest.TempPathFactory, processor_of: Callable[[str], Any]
) -> Callable[[str], Path]:
    """`reader_folder(kind)`: the folder of a model that reads images, with its tokenizer."""
    folders: dict[str, Path] = {}

    def save(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("readers") / kind
            tokenizer = processor_of(kind).tokenizer
            make_reader(kind, tokenizer).save_pretrained(folders[kind])
            tokenizer.save_pretrained(folders[kind])
        return folders[kind]

    return save


@pytest.fixture(scope="session")
def bench_of(reader_folder: Callable[[str], Path], corpus_of: Callable[..., Corpus]) -> Callable[..., Workbench]:
    """`bench_of(kind, **options)`: a model that reads images, with the data as it reads them."""
    models: dict[str, Any] = {}

    def make(kind: str, **options: Any) -> Workbench:
        if kind not in models:
            models[kind] = load_model(ModelSource(str(reader_folder(kind)), device="cpu")), corpus_of(kind)
        return Workbench.prepare(*models[kind], CalibrationOptions(**options))

    return make


@pytest.fixture(params=READERS)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of model that reads images."""
    return str(request.param)
