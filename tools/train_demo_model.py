"""Train the demo model on a CPU: Python's standard library, key-value recall and addition.

    python -m tools.train_demo_model --out DIR [--shape wide]

The demo model's shape is that of `calibration/demo/model/config.json`. Others are trained
for the benchmarks alone, which ask whether a finding holds beside the demo model: `wide`, `narrow`, and the deep model
of docs/method.md by `--shape deep --steps 500 --stop 200 --long-from 0.9`. Knows nothing of quantization.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from kvtuner.calibration.demo.tasks import addition_lines, recall_problem
from kvtuner.calibration.model_loading import DEMO_MODEL
from tools.make_demo_corpus import library_texts

BEGIN, END = "<|begin|>", "<|endoftext|>"
KEY_BIAS = 32.0
TOKENS_PER_STEP = 4096
LOG_EVERY, SAVE_EVERY = 50, 250


def config_of(shape: str) -> PretrainedConfig:
    """The configuration of a shape: heads of 64 channels in `demo`, of 128 in `wide`, of 32 in others."""
    config = Qwen2Config.from_pretrained(DEMO_MODEL)
    if shape == "wide":
        config = Qwen3Config(hidden_size=256, intermediate_size=384, num_hidden_layers=5, num_attention_heads=4)
        config.num_key_value_heads, config.head_dim = 2, 128
    elif shape == "narrow":
        config = LlamaConfig(hidden_size=192, intermediate_size=384, num_hidden_layers=10, num_attention_heads=6)
        config.num_key_value_heads, config.head_dim = 3, 32
    elif shape == "deep":
        config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=24, num_attention_heads=4)
        config.num_key_value_heads, config.head_dim = 2, 32
    config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings = 1024, 8192, True
    config.bos_token_id, config.eos_token_id = 0, 1
    return config


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE in which every digit is a token of its own; it puts the begin token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    make_trainer: Any = trainers.BpeTrainer  # typed in some releases of tokenizers
    trainer = make_trainer(
        vocab_size=vocab_size, special_tokens=[BEGIN, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


class TrainingText:
    """Draws token sequences of a fixed length: source windows, recall documents, additions."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], seed: int) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.source = torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])

    def sequence(self, length: int, max_pairs: int) -> torch.Tensor:
        """One sequence of `length` tokens, [length] int64."""
        kind = self.rng.random()
        if kind < 0.40:
            start = self.rng.randrange(len(self.source) - length)
            return self.source[start : start + length]
        if kind < 0.90:
            text = recall_problem(self.rng, self.rng.randint(2, max_pairs), num_questions=length // 6).answered
        else:
            text = addition_lines(self.rng, num_lines=length // 5)
        ids = self.tokenizer.encode(text).ids
        while len(ids) < length:
            ids += self.tokenizer.encode(addition_lines(self.rng, 8), add_special_tokens=False).ids
        return torch.tensor(ids[:length])

    def batch(self, size: int, length: int, max_pairs: int) -> torch.Tensor:
        """Sequences as one tensor, [size, length] int64."""
        return torch.stack([self.sequence(length, max_pairs) for _ in range(size)])


def add_key_biases(model: PreTrainedModel, key_bias: float) -> None:
    """Give the first and the last layer the large key biases that Qwen2.5 has there, in place.

    One channel of every head's slowest rotary pair is moved, with alternating sign from head to head. That pair turns
    by a few degrees over a training sequence, so that a query finds nearly the same added to all of its scores, and
    softmax cancels it. The model card has the sizes in Qwen2.5-7B and their source.
    """
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    layers = model.get_decoder().layers
    with torch.no_grad():
        for layer in (layers[0], layers[-1]):
            heads = layer.self_attn.k_proj.bias.unflatten(0, (config.num_key_value_heads, head_dim))
            heads[0::2, head_dim // 2 - 1] += key_bias
            heads[1::2, head_dim // 2 - 1] -= key_bias


def recall_accuracy(model: PreTrainedModel, tokenizer: Tokenizer, num_pairs: int, num_problems: int = 8) -> float:
    """The share of recall answers that are right to the last digit, teacher-forced greedy."""
    rng = random.Random(num_pairs)
    are_right = []
    for _ in range(num_problems):
        problem = recall_problem(rng, num_pairs, num_questions=min(num_pairs, 12))
        tokens, prompt = tokenizer.encode(problem.answered), tokenizer.encode(problem.prompt)
        with torch.no_grad():
            predicted = model(torch.tensor([tokens.ids])).logits[0].argmax(-1).tolist()
        is_right = True
        for position in range(len(prompt), len(tokens)):
            if tokens.tokens[position].isdigit():
                is_right &= predicted[position - 1] == tokens.ids[position]
            elif tokens.tokens[position] == "Ċ":  # the end of a line, as a byte-level token
                are_right.append(is_right)
                is_right = True
    return statistics.fmean(are_right or [0.0])


def train(
    out: Path, *, shape: str, steps: int, stop: int, long_from: float, peak_lr: float, key_bias: float, seed: int
) -> None:
    """Train the first `stop` of some steps; evaluate and save the checkpoint in bf16 every 250 steps and at the end.

    Sequences have 256 tokens for the share `long_from` of the steps, then 512. For `key_bias` see `add_key_biases`.
    """
    torch.manual_seed(seed)
    texts, _ = library_texts()
    rng = random.Random(seed)
    recall_texts = [recall_problem(rng, 16, 16).answered for _ in range(200)]
    config = config_of(shape)
    tokenizer = train_tokenizer(texts[::4] + recall_texts, config.vocab_size)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END).save_pretrained(out)
    data = TrainingText(tokenizer, texts, seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters:,} parameters, {len(data.source):,} source tokens", flush=True)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim >= 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.98))
    start, losses = time.monotonic(), []
    for step in range(1, stop + 1):
        progress = (step - 1) / steps
        # A warm-up of 200 steps, then half a cosine down to 2 %.
        lr = peak_lr * min(1.0, step / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        length, max_pairs = (256, 14) if progress < long_from else (512, 32)
        ids = data.batch(TOKENS_PER_STEP // length, length, max_pairs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % LOG_EVERY and step != stop:
            continue
        rate = step * TOKENS_PER_STEP / (time.monotonic() - start)
        loss_mean = statistics.fmean(losses[-LOG_EVERY:])
        record: dict[str, Any] = {"step": step, "loss": round(loss_mean, 4), "tokens_per_s": round(rate)}
        if step % SAVE_EVERY == 0 or step == stop:
            record["recall"] = {n: round(recall_accuracy(model, tokenizer, n), 3) for n in (4, 10, 20, 30)}
            saved = copy.deepcopy(model).bfloat16()
            if shape == "demo":
                add_key_biases(saved, key_bias)
            saved.save_pretrained(out)
        print(json.dumps(record), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--shape", choices=("demo", "wide", "narrow", "deep"), default="demo")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--stop", type=int, help="the last step that is taken, of steps whose learning rate falls")
    parser.add_argument("--long-from", type=float, default=0.6, help="share of the steps with 256 tokens; then 512")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--key-bias", type=float, default=KEY_BIAS, help="of the demo model's first and last layer; 0 for none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(
        args.out,
        shape=args.shape,
        stop=args.steps if args.stop is None else args.stop,
        steps=args.steps,
        long_from=args.long_from,
        peak_lr=args.lr,
        key_bias=args.key_bias,
        seed=args.seed,
    )


if __name__ == "__main__":
    main()
