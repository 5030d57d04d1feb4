"""The geometry of a profile's model in the file: one for all layers, and exceptions by layer. Knows nothing of bits."""

from itertools import pairwise
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, Field, model_validator

from kvtuner.errors import GeometryError
from kvtuner.exported_configs.profile.field_types import MAX_COUNT, Count, LayerId, StrictModel
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, LayerKind

_BESIDE: Final = ("rope_dim", "index_dim")
"""The channels beside a latent, which are 0 where a file has none."""
_COUNTS: Final = ("num_attention_heads", "num_kv_heads", "head_dim", "v_head_dim", *_BESIDE)


def _check_kind(text: str) -> str:
    try:
        LayerKind.parse(text)
    except GeometryError as error:
        raise ValueError(str(error)) from error
    return text


KindText = Annotated[str, Field(max_length=32), AfterValidator(_check_kind)]
CountOrZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class GeometryException(StrictModel):
    """The layers whose geometry is another than that of all, by ascending global id, and the fields that differ."""

    layers: Annotated[tuple[LayerId, ...], Field(strict=False, min_length=1, max_length=MAX_COUNT)]
    kind: KindText | None = None
    num_attention_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    v_head_dim: CountOrZero | None = None
    rope_dim: CountOrZero | None = None
    index_dim: CountOrZero | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(first >= second for first, second in pairwise(self.layers)):
            raise ValueError(f"layers must ascend, but are {list(self.layers)}")
        return self

    def of(self, usual: dict[str, Any]) -> LayerGeometry:
        """The geometry of these layers, where the others have `usual`; `GeometryError` for an idle field."""
        changes = {name: value for name, value in self if name != "layers" and value is not None}
        if not changes:
            raise GeometryError("names no field that differs; leave the layers out")
        for name, value in changes.items():
            if value == usual[name]:
                raise GeometryError(f"{name} is {value!r}, as of the other layers; leave it out")
        kind = LayerKind.parse(changes.get("kind", usual["kind"]))
        if kind.owns_cache:
            return LayerGeometry(**{**usual, **changes, "kind": kind})
        return LayerGeometry(**{**changes, "kind": kind})


Exceptions = Annotated[tuple[GeometryException, ...], Field(strict=False, min_length=1, max_length=MAX_COUNT)]


