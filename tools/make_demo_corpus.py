"""Write the demo corpus: held-out standard-library sources, recall tables and additions, as JSON lines.

    python -m tools.make_demo_corpus --out corpus.jsonl

The committed corpus was written by Python 3.11.7; another version of the standard library gives other excerpts.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.calibration.demo.tasks import addition_lines, recall_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

SKIPPED_FOLDERS = {"test", "tests", "site-packages", "idlelib", "lib2to3", "__pycache__", "turtledemo"}
HELD_OUT_EVERY = 12
EXCERPT_CHARACTERS = 800
"""The length of an excerpt, about a recall table's: a few sequences of 512 tokens then hold something of everything."""


def library_texts() -> tuple[list[str], list[str]]:
    """The standard library's ASCII sources, tabs as spaces: those to train on, and every 12th file, held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
        and 2_000 < path.stat().st_size < 200_000
        and "config-" not in str(path)
    ]
    to_train_on: list[str] = []
    held_out: list[str] = []
    for number, path in enumerate(files, start=1):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.isascii():
            (to_train_on if number % HELD_OUT_EVERY else held_out).append(text.expandtabs(4))
    return to_train_on, held_out


def excerpts(text: str) -> Iterator[str]:
    """Consecutive pieces of whole lines, each at least `EXCERPT_CHARACTERS` long but the last, which is dropped."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        lines.append(line)
        if sum(map(len, lines)) >= EXCERPT_CHARACTERS:
            yield "".join(lines)
            lines = []


def documents(seed: int, num_excerpts: int, num_tables: int, num_additions: int) -> list[str]:
    """All documents of the corpus, shuffled; no two are alike but for white space."""
    rng = random.Random(seed)
    _, held_out = library_texts()
    pieces = [piece for text in held_out for piece in excerpts(text)]
    chosen = rng.sample(pieces, num_excerpts)
    chosen += [
        recall_problem(rng, num_pairs, num_questions=num_pairs).answered
        for num_pairs in (rng.randint(8, 32) for _ in range(num_tables))
    ]
    chosen += [addition_lines(rng, 30) for _ in range(num_additions)]
    unique = list({" ".join(text.split()): text for text in chosen}.values())
    rng.shuffle(unique)
    return unique


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()
    texts = documents(args.seed, num_excerpts=330, num_tables=220, num_additions=50)
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    Path(args.out).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
