"""Launch settings of the kernel that reads rows: a committed table, and what a device fills itself with."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.precision import NATIVE_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtuner.runtime_loader.kernels.kernel_side import KernelSide

TABLE: Final = "launches.json"
"""The file of the settings, which benchmarks/launch_table.py writes."""
LEAST_SPLITS: Final = 16
SHORT_SPLIT: Final = 128
"""The tokens below which a request of a small batch is not split."""
MOST_SPLITS: Final = 256
NARROW, WIDE = 8, 16
"""The pairs of query and head of a program: few where a request has one query and a KV head no more, or many."""
FIRST_DEPENDENT: Final = 90
"""The compute capability from which programmatic dependent launch is there."""
LAUNCH_KINDS: Final = ("launch", "joined", "wide")
"""The settings of a row: of one KV head with few queries, of `JOINED` with half of these, and of many queries."""
EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False, "num_warps": 1}
"""Compiler options of kernels that round as `quant.py` does: a product and a sum stay two roundings.

With one warp a group's minimum and maximum stay inside it: a quarter of the instructions of four (docs/kernels.md).
"""
LOG2_E: Final = math.log2(math.e)
ROUNDS: Final = 2
"""The number of times that a device full of programs is filled again."""


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """The launch of the kernel that reads rows.

    Attributes:
        tokens: The tokens of a block of the loop, whose pipeline has `stages`: one more than blocks that are loaded.
        asm: Whether codes are unpacked by NVIDIA's inline assembly.
        min_split: The tokens below which a request is not split.
        resident: The programs that a multiprocessor holds at once.
        registers: The most registers of a thread; the compiler's choice by default.
        tile: The pairs of query and head of a program.
        heads: The KV heads of a program, side by side in a row.
        dependent: Whether decode's launches begin while the kernel in front of them ends, which they wait for.
    """

    tokens: int
    warps: int
    stages: int
    asm: bool
    min_split: int = 256
    resident: int = 4
    registers: int | None = None
    tile: int = NARROW
    heads: int = 1
    dependent: bool = False

    def programs(self, num_kv_heads: int, gqa: int) -> int:
        """The programs of a part of one query."""
        return num_kv_heads // self.heads * -(-gqa * self.heads // self.tile)

    @property
    def options(self) -> dict[str, int]:
        """The options of Triton's compiler."""
        options = {"num_warps": self.warps, "num_stages": self.stages, **self.launch_options}
        return options if self.registers is None else {**options, "maxnreg": self.registers}

    @property
    def launch_options(self) -> dict[str, int]:
        """The options of decode's launches, whatever else they have."""
        return {"launch_pdl": True} if self.dependent else {}


INTERPRETED: Final = DecodeLaunch(tokens=16, warps=4, stages=1, asm=False, min_split=16, resident=1)
"""The settings in Triton's interpreter: small blocks, so that short requests have several."""
JOINED: Final = 2
"""The KV heads of a program that has room for several."""
INTERPRETED_SPLITS: Final = 3


