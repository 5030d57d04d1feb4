"""A workbench goes from a model and text to a table, in a folder that remembers what it was measured on."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.calibration import workbench as calibrate_module
from kvtuner.calibration.candidate_pass import CandidateMeasurement
from kvtuner.calibration.corpus import MIN_SEQUENCE_LENGTH, Corpus, CorpusSource, load_corpus
from kvtuner.calibration.isolated import candidates, forwards
from kvtuner.calibration.isolated.candidates import MEASURED_TRANSFORMS
from kvtuner.calibration.isolated.forwards import JOURNAL
from kvtuner.calibration.model_loading import ModelSource, load_model
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.sensitivity import TABLE_FILE, Candidate, SensitivityTable, missing_candidates
from kvtuner.calibration.shared_passes import CANDIDATES
from kvtuner.calibration.workbench import IDENTITY_FILE, CalibrationOptions, Workbench, measure_table
from kvtuner.errors import CorpusError, NonFiniteActivationError, RunFolderError
from kvtuner.precision import SEARCHED_BITS, ExactWindow, ScaleLayout
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.run_folder import EVENTS, RunFolder
from kvtuner.transforms import candidate_transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fixture_types import LoadTiny, ModelFolder

    from kvtuner.calibration.corpus import SplitName
    from kvtuner.read_plan_names import ReadPlanName

NUM_CANDIDATES = len(candidate_transforms("k")) + len(candidate_transforms("v"))
"""The candidates of a layer at one width."""
NUM_ISOLATED = 2 * MEASURED_TRANSFORMS
"""The candidates of a layer whose KL is measured: all at 2 bits, and one of each side at each width above."""


@pytest.fixture(scope="module")
def bench_of(load_tiny: LoadTiny, corpus_file: Path) -> Callable[..., Workbench]:
    """`bench_of(family, length=32, sequences=(2, 1, 1), seed=0, **options)`: a workbench, its counter at 0."""

    def make(
        family: str = "llama-gqa",
        *,
        length: int = 32,
        sequences: tuple[int, int, int] = (2, 1, 1),
        model_seed: int = 0,
        corpus_seed: int = 0,
        **options: Any,
    ) -> Workbench:
        loaded = load_tiny(family, seed=model_seed)
        source = CorpusSource(str(corpus_file), sequence_length=length, num_sequences=sequences, seed=corpus_seed)
        corpus = load_corpus(source, loaded.tokenizer)
        bench = Workbench.prepare(loaded, corpus, CalibrationOptions(**{"num_draws": 2, **options}))
        bench.chain.count.layer_tokens = 0
        return bench

    return make


@pytest.fixture(scope="module", autouse=True)
def _no_transform_is_too_bad() -> Iterator[None]:
    """Lets the first transforms of every place be measured on all batches, so that forwards can be counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "LARGEST_FISHER_RATIO", math.inf)
        patch.setattr(forwards, "stages", lambda num_batches: [num_batches])
        yield


@pytest.fixture(scope="module")
def whole(bench_of: Callable[..., Workbench], tmp_path_factory: pytest.TempPathFactory) -> SensitivityTable:
    """The table of a run that nobody interrupts."""
    return measure_table(bench_of(), RunFolder(tmp_path_factory.mktemp("whole")))


def assert_tables_equal(first: SensitivityTable, second: SensitivityTable) -> None:
    assert first.scores == second.scores
    assert first.pairs == second.pairs
    assert first.identity == second.identity
    for one, other in zip(first.constants.values(), second.constants.values(), strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("mu", "lam", "lam_centered"))


def interrupt_after(monkeypatch: pytest.MonkeyPatch, appends: int) -> None:
    """Make the run end as by Ctrl-C after so many lines of the journal."""
    original, seen = RunFolder.append, []

    def append(self: RunFolder, name: str, record: Any) -> None:
        original(self, name, record)
        if name == JOURNAL:
            seen.append(1)
            if len(seen) == appends:
                raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "append", append)


def test_a_second_call_runs_no_layer_at_all(
    bench_of: Callable[..., Workbench], whole: SensitivityTable, tmp_path: Path
) -> None:
    folder, bench = RunFolder(tmp_path / "run"), bench_of()
    first = measure_table(bench, folder)
    assert_tables_equal(first, whole)
    done = bench.chain.count.layer_tokens
    assert done > 0
    assert_tables_equal(measure_table(bench, folder), first)
    assert bench.chain.count.layer_tokens == done
    fresh = bench_of()
    assert_tables_equal(measure_table(fresh, folder), first)
    assert fresh.chain.count.layer_tokens == 0


