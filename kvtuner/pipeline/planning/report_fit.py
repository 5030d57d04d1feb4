"""The requests of a search's report that fit some GPUs, by the functions of a plan. Loads no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.calibration.model_loading import read_shape
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.errors import RunFolderError
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.pipeline.options import ModelOptions
from kvtuner.pipeline.planning.capacity_plan import planned_sizes
from kvtuner.pipeline.planning.plan_options import PlanOptions
from kvtuner.pipeline.planning.served_weights import served_weights
from kvtuner.pipeline.planning.server_memory import size_text
from kvtuner.pipeline.sources import model_source, searched_model
from kvtuner.precision import MIB
from kvtuner.report.formatting import count
from kvtuner.report.plots.tokens_that_fit import FittedMemory, SchemeFit, requested_context
from kvtuner.runtime_loader.model_check import check_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.pipeline.planning.fit_options import FitOptions
    from kvtuner.pipeline.planning.scheme_capacity import SchemeCapacity, SchemeSizes
    from kvtuner.pipeline.planning.served_weights import ServedWeights
    from kvtuner.report.search_data import ReportData


def gpu_fit(options: FitOptions, data: ReportData, file: Path) -> FittedMemory:
    """What fits the GPUs of the options by the schemes of a report; the profile lies in the file.

    Raises:
        RunFolderError: The file is not the report's profile.
        ProfileError: The profile does not fit the model, or no name finds its model.
        ServingError: The weights do not fit.
    """
    profile = load_profile(file)
    if dict(data.provenance).get("digest") != profile.digest:
        raise RunFolderError(f"{file} is not the profile of this report; run its search again, which reuses all of it")
    named = ModelOptions(model=options.model, trust_remote_code=options.trust_remote_code)
    context_length = options.context_length or requested_context(data)
    model = searched_model(named, profile)
    plan_options = PlanOptions(
        model=model.model,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        weights=options.weights,
        gpu=options.gpu,
        memory=options.memory,
        tp_size=options.tp_size or data.budget.tp_size,
        pp_size=options.pp_size or data.budget.pp_size,
        context_length=context_length,
        concurrency=options.concurrency,
        residual_length=profile.window.residual_length,
        sinks=profile.window.sinks,
    )
    source = model_source(plan_options.search_options().model)
    shape = read_shape(source)
    check_model(profile, shape.config, context_length=shape.context_length)
    rows = profile.row_shape()
    quant = QuantizationOptions(k_layout=rows.k_layout, v_layout=rows.v_layout, window=profile.window)
    weights = served_weights(source, shape, plan_options.weights)
    sizes = planned_sizes(plan_options, shape, quant, weights)
    schemes = (*sizes.sglang_rows(), sizes.pairs_row(PROFILE_SCHEME, profile.tuned_pairs))
    return FittedMemory(
        heading="tokens",
        contexts=(shape.context_length,),
        schemes=tuple(SchemeFit(row.name, row.bytes_per_token, row.tokens, (row.requests,)) for row in schemes),
        caption=_caption(plan_options, profile, sizes, weights) + _limit_text(plan_options, sizes, schemes),
    )


def _limit_text(options: PlanOptions, sizes: SchemeSizes, schemes: Sequence[SchemeCapacity]) -> str:
    """What says that a server runs fewer requests than fit; empty where it runs all, or was told how many."""
    context_length = sizes.server.context_length
    if options.concurrency is not None or all(row.tokens // context_length <= row.requests for row in schemes):
        return ""
    return (
        ". Where tokens would hold more requests, a server by default runs no more at once; --concurrency counts more"
    )


def _caption(options: PlanOptions, profile: Profile, sizes: SchemeSizes, weights: ServedWeights) -> str:
    """The GPUs, and where their memory goes, as `kvtuner plan` counts it."""
    server = sizes.server
    gpu = options.gpu if options.gpu and options.memory is None else "GPU"
    ranks = options.tp_size * options.pp_size
    split = f" (TP {options.tp_size} x PP {options.pp_size})" if ranks > 1 else ""
    each = " on each" if ranks > 1 else ""
    running = "" if options.concurrency is None else f"; at most {count(options.concurrency)} run at once"
    copies = ", with the profile's exact copies" if profile.window.num_tokens else ""
    return (
        f": tokens, and requests of {count(server.context_length)} tokens{copies}, on {ranks} x {gpu} of"
        f" {size_text(server.memory_mib * MIB)}{split}, as kvtuner plan counts them:{each} the weights take"
        f" {size_text(server.rank_weights_bytes)} ({weights.origin}), SGLang keeps"
        f" {size_text(server.kept_bytes)} for activations and graphs, and {size_text(server.pool_bytes)} are for the"
        f" cache{running}. What a driver takes is not counted"
    )
