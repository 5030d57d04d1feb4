"""Train the demo model on a CPU: Python's standard library, key-value recall and addition.

    python -m kvtuner.calibration.demo.train --out DIR

Knows nothing of quantization.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvtuner.calibration.demo.tasks import addition_lines, recall_problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

VOCAB_SIZE = 1024
BEGIN, END = "<|begin|>", "<|endoftext|>"
KEY_BIAS = 32.0
HELD_OUT_EVERY = 12  # every 12th source file is kept from training; the demo corpus is cut from those


def source_files() -> tuple[list[Path], list[Path]]:
    """The standard library's sources, split into (trained on, held out)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__", "turtledemo"}
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not skip & set(path.relative_to(root).parts)
        and 2_000 < path.stat().st_size < 200_000
        and "config-" not in str(path)
    ]
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [path for path in files if path not in set(held_out)], held_out


def read_sources(files: list[Path]) -> list[str]:
    """Text of every file that is ASCII, tabs as spaces."""
    texts = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.isascii():
            texts.append(text.expandtabs(4))
    return texts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of 1,024 tokens in which every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    make_trainer: Any = trainers.BpeTrainer  # typed in some releases of tokenizers
    trainer = make_trainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class TrainingText:
    """Draws token sequences of a fixed length: source windows, recall documents, additions."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        begin = tokenizer.token_to_id(BEGIN)
        assert begin is not None
        ids: list[int] = []
        for text in texts:
            ids.append(begin)
            ids.extend(tokenizer.encode(text).ids)
        self.source = torch.tensor(ids, dtype=torch.int64)
        self.begin = begin

    def sequence(self, length: int, max_pairs: int) -> torch.Tensor:
        """One sequence of `length` tokens, [length] int64."""
        kind = self.rng.random()
        if kind < 0.40:
            start = self.rng.randrange(self.source.numel() - length)
            return self.source[start : start + length]
        if kind < 0.90:
            num_pairs = self.rng.randint(2, max_pairs)
            problem = recall_problem(self.rng, num_pairs, num_questions=length // 6)
            text = problem.answered
        else:
            text = addition_lines(self.rng, num_lines=length // 5)
        ids = [self.begin, *self.tokenizer.encode(text).ids][:length]
        while len(ids) < length:
            ids.extend(self.tokenizer.encode(addition_lines(self.rng, 8)).ids)
        return torch.tensor(ids[:length], dtype=torch.int64)

    def batch(self, size: int, length: int, max_pairs: int) -> torch.Tensor:
        """Sequences as one tensor, [size, length] int64."""
        return torch.stack([self.sequence(length, max_pairs) for _ in range(size)])


def build_model() -> PreTrainedModel:
    """The untrained demo model: Qwen2, 9 layers, hidden 256 = 4 heads x 64, 2 KV heads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=9,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        use_sliding_window=False,
    )
    return Qwen2ForCausalLM(config)


def add_key_biases(model: PreTrainedModel, key_bias: float) -> None:
    """Give the first and the last layer the large key biases that Qwen2.5 has there, in place.

    Norms of k_proj's biases in Qwen2.5-7B: about 605 in layer 0, 921 in layer 27, a median of 22
    (github.com/ggml-org/llama.cpp issue 21385). Here one channel of every head's slowest rotary pair is moved, with
    alternating sign from head to head. Over the length of a training sequence that pair turns by a few degrees, so that
    a query finds nearly the same added to all of its scores, and softmax cancels it: the model predicts as before, but
    its keys need care.

    The model is Qwen2, in the dtype that it is saved in.
    """
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    layers = model.get_decoder().layers
    with torch.no_grad():
        for layer in (layers[0], layers[-1]):
            heads = layer.self_attn.k_proj.bias.unflatten(0, (config.num_key_value_heads, head_dim))
            heads[0::2, head_dim // 2 - 1] += key_bias
            heads[1::2, head_dim // 2 - 1] -= key_bias


def recall_accuracy(model: PreTrainedModel, data: TrainingText, num_pairs: int, num_problems: int = 8) -> float:
    """Share of recall answers that are right to the last digit, teacher-forced greedy."""
    rng = random.Random(num_pairs)
    right = total = 0
    model.eval()
    for _ in range(num_problems):
        problem = recall_problem(rng, num_pairs, num_questions=min(num_pairs, 12))
        ids = [data.begin, *data.tokenizer.encode(problem.answered).ids]
        prompt_length = 1 + len(data.tokenizer.encode(problem.prompt).ids)
        with torch.no_grad():
            guess = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        text_right = True
        for position in range(prompt_length, len(ids)):
            token = data.tokenizer.id_to_token(ids[position]) or ""
            if token.isdigit():
                text_right &= guess[position - 1] == ids[position]
            elif token == "Ċ":
                right += text_right
                total += 1
                text_right = True
    model.train()
    return right / max(total, 1)


def train(out: Path, *, steps: int, long_from: float, peak_lr: float, key_bias: float, seed: int) -> None:
    """Train; evaluate and save the checkpoint in bf16 every 250 steps and at the end.

    Sequences have 256 tokens for the share `long_from` of the steps, then 512. For `key_bias` see `add_key_biases`.
    """
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    trained_on, _ = source_files()
    texts = read_sources(trained_on)
    rng = random.Random(seed)
    recall_texts = [recall_problem(rng, 16, 16).answered for _ in range(200)]
    tokenizer = train_tokenizer(texts[::4] + recall_texts)
    data = TrainingText(tokenizer, texts, seed)
    model = build_model()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=peak_lr, betas=(0.9, 0.98)
    )
    save_tokenizer(tokenizer, out)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {data.source.numel():,} source tokens", flush=True
    )
    start, losses = time.monotonic(), []
    for step in range(steps):
        progress = step / steps
        # A warm-up of 200 steps, then half a cosine down to 2 %.
        lr = peak_lr * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        length, size, max_pairs = (256, 16, 14) if progress < long_from else (512, 8, 32)
        ids = data.batch(size, length, max_pairs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            rate = (step + 1) * 4096 / (time.monotonic() - start)  # 16 * 256 tokens in a step, or 8 * 512
            line: dict[str, Any] = {
                "step": step + 1,
                "loss": round(statistics.fmean(losses[-50:]), 4),
                "tokens_per_s": round(rate),
            }
            if (step + 1) % 250 == 0 or step + 1 == steps:
                line["recall"] = {n: round(recall_accuracy(model, data, n), 3) for n in (4, 10, 20, 30)}
                save_model(model, out, key_bias)
            print(json.dumps(line), flush=True)


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json, which puts the begin token before every text, and its transformers configuration."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    saved = Tokenizer.from_str(tokenizer.to_str())
    saved.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, saved.token_to_id(BEGIN))]
    )
    PreTrainedTokenizerFast(tokenizer_object=saved, bos_token=BEGIN, eos_token=END).save_pretrained(out)


def save_model(model: PreTrainedModel, out: Path, key_bias: float) -> None:
    """Write config.json and the weights as bf16 safetensors, with the key biases of `add_key_biases`."""
    import copy

    saved = copy.deepcopy(model).bfloat16()
    add_key_biases(saved, key_bias)
    saved.save_pretrained(out)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument(
        "--long-from", type=float, default=0.6, help="share of the steps with 256-token sequences; then 512"
    )
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--key-bias", type=float, default=KEY_BIAS, help="key bias of the first and the last layer; 0 for none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args.out, steps=args.steps, long_from=args.long_from, peak_lr=args.lr, key_bias=args.key_bias, seed=args.seed)


if __name__ == "__main__":
    main()
