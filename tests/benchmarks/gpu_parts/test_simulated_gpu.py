"""The model of a processor on listings whose cycles are counted by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_parts.sass_listing import NO_BARRIER, Instruction, instructions_of, path_of  # noqa: E402
from gpu_parts.simulated_gpu import ENDLESS, GPUS, WarpWork, simulated_cycles  # noqa: E402

H200 = next(gpu for gpu in GPUS if gpu.name == "H200")
UNLIMITED = replace(H200, bytes_per_s=ENDLESS, cache_bytes_per_s=ENDLESS)
Line = tuple[str, int, int, int, int]
"""The text of an instruction, its stall, the barriers that it sets and frees, and those that it waits for."""


def line(text: str, stall: int = 1, sets: int = NO_BARRIER, frees: int = NO_BARRIER, waits: int = 0) -> Line:
    return text, stall, sets, frees, waits


def listing(lines: list[Line]) -> str:
    """The lines as cuobjdump prints them."""
    printed = []
    for index, (text, stall, sets, frees, waits) in enumerate(lines):
        control = stall | 1 << 4 | sets << 5 | frees << 8 | waits << 11
        printed.append(f"        /*{16 * index:04x}*/  {text} ;  /* 0x0000000000007918 */")
        printed.append(f"                      /* 0x{control << 41 | 0x1F:016x} */")
    return "\n".join(printed)


def cycles(lines: list[Line], warps: int = 1, resident: int = 64, copied: float = 0.0, blocks: int = 1) -> float:
    path = path_of(instructions_of(listing(lines)), blocks)
    return simulated_cycles(WarpWork(path, copied), UNLIMITED, warps, resident)


def test_control_bits_of_a_printed_instruction_are_read() -> None:
    # Printed by cuobjdump for sm_90.
    code = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                       /* 0x00000a00ff017b82 */
                                                                                /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.64 R2, desc[UR4][R2.64] ;              /* 0x0000000402028981 */
                                                                                /* 0x004ea2000c1e1b00 */
    """
    first, second = instructions_of(code)
    assert first == Instruction(0, "LDC R1, c[0x0][0x28]", "LDC", 1, NO_BARRIER, NO_BARRIER, 0)
    assert (second.name, second.stall, second.sets, second.frees, second.waits) == ("LDG.E.64", 1, 2, NO_BARRIER, 4)
    assert (second.pipe, second.lane_bytes, second.is_conditional) == ("memory", 8, True)


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("FFMA R0, R1, R2, R3", "fma"),
        ("HADD2.F32 R0, -RZ, R1.H0_H0", "fma"),
        ("F2FP.F16.F32.PACK_AB R0, R1, R2", "alu"),
        ("F2F.F16.F32 R0, R1", "xu"),
        ("I2FP.F32.S32 R0, R1", "alu"),
        ("LOP3.LUT R0, R1, 0xf, RZ, 0xc0, !PT", "alu"),
        ("IMAD.MOV.U32 R0, RZ, RZ, R1", "imad"),
        ("MUFU.EX2 R0, R1", "xu"),
        ("LDGDEPBAR", "control"),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64]", "memory"),
        ("UIADD3 UR4, UR4, 0x1, URZ", "uniform"),
        ("HMMA.16816.F32 R0, R4, R8, RZ", "tensor"),
    ],
)
def test_opcodes_go_to_their_pipes(opcode: str, pipe: str) -> None:
    assert instructions_of(listing([line(opcode)]))[0].pipe == pipe


def test_one_warp_waits_for_its_stalls_and_several_fill_them() -> None:
    code = [line("FADD R0, R0, R1", stall=4)] * 10
    assert cycles(code) == 40
    assert cycles(code, 4) == 40  # each on a scheduler of its own
    assert cycles(code, 16) == 43  # four on each, one cycle apart
    assert cycles(code, 32) == 83  # eight fill every cycle: 80 are issued, and the last stalls for three more
    assert cycles(code, 32, resident=16) == 83  # the same in two rounds


def test_a_pipe_of_half_a_warp_takes_two_cycles() -> None:
    assert cycles([line("LOP3.LUT R0, R1, R2, RZ, 0xc0, !PT")] * 10, 16) == 4 * 20 - 1
    assert cycles([line("FADD R0, R0, R1"), line("LOP3.LUT R0, R1, R2, RZ, 0xc0, !PT")] * 10, 16) == 80


def test_a_barrier_is_waited_for_until_the_result_is_there() -> None:
    code = [line("LDG.E R0, [R2.64]", sets=3), line("FADD R5, R6, R7"), line("FADD R0, R0, R1", waits=1 << 3)]
    assert cycles(code) == H200.cache_cycles + 1
    assert cycles([*code[:2], line("FADD R0, R0, R1", waits=1 << 2)]) == 3


def test_copies_of_the_block_ahead_stay_on_their_way() -> None:
    copy, group = line("LDGSTS.E.BYPASS.128 [R1], [R2.64]"), line("LDGDEPBAR")
    first, wait_for_all, wait_for_one = (
        [copy, group],
        line("DEPBAR.LE SB0, 0x0"),
        line("DEPBAR.LE SB0, 0x1"),
    )
    late = [line("FADD R0, R0, R1", stall=15)] * 30
    ahead = [*first, *late, *first]
    assert cycles([*ahead, wait_for_one], copied=1024) == H200.memory_cycles + 1
    assert cycles([*ahead, wait_for_all], copied=1024) > H200.memory_cycles + 450


def test_no_more_comes_from_memory_than_it_delivers() -> None:
    copies = [line("LDGSTS.E.BYPASS.128 [R1], [R2.64]"), line("LDGDEPBAR"), line("DEPBAR.LE SB0, 0x0")]
    path = instructions_of(listing(copies * 200))
    for resident in (4, 16, 64):
        taken = simulated_cycles(WarpWork(path, 200 * 512), H200, 64, resident)
        share = 64 * 200 * 512 / (taken / H200.hertz) * H200.processors / H200.bytes_per_s
        assert share <= 1
        # Little's law, of copies that each warp waits for in turn.
        in_flight = resident * 512 * H200.processors / (H200.memory_cycles / H200.hertz) / H200.bytes_per_s
        assert share == pytest.approx(min(1, in_flight), rel=0.15)


def test_the_path_takes_the_loop_with_products_and_no_slow_path() -> None:
    code = [
        line("MOV R0, R1"),  # 00
        line("@P0 EXIT"),  # 10
        line("@P0 BRA 0x50"),  # 20
        line("STG.E [R2.64], R0"),  # 30
        line("EXIT"),  # 40
        line("FADD R0, R0, R1"),  # 50
        line("HMMA.16816.F32 R0, R4, R8, RZ"),  # 60
        line("@P1 BRA 0x50"),  # 70
        line("@P2 BRA 0xa0"),  # 80
        line("CALL.REL.NOINC 0xc0"),  # 90
        line("MUFU.RCP R0, R1"),  # a0
        line("EXIT"),  # b0
        line("FADD R9, R9, R9"),  # c0
    ]
    names = [each.name for each in path_of(instructions_of(listing(code)), 3)]
    loop = ["FADD", "HMMA.16816.F32", "BRA"]
    assert names == ["MOV", "EXIT", "BRA", *loop, *loop, *loop, "BRA", "MUFU.RCP", "EXIT"]
