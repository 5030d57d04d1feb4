"""The profile: the storage of every layer of one model, valid by construction. Knows nothing of files or serving."""

from bisect import bisect_left
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from kvtuner.errors import GeometryError, PrecisionError, ProfileError
from kvtuner.exported_configs.profile.constants_file import constants_hash
from kvtuner.exported_configs.profile.digest import hashed_content
from kvtuner.exported_configs.profile.field_types import MAX_COUNT, Sha256, StrictModel
from kvtuner.exported_configs.profile.geometry_record import GeometryRecord
from kvtuner.exported_configs.profile.layer_sizes import LayerSizes
from kvtuner.exported_configs.profile.layer_storage import (
    Defaults,
    KeyRecord,
    KeyTransform,
    LayerRecord,
    SideDefaults,
    SideRecord,
    group_size_of,
    resolve_transform,
)
from kvtuner.exported_configs.profile.records import BudgetRecord, ModelIdentity, Provenance, QualityRecord
from kvtuner.exported_configs.profile.versions import (
    SCHEMA_VERSIONS,
    SECOND_VERSION,
    SECOND_VERSION_QUALITY,
    why_second_version,
)
from kvtuner.geometry import ConfigLike, ModelGeometry
from kvtuner.layer_geometry import LayerGeometry
from kvtuner.precision import (
    FITTED_BITS,
    MAX_RESIDUAL_LENGTH,
    MAX_SINKS,
    NATIVE_BITS,
    ExactWindow,
    PrecisionPair,
    RowShape,
    Side,
    check_fitted_group,
)
from kvtuner.run_folder import sha256_of
from kvtuner.transforms import MAX_LAMBDA, MIN_LAMBDA, TransformKind

if TYPE_CHECKING:
    from kvtuner.quant import QuantSpec


