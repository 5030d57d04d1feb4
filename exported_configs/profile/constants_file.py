"""The side file of a profile: its mu and lambda as safetensors, in one form only. Knows nothing of the profile's JSON.

``x.constants.safetensors`` stands beside ``x.json``. The same arrays always give the same bytes, those that the
safetensors library writes, so a hash in the profile pins them, and whatever differs from that form is refused.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.document import DocumentKind, first_bytes, parse_json, short, validated
from kvtuner.exported_configs.profile.field_types import MAX_COUNT
from kvtuner.exported_configs.profile.layer_storage import Fp16Array, LayerRecord

CONSTANTS_SUFFIX: Final = ".constants.safetensors"
MAX_CONSTANTS_BYTES: Final = 2**26
MAX_INLINE_CHARS: Final = 6 * 2**20
"""The most base64 that a profile keeps in its own file: whatever else it holds takes less than the rest of 8 MiB."""
_AGAIN: Final = "fetch or export both files again"
_TENSOR: Final = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.k\.(mu|lambda)")
_HEADER: Final = DocumentKind(
    "header", _AGAIN, 2**19, field_name=re.compile(r"[\x20-\x7e]{1,64}"), max_fields=2 * MAX_COUNT
)
_FIELDS: Final = {"dtype", "shape", "data_offsets"}


def constants_name(name: str) -> str:
    """The name of the side file of a profile by the name of its file."""
    return name.removesuffix(".json") + CONSTANTS_SUFFIX


def constants_path(path: Path) -> Path:
    """The side file of a profile's file, whether it is there or not."""
    return path.with_name(constants_name(path.name))


def read_constants_file(path: Path) -> bytes:
    """The content of the side file of the profile at `path`; `ProfileError` where it is absent or too large."""
    side = constants_path(path)
    try:
        return first_bytes(side, MAX_CONSTANTS_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProfileError(
            f"its constants are in {side.name} beside it, which cannot be read ({reason}); {_AGAIN}"
        ) from error


def arrays_of(layers: Iterable[LayerRecord]) -> dict[str, Fp16Array]:
    """The constants of layers by the names of their tensors."""
    named = (
        (f"layers.{layer.layer}.k.{name}", array)
        for layer in layers
        for name, array in (("mu", layer.k.mu), ("lambda", layer.k.lam))
    )
    return {name: array for name, array in named if array is not None}


def encode_constants(arrays: Mapping[str, Fp16Array]) -> bytes:
    """The side file of arrays by the names of their tensors: by ascending name, without gaps and without metadata."""
    tensors, end, names = [], 0, sorted(arrays)
    for name in names:
        heads, channels = arrays[name].shape
        start, end = end, end + 2 * heads * channels
        shape, offsets = f'"shape":[{heads},{channels}]', f'"data_offsets":[{start},{end}]'
        tensors.append(f'"{name}":{{"dtype":"F16",{shape},{offsets}}}')
    header = f"{{{','.join(tensors)}}}".encode()
    header += b" " * (-len(header) % 8)
    return b"".join(
        (len(header).to_bytes(8, "little"), header, *(base64.b64decode(arrays[name].data) for name in names))
    )


def constants_hash(layers: Iterable[LayerRecord]) -> str | None:
    """The hash of the side file that layers with constants would have; None where they have none."""
    arrays = arrays_of(layers)
    return f"sha256:{hashlib.sha256(encode_constants(arrays)).hexdigest()}" if arrays else None


def decode_constants(data: bytes) -> dict[str, Fp16Array]:
    """The arrays of a side file by the names of their tensors; `ProfileError` where it has not its one form."""
    if len(data) > MAX_CONSTANTS_BYTES:
        raise ProfileError(f"must be at most {MAX_CONSTANTS_BYTES} bytes, but is larger; this is no side file")
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= len(data) - 8:
        raise ProfileError(f"must begin with the size of its header, but the header has no {size} bytes; {_AGAIN}")
    header, content = parse_json(data[8 : 8 + size], _HEADER), memoryview(data)[8 + size :]
    if not isinstance(header, dict) or not header:
        raise ProfileError(f"must hold tensors, but its header is {short(header)}; {_AGAIN}")
    arrays, end = {}, 0
    for name in header:
        start, shape = end, _shape(name, header[name])
        end += 2 * shape[0] * shape[1]
        if header[name]["data_offsets"] != [start, end] or end > len(content):
            raise ProfileError(f"{name} must be bytes {start} to {end} of {len(content)} after the header; {_AGAIN}")
        raw = base64.b64encode(content[start:end]).decode()
        arrays[name] = validated(Fp16Array, {"dtype": "float16", "shape": shape, "data": raw}, place=name)
    if end != len(content):
        raise ProfileError(f"its tensors are {end} bytes, but {len(content)} stand after the header; {_AGAIN}")
    if list(arrays) != sorted(arrays):
        raise ProfileError(f"must hold its tensors by ascending name; {_AGAIN}")
    if encode_constants(arrays) != data:
        raise ProfileError(f"must have its header as the safetensors library writes it; {_AGAIN}")
    return arrays


def tensor_place(name: str) -> tuple[int, str]:
    """The layer and the field of a tensor by its name."""
    match = _TENSOR.fullmatch(name)
    assert match is not None, name
    return int(match[1]), match[2]


def _shape(name: str, entry: Any) -> list[int]:
    if _TENSOR.fullmatch(name) is None:
        raise ProfileError(f"must hold layers.N.k.mu and layers.N.k.lambda, but holds {name[:60]!a}; {_AGAIN}")
    if not isinstance(entry, dict) or set(entry) != _FIELDS or entry["dtype"] != "F16":
        raise ProfileError(f"{name} must have dtype F16, a shape and data_offsets alone; {_AGAIN}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or len(numbers) != 2 or any(type(number) is not int for number in numbers):
            raise ProfileError(f"{name} must have a shape of two counts and two offsets; {_AGAIN}")
    if not all(1 <= count <= MAX_COUNT for count in shape):
        raise ProfileError(f"{name} must have 1 to {MAX_COUNT} heads and channels; {_AGAIN}")
    return [*shape]
