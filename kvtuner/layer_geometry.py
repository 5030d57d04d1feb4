"""The shape of a KV cache layer by layer, where layers differ. Knows nothing of configurations or files."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from kvtuner.errors import GeometryError
from kvtuner.geometry import ModelGeometry, kv_heads_of_rank
from kvtuner.precision import NATIVE_BITS, WHOLE_HEADS, PrecisionPair, RowShape, ScaleLayout

KindName = Literal["full", "window", "latent", "none", "shared"]
KINDS: Final[dict[KindName, str]] = {"full": "", "window": ":N", "latent": "", "none": "", "shared": ":L"}
"""The names of kinds, and the suffix that each is written with."""
MAX_WINDOW: Final = 2**31 - 1
_NATIVE_PAIR: Final = PrecisionPair(NATIVE_BITS, NATIVE_BITS)
_OF_MODELS: Final = ("num_layers", "num_shared_layers")
_TUNED: Final = ("full", "latent")
"""The kinds of layers that read all tokens, whose precision is chosen."""
_SCALED_CHANNELS: Final = 128
"""The channels of fp8 that SGLang gives a scale of 4 bytes, where layers have an index."""
_KIND: Final = re.compile(r"(full|latent|none)|(window|shared):(0|[1-9][0-9]{0,9})")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer caches, written ``full``, ``window:N``, ``latent``, ``none`` or ``shared:L``.

    A full layer reads all tokens before a query, one of a window at most the last `number`, the query's own included.
    A latent one caches a row that is read as keys and as values, and rotary channels beside it. A shared one reads the
    cache of layer `number`; it and a layer without keys store nothing.
    """

    name: KindName = "full"
    number: int | None = None

    def __post_init__(self) -> None:
        if (self.number is None) == bool(KINDS[self.name]):
            raise GeometryError(f"kind {self.name} is written {self.name}{KINDS[self.name]}, not {self}")
        if self.name == "window" and self.number is not None and not 1 <= self.number <= MAX_WINDOW:
            raise GeometryError(f"a window has 1 to {MAX_WINDOW} tokens, not {self.number}")

    @classmethod
    def parse(cls, text: str) -> LayerKind:
        """Read a kind, or raise `GeometryError`."""
        match = _KIND.fullmatch(text)
        if match is None:
            forms = ", ".join(name + number for name, number in KINDS.items())
            raise GeometryError(f"kind must be one of {forms}, not {text[:60]!a}")
        name: Any = match[1] or match[2]
        return cls(name, None if match[3] is None else int(match[3]))

    def __str__(self) -> str:
        return self.name if self.number is None else f"{self.name}:{self.number}"

    @property
    def owns_cache(self) -> bool:
        """Whether such a layer stores rows."""
        return self.name not in ("none", "shared")


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """The cache of one layer: heads of the whole model, and the channels of a key head and a value head.

    A latent is one key head without values. All counts are 0 where a layer stores nothing.

    Attributes:
        rope_dim: The rotary channels beside a latent, which stay in the served dtype.
        index_dim: The channels of the keys of an index beside a latent, by which queries select the tokens that they
            read; they stay in the served dtype, and count apart from the cache.
    """

    kind: LayerKind
    num_attention_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    rope_dim: int = 0
    index_dim: int = 0

    def __post_init__(self) -> None:
        kind, counts = self.kind, self.counts()
        if not kind.owns_cache:
            if any(counts.values()):
                raise GeometryError(f"a layer of kind {kind} stores nothing, but has heads or channels")
            return
        is_latent = kind.name == "latent"
        for name, value in counts.items():
            can_be_zero = name in ("rope_dim", "index_dim") or (is_latent and name == "v_head_dim")
            if value < (0 if can_be_zero else 1):
                rule = "be at least 0" if can_be_zero else "be positive"
                raise GeometryError(f"{name} must {rule}, but is {value}")
        if is_latent and (self.num_kv_heads, self.v_head_dim) != (1, 0):
            raise GeometryError(
                "a latent is one key head without values: num_kv_heads must be 1 and v_head_dim 0, but they are"
                f" {self.num_kv_heads} and {self.v_head_dim}"
            )
        for name, what in (("rope_dim", "rotary channels"), ("index_dim", "keys of an index")):
            if not is_latent and counts[name]:
                raise GeometryError(f"only a latent has {what} beside it, but kind {kind} has {name}={counts[name]}")
        if self.num_attention_heads % self.num_kv_heads:
            raise GeometryError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )

    def counts(self) -> dict[str, int]:
        """The fields besides the kind."""
        return {name: value for name, value in asdict(self).items() if name != "kind"}

    def model_counts(self) -> dict[str, int]:
        """The fields that a `ModelGeometry` has of its layers: those of the cache alone."""
        return {name: value for name, value in self.counts().items() if name != "index_dim"}

    @property
    def num_elements(self) -> int:
        """The numbers that are cached of one token."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) + self.rope_dim

    @property
    def index_bytes(self) -> int:
        """The bytes on each rank of one token's key of the index, as SGLang keeps it: it has one head."""
        return scaled_bytes(self.index_dim)

    def native_bytes(self, tp_size: int = 1) -> int:
        """The bytes of one unquantized token on a rank; errors are those of `row_shape`."""
        return self.row_shape(WHOLE_HEADS, WHOLE_HEADS, tp_size=tp_size).pair_bytes(_NATIVE_PAIR)

    def row_shape(self, k_layout: ScaleLayout, v_layout: ScaleLayout, *, tp_size: int = 1) -> RowShape:
        """The shape of a rank's rows; `GeometryError` where heads cannot be split."""
        heads = len(kv_heads_of_rank(self.num_kv_heads, 0, tp_size))
        return RowShape(heads, self.head_dim, self.v_head_dim, k_layout, v_layout, self.rope_dim)


