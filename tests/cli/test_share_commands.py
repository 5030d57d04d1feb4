"""A profile travels: pushed after a preview, pulled by commit, listed, and named wherever a profile is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from fixture_types import MakeKeys, ModelFolder, RunCommand
    from hub_server import LoopbackHub

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]

REPO = "me/tiny-kv4"


@pytest.fixture(scope="module")
def reported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its report."""
    from kvtuner.cli import main

    folder = Path(shutil.copytree(finished, tmp_path_factory.mktemp("reported") / "run"))
    assert main(["report", str(folder)]) == 0
    return folder


@pytest.fixture
def copied(reported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reported, tmp_path / "run"))


def test_the_preview_names_every_file_and_pushes_nothing(run: RunCommand, hub: LoopbackHub, reported: Path) -> None:
    status, out, err = run("push", reported, "--repo", REPO, "--dry-run", "--json")
    plan = json.loads(out)
    assert status == 0 and hub.repos == {}
    assert {"README.md", "profile.json", "report.html"} < set(plan["files"])
    assert all(name in err for name in plan["files"]) and "a new public repository" in err
    assert plan["private"] is False and not hub.requested("POST", "")


@pytest.mark.parametrize("private", [False, True])
def test_the_preview_says_who_will_see_a_repository_that_is_there(
    run: RunCommand, hub: LoopbackHub, reported: Path, private: bool
) -> None:
    commit = hub.repo(REPO, {"notes.txt": b"mine"}, private=private).refs["main"]
    status, out, err = run("push", reported, "--repo", REPO, "--dry-run", "--json")
    kind = "private" if private else "public"
    assert status == 0 and f"{REPO}: onto {commit} of a {kind} repository\n" in err
    assert json.loads(out)["private"] is private


