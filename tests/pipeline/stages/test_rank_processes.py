"""A search by ranks that hold the model together: what one process finds, once each, and no rank outlives its group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from kvtuner.calibration.sensitivity import SensitivityTable
from kvtuner.errors import OptionError
from kvtuner.pipeline.options import CalibrateOptions, ModelOptions
from kvtuner.pipeline.stages.rank_processes import in_groups, refuse_ranks
from kvtuner.pipeline.stages.worker_processes import WorkerPlace
from kvtuner.run_folder import RunFolder, canonical_json
from kvtuner.workers.work_claims import CLAIMS

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder

JOURNALS = ("statistics.jsonl", "candidates.jsonl", "isolated.jsonl", "measured.jsonl", "validation.jsonl")
CODES_AT_AN_EDGE = 0.02
"""Sums over split dimensions round otherwise, and a number between two codes then takes the other one."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def search(model_folder: ModelFolder, corpus_file: Path) -> tuple[str, ...]:
    """The flags of a search on a model of two layers with norms of queries and keys."""
    return (
        *("search", "--model", str(model_folder("qwen3-qk-norm")), "--data", str(corpus_file), "--budget", "3bit"),
        *("--sequence-length", "64", "--sequences", "4,3,3", "--trials", "8", "--word-bits", "32", "--no-report"),
    )


def run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


def lines_of(folder: Path) -> dict[str, list[str]]:
    """What each journal measured, without the results: which lines there are, in an order that no worker decides."""
    keys = ("batch", "layer", "side", "bits", "transform", "configuration", "offsets", "key")
    return {
        name: sorted(canonical_json([record.get(key) for key in keys]) for record in RunFolder(folder).records(name))
        for name in JOURNALS
    }