def scaled_bytes(channels: int) -> int:
    """The bytes of channels that SGLang keeps in fp8, with a scale for every 128, where layers have an index."""
    return channels + channels // _SCALED_CHANNELS * 4


def index_text(index_dim: int) -> str:
    """An index with keys of so many channels, or that there is none."""
    return f"an index of keys of {index_dim} channels" if index_dim else "no index"


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The cache of every layer of a model by its global id, those that store nothing included."""

    layers: tuple[LayerGeometry, ...]

    def __post_init__(self) -> None:
        earlier = set[int | None]()
        for layer_id, layer in enumerate(self.layers):
            if layer.kind.owns_cache:
                earlier.add(layer_id)
            elif layer.kind.name == "shared" and layer.kind.number not in earlier:
                raise GeometryError(
                    f"layer {layer_id} has kind {layer.kind}, but no earlier layer of that id has a cache of its own"
                )
        if not earlier:
            raise GeometryError("no layer has a cache of its own: there is nothing to store")

    @property
    def owners(self) -> tuple[int, ...]:
        """The global ids of the layers that own a cache."""
        return tuple(layer_id for layer_id, layer in enumerate(self.layers) if layer.kind.owns_cache)

    @property
    def num_shared_layers(self) -> int:
        """The layers that read another layer's cache."""
        return sum(layer.kind.name == "shared" for layer in self.layers)

    @property
    def readers(self) -> tuple[int, ...]:
        """The global ids of the layers that read a cache, their own or another layer's."""
        return tuple(layer_id for layer_id, layer in enumerate(self.layers) if layer.kind.name != "none")

    def owner_of(self, layer_id: int) -> int:
        """The layer whose cache a layer reads: another one's where it is shared, otherwise its own."""
        kind = self.layers[layer_id].kind
        return layer_id if kind.name != "shared" or kind.number is None else kind.number

    def num_readers(self) -> dict[int, int]:
        """The number of other layers that read a layer's cache, by its global id, for each layer that any reads."""
        shared = (layer_id for layer_id, layer in enumerate(self.layers) if layer.kind.name == "shared")
        return dict(Counter(self.owner_of(layer_id) for layer_id in shared))

    @property
    def first_read_by_others(self) -> int:
        """The first layer whose cache others read too; the number of layers where none is."""
        return min(self.num_readers(), default=len(self.layers))

    @classmethod
    def of(cls, geometry: ModelGeometry) -> CacheGeometry:
        """The geometry of a model whose layers with a cache all read all tokens, are alike, and are its first ones."""
        assert geometry.layer_ids is None
        counts = {name: value for name, value in geometry.counts().items() if name not in _OF_MODELS}
        last = geometry.num_layers - 1
        shared = (LayerGeometry(LayerKind("shared", last)),) * geometry.num_shared_layers
        kind = LayerKind("latent" if geometry.is_latent else "full")
        return cls((LayerGeometry(kind, **counts),) * geometry.num_layers + shared)

    def tuned(self) -> ModelGeometry:
        """The geometry of the layers that read all tokens, full ones or latents, whose precision is chosen.

        Some of them may have an index, and others none.

        `GeometryError` where there are none, or not alike.
        """
        tuned = {
            layer_id: replace(layer, index_dim=0)
            for layer_id, layer in enumerate(self.layers)
            if layer.kind.name in _TUNED
        }
        if not tuned:
            kinds = ", ".join(dict.fromkeys(str(layer.kind) for layer in self.layers))
            raise GeometryError(f"no layer reads all tokens: their kinds are {kinds}, and only full layers are tuned")
        (first_id, first), *others = tuned.items()
        for layer_id, layer in others:
            if layer != first:
                raise GeometryError(
                    f"layer {layer_id} has other heads or channels than layer {first_id}, and both read all tokens:"
                    " only models whose full layers are alike are tuned; run this one with its own cache"
                )
        ids = None if len(tuned) == len(self.layers) else tuple(tuned)
        return ModelGeometry(len(tuned), **first.model_counts(), layer_ids=ids)

    def window_bytes(self, context_length: int, tp_size: int = 1) -> int:
        """The bytes of one request's layers with windows on one rank: unquantized, of their windows' tokens alone.

        `GeometryError` where heads cannot be split among ranks.
        """
        total = 0
        for layer in self.layers:
            if layer.kind.name == "window":
                assert layer.kind.number is not None
                total += min(layer.kind.number, context_length) * layer.native_bytes(tp_size)
        return total

    def index_bytes(self) -> int:
        """The bytes on each rank of one token's keys of all indexes, as SGLang keeps them: in fp8 with scales."""
        return sum(layer.index_bytes for layer in self.layers)

    def usual(self) -> LayerGeometry:
        """The most frequent geometry of the layers that own a cache, the first among equals."""
        counts = Counter(layer for layer in self.layers if layer.kind.owns_cache)
        return max(counts, key=lambda layer: counts[layer])

    def alike(self) -> ModelGeometry:
        """The geometry that all layers have; `GeometryError` names the first one that is not full or differs."""
        first = self.layers[0]
        for layer_id, layer in enumerate(self.layers):
            if layer.kind.name != "full" or layer != first:
                what = f"kind {layer.kind}" if layer.kind != first.kind or layer_id == 0 else "other heads or channels"
                raise GeometryError(
                    f"layer {layer_id} has {what}, and only models whose layers are all full and alike are searched,"
                    " served and converted so far: show, sign and share this profile, or run the model with its own"
                    " cache"
                )
        return ModelGeometry(len(self.layers), **first.model_counts(), layer_ids=None)
