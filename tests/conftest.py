"""Tiny seeded models with a tokenizer, saved to disk as a user would have them, and text to run them on."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from hub_server import LoopbackHub
from hypothesis import settings
from tiny.latent_models import LATENT
from tiny.layered_models import LAYERED, MULTIMODAL, TEXT_CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from fixture_types import LoadTiny, MakeKeys, MakeTokenizer, ModelFolder, ProfileOf, RunCommand

    from kvtuner.exported_configs.profile.build import LayerQuantization
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.precision import ExactWindow, Fit, WordBits

# Read when libraries are first imported. No test may reach the network, and a second thread only gets in the way of
# tensors this small: on a busy machine waiting for it takes a hundred times the work.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

# Kernels are interpreted where there is no GPU. Triton asks when a kernel is defined.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test is about time, and an example may take seconds on a busy machine.
settings.register_profile("kvtuner", deadline=None)
settings.load_profile("kvtuner")

VOCAB_SIZE = 320
MAX_POSITIONS = 512
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}" + EOS + "\n{% endfor %}"
)

# A wide initialization, so that attention is far from uniform and an error in keys or values reaches the logits.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {"num_hidden_layers": 3}),
    "qwen2-bias": ("Qwen2", {}),
    "qwen3-qk-norm": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 32, **_EXPERTS}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "phi3": ("Phi3", {"num_key_value_heads": 4, "sliding_window": None}),
    "head-dim-80": ("Llama", {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1}),
}

_OPENINGS = ["after", "before", "because", "when", "while", "although", "since", "until", "whenever", "once"]
_SUBJECTS = [
    "fox",
    "baker",
    "sailor",
    "teacher",
    "garden",
    "engine",
    "river",
    "clerk",
    "painter",
    "neighbour",
    "winter",
    "doctor",
]
_VERBS = ["carries", "paints", "counts", "repairs", "hides", "follows", "remembers", "borrows", "sells", "watches"]
_THINGS = [
    "lamps",
    "letters",
    "stones",
    "ships",
    "apples",
    "clocks",
    "rivers",
    "songs",
    "tables",
    "maps",
    "coins",
    "books",
]
_PLACES = ["harbour", "market", "station", "valley", "kitchen", "library", "island", "tower", "bridge", "meadow"]


def write_sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences that all differ, about twenty words each."""
    rng = random.Random(seed)

    def clause() -> str:
        thing = f"{rng.randrange(2, 1000)} {rng.choice(_THINGS)}"
        return f"the {rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {thing} near the {rng.choice(_PLACES)}"

    return [f"{rng.choice(_OPENINGS)} {clause()}, {clause()} and {clause()}.".capitalize() for _ in range(count)]


@pytest.fixture(autouse=True)
def variables_as_before() -> Iterator[None]:
    """Undo what a test's libraries set in this process's environment, for example torch.utils.collect_env."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def sentences() -> Callable[..., list[str]]:
    """`sentences(count, seed)`: a list of different sentences."""
    return write_sentences


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL file with 600 sentences in its field `text`, some 20,000 tokens."""
    path = tmp_path_factory.mktemp("corpus") / "sentences.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in write_sentences(600)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """`make_tokenizer(adds_bos=False, chat_template=None)`: a byte-level BPE of 320 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def make(adds_bos: bool = False, chat_template: str | None = None) -> Any:
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(write_sentences(200, seed=1), trainer)
        if adds_bos:
            bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS)
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


def build_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A seeded random model of one family, float32; `changes` are fields of its configuration."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if name in MULTIMODAL:
        prefix, text, vision = MULTIMODAL[name]
        decoder = {**COMMON, **text, **changes}
        decoder.pop("pad_token_id")
        parts = {"text_config": decoder, "vision_config": vision}
        parts["tie_word_embeddings"] = decoder.get("tie_word_embeddings", False)
        config, model_class = getattr(transformers, f"{prefix}Config")(**parts), f"{prefix}ForConditionalGeneration"
    else:
        prefix, own = FAMILIES.get(name) or LATENT.get(name) or LAYERED.get(name, (name, {}))
        config_class = getattr(transformers, f"{TEXT_CLASSES.get(prefix, prefix)}Config")
        config, model_class = config_class(**{**COMMON, **own, **changes}), f"{prefix}ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter += 0.3 * torch.randn_like(parameter)
            if parameter_name.endswith("sinks"):  # which servers load in bf16
                parameter.copy_(parameter.bfloat16())
    return model


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """`make_model(family, seed=0, **config_changes)`: a fresh random model."""
    return build_model


@pytest.fixture(scope="session")
def families() -> tuple[str, ...]:
    """Names that `model_folder` knows."""
    return tuple(FAMILIES)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: MakeTokenizer) -> ModelFolder:
    """A saved model with its tokenizer: `model_folder(family, adds_bos=False, chat=False, seed=0, **config_changes)`.

    The same arguments give the same folder, which no test may change.
    """
    folders: dict[str, Path] = {}

    def make(name: str = "llama-gqa", *, adds_bos: bool = False, chat: bool = False, **changes: Any) -> Path:
        key = json.dumps([name, adds_bos, chat, changes], sort_keys=True)
        if key not in folders:
            folder = tmp_path_factory.mktemp("models") / name
            build_model(name, **changes).save_pretrained(folder)
            make_tokenizer(adds_bos, CHAT_TEMPLATE if chat else None).save_pretrained(folder)
            folders[key] = folder
        return folders[key]

    return make


