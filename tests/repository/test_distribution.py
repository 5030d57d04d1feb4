"""The ways in: the image, the Kubernetes example, the CI workflow, the citation and the pages of a release agree."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import kvtuner
from kvtuner.cli import main
from kvtuner.runtime_loader.sglang.compat.releases import ACCEPTED, NEWEST
from tools.make_platform_wheels import MACHINES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
WORKFLOW_FILE = ROOT / ".github" / "workflows" / "ci.yml"
LAUNCHES_FILE = WORKFLOW_FILE.with_name("launches.yml")
WHEELS_FILE = WORKFLOW_FILE.with_name("wheels.yml")
AMX_FILE = WORKFLOW_FILE.with_name("amx.yml")
KUBERNETES = ROOT / "examples" / "kubernetes"
CATALOGUE_PROFILE = ROOT / "exported_configs" / "profiles" / "demo-4bit.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_yaml(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def manifests() -> dict[str, Any]:
    """The objects of the Kubernetes example by their kind."""
    files = sorted(KUBERNETES.glob("*.yaml"))
    return {item["kind"]: item for file in files for item in yaml.safe_load_all(file.read_text(encoding="utf-8"))}


def pod() -> Any:
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def server_flags() -> dict[str, str]:
    """The flags of the example's server, by name."""
    (container,) = pod()["containers"]
    pairs = (argument.partition("=") for argument in container["args"])
    return {name: value for name, _, value in pairs}


def steps(workflow: Path = WORKFLOW_FILE) -> Iterator[dict[str, Any]]:
    for job in read_yaml(workflow)["jobs"].values():
        yield from job["steps"]


def test_every_place_names_the_release_of_sglang_that_tests_run_on() -> None:
    assert re.findall(r"^ARG SGLANG_VERSION=(.+)\nFROM lmsysorg/sglang:v\$\{SGLANG_VERSION\}$", DOCKERFILE, re.M) == [
        NEWEST
    ]
    extra = [Requirement(text) for text in PROJECT["optional-dependencies"]["sglang"]]
    (accepted,) = (requirement.specifier for requirement in extra if requirement.name == "sglang")
    first, last = (Version(release).micro for release in (min(ACCEPTED, key=Version), NEWEST))
    found = {f"0.5.{micro}" for micro in range(first - 2, last + 3) if f"0.5.{micro}" in accepted}
    assert found == set(ACCEPTED) and Version(NEWEST) == max(map(Version, ACCEPTED))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "requirements-sglang-cpu.txt", WORKFLOW_FILE]
    for page in pages:
        assert set(re.findall(r"sglang==([\d.]+\d)", page.read_text(encoding="utf-8"))) == {NEWEST}, page.name


