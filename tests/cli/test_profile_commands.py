from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import ExactWindow

if TYPE_CHECKING:
    from fixture_types import ModelFolder, RunCommand, Search

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FITTED = ("--layers", "0-2:K4V2", "--fit", "least_squares", "--score", "fisher")
WHOLE, HALF = 16, 8
"""The channels of the tiny model's heads, and of half a head."""


def events(out: Path, name: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == name]


def side_layouts(file: Path | str) -> list[tuple[int, int]]:
    defaults = load_profile(file).defaults
    return [(side.group_size, side.grid_word_bits) for side in (defaults.k, defaults.v)]


@pytest.fixture(scope="module")
def two_profiles(
    tmp_path_factory: pytest.TempPathFactory, model_folder: ModelFolder, corpus_file: Path
) -> tuple[Path, Path]:
    from kvtuner.cli import main

    out = tmp_path_factory.mktemp("profiles") / "run"
    status = main([
        "search", "--model", str(model_folder("qwen2-bias")), "--data", str(corpus_file), "--budget", "3bit", "5bit",
        "--sequence-length", "64", "--sequences", "2,2,2", "--fisher-draws", "1", "--trials", "3", "--out", str(out),
    ])  # fmt: skip
    assert status == 0
    return out / "profile-3bit.json", out / "profile-5bit.json"


def test_show_prints_every_layer_and_the_bytes(run: RunCommand, two_profiles: tuple[Path, Path]) -> None:
    status, out, _ = run("show", two_profiles[0])
    facts = json.loads(run("show", two_profiles[0], "--json")[1])
    assert status == 0
    assert f"{facts['bytes_per_token']:,} bytes per token" in out
    assert facts["digest"] in out
    assert len(facts["layers"]) == 2


def test_show_of_a_run_folder_shows_all_its_profiles(run: RunCommand, two_profiles: tuple[Path, Path]) -> None:
    facts = json.loads(run("show", two_profiles[0].parent, "--json")[1])
    assert [f["asked"] for f in facts] == ["3bit", "5bit"]


@pytest.mark.parametrize("place", [".", "profile-3bit.json", "../{}/profile-3bit.json"])
def test_a_page_names_a_profile_as_it_was_typed_and_not_where_this_machine_keeps_it(
    run: RunCommand, two_profiles: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, place: str, tmp_path: Path
) -> None:
    folder, page = two_profiles[0].parent, tmp_path / "page.html"
    monkeypatch.chdir(folder)
    typed = place.format(folder.name)
    assert run("show", typed, "--html", page)[0] == 0
    text = page.read_text()
    assert f"--kvtuner-profile {'profile-3bit.json' if place == '.' else typed}" in text
    assert str(folder) not in text and "in the folder in which this page was made" in text
    assert run("show", two_profiles[0], "--html", page)[0] == 0
    assert f"--kvtuner-profile {two_profiles[0]}" in page.read_text(), "a whole path that was typed"
    assert "in the folder in which" not in page.read_text()


def test_validate_accepts_and_refuses(
    run: RunCommand, two_profiles: tuple[Path, Path], model_folder: ModelFolder, tmp_path: Path
) -> None:
    assert run("validate", *two_profiles)[0] == 0
    broken = tmp_path / "broken.json"
    broken.write_text(two_profiles[0].read_text().replace('"bits": 2', '"bits": 4', 1))
    status, _, err = run("validate", broken)
    assert status == 2
    assert "digest" in err
    status, _, err = run("validate", two_profiles[0], "--model", model_folder("head-dim-80"))
    assert status == 2
    assert "num_attention_heads" in err


def test_diff_lists_the_layers_that_changed(run: RunCommand, two_profiles: tuple[Path, Path]) -> None:
    same = json.loads(run("diff", two_profiles[0], two_profiles[0], "--json")[1])
    assert same["same_digest"]
    assert same["layers"] == []
    status, out, _ = run("diff", *two_profiles, "--exit-code")
    assert status == 1
    assert "layer" in out
    assert "bytes_per_token" in out
    changed = json.loads(run("diff", *two_profiles, "--json")[1])
    assert changed["mean_bits"][0] < changed["mean_bits"][1]
    assert changed["layers"]


def test_report_is_written_again_from_the_run_folder(run: RunCommand, two_profiles: tuple[Path, Path]) -> None:
    out = two_profiles[0].parent
    page = out / "report-3bit" / "report.html"
    before = page.read_bytes()
    assert b"<h3>2 sequences at all measured positions" in before
    page.unlink()
    assert run("report", out)[0] == 0
    assert page.read_bytes() == before


