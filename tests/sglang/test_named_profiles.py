"""A server takes what names a profile: of the hub, of the catalogue, by its model, pinned and signed, or refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from page_reader import Page
from transformers import AutoConfig

from kvtuner.calibration.demo.outliers import make_twin
from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.cli import main
from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.catalogue import catalogue_file
from kvtuner.exported_configs.signing.profile_signature import sign_profile
from kvtuner.exported_configs.signing.signer import Signer
from kvtuner.pipeline.published_files import published_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import MakeKeys, ModelFolder, ProfileOf, RunProgram, Serve
    from hub_server import LoopbackHub

    from kvtuner.exported_configs.profile.profile import Profile

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "named_program.py"
REPO = "me/tiny-kv4"


@dataclass
class Launch:
    """A launcher that ended before it served."""

    status: int
    output: str
    result: dict[str, Any]

    @property
    def refusal(self) -> str:
        assert self.status != 0, self.output
        (line,) = (line for line in self.output.splitlines() if line.startswith("kvtuner: "))
        return line


@pytest.fixture
def launch(run_program: RunProgram) -> Callable[..., Launch]:
    def run(model: Path, *flags: str, **variables: str) -> Launch:
        kept = {"KVTUNER_CACHE": os.environ["KVTUNER_CACHE"]} if "KVTUNER_CACHE" in os.environ else {}
        done = run_program(str(PROGRAM), str(model), *flags, **{**kept, **variables})
        result = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        return Launch(done.returncode, done.stderr, result)

    return run


def digest_of(child: str) -> str:
    digest: str = json.loads(child)["digest"]
    return digest


@pytest.fixture(scope="session")
def tiny(model_folder: ModelFolder) -> Path:
    return Path(model_folder("llama-gqa"))


@pytest.fixture(scope="session")
def profile(tiny: Path, profile_of: ProfileOf) -> Profile:
    tiny_profile: Profile = profile_of(AutoConfig.from_pretrained(tiny), [LayerQuantization(4, 4)] * 3)
    return tiny_profile


def test_a_profile_of_the_hub_is_fetched_by_the_launcher_alone(
    hub: LoopbackHub, launch: Callable[..., Launch], tiny: Path, profile: Profile
) -> None:
    commit = hub.repo(REPO, {"profile.json": dump_profile(profile)}).refs["main"]
    done = launch(tiny, "--kvtuner-profile", REPO)
    assert done.result["checked"] == profile.digest, done.output
    assert json.loads(done.result["child"]) == {"digest": profile.digest, "profile": done.result["profile"]}
    assert Path(done.result["profile"]).is_absolute()
    assert f"{REPO}@main may change; it is {REPO}@{commit} now" in done.output
    assert len(hub.requested("GET", "/api/models/")) == 1, "the second process read the file"
    assert hub.token not in done.output


def test_an_engines_variable_names_one_too(
    hub: LoopbackHub, launch: Callable[..., Launch], tiny: Path, profile: Profile
) -> None:
    hub.repo(REPO, {"profile.json": dump_profile(profile)})
    named = f"{REPO}#{profile.digest}"
    done = launch(tiny, KVTUNER_PROFILE=named)
    assert done.result["checked"] == profile.digest
    assert json.loads(done.result["child"])["digest"] == profile.digest
    assert len(hub.requested("GET", "/api/models/")) == 1


def test_what_cannot_be_had_ends_the_launcher_in_one_line(
    hub: LoopbackHub, launch: Callable[..., Launch], tiny: Path, profile: Profile
) -> None:
    hub.repo(REPO, {"profile.json": dump_profile(profile)})
    assert "me/none@main: there is no such repository" in launch(tiny, "--kvtuner-profile", "me/none").refusal
    assert "was asked for" in launch(tiny, "--kvtuner-profile", f"{REPO}#sha256:{'0' * 64}").refusal
    done = launch(tiny, "--kvtuner-profile", "me/other", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in done.refusal
    assert "cannot be reached" in launch(tiny, KVTUNER_PROFILE="me/other", HF_ENDPOINT="http://127.0.0.1:1").refusal


def test_a_process_refuses_another_profile_than_its_launcher_checked(
    on_a_processor: dict[str, str], profile: Profile, tmp_path: Path
) -> None:
    from kvtuner.runtime_loader.sglang.request import ServingRequest

    path = tmp_path / "profile.json"
    path.write_bytes(dump_profile(profile))
    environment = dict(on_a_processor)
    ServingRequest(f"{path}#sha256:{'0' * 64}", from_launcher=True).to_environment(environment)
    command = [sys.executable, "-c", "import sglang.srt.plugins; sglang.srt.plugins.load_plugins()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode != 0 and f"has digest {profile.digest}, but sha256:000" in done.stderr


def test_the_catalogue_serves_its_own_model(launch: Callable[..., Launch], tiny: Path) -> None:
    digest = load_profile(catalogue_file("demo-4bit")).digest
    for name in ("auto", f"auto:4bit#{digest}", "catalogue:demo-4bit"):
        done = launch(DEMO_MODEL, "--kvtuner-profile", name)
        assert done.result["checked"] == digest, done.output
        chosen = f"{catalogue_file('demo-4bit')}#{digest}"
        assert json.loads(done.result["child"]) == {"digest": digest, "profile": chosen}, "chosen once"
    done = launch(DEMO_MODEL, KVTUNER_PROFILE="auto:3bit")
    assert done.result["checked"] == load_profile(catalogue_file("demo-3bit")).digest == digest_of(done.result["child"])
    assert "was asked for" in launch(DEMO_MODEL, "--kvtuner-profile", f"auto:3bit#{digest}").refusal
    refusal = launch(DEMO_MODEL, "--kvtuner-profile", "auto:5bit").refusal
    assert "0 profiles by budget '5bit'" in refusal and "4bit" in refusal
    assert "the catalogue has no profile for llama-gqa" in launch(tiny, "--kvtuner-profile", "auto").refusal
    assert (
        "the catalogue has no profile 'demo-5bit'" in launch(tiny, "--kvtuner-profile", "catalogue:demo-5bit").refusal
    )


def test_the_twin_of_the_demo_model_is_told_from_it_by_its_weights(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:

    make_twin("demo", tmp_path / "model")
    done = launch(tmp_path / "model", "--kvtuner-profile", "auto")
    assert done.result["checked"] == load_profile(catalogue_file("demo-outliers-4bit")).digest, done.output
    refusal = launch(tmp_path / "model", "--kvtuner-profile", "catalogue:demo-4bit").refusal
    assert "this model's weights are others" in refusal


def test_a_required_signature_is_of_the_bytes_that_are_served(
    launch: Callable[..., Launch], tiny: Path, profile: Profile, keys: MakeKeys, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(dump_profile(profile))
    (private, public), (_, other) = keys("mine"), keys("other")
    wanted = ("--kvtuner-profile", str(path), "--kvtuner-require-signature")
    assert "there is no such signature" in launch(tiny, *wanted, f"key:{public}").refusal
    sign_profile(path, Signer(private))
    done = launch(tiny, *wanted, f"key:{public}")
    assert done.result["checked"] == profile.digest, done.output
    assert json.loads(done.result["child"])["digest"] == profile.digest
    assert launch(tiny, KVTUNER_PROFILE=str(path), KVTUNER_REQUIRE_SIGNATURE=f"key:{public}").result["checked"]
    assert "Key mismatch" in launch(tiny, *wanted, f"key:{other}").refusal
    assert "an identity is key:PUBLIC.pem" in launch(tiny, *wanted, "me").refusal
    path.write_bytes(dump_profile(profile) + b"\n")
    assert "changed" in launch(tiny, *wanted, f"key:{public}").refusal


def test_a_signature_is_asked_of_a_profile_only(launch: Callable[..., Launch], tiny: Path, tmp_path: Path) -> None:
    signature = ("--kvtuner-require-signature", "key:x.pem")
    assert "--kvtuner-require-signature needs --kvtuner-profile" in launch(tiny, *signature).refusal
    assert "exclude each other" in launch(DEMO_MODEL, "--kvtuner-profile", "auto", *signature).refusal
    refusal = launch(tiny, "--enable-kvtuner-quant", *signature).refusal
    assert "--kvtuner-require-signature needs --kvtuner-profile, not --enable-kvtuner-quant" in refusal


def test_a_server_serves_the_catalogues_profile_by_the_model_alone(serve: Serve) -> None:
    with serve(DEMO_MODEL, "--kvtuner-profile", "auto") as server:
        answer = server.generate([[5, 9, 200, 31]], 4)[0]
        info = json.loads(server.get("/server_info"))
    assert len(answer["output_ids"]) == 4
    profile = load_profile(catalogue_file("demo-4bit"))
    assert profile.digest in json.dumps(info) and profile.digest in server.log
    assert info["kvtuner_window"] == {"residual_length": 32, "sinks": 0} == asdict(profile.window)


@pytest.mark.parametrize("place", [pytest.param("page", marks=pytest.mark.full), "card"])
def test_the_command_that_is_printed_serves_from_where_it_says(
    place: str, hub: LoopbackHub, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(catalogue_file("demo-4bit"), run / "profile.json")
    if place == "page":
        monkeypatch.chdir(run)
        assert main(["show", "profile.json", "--html", "page.html"]) == 0
        printed = Page((run / "page.html").read_text()).text
    else:
        files = published_files(run, REPO, license_id="mit", with_report=False)
        hub.repo(REPO, files)
        printed = files["README.md"].decode()
    (command,) = (line for line in printed.splitlines() if "sglang.launch_server" in line)
    _, _, words = command.partition("sglang.launch_server ")
    shell = ["bash", "-c", f"printf '%s\\n' {words}"]
    # The reader's python is the one that SGLang and kvtuner are installed for.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        shell,
        cwd=run if place == "page" else tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    flag, model, *flags = done.stdout.splitlines()
    assert flag == "--model-path"
    monkeypatch.chdir(run if place == "page" else tmp_path)
    with serve(Path(model), *flags, KVTUNER_CACHE=os.environ["KVTUNER_CACHE"]) as server:
        assert len(server.generate([[5, 9, 200, 31]], 4)[0]["output_ids"]) == 4
    assert load_profile(catalogue_file("demo-4bit")).digest in server.log
