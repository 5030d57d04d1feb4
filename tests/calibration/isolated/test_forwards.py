"""Isolated KL: the same numbers as the whole simulation, from a journal that survives any interruption."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kvtuner.calibration.forward import parallel_sequences
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator
from kvtuner.calibration.isolated import forwards as isolated
from kvtuner.calibration.isolated.forwards import JOURNAL, measure_isolated, spec_of
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.sensitivity import Candidate, LayerConstants
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import ScaleLayout
from kvtuner.quant import QuantSpec
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from fixture_types import RandomBatches

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.chain import DecoderChain

TOKENS, SPLIT = 21, 6
DECODE, DEFAULTS = ReadPlan("decode", SPLIT), QuantizationOptions()
CANDIDATES = [
    Candidate(0, "k", 2, "none"),
    Candidate(0, "v", 4, "hadamard"),
    Candidate(1, "k", 4, "centered+balanced+hadamard"),
    Candidate(1, "v", 2, "none"),
    Candidate(2, "k", 8, "balanced"),
    Candidate(2, "v", 2, "hadamard"),
]


class Interrupted(Exception):
    pass


class Faulty(QuantSpec):
    """Reads NaN for whatever was stored."""

    def simulate(self, x: Tensor) -> Tensor:
        return torch.full_like(x, torch.nan, dtype=torch.float32)


def kl_of(
    chain: DecoderChain,
    batches: Sequence[Batch],
    folder: RunFolder,
    *,
    constants: Sequence[LayerConstants],
    identity: str = "mine",
    stop_after: int | None = None,
    plan: ReadPlan = DECODE,
    options: QuantizationOptions = DEFAULTS,
    candidates: Sequence[Candidate] = CANDIDATES,
    tell: Callable[[], object] = lambda: None,
    losers_of: Callable[[Mapping[Candidate, float], int], Collection[Candidate]] | None = None,
) -> dict[Candidate, float]:
    calls = 0
    folder.create()

    def on_forward() -> None:
        nonlocal calls
        calls += 1
        if calls == stop_after:
            raise Interrupted
        tell()

    return measure_isolated(
        chain,
        batches,
        candidates,
        constants,
        plan=plan,
        options=options,
        folder=folder,
        identity=identity,
        on_forward=on_forward,
        losers_of=losers_of,
    )


@pytest.fixture(scope="module")
def setting(chain_of: Callable[..., DecoderChain], random_batches: RandomBatches) -> Any:
    """A chain of three layers, three batches and their constants."""
    chain, batches = chain_of("llama-gqa"), random_batches(3, TOKENS)
    return chain, batches, measure_constants(chain, batches)


@pytest.mark.parametrize("name", READ_PLANS)
def test_it_is_the_simulators_kl_of_one_side_of_one_layer(name: str, setting: Any, tmp_path: Path) -> None:
    chain, batches, constants = setting
    plan = ReadPlan(name, 0 if name == "cache" else SPLIT)
    options = QuantizationOptions(k_layout=ScaleLayout(8), symmetric=True)
    found = kl_of(chain, batches, RunFolder(tmp_path), constants=constants, plan=plan, options=options)
    simulator = Simulator(chain, batches, plan)
    assert list(found) == CANDIDATES
    for candidate, kl in found.items():
        expected = simulator.kl({candidate.layer: spec_of(candidate, constants, options)})
        assert kl == pytest.approx(expected, rel=1e-9)
        assert kl > 0


def test_sequences_of_a_smaller_last_batch_weigh_as_much_as_the_others(
    setting: Any, random_batches: RandomBatches, tmp_path: Path
) -> None:
    chain, batches, constants = setting
    alone = kl_of(chain, batches, RunFolder(tmp_path / "1"), constants=constants)
    together = kl_of(chain, random_batches(3, TOKENS, batch_size=2), RunFolder(tmp_path / "2"), constants=constants)
    # Matrix products of another shape may flip a code.
    assert together == pytest.approx(alone, rel=0.02)


def test_each_candidate_is_stored_as_its_name_says(setting: Any) -> None:
    _, _, constants = setting
    options = QuantizationOptions(k_layout=ScaleLayout(8), v_layout=ScaleLayout(4), symmetric=True)
    key = spec_of(Candidate(1, "k", 4, "centered+balanced"), constants, options)
    assert key.v is None
    assert (key.k.bits, key.k.group_size, key.k.symmetric) == (4, 8, True)
    assert torch.equal(key.k.transform.mu, constants[1].mu)
    assert torch.equal(key.k.transform.lam, constants[1].lam_centered)
    value = spec_of(Candidate(2, "v", 2, "hadamard"), constants, options)
    assert value.k is None
    assert (value.v.bits, value.v.group_size, str(value.v.transform.kind)) == (2, 4, "hadamard")


def test_a_run_starts_at_the_candidates_own_layer(setting: Any, tmp_path: Path) -> None:
    chain, batches, constants = setting
    before = chain.count.layer_tokens
    kl_of(chain, batches, RunFolder(tmp_path), constants=constants)
    late = 3 + sum(3 - candidate.layer for candidate in CANDIDATES)
    assert chain.count.layer_tokens - before == 3 * (3 * TOKENS + late * (TOKENS - SPLIT))


@pytest.mark.parametrize("stop_after", [1, 6, 7, 11, 17])
def test_an_interrupted_run_repeats_no_forward(stop_after: int, setting: Any, tmp_path: Path) -> None:
    chain, batches, constants = setting
    whole = kl_of(chain, batches, RunFolder(tmp_path / "whole"), constants=constants)
    folder = RunFolder(tmp_path / "cut")
    with pytest.raises(Interrupted):
        kl_of(chain, batches, folder, constants=constants, stop_after=stop_after)
    before = chain.count.layer_tokens
    resumed = kl_of(chain, batches, folder, constants=constants)
    done = [(number, candidate) for number in range(3) for candidate in CANDIDATES][stop_after:]
    traced = {number for number, _ in done}
    late = 3 * len(traced) + sum(3 - candidate.layer for _, candidate in done)
    assert chain.count.layer_tokens - before == 3 * TOKENS * len(traced) + late * (TOKENS - SPLIT)
    assert resumed == whole
    before = chain.count.layer_tokens
    assert kl_of(chain, batches, folder, constants=constants) == whole
    assert chain.count.layer_tokens == before


@pytest.mark.parametrize("stop_after", [1, 2, 5, 11, 13, 17])
def test_several_sequences_at_once_give_the_same_numbers_and_one_interrupted_forward_is_repeated(
    stop_after: int, setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, batches, constants = setting
    whole = kl_of(chain, batches, RunFolder(tmp_path / "alone"), constants=constants)
    monkeypatch.setattr(isolated, "num_workers", lambda _: 2)
    monkeypatch.setattr(parallel_sequences, "num_workers", lambda _: 2)
    folder = RunFolder(tmp_path / "together")
    finish, finished = chain.finish, itertools.count(1)

    def killed(hidden: torch.Tensor) -> torch.Tensor:
        if next(finished) > stop_after:
            raise Interrupted
        return finish(hidden)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(chain, "finish", killed)
        kl_of(chain, batches, folder, constants=constants)
    # What the other thread finished after the one that was killed is lost with it.
    assert stop_after - 1 <= len(list(folder.records(JOURNAL))) <= stop_after
    assert kl_of(chain, batches, folder, constants=constants) == whole
    keys = [(r["batch"], r["layer"], r["side"], r["bits"]) for r in folder.records(JOURNAL)]
    assert len(keys) == len(set(keys)) == 18


def test_a_journal_cut_in_its_last_line_loses_that_forward_alone(setting: Any, tmp_path: Path) -> None:
    chain, batches, constants = setting
    folder = RunFolder(tmp_path)
    whole = kl_of(chain, batches, folder, constants=constants)
    journal = folder.file(JOURNAL)
    data = journal.read_bytes()
    for cut in (1, 20, 60):
        journal.write_bytes(data[:-cut])
        before = chain.count.layer_tokens
        assert kl_of(chain, batches, folder, constants=constants) == whole
        # cut 1 takes the line's end alone, which loses nothing
        assert chain.count.layer_tokens - before == (0 if cut == 1 else 3 * TOKENS + (3 + 1) * (TOKENS - SPLIT))
        assert len(list(folder.records(JOURNAL))) == 3 * len(CANDIDATES)


def test_lines_of_another_measurement_are_not_used(setting: Any, tmp_path: Path) -> None:
    chain, batches, constants = setting
    folder = RunFolder(tmp_path)
    whole = kl_of(chain, batches, folder, constants=constants)
    lines = [json.loads(line) for line in folder.file(JOURNAL).read_text().splitlines()]
    for line in lines:
        line.update(identity="theirs", kl_sum=1e6)
    foreign = "".join(json.dumps(line) + "\n" for line in lines) + '{"identity": "older"}\n[1]\n\n'
    folder.file(JOURNAL).write_text(foreign)
    before = chain.count.layer_tokens
    assert kl_of(chain, batches, folder, constants=constants) == whole
    assert chain.count.layer_tokens > before


def test_forwards_are_told_whether_done_now_or_before(setting: Any, tmp_path: Path) -> None:
    chain, batches, constants = setting
    folder, progress = RunFolder(tmp_path), []
    for _ in range(2):
        kl_of(chain, batches, folder, constants=constants, tell=lambda: progress.append(1))
    assert len(progress) == 2 * 3 * len(CANDIDATES)


def test_a_candidate_that_drives_the_model_to_nan_is_left_out_and_not_measured_again(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, batches, constants = setting
    broken = CANDIDATES[0]
    rival = replace(broken, transform="hadamard" if broken.transform == "none" else "none")
    candidates = list(dict.fromkeys([*CANDIDATES, rival]))
    spec_of = isolated.spec_of

    def faulty(candidate: Candidate, *args: Any) -> LayerSpec:
        return LayerSpec(k=Faulty(2), v=Faulty(2)) if candidate == broken else spec_of(candidate, *args)

    def measure(folder: RunFolder) -> dict[Candidate, float]:
        ticks: list[int] = []
        found = kl_of(chain, batches, folder, constants=constants, candidates=candidates, tell=lambda: ticks.append(1))
        assert len(ticks) == len(candidates) * len(batches)
        return found

    folder, healthy = RunFolder(tmp_path / "faulty"), RunFolder(tmp_path / "healthy")
    folder.create()
    healthy.create()
    expected = measure(healthy)
    monkeypatch.setattr(isolated, "spec_of", faulty)
    found = measure(folder)
    assert found == {candidate: kl for candidate, kl in expected.items() if candidate != broken}
    lines = folder.file(JOURNAL).read_bytes()
    assert [record["kl_sum"] for record in folder.records(JOURNAL)].count(None) == 1
    assert measure(folder) == found
    assert folder.file(JOURNAL).read_bytes() == lines


@dataclass
class StopAfter:
    """Names candidates as losers after so many batches, and keeps what it was told."""

    batches_of: dict[Candidate, int]
    rounds: list[tuple[set[Candidate], int]] = field(default_factory=list)

    def __call__(self, kl: Mapping[Candidate, float], num_batches: int) -> list[Candidate]:
        self.rounds.append((set(kl), num_batches))
        return [candidate for candidate in kl if self.batches_of.get(candidate) == num_batches]


def test_a_loser_is_measured_on_no_more_batches_and_has_the_mean_of_its_own(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, tmp_path: Path
) -> None:
    chain, batches = chain_of("llama-gqa"), random_batches(5, TOKENS)
    constants = measure_constants(chain, batches)
    losers = {CANDIDATES[0]: 1, CANDIDATES[3]: 2, CANDIDATES[5]: 4}
    rivals = [replace(c, transform="hadamard" if c.transform == "none" else "none") for c in losers]
    candidates = [*CANDIDATES, *rivals]
    ticks: list[int] = []

    def measure(folder: RunFolder, batches: Sequence[Batch], **how: Any) -> dict[Candidate, float]:
        ticks.clear()
        how["tell"] = lambda: ticks.append(1)
        return kl_of(chain, batches, folder, constants=constants, candidates=candidates, **how)

    folder, race = RunFolder(tmp_path / "raced"), StopAfter(losers)
    found = measure(folder, batches, losers_of=race)
    for candidate in candidates:
        count = losers.get(candidate, 5)
        alone = measure(RunFolder(tmp_path / f"whole{count}"), batches[:count])
        assert found[candidate] == pytest.approx(alone[candidate], rel=1e-12)
    left = [{c for c in candidates if losers.get(c, 5) >= count} for count in (1, 2, 4, 5)]
    assert race.rounds == list(zip(left, (1, 2, 4, 5), strict=True))
    lines = folder.file(JOURNAL).read_bytes()
    assert len(lines.splitlines()) == 5 * len(candidates) - 4 - 3 - 1
    again = measure(folder, batches, losers_of=StopAfter(losers))
    assert again == found
    assert len(ticks) == 5 * len(candidates)
    assert folder.file(JOURNAL).read_bytes() == lines


def test_a_loser_goes_on_where_what_beat_it_is_not_finite_on_later_batches(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, batches, constants = setting
    winner = CANDIDATES[0]
    loser = replace(winner, transform="hadamard" if winner.transform == "none" else "none")
    candidates, kl_sum = [winner, loser, *CANDIDATES[1:]], isolated._Measurement._kl_sum

    def faulty(measurement: Any, run: Any, layer: int, hook: Any) -> float | None:
        broken = run.batch.index > 0 and hook is hooks.get("winner")
        return None if broken else kl_sum(measurement, run, layer, hook)

    hooks: dict[str, Any] = {}
    quantized, spec_of = isolated.quantized_attention, isolated.spec_of
    named: dict[int, Candidate] = {}

    def naming(candidate: Candidate, *args: Any) -> LayerSpec:
        spec = spec_of(candidate, *args)
        named[id(spec)] = candidate
        return spec

    def hooked(specs: Any, plan: ReadPlan) -> Any:
        hook = quantized(specs, plan)
        if winner in [named[id(spec)] for spec in specs.values()]:
            hooks["winner"] = hook
        return hook

    expected = kl_of(chain, batches, RunFolder(tmp_path / "whole"), constants=constants, candidates=candidates)
    monkeypatch.setattr(isolated._Measurement, "_kl_sum", faulty)
    monkeypatch.setattr(isolated, "spec_of", naming)
    monkeypatch.setattr(isolated, "quantized_attention", hooked)
    for name in ("first", "first", "second"):
        folder, race = RunFolder(tmp_path / name), StopAfter({loser: 1})
        found = kl_of(chain, batches, folder, constants=constants, candidates=candidates, losers_of=race)
        assert found == {candidate: kl for candidate, kl in expected.items() if candidate != winner}
        assert [(winner in left, loser in left) for left, _ in race.rounds] == [
            (True, True),
            (False, True),
            (False, True),
        ]


def test_a_width_that_no_candidate_keeps_finite_is_refused_by_its_place(
    make_model: Callable[..., Any],
    chain_over: Callable[..., DecoderChain],
    random_batches: RandomBatches,
    tmp_path: Path,
) -> None:
    chain, batches = chain_over(make_model("llama-gqa")), random_batches(1, TOKENS)
    constants = measure_constants(chain, batches)
    finish = chain.finish
    chain.finish = lambda hidden: finish(hidden) * torch.nan  # type: ignore[method-assign]
    first = CANDIDATES[0]
    message = f"layer {first.layer}: its {'keys' if first.side == 'k' else 'values'} at {first.bits} bits make"
    for _ in range(2):
        with pytest.raises(NonFiniteActivationError, match=message):
            kl_of(chain, batches, RunFolder(tmp_path), constants=constants)
    assert {record["kl_sum"] for record in RunFolder(tmp_path).records(JOURNAL)} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [1, 64])
def test_memory_grows_with_depth_by_the_residual_stream_and_the_prompts_keys_and_values(
    num_heads: int,
    chain_of: Callable[..., DecoderChain],
    random_batches: RandomBatches,
    peak_bytes: Callable[[Callable[[], object]], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two sequences in flight: in one batch, or side by side with keys as wide as the residual stream.
    if is_wide := num_heads > 1:
        monkeypatch.setattr(isolated, "num_workers", lambda _: 2)
    monkeypatch.setattr(parallel_sequences, "num_workers", lambda _: 1)  # peaks are those of this thread
    tokens, width, peaks = 32, 1024, {}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads, "head_dim": 16}
    for depth in (3, 12):
        chain = chain_of("llama-gqa", num_hidden_layers=depth, hidden_size=width, intermediate_size=16, **heads)
        constants = measure_constants(chain, random_batches(1, tokens))
        for num_sequences in (2, 6):
            batches = random_batches(num_sequences, tokens, batch_size=1 if is_wide else 2)
            folder = RunFolder(tmp_path / f"{depth}-{num_sequences}")
            work = partial(kl_of, chain, batches, folder, constants=constants)
            peaks[depth, num_sequences] = peak_bytes(work)
    residual = 2 * tokens * width * 4
    prompt = 2 * SPLIT * 2 * num_heads * 16 * 4
    slack = 1.05 if is_wide else 1.01  # two threads do not reach their peaks at the same moment each time
    assert peaks[12, 2] > 12 * 0.75 * residual
    assert peaks[3, 6] <= slack * peaks[3, 2]
    assert peaks[12, 6] <= slack * peaks[12, 2]
    assert peaks[12, 2] - peaks[3, 2] <= 9 * (1.01 * residual + prompt)
