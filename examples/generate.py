"""Generate text with a profile on transformers: packed keys and values, on any machine.

python examples/generate.py --model demo --profile catalogue:demo-4bit --prompt "def main("
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtuner.calibration.model_loading import ModelSource
from kvtuner.exported_configs.sharing.reference import find_profile
from kvtuner.runtime_loader.transformers_cache import KVTunerCache


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="hub id, local folder, or the shipped demo model")
    parser.add_argument("--profile", default="catalogue:demo-4bit", help="file, run folder, owner/name of the hub, ...")
    parser.add_argument("--prompt", default="def main(")
    parser.add_argument("--tokens", type=int, default=48, help="to generate at most")
    args = parser.parse_args()
    path = ModelSource(args.model).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    cache = KVTunerCache.from_profile(find_profile(args.profile).profile, model.config)
    inputs = tokenizer(args.prompt, return_tensors="pt")
    with torch.no_grad(), cache.attending(model):
        ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=args.tokens, do_sample=False)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))
    tokens = cache.get_seq_length()
    print(f"\n{tokens} tokens are stored in {cache.stored_bytes:,} bytes, {cache.stored_bytes / tokens:,.0f} per token")


if __name__ == "__main__":
    main()
