"""Many mutated profiles through the loader, in a process whose memory is capped; prints what happened as JSON.

Usage: ``python load_storm.py COUNT SEED FOLDER``, with a folder for the files of those that are loaded by path. A
fault is anything but a profile or `ProfileError`, a profile that JSON Schema or another reader of the format refuses,
or one that does not survive being written. Mutations are plain and seeded: the same seed, the same documents.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jsonschema

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.exported_configs.profile.load import load_profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtuner.exported_configs.profile.profile import Profile

    Document = dict[str, Any]

HERE = Path(__file__).parent
VECTORS = HERE.parents[2] / "exported_configs" / "vectors"
CAP_BYTES = 512 * 2**20
MAX_FAULTS = 5
LITERALS = [
    *("null", "true", "false", "0", "-0", "1", "2", "3", "4", "4.0", "8", "16", "24", "32", "64", "-1", "1024", "1025"),
    *("0.5", "1e-400", "1e999", "NaN", "-Infinity", "1" + "0" * 400, str(2**53), str(2**63), str(2**64), "1E400"),
    *('""', '" "', '"none"', '"hadamard"', '"balanced"', '"centered"', '"per_channel"', '"per_token"', '"float16"'),
    *('"AAAA"', '"\\ud800"', '"\\u0000"', '"/etc/passwd"', '"a/../b"', '"\\u202e"', '"' + "x" * 300 + '"'),
    *("[]", "{}", "[[]]", "[1, 2]", '{"bits": 16}', '{"bits": 4, "transform": "none"}', "[" * 15 + "]" * 15),
]
NAMES = ["bits", "transform", "fit", "mu", "lambda", "layer", "k", "v", "data", "x", "__proto__", "Bits", "command"]
LIKELY: dict[str, tuple[Any, ...]] = {
    "bits": (2, 3, 4, 8, 16),
    "group_size": (8, 16, 24, 32, 48, 64),
    "symmetric": (True, False),
    "fit": ("minmax", "least_squares", None),
    "residual_length": (0, 32, 1024, 1025, None),
    "sinks": (0, 4, 64, 65, None),
    "granularity": ("per_token", "per_channel"),
    "transform": ("none", "hadamard", "balanced", "centered", "centered+hadamard", "centered+balanced+hadamard"),
    "num_attention_heads": (2, 4, 6, 8, 12),
    "num_kv_heads": (1, 2, 3, 4),
    "head_dim": (16, 32, 40, 48, 64),
    "v_head_dim": (16, 32, 40, 48, 64),
    "num_shared_layers": (0, 1, 1024),
    "tp_size": (1, 2, 3, 4, 8),
    "pp_size": (1, 2, 3, 8),
}
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
GROWTHS: list[tuple[str, Callable[[random.Random, bytes], bytes]]] = [
    ("spaces", lambda _, data: data.ljust(8 * 2**20)),
    ("too large", lambda _, data: data.ljust(8 * 2**20 + 1)),
    ("long text", lambda _, data: data.replace(b'"by hand"', b'"' + b"y" * (8 * 2**20 - 8192) + b'"')),
    ("escapes", lambda _, data: data.replace(b'"by hand"', b'"' + b'\\"' * (4 * 2**20 - 8192) + b'"')),
    ("long list", lambda _, data: data.replace(b'"layers": [', b'"layers": [' + b"{}," * (2 * 2**20))),
    ("long numbers", lambda _, data: data.replace(b'"layer": 0', b'"layer": 0.' + b"1" * (8 * 2**20 - 8192))),
    ("deep", lambda rng, data: data.replace(b'"by hand"', rng.choice((b"[", b'{"a":')) * rng.randrange(10, 10**6))),
    ("fields", lambda _, data: b"{" + b",".join(b'"a%d":0' % n for n in range(600_000)) + b"," + data[1:]),
    ("arrays", lambda _, data: data.replace(b'"data": "', b'"data": "' + b"A" * (7 * 2**20))),
]  # fmt: skip


def module(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(HERE / f"{name}.py")))


READER, RESEAL = module("independent_reader").read, module("broken_profiles").reseal


def containers(node: Any) -> list[Any]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    nested = [inner for child in children for inner in containers(child)]
    return [node, *nested] if isinstance(node, dict | list) and node else nested


def change(rng: random.Random, document: Document, marks: dict[str, str]) -> None:
    """Change one place; literals that Python's JSON would not write stand in as marks."""
    container = rng.choice(containers(document))
    key = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
    mark, value = f"mark {len(marks)}", container[key]
    marks[mark] = rng.choice(LITERALS)
    action = rng.randrange(9)
    if action == 0:
        del container[key]
    elif action == 1:
        other = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
        container[key], container[other] = container[other], container[key]
    elif action == 2:
        container[key] = copy.deepcopy(rng.choice(containers(document)))
    elif action == 3 and isinstance(value, int):
        container[key] = rng.choice((value + 1, value - 1, value * 2, value // 2, float(value), -value, not value))
    elif action == 4 and isinstance(value, str) and value:
        place = rng.randrange(len(value))
        container[key] = value[:place] + rng.choice(("", "A", "/", "=", "\u00e9", "\n", value)) + value[place + 1 :]
    elif action == 5 and isinstance(container, list):
        container.insert(key, copy.deepcopy(rng.choice(container)))
    elif action == 6 and isinstance(container, dict):
        container[rng.choice(NAMES)] = mark
    elif action == 7 and "transform" in container:
        container["transform"] = rng.choice(("none", "hadamard", "balanced", "centered", "centered+hadamard"))
    else:
        container[key] = mark


def nudge(rng: random.Random, document: Document) -> None:
    """Change one place to what might well stand there."""
    places = [
        (node, name) for node in containers(document) if isinstance(node, dict) for name in node if name in LIKELY
    ]
    if places:
        node, name = rng.choice(places)
        node[name] = rng.choice(LIKELY[name])


def restate(document: Document) -> Document:
    """A profile with the digest and the budget that its layers have: a mutation reaches what is checked after them."""
    document = RESEAL(document)
    _, _, sides = READER(json.dumps(document).encode())
    shape = document["geometry"]
    dims = {"k": shape["head_dim"], "v": shape["v_head_dim"]}
    total = sum(side["bytes"] for layer in sides for side in layer.values())
    elements = len(sides) * sum(dims.values())
    payload = sum(side["bits"] * dims[name] for layer in sides for name, side in layer.items())
    figures = {
        "mean_bits": float(f"{payload / elements:.6g}"),
        "effective_bits": float(f"{8 * total / (elements * shape['num_kv_heads']):.6g}"),
        "bytes_per_token": total,
    }
    return {**document, "budget": {**document["budget"], **figures}}


def cut(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Change some bytes, or repeat a line."""
    if rng.random() < 0.05:
        lines = data.splitlines(keepends=True)
        place = rng.randrange(len(lines))
        return b"".join((*lines[:place], lines[place], *lines[place:]))
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(data) + 1)
        stop = start + rng.choice((0, 0, 1, 1, 2, 8, 100))
        other = rng.choice(others)
        place = rng.randrange(len(other))
        inserted = (b"", rng.randbytes(rng.randint(1, 4)), data[start:stop] * 2, other[place : place + 40])
        data = data[:start] + rng.choice(inserted) + data[stop:]
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.05 else data


def mutations(rng: random.Random, bases: list[bytes], count: int) -> Iterator[tuple[str, bytes]]:
    """What was done to a document, and the document."""
    documents = [json.loads(data) for data in bases]
    for number in range(count):
        which = rng.randrange(len(bases))
        if number % 1000 == 999:
            name, grow = GROWTHS[number // 1000 % len(GROWTHS)]
            yield name, next(grown for data in bases if (grown := grow(rng, data)) != data)
            continue
        if rng.random() < 0.3:
            yield "bytes", cut(rng, bases[which], bases)
            continue
        document, marks = copy.deepcopy(documents[which]), {}
        likely = rng.random() < 0.4
        for _ in range(rng.choice((1, 1, 2, 3))):
            if likely:
                nudge(rng, document)
            else:
                change(rng, document, marks)
        text = json.dumps(document, ensure_ascii=rng.random() < 0.5)
        for mark, literal in marks.items():
            text = text.replace(f'"{mark}"', literal)
        name = "likely values" if likely else "values"
        if rng.random() < 0.5:
            try:
                text, name = json.dumps(RESEAL(json.loads(text))), f"{name}, resealed"
                text, name = json.dumps(restate(json.loads(text))), f"{name} and restated"
            except REFUSALS:  # of a document that is no profile, which goes in as it is
                pass
        yield name, text.encode("utf-8", "surrogatepass")


def says(written: Any, original: Any) -> bool:
    """Whether a written profile says what was read: nulls say nothing, figures keep 6 digits, all else is the same."""
    if isinstance(written, dict) and isinstance(original, dict):
        return all(says(written.get(name), original.get(name)) for name in {*written, *original})
    if isinstance(written, list) and isinstance(original, list):
        return len(written) == len(original) and all(map(says, written, original))
    if isinstance(written, float) and type(original) in (int, float):
        return written == float(f"{original:.6g}")
    return type(written) is type(original) and bool(written == original)


def judge(validator: Any, data: bytes, profile: Profile) -> str | None:
    """What is wrong with a profile that was accepted."""
    parsed = json.loads(data)
    problem = next(validator.iter_errors(parsed), None)
    if problem is not None:
        return f"the schema forbids it: {problem.message[:200]}"
    try:
        _, digest, _ = READER(data)
    except REFUSALS as error:
        return f"another reader refuses it: {error!r:.200}"
    if digest != profile.digest:
        return "another reader finds another digest"
    written = dump_profile(profile)
    try:
        again = load_profile(written)
    except ProfileError as error:
        return f"what is written of it is refused: {error}"
    return None if again == profile and says(json.loads(written), parsed) else "it is not what was written"


def storm(load: Callable[[Any], Profile], count: int, seed: int, folder: Path) -> Document:
    """Load `count` mutations and tell what came of them."""
    bases = [path.read_bytes() for path in sorted((VECTORS / "valid").glob("*.json"))]
    validator = jsonschema.Draft202012Validator(json.loads((VECTORS.parent / "schema.json").read_bytes()))
    outcomes, reasons, faults = Counter[str](), Counter[str](), []
    slowest, slow, file = 0.0, "", folder / "mutated.json"
    for number, (name, data) in enumerate(mutations(random.Random(seed), bases, count)):
        source: Any = data
        if number % 20 == 0:
            file.write_bytes(data)
            source = file
        start, fault = time.process_time(), None
        try:
            profile = load(source)
        except ProfileError as error:
            seconds, message = time.process_time() - start, str(error)
            outcomes[f"{name}: refused"] += 1
            reasons[" ".join(word for word in message.split()[1:] if word.isalpha())[:40]] += 1
            if not message.isprintable() or len(message) > 500:
                fault = f"it is refused in more than a line: {message[:200]!a}"
        except Exception as error:  # anything else is a fault, whatever it is
            seconds, fault = time.process_time() - start, f"{type(error).__name__}: {error!s:.200}"
        else:
            seconds = time.process_time() - start
            outcomes[f"{name}: accepted"] += 1
            fault = judge(validator, data, profile)
        if fault is not None and len(faults) < MAX_FAULTS:
            faults.append({"number": number, "what": name, "fault": fault, "data": ascii(data[:4000])})
        if seconds > slowest:
            slowest, slow = seconds, name
    return {
        "count": count,
        "faults": faults,
        "outcomes": dict(sorted(outcomes.items())),
        "reasons": dict(reasons.most_common()),
        "slowest_s": round(slowest, 3),
        "slowest": slow,
    }


def main() -> None:
    """Cap the memory above what is mapped now, and run."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + CAP_BYTES, mapped + CAP_BYTES))
    count, seed, folder = sys.argv[1:]
    json.dump(storm(load_profile, int(count), int(seed), Path(folder)), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