@pytest.fixture(scope="session")
def load_tiny(model_folder: ModelFolder) -> LoadTiny:
    """A `LoadedModel` of a `model_folder`, shared between tests; same arguments."""
    from kvtuner.calibration.model_loading import ModelSource, load_model

    models: dict[Path, Any] = {}

    def load(name: str = "llama-gqa", **changes: Any) -> Any:
        folder = model_folder(name, **changes)
        if folder not in models:
            models[folder] = load_model(ModelSource(str(folder), device="cpu"))
        return models[folder]

    return load


@pytest.fixture(scope="session")
def profile_of() -> ProfileOf:
    """A profile of layer choices for a configuration, as if calibrated up to `last_position`, or not at all.

    Its groups are whole heads, or half ones, and with a `token_group` keys are per channel of so many tokens per scale;
    `words` are the bits of the scale words of keys and of values. Layers are all of the model's, or with `by_kinds`
    those that read all tokens.
    """
    from kvtuner.exported_configs.profile import records
    from kvtuner.exported_configs.profile.build import AskedBudget, build_profile, of_whole_model
    from kvtuner.geometry import ModelGeometry
    from kvtuner.precision import ExactWindow, ScaleLayout
    from kvtuner.supported_models import read_cache_geometry

    digest = "sha256:" + 64 * "0"

    def calibrated_up_to(last_position: int) -> records.CalibrationRecord:
        return records.CalibrationRecord(
            corpus="none",
            token_ids_sha256=records.SplitHashes(calibrate=digest, select=digest, report=digest),
            num_sequences=records.SplitCounts(calibrate=1, select=1, report=1),
            sequence_length=8,
            position_range=(0, last_position),
            seed=0,
            score="kl",
        )

    def make(
        config: Any,
        layers: Sequence[LayerQuantization],
        *,
        group_size: int | None = None,
        symmetric: bool = False,
        fit: Fit = "minmax",
        last_position: int | None = None,
        window: ExactWindow | None = None,
        words: tuple[WordBits, WordBits] = (32, 32),
        half_groups: bool = False,
        token_group: int | None = None,
        by_kinds: bool = False,
    ) -> Profile:
        cache = read_cache_geometry(config) if by_kinds else None
        geometry = ModelGeometry.from_config(config) if cache is None else cache.tuned()
        whole, layers = (geometry, layers) if cache is None else of_whole_model(cache, layers)
        share = 2 if half_groups else 1
        architecture = (getattr(config, "architectures", None) or ["Tiny"])[0]
        k_layout = ScaleLayout(group_size or geometry.head_dim // share, word_bits=words[0])
        if token_group is not None:
            k_layout = ScaleLayout(token_group, granularity="per_channel")
        return build_profile(
            geometry=whole,
            layers=layers,
            k_layout=k_layout,
            v_layout=ScaleLayout(group_size or geometry.v_head_dim // share, word_bits=words[1]),
            symmetric=symmetric,
            fit=fit,
            window=window or ExactWindow(),
            model=records.ModelIdentity(
                id="tiny", revision=None, config_sha256=digest, architecture=architecture, dtype="bfloat16"
            ),
            budget=AskedBudget("by hand"),
            quality=None,
            provenance=records.Provenance(
                kvtuner_version="0",
                calibration=None if last_position is None else calibrated_up_to(last_position),
                search=None,
                libraries=records.Libraries(torch="0", transformers="0", optuna="0"),
            ),
        )

    return make


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run the command line in this process; returns exit status, stdout, stderr."""

    from kvtuner.cli import main

    def call(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(arg) for arg in args])
        except SystemExit as error:  # argparse
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def hubs() -> Callable[[], AbstractContextManager[LoopbackHub]]:
    """One more hub that nobody is told of: `with hubs() as other:`."""
    return lambda: LoopbackHub().running()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A hub on loopback that this process, and what it starts, asks as somebody logged in.

    Nothing of what it gives outlives the test: caches are folders of the test's own.
    """
    from huggingface_hub import constants

    hub = LoopbackHub()
    places = {"HF_HOME": "hf", "HF_HUB_CACHE": "hf/hub", "KVTUNER_CACHE": "kept"}
    for name, folder in places.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    # Read from the environment when the library was imported.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    # The loopback hub takes large files by LFS, as hubs without Xet do.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with hub.running():
        yield hub


@pytest.fixture
def keys(tmp_path: Path) -> MakeKeys:
    """PEM files of an elliptic-curve key by its name, private and public; the same name gives the same key."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    folder = tmp_path / "keys"
    folder.mkdir()

    def make(name: str = "key", *, curve: Any = None, key: Any = None, password: bytes | None = None) -> Any:
        private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
        if not private.exists():
            signer = key or ec.generate_private_key(curve or ec.SECP256R1())
            encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
            private.write_bytes(signer.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
            public.write_bytes(signer.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        return private, public

    return make


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `family` on every family of models."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)


@pytest.fixture
def serve_http() -> Iterator[Callable[[type[BaseHTTPRequestHandler]], Any]]:
    """`serve_http(handler)`: a server on 127.0.0.1, ended with the test."""
    servers: list[ThreadingHTTPServer] = []

    def start(handler: type[BaseHTTPRequestHandler]) -> Any:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
