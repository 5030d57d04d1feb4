"""Alert rules and dashboard of examples/monitoring, beside a live server: it says what they ask, they see it fail."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml
from monitoring_example import (
    ALERTS,
    BOARD,
    CONFIG,
    MONITORING,
    PANELS,
    RECORDS,
    RULES,
    TARGET_LABELS,
    grouping_labels,
    queries,
    selectors,
)
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from fixture_types import MixedLayers, ModelFolder, ProfileOf, SaveProfile, Serve
    from sglang_server import Server

PAGE_SIZE: Final = 16

DCGM: Final = (("DCGM_FI_DEV_GPU_UTIL", 12.0), ("DCGM_FI_DEV_FB_USED", 60_000.0), ("DCGM_FI_DEV_FB_FREE", 20_000.0))
"""Metrics as the default counters of NVIDIA's exporter have them, with a value each.

Source: etc/default-counters.csv of https://github.com/NVIDIA/dcgm-exporter; labels of its README's sample.
"""
DCGM_LABELS: Final = {"gpu": "0", "UUID": "GPU-0", "device": "nvidia0", "modelName": "none", "Hostname": "here"}


class Live:
    """A server with metrics, a profile, host tiers, and room for one request that runs and one that waits."""

    def __init__(self, server: Server, storage: Path) -> None:
        self.server, self.storage = server, storage

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        families = text_string_to_metric_families(self.server.get("/metrics"))
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    def sums(self, expression: str) -> list[float]:
        """The sum of each metric in an expression, in its order, over all samples that it means."""
        found = self.samples()
        return [
            sum(value for name, labels, value in found if selector.accepts(name, labels))
            for selector in selectors(expression)
        ]

    def outcomes(self) -> dict[str, float]:
        """What the rules record of requests, each less what they subtract, once none is active.

        SGLang counts a stream 2 s after its end, and notices within some 4 s that a client has left.
        """
        expressions = {
            rule["labels"]["outcome"]: rule["expr"] for rule in RECORDS if rule["record"] == "kvtuner:requests:total"
        }
        failed = expressions.pop("failed")
        deadline = time.monotonic() + 60
        while (sums := self.sums(failed))[1]:
            assert time.monotonic() < deadline, "a request does not end"
            time.sleep(0.5)
        begun, active, answered_or_refused, _ = sums
        counts = {outcome: self.sums(expression)[0] for outcome, expression in expressions.items()}
        return {"failed": begun - active - answered_or_refused, **counts}

    def gained(self, before: Mapping[str, float]) -> dict[str, float]:
        """What of requests was added since."""
        return {outcome: count - before[outcome] for outcome, count in self.outcomes().items()}

    def ask(self, ids: list[int], num_tokens: int = 4, *, stream: bool = False) -> tuple[int, str]:
        """Status and text of an answer."""
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": stream}
        request = urllib.request.Request(
            f"{self.server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def crowd(self, *, stream: bool) -> int:
        """Ask more than fits at once; how many were told that the queue is full."""
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda first: self.ask([first] * 20, 100, stream=stream), range(10, 18)))
        return sum("The request queue is full." in text for _, text in answers)

    def hang_up(self) -> None:
        """Leave in the middle of a streamed answer."""
        body = {"input_ids": [7] * 20, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}
        text = json.dumps(body)
        with socket.create_connection((self.server.host, self.server.port), timeout=60) as connection:
            head = "POST /generate HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: "
            connection.sendall(f"{head}{len(text)}\r\n\r\n{text}".encode())
            received = b""
            while b"data:" not in received:  # the headers come before the request is even queued
                received += (piece := connection.recv(1000))
                assert piece, received

    def spoil_stored_pages(self, first: int) -> None:
        """Damage what lies in storage of a prompt that begins with a token, and ask for it again."""
        self.outcomes()  # until nothing is active, which would fill the queue
        prompt, files_before = list(range(first, first + 80)), set(self.storage.rglob("*.bin"))
        assert self.ask(prompt)[0] == 200
        deadline = time.monotonic() + 60  # pages are written after the answer
        while len(written := set(self.storage.rglob("*.bin")) - files_before) < len(prompt) // PAGE_SIZE:
            assert time.monotonic() < deadline, "pages were not written"
            time.sleep(0.5)
        for path in written:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        self.server.flush()
        assert self.ask(prompt)[0] == 200


@pytest.fixture(scope="module")
def live(
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
    serve: Serve,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Live]:
    folder = model_folder("llama-gqa", num_hidden_layers=3)
    config = AutoConfig.from_pretrained(folder)
    profile = save_profile(profile_of(config, mixed_layers(config)))
    storage = tmp_path_factory.mktemp("storage")
    storage_config = json.dumps({"file_storage_path": str(storage), "prefetch_threshold": 1})
    with serve(
        folder, "--kvtuner-profile", str(profile), "--enable-metrics", "--page-size", str(PAGE_SIZE),
        "--max-running-requests", "1", "--max-queued-requests", "1", "--enable-hierarchical-cache", "--hicache-ratio",
        "2", "--hicache-storage-backend", "file", "--hicache-storage-backend-config", storage_config,
        "--hicache-storage-prefetch-policy", "wait_complete",
    ) as server:  # fmt: skip
        yield Live(server, storage)


def test_every_alert_says_what_to_do_and_every_panel_asks_something() -> None:
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("critical", "warning"), alert["alert"]
        assert alert["annotations"].keys() == {"summary", "description"}, alert["alert"]
    places = []
    for panel in PANELS:
        assert panel["targets"] and all(target["expr"] for target in panel["targets"]), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", "another Grafana's data source"
        place = panel["gridPos"]
        places += [
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
    assert len(places) == len(set(places)), "panels overlap"
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_alerts_and_panels_name_only_jobs_rules_and_files_that_are_there() -> None:
    assert CONFIG["rule_files"] == ["alerts.yml"]
    jobs = {job["job_name"] for job in CONFIG["scrape_configs"]}
    relabeled = {rule["target_label"] for job in CONFIG["scrape_configs"] for rule in job["relabel_configs"]}
    assert {"instance", "job", *relabeled} == TARGET_LABELS
    for what, expression, _ in queries():
        for selector in selectors(expression):
            jobs_of_selector = {value for label, _, value in selector.matchers if label == "job"}
            assert jobs_of_selector <= jobs, what
            if selector.name.startswith("kvtuner:"):
                recorded = [rule.get("labels", {}) for rule in RECORDS if rule["record"] == selector.name]
                if selector.name == "kvtuner:requests:increase5m":
                    recorded = [rule["labels"] for rule in RECORDS if rule["record"] == "kvtuner:requests:total"]
                assert any(selector.accepts(selector.name, labels) for labels in recorded), (what, selector)


def test_every_metric_and_label_that_is_asked_for_is_on_a_live_server(live: Live) -> None:
    for number in range(2):
        for stream in (False, True):
            assert live.ask(list(range(20 + number, 80)), stream=stream)[0] == 200
    live.hang_up()
    assert live.outcomes()["aborted"] > 0
    samples = live.samples()
    samples += [(name, DCGM_LABELS, value) for name, value in DCGM] + [("up", {}, 1.0)]
    metric_names = set()
    for what, expression, named in queries():
        metrics = selectors(expression)
        assert metrics or expression.startswith("vector("), what
        labels_there = {"outcome"} | TARGET_LABELS
        for selector in metrics:
            if not selector.name.startswith("kvtuner:"):
                metric_names.add(selector.name)
                meant = [labels for name, labels, _ in samples if selector.accepts(name, labels)]
                assert meant, f"{what}: no sample of {selector}"
                labels_there |= set.intersection(*[set(labels) for labels in meant])
        named |= grouping_labels(expression)
        assert named <= labels_there, f"{what}: nothing has labels {named - labels_there}"
    assert len(metric_names) > 30


def test_prometheus_2_which_asks_for_another_format_ends_with_the_same_names(live: Live) -> None:
    (job,) = (job for job in CONFIG["scrape_configs"] if job["job_name"] == "sglang")
    (relabeling,) = job["metric_relabel_configs"]
    assert relabeling["source_labels"] == ["__name__"] and relabeling["target_label"] == "__name__"
    names = []
    for accepted in ("text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0"):
        request = urllib.request.Request(f"{live.server.url}/metrics", headers={"Accept": accepted})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith(accepted.partition(";")[0])
            found = re.findall(r"^([a-zA-Z_:][\w:]*)", answer.read().decode(), re.MULTILINE)
        template = relabeling["replacement"].replace("${1}", r"\1")
        names.append({re.sub(f"^{relabeling['regex']}$", template, name) for name in found})
    assert names[0] == names[1]
    assert any(name.startswith("sglang:") for name in names[0])


def test_a_wrong_name_label_or_value_would_be_noticed() -> None:
    samples = [("sglang:a_total", {"mode": "decode"})]

    def found(expression: str) -> bool:
        (selector,) = selectors(expression)
        return any(selector.accepts(name, labels) for name, labels in samples)

    assert found('sum by (mode) (rate(sglang:a_total{mode="decode", instance=~"$instance"}[$__rate_interval]))')
    assert found('sglang:a_total{mode=~"de.*"} offset 5m')
    assert found('sglang:a_total{mode!="prefill"}')
    for wrong in (
        "sglang:b_total",
        'sglang:a_total{mode="code"}',
        'sglang:a_total{kind="decode"}',
        'sglang:a_total{mode!~"d.*"}',
    ):
        assert not found(wrong)


def test_the_promised_time_to_first_token_is_a_bound_of_the_servers_buckets(live: Live) -> None:
    live.ask([9] * 20)
    (promised,) = (rule["expr"] for rule in RECORDS if rule["record"] == "kvtuner:slo:ttft_p99_seconds")
    threshold = float(re.fullmatch(r"vector\((.+)\)", promised).group(1))  # type: ignore[union-attr]
    name = "sglang:time_to_first_token_seconds_bucket"
    bounds = sorted({float(labels["le"]) for found, labels, _ in live.samples() if found == name})
    assert threshold in bounds[1:-2], "a P99 beside it would be a guess"
    assert bounds[0] > 0.010, "docs/monitoring.md says that 10 ms cannot be told apart"


def test_requests_that_fail_are_counted_and_those_of_others_are_not(live: Live) -> None:
    before = live.outcomes()
    assert live.ask([5] * 20)[0] == 200
    assert live.gained(before) == {"failed": 0, "answered": 1, "finished": 1, "aborted": 0}

    before = live.outcomes()
    assert live.ask([5] * 4000)[0] == 400  # longer than the context: the client's mistake
    assert live.gained(before) == {"failed": 0, "answered": 0, "finished": 0, "aborted": 0}

    before = live.outcomes()
    refused = live.crowd(stream=False)
    assert refused > 0
    assert live.gained(before) == {"failed": refused, "answered": 8 - refused, "finished": 8 - refused, "aborted": 0}

    before = live.outcomes()
    refused = live.crowd(stream=True)
    assert refused > 0  # what the rules find by the difference of answered and finished
    assert live.gained(before) == {"failed": 0, "answered": 8, "finished": 8 - refused, "aborted": 0}

    before = live.outcomes()
    live.hang_up()
    deadline = time.monotonic() + 15
    while not live.gained(before)["finished"] and time.monotonic() < deadline:  # the engine hears of it last
        time.sleep(0.5)
    assert live.gained(before) == {"failed": 0, "answered": 1, "finished": 1, "aborted": 1}


def test_a_damaged_stored_page_is_counted(live: Live) -> None:
    (expression,) = (alert["expr"] for alert in ALERTS if alert["alert"] == "KVTunerStoredPagesRefused")
    (before,) = live.sums(expression)
    live.spoil_stored_pages(30)
    assert live.sums(expression)[0] > before


def tool(name: str) -> str:
    return shutil.which(name) or pytest.fail(
        f"there is no {name}: apt-get install prometheus, or take it from prometheus.io"
    )


@pytest.mark.full
def test_rules_do_on_invented_samples_what_they_should() -> None:
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([tool("promtool"), *command], cwd=MONITORING, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


HAIR_TRIGGERS: Final = {
    "kvtuner:slo:ttft_p99_seconds": "vector(0)",
    "kvtuner:slo:success_ratio": "vector(1)",
    "kvtuner:slo:aborted_ratio": "vector(0)",
    "kvtuner:slo:memory_ratio": "vector(0)",
}


@contextmanager
def pretended_gpu() -> Iterator[str]:
    """What dcgm-exporter says of one GPU, at an address."""
    labels = ",".join(f'{name}="{value}"' for name, value in DCGM_LABELS.items())
    text = "".join(f"# TYPE {name} gauge\n{name}{{{labels}}} {value}\n" for name, value in DCGM)

    class Exporter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Exporter) as exporter:
        thread = threading.Thread(target=exporter.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{exporter.server_port}"
        finally:
            exporter.shutdown()
            thread.join()


@contextmanager
def prometheus(folder: Path, targets: dict[str, list[str]]) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """A real one with our configuration, in which time runs faster and alerts fire at once; yields its query."""
    config = json.loads(json.dumps(CONFIG))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    rules = [
        {
            **rule,
            "expr": HAIR_TRIGGERS.get(rule.get("record", ""), rule["expr"]),
            **({"for": "0s"} if "alert" in rule else {}),
        }
        for rule in RULES
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yml").write_text(yaml.safe_dump({"groups": [{"name": "kvtuner", "rules": rules}]}))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [
        tool("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]  # fmt: skip

    def query(expression: str) -> list[dict[str, Any]]:
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
        return found

    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            for _ in range(60):
                with suppress(OSError):
                    query("vector(1)")
                    break
                time.sleep(0.5)
            yield query
        finally:
            process.kill()


@pytest.mark.full
def test_prometheus_answers_every_panel_and_fires_what_a_live_server_gives_cause_for(
    live: Live, tmp_path: Path
) -> None:
    gone = "127.0.0.1:1"
    address = f"127.0.0.1:{live.server.port}"
    causes = {
        "SGLangDown", "SGLangSlowFirstToken", "SGLangRequestsFail", "SGLangRequestsAborted", "SGLangKVPoolFull",
        "GPUMemoryFull", "GPUIdleUnderLoad", "GPUMetricsMissing", "KVTunerStoredPagesRefused",
    }  # fmt: skip
    with pretended_gpu() as gpu, prometheus(tmp_path, {"sglang": [address, gone], "dcgm": [gpu, gone]}) as query:
        time.sleep(3)
        live.crowd(stream=False)
        live.crowd(stream=True)
        live.hang_up()
        live.spoil_stored_pages(150)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(live.ask, [3] * 20, 470, stream=True)
            time.sleep(1)
            assert not running.done(), "gauges of what runs would be of nothing"
            deadline, fired = time.monotonic() + 180, set[str]()
            while not fired >= causes and time.monotonic() < deadline:
                fired |= {alert["metric"]["alertname"] for alert in query('ALERTS{alertstate="firing"}')}
                if running.done():
                    running = pool.submit(live.ask, [3] * 20, 470, stream=True)
                time.sleep(0.5)
        assert fired == causes
        assert query("kvtuner:success:ratio5m")[0]["value"][1] not in ("0", "1", "NaN")
        for panel in PANELS:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")
                found = query(expression)
                assert found, f"{panel['title']}: {expression}"
                assert all(series["value"][1] != "NaN" for series in found), f"{panel['title']}: {expression}"
                for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                    assert all(label in series["metric"] for series in found), f"{panel['title']}: no {label}"
