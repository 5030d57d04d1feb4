"""A rank of torchrun that compares models in parts with the same models whole, and prints what it found as JSON.

Its arguments are folders of models. The oracle of each is the model that transformers loads in one piece.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.model_loading import LoadedModel, ModelSource, load_model
from kvtuner.calibration.placement.sharded_weights import bytes_here
from kvtuner.errors import KVTunerError

RANKS = 2


def measured(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """What the measurement of a model is made of: final states, logits of all and of some tokens, keys, a gradient."""
    chain = DecoderChain(loaded.model, loaded.shape.cache)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 300, (2, 19), generator=generator)
    positions = torch.arange(19).expand(2, 19)
    keys: list[torch.Tensor] = []

    def note(layer_id: int, call: Any) -> torch.Tensor:
        from kvtuner.calibration.forward.read_plan import attend

        keys.append(call.k)
        return attend(call)

    trace = chain.trace(ids, positions, note)
    some = torch.tensor([3, 299, 0, 160, 161, 7])
    found = {
        "final": trace.final,
        "logits": chain.logits(trace.final),
        "keys": torch.cat([key.flatten() for key in keys]),
    }
    if chain.has_rows_of_tokens:
        found["some logits"] = chain.logits(trace.final[0], some) - chain.logits(trace.final[0])[:, some]
    hidden = trace.residual[0].clone().requires_grad_()
    before = hidden
    for layer_id, call in enumerate(trace.calls):
        hidden = chain.run_layer_exactly(layer_id, hidden, call)
    chain.logits(chain.finish(hidden)).logsumexp(dim=-1).sum().backward()
    assert before.grad is not None
    return {**found, "gradient": before.grad}


def compare(folder: str) -> dict[str, Any]:
    """The largest difference of each of these from that of the whole model, over its largest value; bytes and hash."""
    try:
        sharded = load_model(ModelSource(folder, device="cpu", ranks=RANKS))
    except KVTunerError as error:
        return {"refused": str(error)}
    plain = load_model(ModelSource(folder, device="cpu"))
    ours, theirs = measured(sharded), measured(plain)
    differences = {}
    for name, expected in theirs.items():
        scale = theirs["logits"] if name == "some logits" else expected
        differences[name] = float((ours[name] - expected).abs().max() / scale.abs().max())
    return {
        "differences": differences,
        "share": bytes_here(sharded.model.parameters()) / bytes_here(plain.model.parameters()),
        "is_same_hash": sharded.weights_sha256 == plain.weights_sha256,
    }


def main() -> None:
    """Compare the models; the first rank prints what both found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=RANKS)
    found = {folder: compare(folder) for folder in sys.argv[1:]}
    both: list[Any] = [None] * RANKS
    dist.all_gather_object(both, found)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(both))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
