"""The errors that a user can act on. Each message names the rule, the value and what to do."""

from __future__ import annotations


class KVTunerError(Exception):
    """Base of every error that KVTuner raises on purpose; the command line prints it in one line and exits 2."""


class OptionError(KVTunerError, ValueError):
    """An option outside what it may be."""


class PrecisionError(KVTunerError, ValueError):
    """Bits, group size or layout outside what the packed format can hold."""


class GeometryError(KVTunerError):
    """A model whose KV cache cannot be described, or a rank layout that it does not have."""


class UnsupportedModelError(KVTunerError):
    """A model that cannot be loaded as asked, or is refused by name.

    It has no attention hook or no layer with a KV cache, a layer that is none of those known, or one that the reader
    at hand does not serve.
    """


class NonFiniteActivationError(KVTunerError):
    """NaN or infinity in the keys, values or outputs of a layer."""


class CorpusError(KVTunerError):
    """Data that cannot be read, is empty, too short, or would leak from one split into another."""


class ProfileError(KVTunerError):
    """A profile that breaks the format, its digest, or does not belong to the model at hand."""


class BudgetError(KVTunerError):
    """A budget that cannot be parsed or that no configuration can keep."""


class SearchSpaceError(KVTunerError):
    """A hand-written restriction of the search space that contradicts itself or the model."""


class RunFolderError(KVTunerError):
    """A run folder of another model or data, a corrupted file in it, or a disk that cannot hold it."""


class CacheError(KVTunerError, ValueError):
    """A cache asked for what its content or its reader cannot give: another batch, dtype or read plan."""


class EndpointError(KVTunerError):
    """A server that cannot be reached, stopped answering, or serves something else than was to be measured."""


class ServingError(KVTunerError):
    """A server that was asked to serve a profile and cannot: it must not start without it."""


class HubError(KVTunerError):
    """A hub, or a repository on it, that does not give or take what was asked for."""


class OversizedFileError(HubError):
    """A file of a hub that is larger than any of its kind, or whose size the hub does not tell."""


class SignatureError(KVTunerError):
    """A signature that is missing, cannot be checked, or is not that of who was asked for."""


class RequestError(KVTunerError, ValueError):
    """A request that an engine cannot answer as asked: too long, or parameters outside what they may be."""


class EngineBusyError(KVTunerError):
    """A request that an engine does not take now, since as many wait as may; the same one may be taken later."""
