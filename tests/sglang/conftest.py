"""Real SGLang servers on a processor, and the transformers host that they must agree with."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fork_server import ForkServer
from sglang_server import (
    HERE,
    LENGTHS,
    START_S,
    Agreement,
    Compared,
    Pair,
    Place,
    Programs,
    Server,
    environment,
    free_port,
    kill_tree,
    launch_command,
    wait_until_ready,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile
from kvtuner.quant import Transform
from kvtuner.runtime_loader.sglang.compat.releases import release_rules
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.supported_models import read_cache_geometry
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fixture_types import (
        Compare,
        CompareServed,
        LaunchedNodes,
        MixedLayers,
        MixedProfile,
        ProfileOf,
        Prompts,
        Refused,
        RunProgram,
        SaveProfile,
        Serve,
        ServePair,
    )

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.read_plan_names import ReadPlanName


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def sglang_is_installed() -> None:
    try:
        importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("install SGLang as the README's test block does, or leave these out: -m 'not sglang'")


def _unless_refused(option: str) -> None:
    for rule in release_rules().refused:
        if rule.name == option:
            pytest.skip(f"{rule.flag} is refused with this SGLang: {rule.reason}")


@pytest.fixture(scope="session")
def drafts_work() -> None:
    """Skip where the installed SGLang is too old for drafts."""
    _unless_refused("speculative_algorithm")


@pytest.fixture(scope="session")
def replicas_work() -> None:
    """Skip where the installed SGLang is too old for replicas."""
    _unless_refused("dp_size")


@pytest.fixture(scope="session")
def on_a_processor() -> dict[str, str]:
    """`environment()`, for other programs of SGLang."""
    return environment()


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """What starts programs of SGLang."""
    forks = ForkServer(tmp_path_factory.mktemp("forks"), environment())
    yield Programs(forks)
    forks.end()


@pytest.fixture(scope="session")
def run_program(programs: Programs) -> RunProgram:
    """`run_program(*arguments, **variables)`: what a Python program of SGLang printed, and its status."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return programs.run([sys.executable, *arguments], environment(**variables))

    return run


@pytest.fixture(scope="session")
def here() -> Place:
    """The place on the loopback interface, beside all others."""
    return HERE