def test_report_of_an_unfinished_run_says_what_to_do(run: RunCommand, tmp_path: Path) -> None:
    status, _, err = run("report", tmp_path)
    assert status == 2
    assert "kvtuner search" in err


def test_a_way_out_is_one_that_the_command_has(run: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "report-data.json").write_text("{")
    status, _, err = run("report", tmp_path)
    assert status == 2 and "is damaged" in err
    assert "delete it and run the command that wrote it again" in err
    status, _, err = run("show", "catalogue:demo-4bit", "--html", "/proc/page.html")
    assert status == 2 and "/proc" in err
    assert "--out" not in err


def test_doctor_finds_this_machine_fit(run: RunCommand) -> None:
    status, out, _ = run("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert status == 0, findings
    assert findings["attention hook"]["status"] == "ok"


@pytest.mark.parametrize("asked", ["", "torch"])
def test_doctor_says_what_attends_on_this_processor(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("KVTUNER_ATTENTION", asked)
    _, out, _ = run("doctor", "--json")
    (finding,) = (each for each in json.loads(out) if each["name"] == "processor attention")
    expected = (("ok", "cpu: C++ for "), ("note", "torch, which is slower: ")) if not asked else (("note", "torch, "),)
    assert any(finding["status"] == status and finding["detail"].startswith(begins) for status, begins in expected)


def test_doctor_knows_a_module_from_a_distribution_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtuner.cli.commands import doctor

    def version(name: str) -> str:
        if name != "triton-windows":
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.5"

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"triton": ["triton-windows"]})
    assert doctor._optional("triton", "kernels") == doctor.DoctorCheck("triton", "ok", "3.5")
    assert doctor._optional("sglang", "serving").status == "ok"


