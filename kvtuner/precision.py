"""Bits and bytes of a KV cache: widths, K/V pairs and the one byte formula. Knows nothing of tensors or models.

Every byte figure in the project, from the tuner's budget to the size of the serving pool, comes from `row_bytes`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal

from kvtuner.errors import PrecisionError

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKED_BITS: Final = (2, 3, 4, 8)
NATIVE_BITS: Final = 16
ALL_BITS: Final = (*PACKED_BITS, NATIVE_BITS)
THREE_BITS: Final = 3
"""The one width whose units have 24 bits; a profile of schema version 1 does not have it."""
WIDEST_PACKED_BITS: Final = PACKED_BITS[-1]
SEARCHED_BITS: Final = (2, 4, 8)
"""The packed widths that a search measures and offers, if it is not asked for more."""
ROW_ALIGNMENT_BYTES: Final = 16  # of the widest load of a GPU thread
FP16_MAX: Final = 65504.0
LAYOUT_ID: Final = "halfword-sliced-v1"
MIB: Final = 1 << 20
GIB: Final = 1 << 30
POSITION_BYTES: Final = 4  # of the int32 that names the token in a place of an exact window
MAX_RESIDUAL_LENGTH: Final = 1024
MAX_SINKS: Final = 64
WIDE_WORD_BITS: Final = 32
"""The bits of a scale word that holds scale and minimum, fp16 each."""
SHORT_WORD_BITS: Final = 16
"""The bits of a scale word that holds a shortened scale and a zero point; 8-bit codes never have such words."""

Side = Literal["k", "v"]
SIDES: Final[tuple[Side, Side]] = ("k", "v")
Granularity = Literal["per_token", "per_channel"]
Fit = Literal["minmax", "least_squares"]
ConstantsPlace = Literal["auto", "inline", "file"]
CONSTANTS_PLACES: Final[tuple[ConstantsPlace, ...]] = ("auto", "inline", "file")
"""The places of mu and lambda: a profile's own file while it can hold them, always that file, or one beside it."""
FITS: Final[tuple[Fit, ...]] = ("minmax", "least_squares")
FITTED_BITS: Final = (2, 3, 4)
"""The widths that are fitted: at 8 bits a fit lowers the squared error by less than 5 %."""
MAX_FITTED_CHANNELS: Final = 256
"""The most channels of a group that is fitted: the sums of a fit are below 256 * 255**2, and so below 2**24."""
WordBits = Literal[32, 16]
WORD_BITS: Final[tuple[WordBits, ...]] = (32, 16)
WordChoice = Literal["32", "16", "auto"]
WORD_CHOICES: Final[tuple[WordChoice, ...]] = ("32", "16", "auto")
TOKEN_GROUPS: Final = (16, 32, 64, 128)
"""Tokens that may share one scale of a channel where keys are stored per channel."""
KIVI_TOKENS: Final = 32
"""The tokens of such a group in KIVI, which leaves as many of the newest tokens unquantized."""

_UNIFORM = re.compile(r"[0-9]{1,2}")
_PAIR = re.compile(r"K([0-9]{1,2})V([0-9]{1,2})")


@dataclass(frozen=True, slots=True, order=True)
class PrecisionPair:
    """Widths of one layer's keys and values, written ``K8V4``."""

    k_bits: int
    v_bits: int

    def __post_init__(self) -> None:
        for name, bits in (("k_bits", self.k_bits), ("v_bits", self.v_bits)):
            if bits not in ALL_BITS:
                raise PrecisionError(f"{name} must be one of {ALL_BITS}, but is {bits!r}")

    @classmethod
    def parse(cls, text: str) -> PrecisionPair:
        """Read ``K8V4``, or ``8`` and ``bf16``/``fp16`` for equal widths.

        Raises:
            PrecisionError: Any other text.
        """
        name = text.strip()
        if name.lower() in ("bf16", "fp16", "float16", "bfloat16", "auto"):
            return cls(NATIVE_BITS, NATIVE_BITS)
        if _UNIFORM.fullmatch(name):
            return cls(int(name), int(name))
        match = _PAIR.fullmatch(name.upper())
        if match is None:
            raise PrecisionError(f"a precision is written K8V4, 8 or bf16, not {text!r}")
        return cls(int(match[1]), int(match[2]))

    @property
    def is_packed(self) -> bool:
        """Whether neither side has the 16 bits of the served dtype."""
        return max(self.k_bits, self.v_bits) < NATIVE_BITS

    def __str__(self) -> str:
        return f"K{self.k_bits}V{self.v_bits}"


def num_slots(bits: int) -> int:
    """The codes of a unit: as many as fill 16 bits or, at 3 bits, 24."""
    return 8 if bits == THREE_BITS else 16 // bits


