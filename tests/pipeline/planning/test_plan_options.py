"""A plan needs a GPU or its memory, and takes numbers as servers' flags do, from Python too."""

from __future__ import annotations

import pytest

from kvtuner.errors import OptionError
from kvtuner.pipeline.flags.number_readers import byte_count
from kvtuner.pipeline.planning.gpus import GPUS, find_gpu
from kvtuner.pipeline.planning.plan_options import PlanOptions


def test_texts_from_python_become_numbers() -> None:
    options = PlanOptions(model="demo", gpu="rtx-4090", memory="20GiB", context_length="4k", weights="2GiB")  # type: ignore[arg-type]
    assert (options.gpu, options.memory, options.context_length, options.weights) == (
        "RTX 4090",
        20 << 30,
        4096,
        2 << 30,
    )
    assert byte_count(str(options.memory)) == options.memory


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give --gpu, such as H100, or --memory"),
        ({"gpu": "H1000"}, "gpu knows no GPU 'H1000', only T4, .*B200; give another's memory instead: --memory 80GiB"),
        ({"memory": 0}, "memory bytes are written"),
        ({"memory": 1000}, "at least 1GiB"),
        ({"gpu": "T4", "concurrency": 0}, "concurrency must be at least 1"),
        ({"gpu": "T4", "residual_length": 5000}, "residual_length must be within 0..1024"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        PlanOptions(model="demo", **options)  # type: ignore[arg-type]


def test_gpus_are_found_by_name_in_any_case() -> None:
    for gpu in GPUS:
        for name in (gpu.name, gpu.name.lower(), gpu.name.upper().replace(" ", "-"), gpu.name.replace("-", " ")):
            assert find_gpu(name) == gpu
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