@pytest.mark.parametrize(("name", "version", "status"), [
    ("transformers", "4.57.1", "bad"), ("transformers", "5.0.0rc1", "ok"), ("optuna", "3.6", "bad"),
    ("optuna", "4.10.0", "ok"), ("tqdm", None, "bad"), ("pyyaml", None, "bad"), ("pyyaml", "6.0", "ok"),
])  # fmt: skip
def test_doctor_checks_the_versions_that_kvtuner_needs(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str | None, status: str
) -> None:
    from kvtuner.cli.commands import doctor

    def installed(package: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    least = doctor.needed()[name]
    monkeypatch.setattr("importlib.metadata.version", installed)
    assert doctor._package(name, least).status == status


def test_doctor_of_a_clone_that_nobody_installed_checks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtuner.cli.commands import doctor

    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    installed = doctor.needed()
    monkeypatch.setattr("importlib.metadata.requires", missing)
    assert {"torch", *installed} <= set(doctor.needed())


@pytest.mark.parametrize(
    "code", ["import kvtuner.cli", "from kvtuner.cli.parser import build_parser; build_parser().format_help()"]
)
def test_help_imports_nothing_heavy(code: str) -> None:
    heavy = "{'torch', 'transformers', 'optuna', 'numpy', 'matplotlib', 'yaml'}"
    script = f"import sys; {code}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_the_module_can_be_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtuner", "--version"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.startswith("kvtuner ")


def test_a_file_of_several_that_is_no_profile_hides_no_other(run: RunCommand, finished: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text((finished / "profile.json").read_text()[:200])
    status, out, _ = run("validate", finished, cut, finished, "--json")
    assert status == 2
    results = json.loads(out)
    assert [result["valid"] for result in results] == [True, False, True]
    assert "JSON" in results[1]["error"]
    status, out, _ = run("validate", cut, finished)
    assert (status, out.splitlines()[0].startswith(f"{cut}: refused: ")) == (2, True)
    assert ": valid, for " in out.splitlines()[1] and out.splitlines()[2].startswith("  sha256:")
    assert run("validate", cut)[0] == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line(finished: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvtuner", "show", str(finished)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "kvtuner show: error: no space left for what is written (No space left on device)\n"


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_output_is_no_failure(closed: str, finished: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m kvtuner show "$1" {closed}', sys.executable, str(finished)], capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_short_words_stand_in_the_profile_and_the_rows_are_shorter(search: Search, tmp_path: Path) -> None:
    flags = ("--layers", "0-2:K4V2", "--k-group-size", "8", "--v-group-size", "8")
    wide = search(tmp_path / "wide", *flags, "--word-bits", "32", trials=None)
    short = search(tmp_path / "short", *flags, "--word-bits", "16", trials=None)
    auto = search(tmp_path / "auto", *flags, "--word-bits", "auto", trials=None)
    profiles = [load_profile(result["profile"]) for result in (wide, short, auto)]
    assert [profile.schema_version for profile in profiles] == [2, 2, 2]
    assert profiles[0].defaults.k.word_bits is profiles[0].defaults.v.word_bits is None
    assert profiles[1].defaults.k.word_bits == profiles[1].defaults.v.word_bits == 16
    assert profiles[1].digest == profiles[2].digest != profiles[0].digest
    assert short["budget"]["bytes_per_token"] == profiles[1].bytes_per_token() < profiles[0].bytes_per_token()


def test_a_group_size_of_a_side_stays_and_words_are_short_where_rows_are_shorter(
    search: Search, tmp_path: Path
) -> None:
    groups = ("--k-group-size", str(WHOLE), "--v-group-size", str(HALF))
    result = search(tmp_path / "run", *FITTED, *groups, "--word-bits", "auto", "--no-three-bits", trials=None)
    # At 2, 4 and 8 bits, padding takes what short words of the keys would save.
    assert side_layouts(result["profile"]) == [(WHOLE, 32), (HALF, 16)]
    assert not (tmp_path / "run" / "scale-layouts.jsonl").exists()


def test_auto_measures_each_side_once_and_makes_the_profile_of_what_it_chose(search: Search, tmp_path: Path) -> None:
    first = search(tmp_path / "auto", *FITTED, "--word-bits", "auto", trials=None)
    chosen = {event["side"]: event["chosen"] for event in events(tmp_path / "auto", "scale layout")}
    texts = {f"32 bits in groups of {WHOLE}": (WHOLE, 32), f"16 bits in groups of {HALF}": (HALF, 16)}
    layouts = [texts[chosen[side]] for side in "kv"]
    assert side_layouts(first["profile"]) == layouts
    assert first["scale_words"].startswith(f"keys {chosen['k']}") and f", values {chosen['v']}" in first["scale_words"]
    # The same again reads what was measured; another folder measures the same, and gives the same bytes.
    again = search(tmp_path / "auto", *FITTED, "--word-bits", "auto", trials=None)
    assert again["forwards"]["scale layouts"] == 0
    other = search(tmp_path / "other", *FITTED, "--word-bits", "auto", trials=None)
    files = [Path(result["profile"]).read_text().replace("other", "auto") for result in (first, again, other)]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("short_side", ["k", "v"])
def test_a_measured_choice_decides_the_measurements_the_bytes_and_the_profile(
    short_side: str, search: Search, run_search: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtuner.calibration.auto_settings import scale_layouts

    def measure(self: Any, quant: Any, bits: int, sides: tuple[str], constants: Any, places: Any) -> list[float]:
        is_better = (quant.layout(sides[0]).word_bits == 16) == (sides[0] == short_side)
        return [0.25 if is_better else 0.5] * len(places)

    monkeypatch.setattr(scale_layouts.WholeModelKL, "measure", measure)
    out = tmp_path / "run"
    flags = ("--budget", "5bpe", "--fit", "least_squares", "--score", "fisher")
    result = search(out, *flags, "--word-bits", "auto", trials=2, report=True)
    layouts = [(HALF, 16), (WHOLE, 32)] if short_side == "k" else [(WHOLE, 32), (HALF, 16)]
    profile = load_profile(result["profile"])
    assert side_layouts(result["profile"]) == layouts
    assert result["budget"]["bytes_per_token"] == profile.bytes_per_token()
    bound = json.loads((out / "run.json").read_text())["payload"]
    other = "v" if short_side == "k" else "k"
    assert (bound[f"{short_side}_group_size"], bound[f"{short_side}_word_bits"]) == (HALF, 16)
    assert bound[f"{other}_group_size"] is None and f"{other}_word_bits" not in bound
    texts = [f"{bits} bits in groups of {group}" for group, bits in layouts]
    ratio = f" (0.50 of the KL of 32 bits in groups of {WHOLE})"
    expected = f"keys {texts[0]}{ratio * (short_side == 'k')}, values {texts[1]}{ratio * (short_side == 'v')}"
    assert result["scale_words"] == expected
    assert expected in (out / "report.html").read_text()
    status, _, stderr = run_search(*flags, "--word-bits", "32", "--out", out)
    assert status == 2 and f"{short_side}_group_size is {HALF} there and null here" in stderr


def test_a_plan_counts_the_comparison_and_sizes_rows_as_they_are_for_both(run_search: RunCommand) -> None:
    plain, auto = (
        json.loads(run_search("--budget", "3bit", "--dry-run", "--json", *words)[1])
        for words in (("--word-bits", "32"), ())
    )
    assert auto["uniform"] == plain["uniform"]
    # Two sequences of 64 tokens: the exact model twice, and two sides in two layouts.
    assert auto["forward_tokens"].pop("scale layouts") == 128 * (2 + 4)
    auto["forward_tokens"].pop("total")
    assert auto["forward_tokens"].items() <= plain["forward_tokens"].items()


def test_a_window_stands_in_the_profile_and_is_charged_beside_its_rows(search: Search, tmp_path: Path) -> None:
    flags = ("--layers", "0-2:K2V2", "--fit", "minmax", "--word-bits", "32")
    plain = search(tmp_path / "plain", *flags, "--residual-length", "0", trials=None)
    result = search(tmp_path / "run", *flags, "--residual-length", "24", "--sinks", "2", trials=None)
    profile = load_profile(result["profile"])
    assert profile.window == ExactWindow(24, 2)
    assert {"--residual-length", "24", "--sinks", "2"} <= {*(profile.provenance.command or "").split()}
    assert result["budget"]["bytes_per_token"] == plain["budget"]["bytes_per_token"] == profile.bytes_per_token()
    assert (result["budget"]["residual_length"], result["budget"]["sinks"]) == (24, 2)
    for before, after in zip(plain["quality"], result["quality"], strict=True):
        assert after["winner"]["kl"]["mean"] < 0.8 * before["winner"]["kl"]["mean"]
        # The rivals of a search have its window, but for fp8, which is as SGLang serves it.
        kls = [{row["name"]: row["kl"]["mean"] for row in quality["baselines"]} for quality in (before, after)]
        assert kls[1]["K4V4"] < kls[0]["K4V4"]
        assert kls[1]["fp8"] == kls[0]["fp8"]


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that are few of the tiny model's 512 positions."""
    from kvtuner.calibration.auto_settings import window_lengths

    monkeypatch.setattr(window_lengths, "COMPARED_LENGTHS", (0, 4, 8))


@pytest.mark.usefixtures("short_windows")
def test_auto_measures_window_lengths_and_the_profile_keeps_the_chosen_one(search: Search, tmp_path: Path) -> None:
    flags = ("--layers", "0-2:K2V2", "--residual-length", "auto", "--score", "fisher")
    result = search(tmp_path / "run", *flags, trials=None)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "window length")
    figures = {int(length): kl for length, kl in event["at_equal_bytes"].items()}
    assert list(figures) == [0, 4, 8] and event["chosen"] == min(figures, key=figures.__getitem__) > 0
    profile = load_profile(result["profile"])
    assert profile.window == ExactWindow(event["chosen"])
    assert result["budget"]["residual_length"] == event["chosen"]
    assert result["window_length"].startswith(f"the last {event['chosen']} tokens, of 0, 4, 8, 0.")
    assert "--residual-length auto" in (profile.provenance.command or "")
    # The same again reads what was measured.
    again = search(tmp_path / "run", *flags, trials=None)
    assert (again["forwards"]["window length"], again["digest"]) == (0, result["digest"])
    plan = search(tmp_path / "plan", *flags, "--dry-run", trials=None)
    # Two sequences of 64 tokens: the exact model twice, and three lengths at two widths.
    assert plan["forward_tokens"]["window length"] == 128 * (2 + 6)


@pytest.mark.usefixtures("short_windows")
def test_a_budget_of_requests_holds_the_copies_of_a_measured_window(search: Search, tmp_path: Path) -> None:
    flags = ("--budget", "64KiB@2x256", "--score", "fisher", "--sampler", "none")
    measured = search(tmp_path / "auto", *flags, "--residual-length", "auto", trials=None)
    length = measured["budget"]["residual_length"]
    given = search(tmp_path / "given", *flags, "--residual-length", str(length), trials=None)
    assert length > 0 and measured["digest"] == given["digest"]
    profile = load_profile(measured["profile"])
    assert 2 * (256 * profile.bytes_per_token() + profile.window_bytes()) <= 64 * 1024