def check_group_size(head_dim: int, bits: int, group_size: int) -> None:
    """Check that rows of `head_dim` channels can be packed at `bits` with groups of `group_size` channels.

    Raises:
        PrecisionError: Bits outside {2, 3, 4, 8}; head_dim * bits no multiple of 16; a group that does not
            divide head_dim or cuts through the channels of a slot (it must be a multiple of head_dim / slots).
    """
    _check_units(head_dim, bits)
    block = head_dim // num_slots(bits)
    if group_size <= 0 or head_dim % group_size or group_size % block:
        raise PrecisionError(
            f"group_size {group_size} must divide head_dim {head_dim} and be a multiple of {block} at {bits} bits;"
            f" {head_dim} (one group per head) always works"
        )


def check_fitted_group(group_size: int) -> None:
    """Refuse groups whose fit would have sums that are not exact by a `PrecisionError`."""
    if group_size > MAX_FITTED_CHANNELS:
        raise PrecisionError(
            f"a grid is fitted to at most {MAX_FITTED_CHANNELS} channels, not {group_size}; use a smaller group size,"
            " or --fit minmax"
        )


def check_token_group(head_dim: int, bits: int, group_size: int) -> None:
    """Check that keys of `head_dim` channels can be packed at `bits`, one scale per channel and `group_size` tokens.

    Raises:
        PrecisionError: Bits outside {2, 3, 4, 8}; head_dim * bits no multiple of 16; a group outside
            `TOKEN_GROUPS`.
    """
    _check_units(head_dim, bits)
    if group_size not in TOKEN_GROUPS:
        raise PrecisionError(
            f"per-channel keys need a group_size of {TOKEN_GROUPS} tokens, but it is {group_size}; KIVI's is 32"
        )


def _check_units(head_dim: int, bits: int) -> None:
    if bits not in PACKED_BITS:
        raise PrecisionError(f"packed bits must be one of {PACKED_BITS}, but are {bits!r}; 16 is stored unpacked")
    if head_dim <= 0 or head_dim * bits % 16:
        raise PrecisionError(
            f"head_dim {head_dim} cannot be packed at {bits} bits: head_dim * bits must be a multiple of 16"
        )


def used_word_bits(bits: int, word_bits: WordBits) -> WordBits:
    """The bits of a scale word beside codes of `bits`, on a side whose words have `word_bits`: 32 at 8 bits."""
    return WIDE_WORD_BITS if bits == WIDEST_PACKED_BITS else word_bits


