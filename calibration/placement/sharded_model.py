"""Loads a model in parts on the ranks of a group, by transformers' plan of tensor parallelism. Measures nothing.

Every rank sees all queries, keys and values: projections around attention are split like the others, but their results
are put together, so that what measures attention runs on every rank as it does on one.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from kvtuner.calibration.forward.decoder_layers import find_decoder_layers
from kvtuner.calibration.placement.sharded_weights import release_other_parts
from kvtuner.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from kvtuner.calibration.model_loading import ModelSource

_UNSPLIT: Final = "kvtuner_unsplit"
_AROUND_ATTENTION: Final = {
    "colwise": "colwise_gather_output",
    "colwise_rep": "colwise_rep",
    "colwise_gather_output": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
    "rowwise_rep": "rowwise_rep",
    "rowwise_split_input": "rowwise_split_input",
    # These mend gradients of a rank that has a part of the heads.
    "replicated_with_grad_allreduce": _UNSPLIT,
    "mla_kv_a_proj": _UNSPLIT,
}
"""The style of a module around attention that gives every rank all heads, by its style in transformers' plan."""
LEAST_SPLIT: Final = 0.5
"""The part of a model's weights that a plan must split: with less, more ranks are no way to hold it."""
_WAY_OUT: Final = (
    "leave --tp out, which spreads layers over this machine's GPUs, or give --stream, which needs memory for two layers"
)


def refuse_sharding(config: PretrainedConfig, name: str) -> None:
    """Refuse to split what cannot be.

    Raises:
        UnsupportedModelError: Quantized weights, or a transformers that is too old; the name is what the user calls the
            model.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{name} is quantized, and such weights are not split over ranks; {_WAY_OUT}")
    try:
        from transformers.distributed.configuration_utils import DistributedConfig  # noqa: F401  # asks whether it is there
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES  # noqa: F401  # likewise
    except ImportError as error:
        version = importlib.metadata.version("transformers")
        raise UnsupportedModelError(
            f"--tp needs transformers 5.19 or newer, but this is {version}; pip install -U transformers"
        ) from error


def load_sharded(
    auto_class: Any, source: ModelSource, config: PretrainedConfig, num_layers: int, **arguments: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """This rank's part of a model, and what transformers says of the loading; all ranks of the process group call it.

    Raises:
        UnsupportedModelError: The model has no plan, or one that cannot be used or does not fit so many ranks.
    """
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    with torch.device("meta"):
        skeleton = auto_class.from_config(config, trust_remote_code=source.trust_remote_code)
    plan = ShardingPlan.of(skeleton, num_layers, source.model)
    plan.refuse_ranks(skeleton, source.ranks, source.model)
    del skeleton
    ALL_PARALLEL_STYLES[_UNSPLIT] = TensorParallelLayer()
    model, info = auto_class.from_pretrained(
        source.path,
        distributed_config=DistributedConfig(tp_size=source.ranks, tp_plan=plan.changes),
        output_loading_info=True,
        **arguments,
    )
    release_other_parts(model)
    return model, info


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The style by which each module or weight is split, by its name with a star for a layer's number.

    Attributes:
        given: The plan of transformers.
        changes: What is otherwise here.
    """

    given: dict[str, str]
    changes: dict[str, str]

    @classmethod
    def of(cls, skeleton: PreTrainedModel, num_layers: int, name: str) -> ShardingPlan:
        """The plan of a model that may be on the meta device.

        Raises:
            UnsupportedModelError: There is none, or attention has a style that is not known here.
        """
        given = dict(skeleton.tp_plan)
        found = find_decoder_layers(skeleton, num_layers)
        if not given or found is None:
            raise UnsupportedModelError(f"{name} has no plan of tensor parallelism in transformers; {_WAY_OUT}")
        layers = list(found[1])
        attention = {
            module
            for layer in layers
            for module in layer.modules()
            if module is not layer and hasattr(module, "layer_idx")
        }
        around = tuple(f"{_starred(path)}." for path, module in skeleton.named_modules() if module in attention)
        modules = {_starred(path): module for path, module in skeleton.named_modules()}
        changes = {}
        for key, style in given.items():
            if not key.startswith(around):
                continue
            # A weight of attention itself, such as one for each head, has no results to put together.
            changed = _AROUND_ATTENTION.get(style) if key in modules else _UNSPLIT
            if changed is None:
                raise UnsupportedModelError(f"{name} splits {key} as {style!r}, which is not supported; {_WAY_OUT}")
            changes[key] = changed
        embeddings = skeleton.get_input_embeddings()
        key = next(path for path, module in modules.items() if module is embeddings)
        if type(embeddings) is nn.Embedding and key not in given:
            changes[key] = "embedding_rowwise"
        return cls(given, {key: style for key, style in changes.items() if style != given.get(key)})

    def refuse_ranks(self, skeleton: PreTrainedModel, ranks: int, name: str) -> None:
        """Refuse a number of ranks that does not divide what they split, and a plan that leaves most of a model whole.

        Raises:
            UnsupportedModelError: One that does not, which names the first weight; or such a plan.
        """
        styles = self.given | self.changes
        split = total = 0
        for path, parameter in skeleton.named_parameters():
            key = _starred(path)
            style = styles.get(key) or styles.get(key.rpartition(".")[0]) or _UNSPLIT
            module = skeleton.get_submodule(path.rpartition(".")[0])
            dimension = _split_dimension(style, module, parameter)
            parts = ranks * (2 if style.startswith("packed_") else 1)
            total += parameter.numel()
            split += 0 if dimension is None else parameter.numel()
            if dimension is not None and parameter.shape[dimension] % parts:
                raise UnsupportedModelError(
                    f"--tp {ranks} must divide what it splits, but {name} has {list(parameter.shape)} in {path}, of"
                    f" which it splits the {parameter.shape[dimension]}; give a divisor, or {_WAY_OUT}"
                )
        if split < total * LEAST_SPLIT:
            raise UnsupportedModelError(
                f"transformers' plan of tensor parallelism splits {split / total:.0%} of the weights of {name}, and"
                f" each rank would hold all others; {_WAY_OUT}"
            )


def _starred(path: str) -> str:
    """The name of a module or weight in a plan."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _split_dimension(style: str, module: nn.Module, parameter: nn.Parameter) -> int | None:
    """The dimension of a weight that a style splits; None where it leaves it whole."""
    is_embedding = isinstance(module, nn.Embedding)
    if "colwise" in style:
        return 1 if is_embedding else max(0, parameter.ndim - 2)
    if "rowwise" in style:
        return 0 if is_embedding else None if parameter.ndim == 1 else parameter.ndim - 1
    return None