@dataclass(frozen=True, slots=True)
class Device:
    """The device that kernels run on: its architecture, such as sm_90 or "interpreter", and multiprocessors."""

    arch: str
    processors: int

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """Return what kernels must know of a device."""
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            name = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
            arch = name.partition(":")[0] or f"sm_{properties.major}{properties.minor}"
            return cls(arch, properties.multi_processor_count)
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
            return cls("interpreter", 1)
        raise ServingError(
            f"the Triton kernels do not run on {device.type}; use a GPU, or set TRITON_INTERPRET=1 to run them in"
            " Triton's interpreter, which is slow"
        )

    def launch(
        self, keys: KernelSide, values: KernelSide, gqa: int, *, extend: bool = False, num_requests: int | None = None
    ) -> DecodeLaunch:
        """Return the table's settings for a layer, for one query of a request or, to extend, for several.

        Few requests have one KV head in a program, since half as many programs would leave the device idle; by default
        there are many.

        Raises:
            ServingError: The table has no row for this pair of widths on this device.
        """
        # Heads of a program share the columns of its products, in equal powers of two. A query's zeros hide another
        # head's codes, but not a NaN that native rows may hold.
        native = NATIVE_BITS in (keys.bits, values.bits)
        joins = not (extend or native) and gqa * JOINED <= NARROW and keys.num_heads % JOINED == 0
        joins &= keys.token_group == 1  # of keys per channel scales are folded into the queries of one head
        joins &= num_requests is None or num_requests * keys.num_heads >= self.processors
        if self.arch == "interpreter":
            wide, heads = extend or gqa > NARROW, JOINED if joins else 1
            return _within_group(replace(INTERPRETED, tile=WIDE if wide else NARROW, heads=heads), keys)
        groups = max(keys.groups, values.groups)
        rows = _table().get((self.arch, keys.bits, values.bits, keys.head_dim, groups), {})
        fitting = [least_gqa for least_gqa in rows if least_gqa <= gqa]
        if not fitting or keys.head_dim != values.head_dim:
            raise ServingError(
                f"there is no kernel for K{keys.bits}V{values.bits} with head_dim {keys.head_dim} and"
                f" {values.head_dim}, {groups} scales for a head, on {self.arch}; serve without a profile, or in a"
                f" checkout make the table of runtime_loader/kernels/{TABLE} anew: python benchmarks/launch_table.py"
            )
        launches = rows[max(fitting)]
        kind = "wide" if extend or gqa > NARROW else "joined" if joins and "joined" in launches else "launch"
        return _within_group(replace(launches[kind], dependent=self.launches_dependents), keys)

    @property
    def launches_dependents(self) -> bool:
        """Whether decode's launches begin while the kernel in front of them ends."""
        return self.arch.startswith("sm_") and int(self.arch.removeprefix("sm_")) >= FIRST_DEPENDENT

    def for_batch(self, launch: DecodeLaunch, num_requests: int, tiles: int) -> DecodeLaunch:
        """Return the settings of a batch: shorter splits where one part of each request leaves the device idle."""
        if self.arch == "interpreter" or num_requests * tiles >= self.processors:
            return launch
        return replace(launch, min_split=min(launch.min_split, SHORT_SPLIT))

    def splits(self, launch: DecodeLaunch, num_requests: int, tiles: int, least: int = LEAST_SPLITS) -> int:
        """Return the parts of a request: as many as fill the device `ROUNDS` times, and not a part of a round more.

        A part of a request takes `tiles` programs. There are at least `least` parts, since requests differ in length,
        and fewer where there are many requests.
        """
        if self.arch == "interpreter":
            return INTERPRETED_SPLITS
        wanted = ROUNDS * launch.resident * self.processors // max(1, num_requests * tiles)
        least = max(1, min(least, 1024 // max(1, num_requests)))
        return min(max(wanted, least), MOST_SPLITS)


def _within_group(launch: DecodeLaunch, keys: KernelSide) -> DecodeLaunch:
    """The settings with blocks of which each lies in one group of keys per channel."""
    return launch if keys.token_group == 1 else replace(launch, tokens=min(launch.tokens, keys.token_group))


@cache
def _table() -> Mapping[tuple[str, int, int, int, int], dict[int, dict[str, DecodeLaunch]]]:
    """Settings by architecture, bits, head_dim and groups, then by the least GQA that they are for, and their kind."""
    text = resources.files("kvtuner.runtime_loader.kernels").joinpath(TABLE).read_text()
    content: dict[str, Any] = json.loads(text)
    table: dict[tuple[str, int, int, int, int], dict[int, dict[str, DecodeLaunch]]] = {}
    for row in content["rows"]:
        launches = {kind: DecodeLaunch(**row[kind]) for kind in LAUNCH_KINDS if kind in row}
        for arch in row["archs"]:
            key = (arch, row["k_bits"], row["v_bits"], row["head_dim"], row["groups"])
            table.setdefault(key, {})[row["gqa"]] = launches
    return table