class GeometryRecord(StrictModel):
    """The fields of `ModelGeometry` in the file, which all layers have but for exceptions.

    Attributes:
        num_layers: The layers that own a cache.
        num_shared_layers: The layers that read another layer's cache: the last ones, or those that exceptions name.
        kind: What layers cache; None is ``full``.
        rope_dim: The rotary channels beside a latent; None is 0.
        index_dim: The channels of the keys of an index beside a latent; None is 0.
        exceptions: Other geometries by layer, each layer at most once.
    """

    num_layers: Count
    num_attention_heads: Count
    num_kv_heads: Count
    head_dim: Count
    v_head_dim: CountOrZero
    num_shared_layers: CountOrZero
    kind: KindText | None = None
    rope_dim: CountOrZero | None = None
    index_dim: CountOrZero | None = None
    exceptions: Exceptions | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            if self.is_by_layer:
                self.by_layer()
            else:
                self.owners()
        except GeometryError as error:
            raise ValueError(str(error)) from error
        return self

    @classmethod
    def fields_of(cls, geometry: ModelGeometry | CacheGeometry) -> dict[str, Any]:
        """The fields of a geometry in the file: the most frequent one, and what differs from it by layer."""
        if isinstance(geometry, ModelGeometry):
            assert geometry.layer_ids is None, "a profile needs the geometry of all layers"
            if not geometry.is_latent:
                return geometry.counts()
            geometry = CacheGeometry.of(geometry)
        usual = geometry.usual()
        counts = {name: value for name, value in usual.counts().items() if name not in _BESIDE or value}
        size = {"num_layers": len(geometry.owners), "num_shared_layers": geometry.num_shared_layers}
        kind = {} if usual.kind == LayerKind() else {"kind": str(usual.kind)}
        others = dict.fromkeys(layer for layer in geometry.layers if layer != usual)
        exceptions = [
            {
                "layers": [layer_id for layer_id, layer in enumerate(geometry.layers) if layer == other],
                **_difference(other, usual),
            }
            for other in others
        ]
        return {**size, **counts, **kind, **({"exceptions": exceptions} if exceptions else {})}

    @property
    def is_by_layer(self) -> bool:
        """Whether the file says more than version 1 can: another kind than full, or exceptions."""
        has_beside = any(getattr(self, name) for name in _BESIDE)
        return self.kind not in (None, "full") or has_beside or self.exceptions is not None

    def to_geometry(self) -> ModelGeometry:
        """The `ModelGeometry` of these fields; `GeometryError` where layers are not all full and alike."""
        if self.is_by_layer:
            return self.by_layer().alike()
        return ModelGeometry(**self.model_dump(exclude={"kind", "exceptions", *_BESIDE}))

    def tuned(self) -> ModelGeometry:
        """The geometry of the layers that read all tokens; `GeometryError` where there are none, or not alike."""
        return self.by_layer().tuned() if self.is_by_layer else self.to_geometry()

    def owners(self) -> dict[int, LayerGeometry]:
        """The geometry of every layer that owns a cache, by ascending global id."""
        if self.is_by_layer:
            geometry = self.by_layer()
            return {layer_id: geometry.layers[layer_id] for layer_id in geometry.owners}
        counts = self.model_dump(include={*_COUNTS})
        return dict.fromkeys(range(self.num_layers), LayerGeometry(LayerKind(), **counts))

    def growing(self) -> dict[int, LayerGeometry]:
        """The owners that take more bytes for every token: those without a window, or all where each has one."""
        owners = self.owners()
        return {layer_id: layer for layer_id, layer in owners.items() if layer.kind.name != "window"} or owners

    def whole(self) -> CacheGeometry:
        """The geometry of every layer of the model by its global id."""
        return self.by_layer() if self.is_by_layer else CacheGeometry.of(self.to_geometry())

    def by_layer(self) -> CacheGeometry:
        """The geometry of every layer of the model by its global id, from a record that `is_by_layer`.

        `GeometryError` where exceptions contradict themselves or the counts.
        """
        kind = LayerKind.parse(self.kind or "full")
        if not kind.owns_cache:
            raise GeometryError(f"kind of all layers must own a cache, not {kind}; name such layers in exceptions")
        counts = {name: getattr(self, name) or 0 for name in _COUNTS}
        changed: dict[int, LayerGeometry] = {}
        for place, exception in enumerate(self.exceptions or ()):
            try:
                changed |= dict.fromkeys(exception.layers, exception.of({"kind": str(kind), **counts}))
            except GeometryError as error:
                raise GeometryError(f"exceptions[{place}]: {error}") from error
        return self._assembled(changed, LayerGeometry(kind, **counts))

    def _assembled(self, changed: dict[int, LayerGeometry], usual: LayerGeometry) -> CacheGeometry:
        num_named = sum(len(exception.layers) for exception in self.exceptions or ())
        if len(changed) != num_named:
            raise GeometryError("exceptions must name a layer once, but some layer stands in two; leave it out of one")
        num_without = sum(not layer.kind.owns_cache for layer in changed.values())
        num_shared = sum(layer.kind.name == "shared" for layer in changed.values())
        if num_shared != self.num_shared_layers:
            raise GeometryError(
                f"num_shared_layers is {self.num_shared_layers}, but exceptions name {num_shared} layers of kind shared"
            )
        total = self.num_layers + num_without
        if any(layer_id >= total for layer_id in changed):
            raise GeometryError(f"exceptions name layer {max(changed)}, but the last of {total} layers is {total - 1}")
        return CacheGeometry(tuple(changed.get(layer_id, usual) for layer_id in range(total)))

    def hashed(self) -> dict[str, Any]:
        """What the digest covers: the six counts where they are all, else the geometry of every layer, written out.

        Keys of an index stand there only where a layer has some.
        """
        if not self.is_by_layer:
            return self.to_geometry().counts()
        layers = []
        for layer in self.by_layer().layers:
            counts = layer.counts() if layer.index_dim else layer.model_counts()
            layers.append({"kind": str(layer.kind), **(counts if layer.kind.owns_cache else {})})
        return {"layers": layers}


def _difference(layer: LayerGeometry, usual: LayerGeometry) -> dict[str, Any]:
    """The fields of an exception; a layer that stores nothing has its kind alone."""
    kind = {} if layer.kind == usual.kind else {"kind": str(layer.kind)}
    if not layer.kind.owns_cache:
        return kind
    others = usual.counts()
    return {**kind, **{name: value for name, value in layer.counts().items() if value != others[name]}}