@pytest.fixture(scope="module")
def by_two(search: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two ranks that hold the model together."""
    folder = tmp_path_factory.mktemp("ranks") / "two"
    done = run((*TORCHRUN, "2", "-m", "kvtuner", *search, "--tp", "2", "--out", str(folder), "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["profile"] == str(folder / "profile.json")
    assert done.stderr.count("loading the model") == 1
    assert "of weights here" in done.stderr
    return folder


@pytest.mark.slow
def test_ranks_find_what_one_process_finds(search: tuple[str, ...], by_two: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    done = run((sys.executable, "-m", "kvtuner", *search, "--out", str(alone)))
    assert done.returncode == 0, done.stderr
    assert lines_of(by_two) == lines_of(alone)
    assert all(len(set(lines)) == len(lines) for lines in lines_of(by_two).values())
    tables = [SensitivityTable.load(RunFolder(folder)) for folder in (alone, by_two)]
    assert tables[0].identity == tables[1].identity  # the same weights, whoever holds them
    for layer, constants in tables[0].constants.items():
        for name in ("mu", "lam", "lam_centered"):
            here, there = (getattr(found, name) for found in (constants, tables[1].constants[layer]))
            torch.testing.assert_close(here, there, rtol=2e-3, atol=1e-4)  # two steps of fp16
    for candidate, scores in tables[0].scores.items():
        others = tables[1].scores[candidate]
        assert (others.kl is None) == (scores.kl is None), candidate
        for name, expected in asdict(scores).items():
            if expected is not None:
                assert getattr(others, name) == pytest.approx(expected, rel=CODES_AT_AN_EDGE), (candidate, name)
    profiles = [json.loads((folder / "profile.json").read_text()) for folder in (alone, by_two)]
    stored = [
        [(layer[side]["bits"], layer[side].get("transform")) for layer in profile["layers"] for side in ("k", "v")]
        for profile in profiles
    ]
    assert stored[0] == stored[1]
    kls = [profile["quality"]["measured_kl"]["mean"] for profile in profiles]
    assert kls[1] == pytest.approx(kls[0], rel=CODES_AT_AN_EDGE)


@pytest.mark.full
def test_two_groups_share_the_work_of_one(search: tuple[str, ...], by_two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "four"
    done = run((*TORCHRUN, "4", "-m", "kvtuner", *search, "--tp", "2", "--out", str(folder)))
    assert done.returncode == 0, done.stderr
    assert (folder / "profile.json").read_bytes() == (by_two / "profile.json").read_bytes()
    assert lines_of(folder) == lines_of(by_two)
    workers = {record["worker"] for record in RunFolder(folder).records(CLAIMS) if record["worker"] is not None}
    assert len(workers) == 2  # a group is one worker


@pytest.mark.slow
def test_a_killed_rank_ends_its_group_which_goes_on_with_the_same_command(
    search: tuple[str, ...], by_two: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the test holds its port throughout

    def start(rank: int) -> subprocess.Popen[str]:  # as Slurm does, which ends no rank for another one
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        environment = {**os.environ, **{name: str(value) for name, value in {**place, **meeting}.items()}}
        command = (sys.executable, "-m", "kvtuner", *search, "--tp", "2", "--out", str(folder))
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    ranks = [start(0), start(1)]
    begun = time.monotonic()
    while not folder.exists() or sum(map(len, lines_of(folder).values())) < 20:
        assert time.monotonic() - begun < 300
        ended = [rank for rank in ranks if rank.poll() is not None]
        assert not ended, [rank.communicate() for rank in ended]
        time.sleep(0.05)
    ranks[1].kill()
    _, messages = ranks[0].communicate(timeout=120)
    ranks[1].communicate()
    assert ranks[0].returncode == 1
    assert "rank 1 of this group ended" in messages
    assert not (folder / "profile.json").exists()
    done = run((*TORCHRUN, "2", "-m", "kvtuner", *search, "--tp", "2", "--out", str(folder)))
    assert done.returncode == 0, done.stderr
    assert (folder / "profile.json").read_bytes() == (by_two / "profile.json").read_bytes()
    assert lines_of(folder) == lines_of(by_two)


@pytest.mark.slow
def test_a_model_that_cannot_be_split_is_refused_before_its_weights_are_read(
    model_folder: ModelFolder, tmp_path: Path
) -> None:
    model = str(model_folder("gpt-oss"))
    flags = ("calibrate", "--model", model, "--sequence-length", "64", "--tp", "2", "--out", str(tmp_path / "run"))
    done = run((*TORCHRUN, "2", "-m", "kvtuner", *flags))
    assert done.returncode != 0
    assert "kvtuner calibrate: error: transformers' plan of tensor parallelism splits" in done.stderr
    assert "--stream" in done.stderr


@pytest.mark.parametrize(
    ("options", "place", "reason"),
    [
        ({"stream": True}, WorkerPlace(0, 2, 0, 2), "--tp and --stream are two ways"),
        ({"workers": 2}, WorkerPlace(0, 2, 0, 2), "leave --workers out"),
        ({}, WorkerPlace(), "this is one process; start torchrun --standalone --nproc-per-node 2 "),
        ({}, WorkerPlace(0, 3, 0, 3), "torchrun started 3"),
        ({"model": ModelOptions(device="cuda:1")}, WorkerPlace(0, 2, 0, 2), "leave --device cuda:1 out"),
    ],
)
def test_what_ranks_cannot_have_is_refused(
    options: dict[str, Any], place: WorkerPlace, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(OptionError, match=reason):
        refuse_ranks(CalibrateOptions(tp=2, **options), place)
    refuse_ranks(CalibrateOptions(**options), place)
    refuse_ranks(CalibrateOptions(tp=2), WorkerPlace(2, 4, 2, 4))


def test_processes_without_an_address_to_meet_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(OptionError, match="where its processes meet"):
        refuse_ranks(CalibrateOptions(tp=2), WorkerPlace(0, 2, 0, 2))


def test_processes_next_to_each_other_make_a_group() -> None:
    assert [in_groups(WorkerPlace(number, 8), 4) for number in (0, 3, 4, 7)] == [(0, 0), (0, 3), (1, 0), (1, 3)]