class Profile(StrictModel):
    """The storage of every layer of one model, its cost, and its measured quality.

    Construction checks all that can be checked without the model, the digest included. It raises
    `ProfileError`, or `pydantic.ValidationError` for a field that is wrong on its own; `explain` puts that in one line.

    Attributes:
        digest: The digest of layout, geometry, expanded layers and window; new evaluations never change it.
        residual_length: The last tokens of a request that are also kept exactly; None is 0.
        sinks: The first tokens of a request that are also kept exactly; None is 0.
        constants_sha256: The hash of the side file that holds all mu and lambda, which the layers have here; None where
            the profile's own file holds them.
        layers: The storage of every layer that owns a cache, by ascending global id, which may have gaps; independent
            of tensor and pipeline parallelism.
    """

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSIONS[-1]), WithJsonSchema({"enum": list(SCHEMA_VERSIONS)})]
    digest: Sha256
    layout: Literal["halfword-sliced-v1"]
    model: ModelIdentity
    geometry: GeometryRecord
    defaults: Defaults
    residual_length: Annotated[int, Field(ge=0, le=MAX_RESIDUAL_LENGTH)] | None = None
    sinks: Annotated[int, Field(ge=0, le=MAX_SINKS)] | None = None
    constants_sha256: Sha256 | None = None
    layers: Annotated[tuple[LayerRecord, ...], Field(strict=False, min_length=1, max_length=MAX_COUNT)]
    budget: BudgetRecord
    quality: QualityRecord | None
    provenance: Provenance

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_version(self)
        owners = self.geometry.owners()
        _check_layer_ids(self, tuple(owners))
        for entry in self.layers:
            _check_layer(self, entry, owners[entry.layer])
        if self.constants_sha256 not in (None, constants_hash(self.layers)):
            raise ProfileError("constants_sha256: is not of the layers' mu and lambda; export the profile again")
        _check_digest(self)
        _check_budget(self)
        return self

    def __repr__(self) -> str:
        size = f"{float(self.mean_bits):.3g} bits, {self.bytes_per_token():,} bytes per token"
        exact = f", {self.window}" if self.window.num_tokens else ""
        return f"Profile({self.model.id!r}, {size}{exact}, {self.digest[:19]})"

    __str__ = __repr__  # pydantic's would print every constant

    def _repr_html_(self) -> str:
        """The strip of layers, which a notebook shows in place of the text."""
        from kvtuner.report.profile_report import strip_html  # the one import that points up; see pyproject.toml

        return strip_html(self)

    @property
    def pairs(self) -> tuple[PrecisionPair, ...]:
        """The widths of the layers that own a cache, in their order; a latent's is that of keys and of values."""
        return tuple(entry.pair for entry in self.layers)

    @property
    def tuned_pairs(self) -> tuple[PrecisionPair, ...]:
        """The widths of the full layers, in their order; `ProfileError` where these are not alike."""
        tuned = self.tuned_geometry().ids
        return tuple(entry.pair for entry in self.layers if entry.layer in tuned)

    @property
    def mean_bits(self) -> Fraction:
        """The payload bits per element, exact."""
        return self.sizes().mean_bits

    @property
    def effective_bits(self) -> Fraction:
        """The stored bits per element where one rank holds all heads, exact."""
        return self.sizes().effective_bits

    @property
    def window(self) -> ExactWindow:
        """The tokens that are also kept exactly."""
        return ExactWindow(self.residual_length or 0, self.sinks or 0)

    def window_bytes(self) -> int:
        """The bytes that a server keeps of one request's exact copies, all layers, on one rank with all heads."""
        return self.window.num_tokens * self.sizes().num_copied_bytes

    def row_shape(self, tp_size: int = 1) -> RowShape:
        """The shape of the rows of one of `tp_size` ranks; `GeometryError` where heads cannot be split among them.

        Errors for layers of several shapes are those of `check_one_shape`.
        """
        self.check_one_shape()
        return self.defaults.row_shape(self.tuned_geometry(), tp_size)

    def check_one_shape(self) -> None:
        """Check that rows of all full layers have one shape; a `ProfileError` names the first layer that differs."""
        tuned = self.tuned_geometry().ids
        for entry in self.layers:
            if entry.layer not in tuned:
                _check_native(entry)
                continue
            for side, record, defaults in entry.sides(self.defaults):
                if group_size_of(record, defaults) != defaults.group_size:
                    raise ProfileError(
                        f"layers[{entry.layer}].{side} has groups of {record.group_size}, and other layers of"
                        f" {defaults.group_size}: such a profile is shown, signed and shared, but not yet measured or"
                        " converted; use one group_size"
                    )

    @property
    def has_per_channel_keys(self) -> bool:
        """Whether some layer's keys are quantized per channel."""
        return self.defaults.k.granularity == "per_channel" and any(p.k_bits != NATIVE_BITS for p in self.pairs)

    def sizes(self, tp_size: int = 1) -> LayerSizes:
        """What one token takes on one of `tp_size` ranks; `GeometryError` where heads cannot be split among them."""
        return LayerSizes.of(self.geometry, self.defaults, self.layers, tp_size)

    def bytes_per_token(self, tp_size: int = 1) -> int:
        """The stored bytes of one token, all layers, on one of `tp_size` tensor-parallel ranks."""
        return self.sizes(tp_size).num_bytes

    def bf16_bytes_per_token(self, tp_size: int = 1) -> int:
        """The bytes of one token in an unquantized 16-bit cache, all layers, on one of `tp_size` ranks."""
        return self.sizes(tp_size).num_native_bytes

    @property
    def index_bytes(self) -> int:
        """The bytes of one token's keys of indexes, as SGLang keeps them, which `bytes_per_token` leaves out."""
        return self.geometry.whole().index_bytes()

    def transform_name(self, layer_id: int, side: Side) -> KeyTransform:
        """The transform of one side of one layer, ``none`` at 16 bits and where a latent has no values."""
        record, defaults = self._side(layer_id, side)
        return "none" if record is None else resolve_transform(record, defaults)

    def quant_spec(self, layer_id: int, side: Side) -> "QuantSpec | None":
        """The storage of one side of one layer; None at 16 bits and for no values."""
        from kvtuner.quant import QuantSpec, Transform  # brings torch, which only those who read or write rows need

        record, defaults = self._side(layer_id, side)
        if record is None or record.bits == NATIVE_BITS:
            return None
        kind = TransformKind.parse(self.transform_name(layer_id, side))
        arrays = (record.mu, record.lam) if isinstance(record, KeyRecord) else (None, None)
        mu, lam = (None if array is None else array.decode() for array in arrays)
        transform = Transform(kind, mu, lam)
        group, fit, word_bits = group_size_of(record, defaults), defaults.grid_fit, defaults.grid_word_bits
        if defaults.granularity == "per_channel":
            return QuantSpec(record.bits, symmetric=defaults.symmetric, token_group=group)
        return QuantSpec(record.bits, transform, group, defaults.symmetric, fit, word_bits=word_bits)

    def to_geometry(self) -> ModelGeometry:
        """The geometry of all layers; where not all are full and alike, a `ProfileError` names the first other one."""
        try:
            return self.geometry.to_geometry()
        except GeometryError as error:
            raise ProfileError(str(error)) from error

    def tuned_geometry(self) -> ModelGeometry:
        """The geometry of the full layers; where these are not alike, a `ProfileError` names the first other one."""
        try:
            return self.geometry.tuned()
        except GeometryError as error:
            raise ProfileError(str(error)) from error

    def check_model(self, config: ConfigLike) -> None:
        """Check that the profile fits the model of a transformers configuration, whose layers are all alike.

        A `ProfileError` names the first count that differs; a configuration without a cache is a `GeometryError`.
        """
        self.check_geometry(self.to_geometry(), ModelGeometry.from_config(config))

    def check_geometry(self, own: ModelGeometry, other: ModelGeometry) -> None:
        """Check that a geometry of the profile is that of a model; a `ProfileError` names the first difference."""
        if difference := own.difference(other):
            raise ProfileError(f"the profile of {self.model.id} has {difference}; use one that was searched for it")

    def _side(self, layer_id: int, side: Side) -> tuple[SideRecord | None, SideDefaults]:
        place = bisect_left(self.layers, layer_id, key=lambda entry: entry.layer)
        assert self.layers[place : place + 1] and self.layers[place].layer == layer_id, f"no layer {layer_id}"
        entry = self.layers[place]
        return (entry.k, self.defaults.k) if side == "k" else (entry.v, self.defaults.v)


