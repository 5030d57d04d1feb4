"""An estimate of what a search takes: tokens, time and memory. Nothing here was ever measured on a GPU."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.bench.expert_share import reached_elements
from kvtuner.calibration.forward.continuation import PROMPT_BYTES
from kvtuner.calibration.forward.simulator import REUSE_BYTES
from kvtuner.calibration.model_loading import auto_class_of
from kvtuner.errors import UnsupportedModelError
from kvtuner.pipeline.dry_run import dry_run_facts
from kvtuner.pipeline.sources import corpus_source
from kvtuner.supported_models import has_indexes

if TYPE_CHECKING:
    from kvtuner.calibration.model_loading import ModelShape, ModelSource
    from kvtuner.geometry import ConfigLike
    from kvtuner.pipeline.options import SearchOptions
    from kvtuner.pipeline.planning.gpus import Gpu

USED_SHARE: Final = 0.3
"""The share of a GPU's rate for dense matrices that a search is taken to use."""
OPERATIONS_PER_PARAMETER: Final = 2
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class SearchCost:
    """The estimated cost of a search.

    Attributes:
        forward_tokens: The tokens that run through the whole model, at most; a backward counts as two forwards.
        parameters: The parameters that a token meets: of experts, those of the ones that it goes to.
        hours: The hours on one GPU of the name asked for; None where no name tells its rate.
        weights_bytes: The bytes of the weights as they are loaded.
        working_bytes: The bytes of what a search keeps beside them, at most: prompts' keys and values, the results of
            first layers that configurations share, and of the sequences in flight the float32 logits and what an index
            selects by.
    """

    forward_tokens: int
    parameters: int
    hours: float | None
    weights_bytes: int
    working_bytes: int

    @property
    def memory_bytes(self) -> int:
        """The bytes of weights and what is beside them."""
        return self.weights_bytes + self.working_bytes

    def to_json(self) -> dict[str, Any]:
        """The facts for a program."""
        estimate = {"used_share": USED_SHARE, "operations_per_parameter": OPERATIONS_PER_PARAMETER}
        return {**asdict(self), "memory_bytes": self.memory_bytes, "measured": False, **estimate}


def search_cost(
    options: SearchOptions, source: ModelSource, shape: ModelShape, *, weights_bytes: int, gpu: Gpu | None
) -> SearchCost:
    """Estimate what a search with these options takes."""
    tokens = dry_run_facts(options)["forward_tokens"]["total"]
    parameters = parameters_per_token(source, shape)
    seed = options.measurement.seed
    length = corpus_source(options.data, options.model, shape, seed=seed).sequence_length
    vocabulary = shape.config.get_text_config(decoder=True).vocab_size
    batch_size = options.measurement.batch_size
    logits = batch_size * length * vocabulary * _FLOAT_BYTES
    scores = index_score_bytes(shape.config, batch_size, length)
    hours = None
    if gpu is not None:
        hours = OPERATIONS_PER_PARAMETER * parameters * tokens / (USED_SHARE * gpu.tflops * 1e12) / 3600
    return SearchCost(tokens, parameters, hours, weights_bytes, PROMPT_BYTES + REUSE_BYTES + logits + scores)


def index_score_bytes(config: ConfigLike, batch_size: int, length: int) -> int:
    """The bytes in which an index of one layer selects for all queries of sequences that run together; 0 without one.

    Transformers' code has float32 scores of each head for each query and token, twice while it scales and cuts them,
    and beside the first of both a key of its own for each query, where several sequences run together.
    """
    if not has_indexes(config):
        return 0
    text = config.get_text_config(decoder=True)
    heads, channels = int(text.index_n_heads), int(text.index_head_dim)
    return batch_size * length**2 * max(2 * heads, heads + channels if batch_size > 1 else 0) * _FLOAT_BYTES


def parameters_per_token(source: ModelSource, shape: ModelShape) -> int:
    """The parameters that a token meets, by the configuration alone; all where that names no number of experts.

    Raises:
        UnsupportedModelError: Transformers cannot make the model.
    """
    import torch

    text = shape.config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            auto_class = auto_class_of(shape.config, source.model)
            model = auto_class.from_config(shape.config, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # remote code raises anything
        raise UnsupportedModelError(
            f"the parameters of {source.model} cannot be counted from its configuration"
            f" ({' '.join(str(error).split())}); see its size with kvtuner search --dry-run"
        ) from error
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    reached = reached_elements(text, shapes)
    return sum(map(math.prod, shapes.values())) if reached is None else math.ceil(reached)