def test_the_table_holds_every_candidate_and_every_width_has_a_kl(
    bench_of: Callable[..., Workbench], tmp_path: Path
) -> None:
    bench = bench_of("qwen2-bias")
    table = measure_table(bench, RunFolder(tmp_path))
    assert len(table.scores) == 2 * NUM_CANDIDATES * len(SEARCHED_BITS)
    assert list(missing_candidates(table, "kl")) == []
    with_kl = [candidate for candidate, scores in table.scores.items() if scores.kl is not None]
    wider = [bits for bits in SEARCHED_BITS if bits > min(SEARCHED_BITS)]
    assert len(with_kl) == 2 * (NUM_ISOLATED + 2 * len(wider))
    for layer, side, bits in product(range(2), ("k", "v"), wider):
        least = min(table.of(layer, side, bits).values(), key=lambda scores: scores.fisher)
        assert least.kl == least.fisher, "above the narrowest width the Fisher score is the KL"
    assert table.geometry == bench.loaded.shape.geometry
    assert table.identity == json.loads(json.dumps(bench.identity()))
    assert_tables_equal(SensitivityTable.load(RunFolder(tmp_path)), table)


def test_scores_that_need_no_isolated_kl_skip_it_and_a_later_run_adds_only_that(
    bench_of: Callable[..., Workbench], whole: SensitivityTable, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    cheap = bench_of(score="fisher")
    first = measure_table(cheap, folder)
    assert all(scores.kl is None for scores in first.scores.values())
    assert not folder.file(JOURNAL).exists()
    assert_tables_equal(measure_table(bench_of(score="e_o"), folder), first)
    full = bench_of(score="kl")
    second = measure_table(full, folder)
    assert_tables_equal(second, whole)
    assert {c: replace(s, kl=None) for c, s in second.scores.items()} == dict(first.scores)
    # Per sequence: a trace of all 32 tokens, and of the 24 after the prompt another, and each isolated candidate of
    # a layer from that layer on.
    assert full.chain.count.layer_tokens == 2 * (32 * 3 + 24 * (3 + NUM_ISOLATED * (3 + 2 + 1)))
    after = bench_of(score="fisher")
    assert_tables_equal(measure_table(after, folder), second)
    assert after.chain.count.layer_tokens == 0


def test_a_deeper_model_measures_isolated_kl_on_fewer_sequences_beside_their_own_fisher_score(
    bench_of: Callable[..., Workbench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "LAYERS_TIMES_SEQUENCES", 3)
    folder, bench = RunFolder(tmp_path), bench_of()
    table = measure_table(bench, folder)
    lines = list(folder.records(JOURNAL))
    assert {record["batch"] for record in lines} == {0}
    assert len(lines) == 3 * NUM_ISOLATED
    first = next(record for record in folder.records(CANDIDATES) if record["batch"] == 0)
    fisher = {Candidate(*place): errors["fisher"] for *place, errors in first["sums"]}
    for record in lines:
        candidate = Candidate(record["layer"], record["side"], record["bits"], record["transform"])
        log_ratio = math.log(record["kl_sum"] / 24 / fisher[candidate])
        moved = math.exp(math.copysign(max(0.0, abs(log_ratio) - 0.4), log_ratio))
        scores = table.scores[candidate]
        assert scores.kl == pytest.approx(scores.fisher * moved)


@pytest.mark.parametrize("appends", [1, NUM_ISOLATED + 1, 3 * NUM_ISOLATED + 2])
def test_a_run_interrupted_among_isolated_forwards_resumes_with_what_is_left(
    appends: int,
    bench_of: Callable[..., Workbench],
    whole: SensitivityTable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, cut = RunFolder(tmp_path), bench_of()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, appends)
        measure_table(cut, folder)
    assert len(list(folder.records(JOURNAL))) == appends
    resumed = bench_of()
    assert_tables_equal(measure_table(resumed, folder), whole)
    # What is left of each sequence's three layers, and two traces of each sequence that is not finished.
    of_sequence = 3 * NUM_ISOLATED
    left = [3 - n % of_sequence // NUM_ISOLATED for n in range(appends, 2 * of_sequence)]
    traces = 2 - appends // of_sequence
    assert resumed.chain.count.layer_tokens == 24 * (sum(left) + 3 * traces) + 32 * 3 * traces
    lines = [json.dumps(record, sort_keys=True) for record in folder.records(JOURNAL)]
    assert len(lines) == len(set(lines)) == 2 * of_sequence


def test_a_run_interrupted_in_the_candidate_pass_starts_that_pass_again(
    bench_of: Callable[..., Workbench], whole: SensitivityTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, original = RunFolder(tmp_path), CandidateMeasurement._score_layer

    def stop(self: Any, layer_id: int, *args: Any) -> Any:
        if layer_id == 1:
            raise KeyboardInterrupt
        return original(self, layer_id, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CandidateMeasurement, "_score_layer", stop)
        measure_table(bench_of(), folder)
    assert not folder.file(TABLE_FILE).exists()
    assert_tables_equal(measure_table(bench_of(), folder), whole)


def test_pairs_asked_for_later_are_added_without_isolated_forwards(
    bench_of: Callable[..., Workbench], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    first = measure_table(bench_of(), folder)
    journal = folder.file(JOURNAL).read_bytes()
    second = measure_table(bench_of(with_pairs=True), folder)
    assert len(second.pairs) == 3 * 9
    assert second.scores == first.scores
    assert folder.file(JOURNAL).read_bytes() == journal


def test_each_phase_is_logged(bench_of: Callable[..., Workbench], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    measure_table(bench_of(), folder)
    assert [record["event"] for record in folder.records(EVENTS)] == ["statistics", "candidates", "isolated"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"family": "qwen2-bias"}, "model_config"),
        ({"model_seed": 1}, "model_weights"),
        ({"corpus_seed": 1}, "calibrate_tokens"),
        ({"length": 16, "sequences": (4, 2, 2)}, "sequence_length"),
        ({"read_plan": "hit"}, "read_plan"),
        ({"num_draws": 3}, "num_draws"),
        ({"batch_size": 2}, "batch_size"),
        ({"seed": 5}, "seed"),
        ({"quant": QuantizationOptions(k_layout=ScaleLayout(8))}, "k_group_size"),
        ({"quant": QuantizationOptions(v_layout=ScaleLayout(8))}, "v_group_size"),
        ({"quant": QuantizationOptions(symmetric=True)}, "symmetric"),
    ],
)
def test_a_folder_of_another_measurement_is_refused_by_the_field_that_differs(
    changes: dict[str, Any], field: str, bench_of: Callable[..., Workbench], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    folder.check_identity(IDENTITY_FILE, bench_of().identity(), "measurements")
    other = bench_of(**changes)
    with pytest.raises(RunFolderError, match=rf"holds the measurements of another run: {field} is .* there and"):
        measure_table(other, folder)
    assert other.chain.count.layer_tokens == 0


def test_measurements_of_another_version_of_the_code_are_refused(
    bench_of: Callable[..., Workbench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    for older in ({"measurement": calibrate_module.MEASUREMENT - 1}, {}):  # the first version had no number
        identity = bench_of().identity()
        identity.pop("measurement")
        folder.file(IDENTITY_FILE).unlink(missing_ok=True)
        folder.check_identity(IDENTITY_FILE, {**identity, **older}, "measurements")
        with pytest.raises(RunFolderError, match="measurement is"):
            measure_table(bench_of(), folder)


def test_a_folder_of_another_dtype_is_refused_by_the_dtype_and_not_by_the_weights(
    bench_of: Callable[..., Workbench], model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder, bench = RunFolder(tmp_path), bench_of()
    folder.check_identity(IDENTITY_FILE, bench.identity(), "measurements")
    half = load_model(ModelSource(str(model_folder()), device="cpu", dtype="bfloat16"))
    with pytest.raises(RunFolderError, match=r"dtype is .*float32.* there and .*bfloat16"):
        measure_table(replace(bench, loaded=half), folder)


def test_tokens_that_the_model_has_no_embedding_of_are_refused(bench_of: Callable[..., Workbench]) -> None:
    bench = bench_of()
    for split in ("calibrate", "select", "report"):
        splits = {name: ids.clone() for name, ids in bench.corpus.splits.items()}
        splits[split][0, 5] = 319
        Workbench.prepare(bench.loaded, Corpus(splits), bench.options)
        splits[split][0, 5] = 320
        with pytest.raises(CorpusError, match="below the 320 embedding rows of llama-gqa, but its tokenizer gives 320"):
            Workbench.prepare(bench.loaded, Corpus(splits), bench.options)


@pytest.mark.parametrize("split", ["select", "report"])
def test_nan_of_a_token_outside_the_calibrate_split_is_an_error_that_names_the_layer(
    split: SplitName, bench_of: Callable[..., Workbench], make_model: Callable[..., Any]
) -> None:
    shared = bench_of()
    splits = {name: ids.clamp(max=300) for name, ids in shared.corpus.splits.items()}
    splits[split][0, 5] = 310
    model = make_model("llama-gqa")
    model.set_attn_implementation(shared.loaded.model.config._attn_implementation)
    model.requires_grad_(False).get_input_embeddings().weight[310] = torch.nan
    bench = Workbench.prepare(replace(shared.loaded, model=model), Corpus(splits), shared.options)
    bench.simulator("calibrate").prepare()
    with pytest.raises(NonFiniteActivationError, match="layer 0: its inputs hold NaN or infinity"):
        bench.simulator(split).prepare()


@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_the_shortest_sequences_have_something_to_score_under_every_read_plan(
    read_plan: ReadPlanName, bench_of: Callable[..., Workbench]
) -> None:
    bench = bench_of(length=MIN_SEQUENCE_LENGTH, read_plan=read_plan)
    assert bench.plan.split > 0 or read_plan == "cache"
    assert bench.simulator("report").measure({}).nll.isfinite().any()


def test_every_measurement_setting_is_part_of_the_identity(bench_of: Callable[..., Workbench]) -> None:
    bench = bench_of()
    first = bench.identity()
    shorter = replace(bench.loaded, shape=replace(bench.loaded.shape, context_length=100))
    assert replace(bench, loaded=shorter).identity() != first
    for split in ("calibrate", "select", "report"):
        splits = {name: ids.clone() for name, ids in bench.corpus.splits.items()}
        splits[split][0, 5] += 1
        assert replace(bench, corpus=Corpus(splits)).identity()[f"{split}_tokens"] != first[f"{split}_tokens"]
    for score in ("fisher", "e_o"):
        assert replace(bench, options=replace(bench.options, score=score)).identity() == first
    windowed = replace(bench.options, quant=replace(bench.options.quant, window=ExactWindow(32)))
    assert replace(bench, options=windowed).identity() == {**first, "residual_length": 32, "sinks": 0}
    assert not {"residual_length", "sinks"} & set(first)  # an older run folder goes on


def test_a_table_copied_from_another_run_is_refused(bench_of: Callable[..., Workbench], tmp_path: Path) -> None:
    measure_table(bench_of(score="fisher"), RunFolder(tmp_path / "theirs"))
    mine = RunFolder(tmp_path / "mine")
    mine.create()
    shutil.copy(tmp_path / "theirs" / TABLE_FILE, mine.file(TABLE_FILE))
    with pytest.raises(RunFolderError, match="was measured on something else: model_weights is"):
        measure_table(bench_of(score="fisher", model_seed=1), mine)


@pytest.mark.parametrize("name", [TABLE_FILE, IDENTITY_FILE])
@pytest.mark.parametrize("damage", ["cut", "flip", "foreign"])
def test_a_damaged_file_is_refused_and_nothing_is_overwritten(
    name: str, damage: str, bench_of: Callable[..., Workbench], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    measure_table(bench_of(score="fisher"), folder)
    good = folder.file(name).read_bytes()
    middle = good.index(b'"seed": ') + len('"seed": ')
    bad = {
        "cut": good[: len(good) // 2],
        "flip": good[:middle] + b"9" + good[middle + 1 :],
        "foreign": b'{"payload": {}}',
    }[damage]
    folder.file(name).write_bytes(bad)
    with pytest.raises(RunFolderError, match=f"{name} is damaged"):
        measure_table(bench_of(), folder)
    assert folder.file(name).read_bytes() == bad


def test_splits_are_read_at_positions_of_their_own_the_same_each_time(bench_of: Callable[..., Workbench]) -> None:
    bench = bench_of(sequences=(3, 3, 3))
    starts = {}
    for split in ("calibrate", "select", "report"):
        first, again = (torch.cat([batch.position_ids[:, 0] for batch in bench.batches(split)]) for _ in range(2))
        assert torch.equal(first, again)
        starts[split] = first.tolist()
    assert len({tuple(value) for value in starts.values()}) == 3
    assert [batch.position_ids[0, -1].item() for batch in bench.batches("report", "large")] == [511] * 3


def test_the_simulator_measures_the_split_it_was_asked_for(bench_of: Callable[..., Workbench]) -> None:
    bench = bench_of(sequences=(2, 1, 3))
    for split, count in (("calibrate", 2), ("select", 1), ("report", 3)):
        assert bench.simulator(split).measure({}).kl.shape == (count, 32 - 8)


def test_counts_that_are_reported_stand_in_the_table(whole: SensitivityTable) -> None:
    assert whole.info == {"calibrate_tokens": 64, "split_tokens": 8}


@pytest.mark.slow
def test_every_family_calibrates_from_disk(family: str, bench_of: Callable[..., Workbench], tmp_path: Path) -> None:
    table = measure_table(bench_of(family, length=64, batch_size=2), RunFolder(tmp_path))
    for layer in range(table.geometry.num_layers):
        for side in ("k", "v"):
            by_bits = [table.best(layer, side, bits, "kl")[1] for bits in SEARCHED_BITS]
            assert by_bits == sorted(by_bits, reverse=True)
