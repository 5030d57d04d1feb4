"""Flags of evaluations and benchmarks to sources, until they have options of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.pipeline import sources
from kvtuner.pipeline.options import DataOptions, ModelOptions, options_from

if TYPE_CHECKING:
    from argparse import Namespace

    from kvtuner.calibration.corpus import CorpusSource
    from kvtuner.calibration.model_loading import ModelShape, ModelSource
    from kvtuner.run_folder import RunFolder


def model_source(args: Namespace) -> ModelSource:
    """The model that the flags name."""
    return sources.model_source(options_from(ModelOptions, vars(args)))


def corpus_source(args: Namespace, shape: ModelShape) -> CorpusSource:
    """The data that the flags name."""
    model, data = options_from(ModelOptions, vars(args)), options_from(DataOptions, vars(args))
    return sources.corpus_source(data, model, shape, seed=args.seed)


def run_folder(args: Namespace, name: str) -> RunFolder:
    """The folder that ``--out`` names, or ``runs/<model>-<name>``."""
    return sources.run_folder(options_from(ModelOptions, vars(args)), args.out, name)