def test_the_image_takes_what_a_wheel_is_built_from() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    needed = {PROJECT["readme"], *(name.partition("/")[0] for name in PROJECT["license-files"]), "pyproject.toml"}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    assert "*" in lines and kept == needed | set(packages.values())
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.slow
@pytest.mark.sglang
def test_the_images_own_check_refuses_another_sglang(tmp_path: Path) -> None:
    (check,) = re.findall(r'^RUN python3 -c "(.+)"$', DOCKERFILE, re.MULTILINE)
    assert subprocess.run([sys.executable, "-c", check], cwd=tmp_path, check=False).returncode == 0
    other = f"import importlib.metadata as m; m.version = lambda name: '0.5.99'; {check}"
    done = subprocess.run([sys.executable, "-c", other], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "0.5.99 is installed" in done.stderr


def test_the_config_maps_profile_is_valid_and_the_one_that_the_server_pins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = manifests()["ConfigMap"]["data"]["profile.json"]
    how = "make profile.yaml again by the command at its top, and enter the digest in server.yaml"
    assert text == CATALOGUE_PROFILE.read_text(encoding="utf-8"), how
    file = tmp_path / "profile.json"
    file.write_text(text, encoding="utf-8")
    _, _, pin = server_flags()["--kvtuner-profile"].partition("#")
    assert pin, "the server pins the profile"
    assert main(["validate", f"{file}#{pin}"]) == 0, how
    assert pin in capsys.readouterr().out
    assert main(["validate", f"{file}#{pin[:-1]}{'1' if pin[-1] == '0' else '0'}"]) == 2


def test_the_objects_of_the_kubernetes_example_name_each_other() -> None:
    found = manifests()
    assert set(found) == {"ConfigMap", "Deployment", "Service"}
    (container,) = pod()["containers"]
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(volumes) == set(mounts)
    assert volumes["profile"]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    folder, _, name = server_flags()["--kvtuner-profile"].partition("#")[0].rpartition("/")
    assert folder == mounts["profile"] and name in found["ConfigMap"]["data"]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == found["Service"]["spec"]["selector"] == labels
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert found["Service"]["spec"]["ports"][0]["targetPort"] in ports
    assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")} == {"http"}
    entry = json.loads(re.findall(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.MULTILINE)[0])
    assert entry[entry.index("--port") + 1] == str(ports["http"]) and f"EXPOSE {ports['http']}\n" in DOCKERFILE
    model = server_flags()["--model-path"].removeprefix(re.findall(r"^WORKDIR (.+)$", DOCKERFILE, re.MULTILINE)[0])
    assert (ROOT / model.lstrip("/") / "config.json").exists()
    assert container["image"].endswith(f":{kvtuner.__version__}")


def test_ci_runs_its_targets_by_the_commands_of_contributing() -> None:
    workflow = read_yaml(WORKFLOW_FILE)
    assert {"push", "pull_request"} == set(workflow[True]), "YAML 1.1 reads the key `on` as true"
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"]["target"] == ["check", "test", "test-sglang", "test-triton"]
    older = re.findall(r"^SGLANG \?= (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*older, NEWEST} == set(ACCEPTED), "a job for each accepted release"
    commands = [step["run"] for step in steps() if "run" in step]
    setup = re.findall(r"```sh\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    installs = [line.partition("  #")[0] for line in setup.splitlines() if line.startswith("pip install")]
    assert commands[1:] == [*installs, "make ${{ matrix.target }}"]
    (packages,) = re.findall(r"`apt install (g\+\+-.+?)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert commands[0].endswith(f"apt-get install -y {packages}")
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps() if "uses" in step)
    (python,) = (step["with"]["python-version"] for step in steps() if "setup-python" in step.get("uses", ""))
    assert python == PROJECT["requires-python"].removeprefix(">=")


def test_every_launch_is_checked_once_a_week_on_each_architecture() -> None:
    workflow = read_yaml(LAUNCHES_FILE)
    assert set(workflow[True]) == {"schedule", "workflow_dispatch"} and workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    tested = ROOT / "tests" / "runtime_loader" / "kernels" / "test_launch.py"
    (archs,) = set(re.findall(r"ARCHITECTURES = (\[.+?\])", tested.read_text(encoding="utf-8")))
    assert job["strategy"]["matrix"]["arch"] == json.loads(archs)
    commands = [step["run"] for step in steps(LAUNCHES_FILE) if "run" in step]
    assert commands[-1] == "make test-launches ARCH=${{ matrix.arch }}"
    assert commands[0] in [step["run"] for step in steps() if "run" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps(LAUNCHES_FILE) if "uses" in step)


def test_attention_runs_on_an_emulated_processor_once_a_week() -> None:
    workflow = read_yaml(AMX_FILE)
    assert set(workflow[True]) == {"schedule", "workflow_dispatch"} and workflow["permissions"] == {"contents": "read"}
    commands = [step["run"] for step in steps(AMX_FILE) if "run" in step]
    assert commands[-1] == "make test-amx"
    assert commands[0] in [step["run"] for step in steps() if "run" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps(AMX_FILE) if "uses" in step)


def test_a_tag_makes_wheels_by_the_target_of_make() -> None:
    workflow = read_yaml(WHEELS_FILE)
    assert workflow[True]["push"] == {"tags": ["v*"]} and workflow["permissions"] == {"contents": "read"}
    commands = [step["run"] for step in steps(WHEELS_FILE) if "run" in step]
    assert commands[-1] == "make wheels" and commands[-2].endswith("-e . -r requirements-dev.txt")
    assert all(f"g++-{name}-linux-gnu" in commands[0] for name in MACHINES if name != "x86_64"), "a runner has its own"
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps(WHEELS_FILE) if "uses" in step)


def test_pages_name_targets_of_make_that_exist() -> None:
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in ("CONTRIBUTING.md", "RELEASING.md"):
        named = set(re.findall(r"`make ([\w-]+)", (ROOT / page).read_text(encoding="utf-8")))
        assert named and named <= known, page


def test_the_citation_says_what_the_package_says() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    assert str(citation["version"]) == kvtuner.__version__
    assert " AND ".join(citation["license"]) == PROJECT["license"]
    assert citation["keywords"] == PROJECT["keywords"] and citation["authors"] == PROJECT["authors"]


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("github-workflows", WORKFLOW_FILE),
        ("github-workflows", WHEELS_FILE),
        ("github-workflows", AMX_FILE),
        ("citation-file-format", ROOT / "CITATION.cff"),
    ],
)
def test_the_published_schema_accepts_the_file_and_refuses_a_slip(schema: str, file: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("needs check-jsonschema of requirements-dev.txt")
    slip = tmp_path / file.name
    text = file.read_text(encoding="utf-8")
    slip.write_text(text.replace("runs-on", "run-on").replace("cff-version", "version-of-cff"), encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    statuses = [subprocess.run([*command, path], capture_output=True, check=False).returncode for path in (file, slip)]
    assert statuses == [0, 1]