@pytest.mark.parametrize(
    ("variables", "reason"),
    [({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"), ({"HF_ENDPOINT": "http://127.0.0.1:1"}, "cannot be reached")],
)
def test_a_preview_needs_no_network_and_no_token(
    variables: dict[str, str], reason: str, hub: LoopbackHub, reported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = kvtuner("push", str(reported), "--repo", REPO, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert {"README.md", "profile.json", "report.html"} < set(plan["files"]) and plan["parent"] is None
    assert reason in plan["unknown_parent"] and reason in done.stderr and hub.requests == []
    assert all(f"uploads  {name}" in done.stderr for name in plan["files"])
    assert all(line in done.stderr for line in plan["card"].splitlines())
    pushed = kvtuner("push", str(reported), "--repo", REPO, "--yes")
    assert pushed.returncode == 2 and reason in pushed.stderr


def test_a_preview_without_a_token_does_not_take_a_private_repository_for_none(
    hub: LoopbackHub, reported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    hub.repo(REPO, {"profile.json": b"{}"}, private=True)
    done = kvtuner("push", str(reported), "--repo", REPO, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert "or it is private" in plan["unknown_parent"] and "a new public" not in done.stderr
    assert "onto what nobody here knows (private or public)," in done.stderr and plan["private"] is None


def test_without_somebody_to_ask_nothing_is_pushed(run: RunCommand, hub: LoopbackHub, reported: Path) -> None:
    status, _, err = run("push", reported, "--repo", REPO)
    assert status == 2 and "add --yes" in err and hub.repos == {}


def test_push_pull_and_use_by_commit(run: RunCommand, hub: LoopbackHub, reported: Path, tmp_path: Path) -> None:
    status, out, _ = run("push", reported, "--repo", REPO, "--yes", "--json")
    summary = json.loads(out)
    assert status == 0 and len(hub.repos[REPO].commits) == 2, "the repository's first commit, and ours"
    files = hub.repos[REPO].commits[summary["commit"]]
    assert files["profile.json"] == (reported / "profile.json").read_bytes()
    assert files["report.html"] == (reported / "report.html").read_bytes()
    assert any(name.startswith("pictures/") for name in files)

    named = f"{REPO}@{summary['commit']}"
    status, out, _ = run("pull", named, "--out", tmp_path / "p.json", "--json")
    pulled = json.loads(out)
    assert status == 0 and (tmp_path / "p.json").read_bytes() == files["profile.json"]
    digest = pulled["digest"]

    for words in (("show", named), ("validate", f"{named}#{digest}"), ("diff", named, reported / "profile.json")):
        status, out, err = run(*words)
        assert status == 0 and digest in out, err
    status, _, err = run("show", f"{named}#sha256:{'0' * 64}")
    assert status == 2 and "was asked for" in err
    status, out, _ = run("list", "--json")
    rows = [row for row in json.loads(out) if row["where"] == "cache"]
    assert [row["name"] for row in rows] == [f"{named}:profile.json"] and rows[0]["digest"] == digest


def test_a_branch_is_said_to_move(run: RunCommand, hub: LoopbackHub, reported: Path) -> None:
    hub.repo(REPO, {"profile.json": (reported / "profile.json").read_bytes()})
    commit = hub.repos[REPO].refs["main"]
    status, _, err = run("show", REPO)
    assert status == 0 and f"{REPO}@main may change; it is {REPO}@{commit} now" in err


def test_pushing_the_same_again_makes_no_commit(run: RunCommand, hub: LoopbackHub, reported: Path) -> None:
    assert run("push", reported, "--repo", REPO, "--yes")[0] == 0
    before = dict(hub.repos[REPO].commits)
    assert run("push", reported, "--repo", REPO, "--yes")[0] == 0
    assert hub.repos[REPO].commits.keys() == before.keys()


def test_what_belonged_to_the_replaced_profile_goes(run: RunCommand, hub: LoopbackHub, reported: Path) -> None:
    old = {"profile.json": b"{}", "profile.json.sig": b"old", "profile.evaluation-x.json": b"{}", "notes.txt": b"mine"}
    hub.repo(REPO, old)
    status, _, err = run("push", reported, "--repo", REPO, "--yes")
    files = hub.repos[REPO].commits[hub.repos[REPO].refs["main"]]
    assert status == 0 and files["notes.txt"] == b"mine"
    assert "profile.json.sig" not in files and "profile.evaluation-x.json" not in files
    assert "removes  profile.json.sig" in err and "replaces profile.json" in err


def test_the_card_says_what_a_hub_and_a_person_look_for(run: RunCommand, hub: LoopbackHub, reported: Path) -> None:
    plan = json.loads(run("push", reported, "--repo", REPO, "--dry-run", "--json", "--license", "mit")[1])
    profile = json.loads((reported / "profile.json").read_text())
    _, metadata, body = plan["card"].split("---\n", 2)
    card = yaml.safe_load(metadata)
    assert card["license"] == "mit" and card["library_name"] == "kvtuner"
    assert {"kv-cache", "sglang", "kvtuner"} <= set(card["tags"])
    assert "base_model" not in card, "a folder's name is no model of the hub"
    assert profile["digest"] in body and f"{profile['budget']['bytes_per_token']:,} bytes per token" in body
    rows = re.findall(r"^\| (.+?) \|", body, re.MULTILINE)
    assert {"this profile", *(row["name"] for row in profile["quality"]["baselines"])} <= set(rows)
    assert f"    {profile['provenance']['command']}\n" in body
    assert f"    kvtuner pull '{REPO}@main#{profile['digest']}'\n" in body
    assert "--model-path FOLDER_OF_THE_MODEL" in body and f"your copy of `{profile['model']['id']}`" in body
    hub.repo(REPO, {"notes.txt": b"mine"}).commit({}, branch="v2")
    other = json.loads(run("push", reported, "--repo", REPO, "--dry-run", "--json", "--revision", "v2")[1])
    assert f"--kvtuner-profile '{REPO}@v2#{profile['digest']}'" in other["card"]


def test_the_card_of_a_model_of_the_hub_names_it_as_its_base(
    run: RunCommand, hub: LoopbackHub, copied: Path, tmp_path: Path
) -> None:
    path = copied / "profile.json"
    document = json.loads(path.read_text())
    document["model"]["id"] = "Qwen/Qwen2.5-7B-Instruct"
    document["provenance"]["calibration"]["corpus"] = "allenai/c4"
    document["quality"]["baselines"][0]["name"] = "x | <b>`y`</b> [z](http://evil)"
    path.write_text(json.dumps(document))
    plan = json.loads(run("push", path, "--repo", REPO, "--dry-run", "--json")[1])
    card = yaml.safe_load(plan["card"].split("---\n", 2)[1])
    assert card["base_model"] == "Qwen/Qwen2.5-7B-Instruct" and card["base_model_relation"] == "quantized"
    assert card["datasets"] == ["allenai/c4"]
    body = plan["card"].split("---\n", 2)[2]
    assert "<b>" not in body and "](http" not in body and "pypi.org" not in body
    (row,) = (line for line in body.splitlines() if "evil" in line)
    assert row.count("|") == 6, "a name ends no cell"


def test_a_link_publishes_nothing(run: RunCommand, hub: LoopbackHub, copied: Path, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_bytes(b"hf_SECRET")
    for name in ("report.html", "profile.json.sig", "layers.png", "profile.evaluation-x-1.json"):
        path = copied / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        path.symlink_to(secret)
        status, _, err = run("push", copied, "--repo", f"me/{name}", "--yes")
        if name == "layers.png":  # no picture of the report's is called so
            repo = hub.repos[f"me/{name}"]
            assert status == 0 and b"hf_SECRET" not in b"".join(repo.commits[repo.refs["main"]].values())
        else:
            assert status == 2 and "is a link" in err and f"me/{name}" not in hub.repos
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    picture = next(copied.glob("*.png"))
    picture.write_bytes(b"hf_SECRET")
    status, _, err = run("push", copied, "--repo", "me/other", "--yes")
    assert status == 2 and "is no picture of a report" in err and "me/other" not in hub.repos
    (copied / "holiday.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    plan = json.loads(run("push", copied, "--repo", "me/other", "--dry-run", "--no-report", "--json")[1])
    assert set(plan["files"]) == {"README.md", "profile.json"}


def test_a_signature_of_other_bytes_is_not_pushed(
    run: RunCommand, hub: LoopbackHub, copied: Path, keys: MakeKeys
) -> None:
    path = copied / "profile.json"
    assert run("sign", path, "--private-key", keys("mine")[0])[0] == 0
    plan = json.loads(run("push", copied, "--repo", REPO, "--dry-run", "--json")[1])
    assert "profile.json.sig" in plan["files"]
    path.write_text(path.read_text() + "\n")
    status, _, err = run("push", copied, "--repo", REPO, "--yes")
    assert status == 2 and "signs another content" in err and hub.repos == {}


def test_a_pushed_signature_is_verified_where_it_arrives(
    run: RunCommand, hub: LoopbackHub, copied: Path, keys: MakeKeys, tmp_path: Path
) -> None:
    private, public = keys("mine")
    assert run("sign", copied / "profile.json", "--private-key", private)[0] == 0
    assert run("push", copied, "--repo", REPO, "--yes")[0] == 0
    assert run("verify", REPO, "--identity", f"key:{public}")[0] == 0
    copy = tmp_path / "here.json"
    assert run("pull", REPO, "--out", copy)[0] == 0
    assert run("verify", copy, "--identity", f"key:{public}")[0] == 0
    assert run("verify", copy, "--identity", f"key:{keys('other')[1]}")[0] == 2


def test_a_pull_overwrites_nothing_that_nobody_said(
    run: RunCommand, hub: LoopbackHub, reported: Path, tmp_path: Path
) -> None:
    hub.repo(REPO, {"profile.json": (reported / "profile.json").read_bytes()})
    mine = tmp_path / "mine.json"
    mine.write_text("precious")
    (tmp_path / "mine.json.sig").write_text("of something else")
    status, _, err = run("pull", REPO, "--out", mine)
    assert status == 2 and "--force" in err and mine.read_text() == "precious"
    assert run("pull", REPO, "--out", mine, "--force")[0] == 0
    assert mine.read_bytes() == (reported / "profile.json").read_bytes()
    assert not (tmp_path / "mine.json.sig").exists(), "a signature of another file is worse than none"


def test_an_evaluation_names_no_folder_of_this_machine(reported: Path, tmp_path: Path) -> None:
    from kvtuner.pipeline.eval_bench_options import EvalOptions
    from kvtuner.pipeline.provenance import result_command

    digest = json.loads((reported / "profile.json").read_text())["digest"]
    for named in (str(reported / "profile.json"), f"{reported / 'profile.json'}#{digest}", str(tmp_path / "gone.json")):
        command = result_command("eval", EvalOptions(profile=named))
        assert str(tmp_path.parent.name) not in " ".join(command) and command[2].startswith(
            ("profile.json", "gone.json")
        )
    command = result_command("eval", EvalOptions(profile=f"{REPO}@v1:x.json#{digest}"))
    assert command[2] == f"{REPO}@v1:x.json#{digest}"


def test_the_command_of_a_profile_is_the_search_that_made_it(reported: Path) -> None:
    from kvtuner.cli.parser import build_parser, parse

    profile = json.loads((reported / "profile.json").read_text())
    words = shlex.split(profile["provenance"]["command"])
    assert words[:2] == ["kvtuner", "search"]
    args = parse(build_parser(), words[1:])
    assert args.budget == [profile["budget"]["asked"]]
    assert args.model == profile["model"]["id"] and "/" not in args.data
    assert args.sequence_length == profile["provenance"]["calibration"]["sequence_length"]
    assert str(reported) not in profile["provenance"]["command"]


def test_an_evaluation_of_another_profile_is_not_pushed(run: RunCommand, hub: LoopbackHub, copied: Path) -> None:
    status, _, err = run("push", copied / "nothing.json", "--repo", REPO, "--yes")
    assert status == 2 and "nothing.json" in err
    (copied / "profile.evaluation-x-1.json").write_text("{}")
    status, _, err = run("push", copied, "--repo", REPO, "--yes")
    assert status == 2 and "profile.evaluation-x-1.json" in err and hub.repos == {}


@pytest.mark.parametrize("words", [("push", "--repo", "nobody"), ("pull",), ("push",)])
def test_wrong_words_are_refused_in_one_line(words: tuple[str, ...], reported: Path) -> None:
    done = kvtuner(words[0], str(reported), *words[1:])
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_a_process_of_its_own_pulls_from_the_named_endpoint_and_keeps_the_token_to_itself(
    hub: LoopbackHub, reported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo(REPO, {"profile.json": (reported / "profile.json").read_bytes()}, private=True)
    done = kvtuner("pull", REPO, "--json")
    assert done.returncode == 0, done.stderr
    pulled = json.loads(done.stdout)
    assert Path(pulled["file"]).is_relative_to(os.environ["KVTUNER_CACHE"])
    assert hub.token not in done.stdout + done.stderr
    assert hub.token not in "".join(path.read_text() for path in Path(pulled["file"]).parent.iterdir())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    done = kvtuner("show", REPO)
    assert done.returncode == 0 and "HF_HUB_OFFLINE" in done.stderr and hub.requests == []


def test_list_shows_what_a_folder_holds_and_what_fits_a_model(
    run: RunCommand, hub: LoopbackHub, reported: Path, model_folder: ModelFolder
) -> None:
    status, out, _ = run("list", reported.parent, "--json", "--model", model_folder("head-dim-80"))
    assert status == 0 and json.loads(out) == []
    rows = json.loads(run("list", reported.parent, "--json")[1])
    assert str(reported / "profile.json") in [row["name"] for row in rows]
    status, _, err = run("list", reported / "nowhere")
    assert status == 2 and "is no folder" in err


def test_list_looks_at_files_alone_and_not_into_what_tools_keep(run: RunCommand, copied: Path) -> None:
    (copied / "profile-folder.json").mkdir()
    (copied / "node_modules").mkdir()
    shutil.copy(copied / "profile.json", copied / "node_modules")
    (copied / "more").mkdir()
    (copied / "more" / "profile-cut.json").write_text("{")
    status, out, err = run("list", copied, "--json")
    assert status == 0
    assert [row["name"] for row in json.loads(out) if row["where"] == "folder"] == [str(copied / "profile.json")]
    assert err.count("not shown") == 1 and "profile-cut.json" in err


def kvtuner(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtuner", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, check=False)
