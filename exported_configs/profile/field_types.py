"""Field types that the sections of a profile share: bits, figures, texts. Knows nothing of the sections."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_serializer
from pydantic import SerializerFunctionWrapHandler as Handler

from kvtuner.precision import ALL_BITS, WORD_BITS

MAX_COUNT: Final = 1024
"""Cap on layers, heads and channels, so that no profile can ask for memory that no model needs."""

MAX_PROFILE_BYTES: Final = 8 * 2**20
MAX_TOKENS: Final = 2**53
MAX_TEXT: Final = 256


def round_figure(value: float) -> float:
    """Round to 6 significant digits: what a profile keeps of a measurement."""
    return float(f"{value:.6g}")


def _check_bits(bits: int) -> int:
    if bits not in ALL_BITS:
        raise ValueError(f"must be 2, 3, 4, 8 or 16, not {bits}")
    return bits


def _check_printable(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError(f"must be printable, without spaces around it, not {text[:60]!a}")
    return text


def _check_word_bits(bits: int) -> int:
    if bits not in WORD_BITS:
        raise ValueError(f"must be 16 or 32, not {bits}")
    return bits


def _check_name(name: str) -> str:
    if name.startswith(("/", "~", ".")) or "\\" in name or "/../" in name or name.endswith("/.."):
        raise ValueError(f"must be a name, not a path of one machine like {name[:60]!a}; give its last component")
    return name


def _check_hub_id(name: str) -> str:
    if name.count("/") > 1 or name.endswith("/"):
        raise ValueError(f"must be a hub id (owner/name) or a base name, not {name[:60]!a}")
    return name


# An integer Literal would take 4.0 and True for 4 and 1: pydantic compares literals by equality.
Bits = Annotated[int, AfterValidator(_check_bits), WithJsonSchema({"type": "integer", "enum": list(ALL_BITS)})]
WordSize = Annotated[
    int, AfterValidator(_check_word_bits), WithJsonSchema({"type": "integer", "enum": sorted(WORD_BITS)})
]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
LayerId = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
Figure = Annotated[float, Field(allow_inf_nan=False, ge=-1e30, le=1e30), AfterValidator(round_figure)]
Share = Annotated[Figure, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(_check_printable)]
CommandText = Annotated[str, Field(max_length=2000), AfterValidator(_check_printable)]
Name = Annotated[Text, AfterValidator(_check_name)]
HubId = Annotated[Name, AfterValidator(_check_hub_id)]
Sha256 = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
TokenCount = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class StrictModel(BaseModel):
    """A JSON object of the profile: immutable, no coercion, no unknown fields; what may be absent and is, stays so."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _omit_absent(self, handler: Handler) -> dict[str, Any]:
        optional = {
            name
            for field, info in type(self).model_fields.items()
            if not info.is_required()
            for name in (field, info.alias)
        }
        return {name: value for name, value in handler(self).items() if value is not None or name not in optional}