def _check_native(entry: LayerRecord) -> None:
    if entry.pair != PrecisionPair(NATIVE_BITS, NATIVE_BITS):
        raise ProfileError(
            f"layers[{entry.layer}] stores {entry.pair} and does not read all tokens: such a profile is shown, signed"
            " and shared, but only full layers are measured and stored packed; give it 16 bits"
        )


def _check_version(profile: Profile) -> None:
    """Refuse what only the second version has in the first, and the second without fits."""
    if profile.schema_version < SECOND_VERSION:
        own = {name: getattr(profile, name) for name in ("residual_length", "sinks", "constants_sha256")}
        own |= {f"quality.{name}": getattr(profile.quality, name, None) for name in SECOND_VERSION_QUALITY}
        wrong = why_second_version(profile.geometry, profile.defaults, profile.layers, **own)
    else:
        shared = {"k": profile.defaults.k, "v": profile.defaults.v}
        missing = [side for side, defaults in shared.items() if defaults.fit is None]
        wrong = [f"defaults.{side}.fit: schema_version {profile.schema_version} needs it" for side in missing]
    if wrong:
        raise ProfileError(f"{wrong[0]}; export the profile again")


def _check_layer_ids(profile: Profile, owners: tuple[int, ...]) -> None:
    for expected, entry in zip(owners, profile.layers, strict=False):
        if entry.layer != expected:
            raise ProfileError(
                f"layers must hold every layer that owns a cache once, in order, but layer {entry.layer} stands where"
                f" layer {expected} belongs; export the profile again"
            )
    if len(profile.layers) != len(owners):
        raise ProfileError(
            f"geometry has num_layers {len(owners)}, but layers holds {len(profile.layers)}; export the profile again"
        )


