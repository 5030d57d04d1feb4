"""A strip in the terminal says what the profile says, at any width, in colours where they are asked for."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from profile_samples import BITS, ESCAPES, choice, hostile, layers_of, make_profile, read_strip, stored_layers

from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import ScaleLayout
from kvtuner.report.layer_strip import COLOURS, Terminal, profile_strip, wants_colour
from kvtuner.report.profile_difference import difference_lines, difference_of
from kvtuner.report.profile_report import describe

if TYPE_CHECKING:
    from fixture_types import RunCommand

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("width", [24, 40, 80, 200])
@pytest.mark.parametrize("count", [1, 10, 28, 80, 1024])
@pytest.mark.parametrize("has_colour", [False, True])
def test_a_strip_is_read_back_at_every_width(width: int, count: int, has_colour: bool) -> None:
    profile = make_profile(layers_of(count))
    lines = profile_strip(profile, Terminal(width, has_colour))
    plain = [ESCAPES.sub("", line) for line in lines]
    assert max(map(len, plain)) <= width
    assert read_strip(plain) == stored_layers(profile)
    assert any(line != bare for line, bare in zip(lines, plain, strict=True)) == has_colour
    assert all(line.isascii() and line.isprintable() for line in plain)


def test_the_legend_names_what_occurs_and_nothing_else() -> None:
    lines = profile_strip(make_profile([choice((4, 16), "centered+hadamard")]), Terminal(80))
    legend = " ".join(lines[lines.index("") :])
    assert "transform before rounding:" in " ".join(legend.split())
    assert "4 F=16" in legend and "C=centered + hadamard" in legend and ".=none" in legend
    assert "hadamard" not in legend.replace("centered + hadamard", "") and "2" not in legend and "8" not in legend


def test_the_name_of_a_transform_stays_on_one_line() -> None:
    names = ("none", "hadamard", "balanced+hadamard", "centered+balanced", "centered+balanced+hadamard")
    lines = profile_strip(make_profile([choice((4, 4), name) for name in names]), Terminal(80))
    legend = lines[lines.index("") :]
    assert [line for line in legend if "x=centered + balanced  X=centered + balanced + hadamard" in line]
    assert len([line for line in legend if "=" in line]) == 2


def test_keys_per_channel_have_a_letter_of_their_own() -> None:
    profile = make_profile([choice(), choice((16, 4))], k_layout=ScaleLayout(32, granularity="per_channel"))
    lines = profile_strip(profile, Terminal(80))
    assert "K transform p." in lines
    assert "p=per channel" in " ".join(lines)


@pytest.mark.parametrize(
    ("environment", "is_terminal", "expected"),
    [
        ({"TERM": "xterm-256color"}, True, True),
        ({}, True, True),
        ({"TERM": "xterm-256color"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ({"FORCE_COLOR": ""}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colour_is_for_those_who_want_it(environment: dict[str, str], is_terminal: bool, expected: bool) -> None:
    primary, secondary = pty.openpty()
    with open(primary, "rb"), open(secondary if is_terminal else os.devnull, "w") as stream:
        if not is_terminal:
            os.close(secondary)
        assert wants_colour(stream, environment) == expected


def luminance(number: int) -> float:
    """The luminance of one of the 240 colours that terminals agree on: a cube of six levels, then greys."""
    levels = (0, 95, 135, 175, 215, 255)
    cell = number - 16
    channels = (
        [levels[cell // 36], levels[cell // 6 % 6], levels[cell % 6]] if number < 232 else [8 + 10 * (cell - 216)] * 3
    )
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_digits_are_readable_and_widths_told_apart_by_lightness_alone() -> None:
    papers = []
    for letter in BITS:
        ink, paper = (luminance(number) for number in COLOURS[letter])
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.5
        papers.append(116 * paper ** (1 / 3) - 16 if paper > 0.008856 else 903.3 * paper)
    assert all(wider + 15 < narrower for narrower, wider in itertools.pairwise(papers))


def test_show_colours_on_demand_only(run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = make_profile(layers_of(28))
    file = tmp_path / "profile.json"
    file.write_bytes(dump_profile(profile))
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    plain = run("show", file)[1]
    assert "\x1b" not in plain and read_strip(plain.splitlines()) == stored_layers(profile)
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run("show", file)[1]
    assert "\x1b" in coloured and ESCAPES.sub("", coloured) == plain
    assert "\x1b" in run("diff", file, file)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("show", file)[1] == plain


@pytest.mark.slow
def test_show_on_a_real_terminal_has_its_width_and_colours(tmp_path: Path) -> None:
    profile = make_profile(layers_of(80))
    file = tmp_path / "profile.json"
    file.write_bytes(dump_profile(profile))
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    unset = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    environment = {**{k: v for k, v in os.environ.items() if k not in unset}, "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-m", "kvtuner", "show", str(file)],
        stdout=secondary,
        stderr=secondary,
        env=environment,
        cwd=ROOT,
    ) as process:
        os.close(secondary)
        output = b""
        while True:
            try:
                part = os.read(primary, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            output += part
    os.close(primary)
    assert process.returncode == 0
    assert b"\x1b[38;5;" in output
    lines = ESCAPES.sub("", output.decode()).splitlines()
    strip = [line for line in lines if line.startswith(("K bits", "V bits", "K transform", "V transform"))]
    assert {len(line) for line in strip} == {52}  # twice 40 layers beside names
    assert read_strip(lines) == stored_layers(profile)


def test_show_says_every_layer_once(run: RunCommand, tmp_path: Path) -> None:
    """Four rows of the strip and the ruler are all that grows with the layers."""
    lengths = []
    for count in (9, 10):
        file = tmp_path / f"{count}.json"
        file.write_bytes(dump_profile(make_profile([choice((2 + 2 * (n % 2), 4)) for n in range(count)])))
        lines = run("show", file)[1].splitlines()
        assert read_strip(lines) == stored_layers(load_profile(file))
        lengths.append((len(lines), [len(line) for line in lines if line.startswith(("K ", "V "))]))
    assert lengths[0][0] == lengths[1][0]
    assert [after - before for before, after in zip(lengths[0][1], lengths[1][1], strict=True)] == [1] * 4


def test_show_says_how_scales_are_shared() -> None:
    plain = [choice((4, 4))]
    lines = describe(
        make_profile(plain, k_layout=ScaleLayout(32, granularity="per_channel"), v_layout=ScaleLayout(8))
    ).splitlines()
    assert "keys      per channel, 32 tokens per scale of a channel" in lines
    assert "values    per token, 8 channels per scale" in lines
    assert "keys      per token, 16 channels per scale, symmetric" in describe(make_profile(plain, symmetric=True))


def test_hostile_text_steers_no_terminal() -> None:
    profile = hostile(make_profile(layers_of(3)))
    lines = [
        *describe(profile).split("\n"),
        *difference_lines(difference_of(profile, profile), Terminal(80), ("a.json", "b.json")),
    ]
    assert "evil.example" in "".join(lines)
    assert all(line.isprintable() for line in lines)


def test_a_strip_of_other_letters_would_be_noticed() -> None:
    """The reader above can fail: a wrong cell and a shifted ruler are found."""
    profile = make_profile(layers_of(28))
    lines = profile_strip(profile, Terminal(80))
    wrong = [line.replace("K bits      2", "K bits      4") for line in lines]
    assert read_strip(wrong) != stored_layers(profile)
    with pytest.raises(AssertionError):
        read_strip([line.replace("|10 ", " |10") for line in lines])