@pytest.fixture(scope="session")
def serve(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """`with serve(model, *flags, places=[...], **variables) as server:`, a node in each place, killed at the end."""

    @contextmanager
    def start(model: Path, *flags: str, places: Sequence[Place] = (HERE,), **variables: str) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("server")
        port = free_port()
        processes, logs = programs.start_nodes(model, folder, [flags] * len(places), port, variables, places)
        server = Server(port, logs, processes, places[0].address)
        try:
            wait_until_ready(server)
            yield server
        finally:
            for process in processes:
                kill_tree(process)

    return start


@pytest.fixture(scope="session")
def serve_pair(serve: Serve) -> ServePair:
    """`with serve_pair(model, *flags, decode=[...]) as pair:`, one for prompts and one that answers."""

    @contextmanager
    def start(model: Path, *flags: str, prefill: Sequence[str] = (), decode: Sequence[str] = ()) -> Iterator[Pair]:
        port = free_port()
        of_prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
        with (
            serve(model, *flags, *prefill, *of_prefill) as first,
            serve(model, *flags, *decode, "--disaggregation-mode", "decode") as second,
        ):
            yield Pair(first, second, port)

    return start


@pytest.fixture(scope="session")
def save_profile(tmp_path_factory: pytest.TempPathFactory) -> SaveProfile:
    """Write a profile to a file of its own."""

    def save(profile: Profile) -> Path:
        path = tmp_path_factory.mktemp("profile") / "profile.json"
        path.write_bytes(dump_profile(profile))
        return path

    return save


KEY_KINDS = (
    "none",
    "hadamard",
    "balanced",
    "centered",
    "balanced+hadamard",
    "centered+hadamard",
    "centered+balanced",
    "centered+balanced+hadamard",
)


@pytest.fixture(scope="session")
def mixed_layers() -> MixedLayers:
    """Choices for the full layers of a configuration: widths and transforms of every kind, one after the other."""

    def choose(config: Any) -> list[LayerQuantization]:
        geometry = read_cache_geometry(config).tuned()
        generator = torch.Generator().manual_seed(11)
        shape = (geometry.num_kv_heads, geometry.head_dim)
        choices = []
        for layer in range(geometry.num_layers):
            kind = TransformKind.parse(KEY_KINDS[(layer + 7) % 8])
            mu = (0.3 * torch.randn(shape, generator=generator)).half() if kind.centered else None
            lam = (0.4 * torch.randn(shape, generator=generator)).exp().half() if kind.balanced else None
            v_transform = Transform(TransformKind.parse("none" if layer % 2 else "hadamard"))
            k_bits, v_bits = (4, 8, 3)[layer % 3], (4, 3, 8, 16)[layer % 4]
            if geometry.is_latent:  # which has one width, and no values beside it
                choices.append(LayerQuantization(k_bits, k_bits, Transform(kind, mu, lam)))
                continue
            choices.append(LayerQuantization(k_bits, v_bits, Transform(kind, mu, lam), v_transform))
        choices[-1] = LayerQuantization(16, 16)
        return choices

    return choose


@pytest.fixture(scope="session")
def mixed_profile(profile_of: ProfileOf, mixed_layers: MixedLayers) -> MixedProfile:
    """A profile of `mixed_layers` for a saved model, with the options of `profile_of`."""

    def make(folder: Path, **options: Any) -> Profile:
        config = AutoConfig.from_pretrained(folder)
        return profile_of(config, mixed_layers(config), **options)

    return make


@pytest.fixture(scope="session")
def compare() -> Compare:
    """`compare(server, model_folder, profile, prompts, num_tokens)`: greedy continuations of a server and of the host.

    The host reads the server's own tokens, so that one flipped code does not end the comparison; prompts are
    prefilled at once on both sides or, where the server cuts them into chunks of `chunk` tokens, one after the other
    in such chunks; with `is_hit` the first chunk is there from another request. Chunks are read by `read_plan`, `hit`
    by default, and what is not cut, and answers, by `decode` or by that plan. With `of_prompts` the predictions behind
    each token of a prompt are compared too. `alter` changes the host's model first.
    SGLang's Triton backend reads one token less of a window where it decodes than where it prefills, and than
    transformers does: the host's windows are then as long as that. Its code for Gemma 4 counts positions from 1, which
    no prediction tells, but the codes of rotated keys: the host then counts so too.
    """

    def forward(model: Any, ids: torch.Tensor, cache: Any, past: int) -> Any:
        first = past + (model.config.model_type == "gemma4")
        positions = torch.arange(first, first + ids.shape[1])[None]
        return model(ids, past_key_values=cache, use_cache=True, position_ids=positions)

    @torch.no_grad()
    def log_probs(
        model: Any,
        cache: Any,
        ids: Sequence[int],
        fed: Sequence[int],
        chunk: int | None = None,
        read_plan: ReadPlanName | None = None,
    ) -> torch.Tensor:
        with ExitStack() as chunks:
            if chunk is not None or read_plan is not None:
                chunks.enter_context(cache.reading(read_plan or "hit"))
                chunks.enter_context(cache.attending(model, in_place=False))
            past, logits = 0, []
            for piece in torch.tensor([ids]).split(chunk or len(ids), dim=1):
                forwarded = forward(model, piece, cache, past)
                past, cache = past + piece.shape[1], forwarded.past_key_values
                logits.append(forwarded.logits[0])
        text = model.config.get_text_config(decoder=True)
        window = getattr(text, "sliding_window", None)
        if window:
            text.sliding_window = window - 1
        with nullcontext() if read_plan is None else cache.reading(read_plan):
            for token in fed[:-1]:
                logits.append(forward(model, torch.tensor([[token]]), cache, past).logits[0])
                past += 1
        if window:
            text.sliding_window = window
        return torch.cat(logits).double().log_softmax(-1)

    def run(
        server: Server,
        folder: Path,
        profile: Profile,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        chunk: int | None = None,
        *,
        read_plan: ReadPlanName | None = None,
        is_hit: bool = False,
        of_prompts: bool = False,
        alter: Callable[[Any], None] | None = None,
    ) -> Agreement:
        is_text = type(AutoConfig.from_pretrained(folder)) in AutoModelForCausalLM._model_mapping
        auto_class = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
        # Of transformers' implementations this one knows logit caps.
        model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        if alter is not None:
            alter(model)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        found, wanted, exact = [], [], []
        server.flush()
        batches = [prompts] if chunk is None else [[ids] for ids in prompts]
        if is_hit:
            server.generate([ids[:chunk] for ids in prompts], 1)
        first = 0 if of_prompts else None
        answers = [
            answer
            for batch in batches
            for answer in server.generate(batch, num_tokens, top=vocab_size, first_of_prompt=first)
        ]
        for ids, answer in zip(prompts, answers, strict=True):
            meta = answer["meta_info"]
            assert meta["cached_tokens"] == (chunk if is_hit else 0), "the cuts differ"
            tops = [*(meta["input_top_logprobs"][1:] if of_prompts else ()), *meta["output_top_logprobs"]]
            served = torch.full((len(tops), vocab_size), torch.nan, dtype=torch.float64)
            for position, top in enumerate(tops):
                served[position, [token for _, token, _ in top]] = torch.tensor([p for p, _, _ in top]).double()
            found.append(served)
            cache = KVTunerCache.from_profile(profile, model.config)
            wanted.append(log_probs(model, cache, ids, answer["output_ids"], chunk, read_plan)[-len(tops) :])
            exact.append(log_probs(model, None, ids, answer["output_ids"])[-len(tops) :])
        p, q, unquantized = torch.cat(wanted), torch.cat(found), torch.cat(exact)
        assert not q.isnan().any(), "the server left out tokens"
        divergences = (p.exp() * (p - q)).sum(-1)
        return Agreement(
            divergence=divergences.mean().item(),
            typical=divergences.median().item(),
            own=(unquantized.exp() * (unquantized - p)).sum(-1).mean().item(),
            same_argmax=(p.argmax(-1) == q.argmax(-1)).double().mean().item(),
            positions=len(p),
        )

    return run


@pytest.fixture(scope="session")
def compare_served(serve: Serve, compare: Compare, prompts: Prompts, save_profile: SaveProfile) -> CompareServed:
    """`compare_served(folder, profile, *flags)`: a server of a profile, compared with the host by `compare`.

    Prompts are of `LENGTHS` and get 40 tokens each, or as asked.
    """

    def run(
        folder: Path,
        profile: Profile,
        *flags: str,
        lengths: Sequence[int] = LENGTHS,
        num_tokens: int = 40,
        chunk: int | None = None,
        **variables: str,
    ) -> Compared:
        with serve(folder, "--kvtuner-profile", str(save_profile(profile)), *flags, **variables) as server:
            agreement = compare(server, folder, profile, prompts(*lengths), num_tokens, chunk)
            metrics = server.get("/metrics") if "--enable-metrics" in flags else ""
        assert agreement.positions == len(lengths) * num_tokens
        return Compared(agreement, server.log, metrics)

    return run


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """`prompts(*lengths, vocab_size=320, seed=0)`: random token ids."""

    def make(*lengths: int, vocab_size: int = 320, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(2, vocab_size, (length,), generator=generator).tolist() for length in lengths]

    return make


@pytest.fixture
def capped() -> dict[str, Any]:
    """Fields of a Gemma 2 with a logit cap, and windows that cover its context."""
    return {
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 512, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": None, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    }  # fmt: skip


@pytest.fixture
def apart() -> Iterator[list[Place]]:
    """Two places with a network, addresses and shared memory of their own behind a bridge, as two machines have."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    own = os.getpid()
    bridge, names, net = f"kvt{own}b", [f"kvt{own}n{index}" for index in range(2)], f"10.231.{own % 256}"

    def ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no network namespaces here: ip {' '.join(arguments)}: {done.stderr.strip()}")

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{net}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for index, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"kvt{own}v{index}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"kvt{own}v{index}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{net}.{index + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "route", "add", "default", "via", f"{net}.254")
        # SGLang takes ranks that see the same shared memory for one node's.
        own_memory = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
        yield [
            Place(f"{net}.{index + 1}", ("ip", "netns", "exec", name, *own_memory)) for index, name in enumerate(names)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True)


@pytest.fixture
def launched_nodes(programs: Programs, tmp_path: Path) -> LaunchedNodes:
    """`launched_nodes(model, flags_of_each_node, *flags, **variables)`: how nodes end that must not start."""

    def run(model: Path, own: Sequence[Sequence[str]], *flags: str, **variables: str) -> tuple[list[int], str]:
        processes, logs = programs.start_nodes(
            model, tmp_path, [(*flags, *mine) for mine in own], free_port(), variables
        )
        try:
            statuses = [process.wait(START_S) for process in processes]
        finally:
            for process in processes:
                kill_tree(process)
        return statuses, "".join(path.read_text(errors="replace") for path in logs)

    return run


@pytest.fixture
def refused(programs: Programs) -> Refused:
    """`refused(model, *flags, **variables)`: a server that ends by itself, non-zero; its one line of `kvtuner:`.

    With `before_weights` it has loaded none.
    """

    def run(
        model: Path, *flags: str, extra_path: str = "", begins: str = "kvtuner: ", before_weights: bool = False,
        **variables: str,
    ) -> str:  # fmt: skip
        env = environment(**variables)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [extra_path, env["PYTHONPATH"]]))
        ended = programs.run(launch_command(model, *flags), env)
        assert ended.returncode != 0
        output = ended.stdout + ended.stderr
        assert "ready to roll" not in output
        assert not before_weights or "Load weight begin" not in output
        lines = [line for line in output.splitlines() if line.startswith(begins)]
        assert len(lines) == 1, output[-4000:]
        return lines[0].removeprefix(begins)

    return run