def _check_layer(profile: Profile, entry: LayerRecord, geometry: LayerGeometry) -> None:
    if (entry.v is None) != (geometry.v_head_dim == 0):
        rule = "a latent has none beside it" if entry.v else f"a layer of kind {geometry.kind} needs them"
        raise ProfileError(f"layers[{entry.layer}].v: {rule}; export the profile again")
    shape = profile.defaults.layer_shape(geometry, entry)
    row_bytes = {"k": shape.k_bytes, "v": shape.v_bytes}
    for side, record, defaults in entry.sides(profile.defaults):
        place = f"layers[{entry.layer}].{side}"
        for name in ("transform", "group_size"):
            if record.bits == NATIVE_BITS and (value := getattr(record, name)) is not None:
                raise ProfileError(f"{place}: 16 bits are stored as they are, but {name} is {value!r}; remove it")
        if defaults.granularity == "per_channel" and record.group_size is not None:
            raise ProfileError(f"{place}: per_channel keys have the group_size of defaults; remove their own")
        try:
            row_bytes[side](record.bits)
            if defaults.grid_fit == "least_squares" and record.bits in FITTED_BITS:
                check_fitted_group(group_size_of(record, defaults))
        except PrecisionError as error:
            raise ProfileError(f"{place}: {error}") from error
    name = profile.transform_name(entry.layer, "k")
    if profile.defaults.k.granularity == "per_channel" and name != "none":
        raise ProfileError(
            f"layers[{entry.layer}].k: per_channel keys have transform 'none', not {name!r}; use per_token with it"
        )
    keys_shape = (geometry.num_kv_heads, geometry.head_dim)
    _check_constants(keys_shape, entry.k, f"layers[{entry.layer}].k", TransformKind.parse(name))


def _check_constants(shape: tuple[int, int], keys: KeyRecord, place: str, kind: TransformKind) -> None:
    for field, wanted, array in (("mu", kind.centered, keys.mu), ("lambda", kind.balanced, keys.lam)):
        if wanted != (array is not None):
            rule = "needs it, but it is missing" if wanted else "has none, but it is present"
            raise ProfileError(f"{place}.{field}: transform {str(kind)!r} {rule}; export the profile again")
        if array is not None and array.shape != shape:
            raise ProfileError(
                f"{place}.{field}: shape must be [num_kv_heads, head_dim] = {list(shape)}, not {list(array.shape)};"
                " export the profile again"
            )
    if keys.lam is not None:
        lam = keys.lam.values()
        for value in (lam.min().item(), lam.max().item()):
            if not MIN_LAMBDA <= value <= MAX_LAMBDA:
                raise ProfileError(
                    f"{place}.lambda: must lie within [1/64, 64], but holds {value:.6g}; calibrate again"
                )


def _check_digest(profile: Profile) -> None:
    actual = sha256_of(
        hashed_content(
            *(profile.layout, profile.geometry, profile.defaults, profile.layers),
            *(profile.window, profile.constants_sha256),
        )
    )
    if profile.digest != actual:
        raise ProfileError(
            f"digest is {profile.digest}, but layout, geometry, layers and window give {actual}: the file was"
            " edited or damaged; fetch or export it again"
        )


def _check_budget(profile: Profile) -> None:
    budget = profile.budget
    try:
        profile.sizes(budget.tp_size)
    except GeometryError as error:
        raise ProfileError(f"budget: {error}") from error
    if budget.pp_size > len(profile.layers):
        raise ProfileError(
            f"budget: pp_size {budget.pp_size} does not fit {len(profile.layers)} layers; export the profile again"
        )
    for name, actual in profile.sizes().reached_figures().items():
        stated = getattr(budget, name)
        if stated != actual:
            raise ProfileError(f"budget.{name}: is {stated}, but the layers give {actual}; export the profile again")