def row_bytes(
    num_heads: int,
    head_dim: int,
    bits: int,
    group_size: int | None = None,
    *,
    granularity: Granularity = "per_token",
    word_bits: WordBits = WIDE_WORD_BITS,
) -> int:
    """Bytes of one token's keys (or values) in one layer: codes, scale words, padding.

    Args:
        num_heads: KV heads stored on this rank.
        head_dim: channels per head.
        bits: 2, 3, 4, 8, or 16 for the native, unpadded dtype.
        group_size: channels per scale of a token, one group per head by default; or tokens per scale of a channel.
        granularity: per_channel spreads a group's scale words over its tokens, rounded up.
        word_bits: the bits of a scale word; 8-bit codes have 32 whatever is asked.

    Raises:
        PrecisionError: `check_group_size` or `check_token_group` refuses the group.
    """
    if num_heads <= 0:
        raise PrecisionError(f"num_heads must be positive, but is {num_heads}")
    if bits == NATIVE_BITS:
        return num_heads * head_dim * 2
    group_size = head_dim if group_size is None else group_size
    if granularity == "per_channel":
        check_token_group(head_dim, bits, group_size)
    else:
        check_group_size(head_dim, bits, group_size)
    num_codes, word_bytes = num_heads * head_dim, used_word_bits(bits, word_bits) // 8
    # Both are one word for every `group_size` codes; only those of a channel need not come out whole in a token.
    stored = num_codes * bits // 8 + _ceil_div(word_bytes * num_codes, group_size)
    return _ceil_div(stored, ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES


def words_offset(num_heads: int, head_dim: int, bits: int, word_bits: WordBits = WIDE_WORD_BITS) -> int:
    """The bytes of a row before its scale words, which lie at a multiple of their own bytes at 3 bits."""
    code_bytes, size = num_heads * head_dim * bits // 8, used_word_bits(bits, word_bits) // 8
    return _ceil_div(code_bytes, size) * size if bits == THREE_BITS else code_bytes


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """What shares a scale on one side of a layer, keys or values, and the bits of its scale word.

    Attributes:
        group_size: channels per scale of a token, a head's if None; or tokens per scale of a channel.
        word_bits: bits of a scale word.
        granularity: values are always stored per token.
    """

    group_size: int | None = None
    word_bits: WordBits = WIDE_WORD_BITS
    granularity: Granularity = "per_token"

    def __str__(self) -> str:
        return f"{self.word_bits} bits in groups of {self.group_size}"

    def of_head(self, head_dim: int) -> ScaleLayout:
        """The same with a group size, where it has none, of a head of so many channels."""
        return replace(self, group_size=head_dim) if self.group_size is None else self


WHOLE_HEADS: Final = ScaleLayout()


@dataclass(frozen=True, slots=True)
class RowShape:
    """The shape that decides a row's bytes besides its bits: heads on one rank, channels, and what shares a scale.

    Attributes:
        num_kv_heads: The KV heads on one rank.
        head_dim: channels of a key head, or of a latent.
        v_head_dim: channels of a value head; 0 where a latent is read as values too.
        k_layout: What shares a scale of keys; whole heads by default, and with their channels as its group size.
        v_layout: The same of values.
        rope_dim: The rotary channels beside a latent, in the native dtype.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    k_layout: ScaleLayout = WHOLE_HEADS
    v_layout: ScaleLayout = WHOLE_HEADS
    rope_dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "k_layout", self.k_layout.of_head(self.head_dim))
        object.__setattr__(self, "v_layout", self.v_layout.of_head(self.v_head_dim))

    def k_bytes(self, bits: int) -> int:
        """Bytes of one token's keys in one layer."""
        return self._side_bytes(self.head_dim, bits, self.k_layout)

    def v_bytes(self, bits: int) -> int:
        """Bytes of one token's values in one layer; none where a latent is read as values."""
        return self._side_bytes(self.v_head_dim, bits, self.v_layout) if self.v_head_dim else 0

    def pair_bytes(self, pair: PrecisionPair) -> int:
        """Bytes of one token in one layer, keys and values, or a latent and the rotary channels beside it."""
        return self.k_bytes(pair.k_bits) + self.v_bytes(pair.v_bits) + 2 * self.rope_dim

    def payload_bits(self, pair: PrecisionPair) -> int:
        """Payload bits of one token in one layer, for each KV head; a latent is one."""
        return pair.k_bits * self.head_dim + pair.v_bits * self.v_head_dim + NATIVE_BITS * self.rope_dim

    @property
    def channels(self) -> int:
        """The numbers of one token in one layer, for each KV head; a latent is one."""
        return self.head_dim + self.v_head_dim + self.rope_dim

    def _side_bytes(self, channels: int, bits: int, layout: ScaleLayout) -> int:
        words, granularity = layout.word_bits, layout.granularity
        return row_bytes(self.num_kv_heads, channels, bits, layout.group_size, granularity=granularity, word_bits=words)


def bytes_per_token(pairs: Sequence[PrecisionPair], shape: RowShape) -> int:
    """Stored bytes of one token over the layers given, on a rank that holds `shape.num_kv_heads` heads."""
    return sum(shape.pair_bytes(pair) for pair in pairs)


@dataclass(frozen=True, slots=True)
class ExactWindow:
    """The tokens of a request whose keys and values are also kept exactly, beside their rows.

    A query at position t reads positions t - residual_length + 1 to t, its own included, and 0 to sinks - 1 from the
    exact copies, and all others from their rows. Whoever has no copy of a token reads its row.

    Attributes:
        residual_length: The last tokens.
        sinks: The first tokens.
    """

    residual_length: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, tokens, most in (
            ("residual_length", self.residual_length, MAX_RESIDUAL_LENGTH),
            ("sinks", self.sinks, MAX_SINKS),
        ):
            if not 0 <= tokens <= most:
                raise PrecisionError(f"{name} must be within 0 and {most} tokens, not {tokens}")

    def __str__(self) -> str:
        places = (("last", self.residual_length), ("first", self.sinks))
        named = [f"the {place} {tokens} tokens" for place, tokens in places if tokens]
        return f"{' and '.join(named) or 'no tokens'} exact"

    @property
    def num_tokens(self) -> int:
        """The most tokens of a request that are kept twice; 0 where there is no window."""
        return self.residual_length + self.sinks

    def bits_at(self, context_length: int) -> Fraction:
        """Bits per cached element that the copies add to `effective_bits` in a request of `context_length` tokens."""
        return Fraction(NATIVE_BITS * min(self.num_tokens, context_length), context_length)


NO_WINDOW: Final = ExactWindow()


def copy_bytes(pair: PrecisionPair, native_bytes: int) -> int:
    """Bytes that a server keeps of a copied token in one layer, which takes `native_bytes` unquantized.

    They are its position and, unless rows of 16 bits are exact already, its keys and values.
    """
    is_exact = (pair.k_bits, pair.v_bits) == (NATIVE_BITS, NATIVE_BITS)
    return POSITION_BYTES if is_exact else POSITION_BYTES + native_bytes


def tokens_per_gib(stored_bytes: int) -> int:
    """Tokens that fit into 1 GiB, where one takes so many bytes."""
    return GIB // stored_bytes


def mean_bits(pairs: Sequence[PrecisionPair], shape: RowShape) -> Fraction:
    """Payload bits per cached element, scales not counted: the field's "4-bit"."""
    return Fraction(sum(map(shape.payload_bits, pairs)), len(pairs) * shape.channels)


def effective_bits(pairs: Sequence[PrecisionPair], shape: RowShape) -> Fraction:
    """Stored bits per cached element: codes, scale words and padding."""
    elements = len(pairs) * shape.num_kv_heads * shape.channels
    return Fraction(8 * bytes_per_token(pairs, shape), elements)
