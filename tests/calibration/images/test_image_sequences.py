"""Documents with images become sequences in which no image is cut and what follows it is scored."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny.image_models import KINDS
from tiny.image_readers import make_processor, picture

from kvtuner.calibration.batches import batches
from kvtuner.calibration.corpus import SPLITS, CorpusSource, load_corpus
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.images.image_sequences import ImageTokenizer
from kvtuner.calibration.images.sequence_images import SequenceImages
from kvtuner.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fixture_types import MakeTokenizer

    from kvtuner.calibration.corpus import Corpus

FEATURES = {"Gemma3": 4, "Llama4": 4}


def write(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def refusal(path: Path, processor: Any, **source: Any) -> str:
    data = {"data": str(path), "sequence_length": 32, "num_sequences": (1, 1, 1), **source}
    with pytest.raises(CorpusError) as caught:
        load_corpus(CorpusSource(**data), processor.tokenizer, lambda: processor)
    return str(caught.value)


def test_every_image_stands_whole_in_one_sequence(kind: str, corpus_of: Callable[..., Corpus]) -> None:
    corpus = corpus_of(kind)
    assert sum(len(sequence.spans) for name in SPLITS for sequence in corpus.images[name]) >= 8
    for name in SPLITS:
        for ids, is_image, sequence in zip(
            corpus.splits[name], corpus.in_images(name), corpus.images[name], strict=True
        ):
            types = sequence.inputs["token_type_ids" if kind == "Gemma3" else "mm_token_type_ids"]
            assert types.shape == (1, sequence.num_tokens) and sequence.num_tokens <= len(ids)
            assert is_image.sum() == sum(end - start for start, end in sequence.spans)
            assert types[0].bool().sum() > 0 or not sequence.spans
            assert not types[0].bool()[~is_image[: sequence.num_tokens]].any()


@pytest.mark.parametrize("kind", ["Gemma3", "Llama4"])
def test_the_places_of_an_image_hold_all_tokens_that_its_features_take(
    kind: str, corpus_of: Callable[..., Corpus], make_tokenizer: MakeTokenizer
) -> None:
    (feature,) = make_processor(kind, make_tokenizer()).tokenizer.convert_tokens_to_ids([KINDS[kind].tokens[0]])
    corpus = corpus_of(kind)
    for name in SPLITS:
        for ids, sequence in zip(corpus.splits[name], corpus.images[name], strict=True):
            counts = [int((ids[start:end] == feature).sum()) for start, end in sequence.spans]
            assert counts == [FEATURES[kind]] * len(sequence.spans)
            assert int((ids == feature).sum()) == sum(counts)
            assert len(sequence.inputs.get("pixel_values", ())) == len(counts)


def test_a_sequence_ends_before_an_image_that_it_would_cut(
    tmp_path: Path, processor_of: Callable[[str], Any], sentences: Callable[..., list[str]]
) -> None:
    processor, texts = processor_of("Gemma3"), sentences(30, seed=3)
    picture(0).save(tmp_path / "a.png")
    rows = [{"images": [{"path": str(tmp_path / "a.png")}], "text": f"{text.split(',')[0]} <image>"} for text in texts]
    data = CorpusSource(data=str(write(tmp_path, rows)), sequence_length=50, num_sequences=(2, 2, 2))
    corpus = load_corpus(data, processor.tokenizer, lambda: processor)
    lengths = [sequence.num_tokens for name in SPLITS for sequence in corpus.images[name]]
    assert min(lengths) < 50
    mark, end = processor.tokenizer.convert_tokens_to_ids(["<start_of_image>", "<end_of_image>"])
    stream = [t for name in SPLITS for ids, s in zip(corpus.splits[name], corpus.images[name], strict=True)
              for t in ids[: s.num_tokens].tolist()]  # fmt: skip
    assert stream.count(mark) == stream.count(end) >= 4
    ids = [ids for name in SPLITS for ids in corpus.splits[name]][lengths.index(min(lengths))]
    assert ids[min(lengths) :].eq(processor.tokenizer.eos_token_id).all()


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_images_side_by_side_have_the_marks_of_the_chat_template_which_no_sequence_cuts(
    kind: str, tmp_path: Path, processor_of: Callable[[str], Any], sentences: Callable[..., list[str]]
) -> None:
    processor, own = processor_of(kind), "<|image_pad|>"
    texts = [text.split(",")[0] for text in sentences(60, seed=3)]
    marks = ("{}", "<image><image> {}", f"{own}{own} {{}}", "{} " + f"<|vision_start|>{own}<|vision_end|>" * 2)
    rows = []
    for number, text in enumerate(texts):
        names = [f"{2 * number + place}.png" for place in range(2)]
        for place, name in enumerate(names):
            picture(2 * number + place).save(tmp_path / name)
        marked = marks[number % 4].format(text)
        rows.append({"images": names, "text": marked})
    data = CorpusSource(data=str(write(tmp_path, rows)), sequence_length=96, num_sequences=(3, 3, 3))
    corpus = load_corpus(data, processor.tokenizer, lambda: processor)
    start, pad, end = processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", own, "<|vision_end|>"])
    spans = 0
    for name in SPLITS:
        for ids, images in zip(corpus.splits[name].tolist(), corpus.images[name], strict=True):
            for first, last in images.spans:
                assert ids[first] == start and ids[last - 1] == end
                assert set(ids[first + 1 : last - 1]) == {pad}
            assert ids.count(start) == ids.count(end) == len(images.spans)
            spans += len(images.spans)
    assert spans > 18


def test_images_that_a_model_would_take_for_one_are_refused(
    tmp_path: Path, processor_of: Callable[[str], Any], sentences: Callable[..., list[str]]
) -> None:
    processor = processor_of("Qwen3VL")
    processor.chat_template = processor.chat_template.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    rows = []
    for number, text in enumerate(sentences(20, seed=3)):
        picture(number).save(tmp_path / f"{number}.png")
        image = {"type": "image", "path": f"{number}.png"}
        parts = [image, image, {"type": "text", "text": text}]
        rows.append({"messages": [{"role": "user", "content": parts}]})
    message = refusal(write(tmp_path, rows), processor, sequence_length=64)
    assert "two images stand side by side with nothing that tells a model where the first ends" in message


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        ("Mistral3", "[IMG]"),
        ("Gemma3", "<image_soft_token>"),
        ("Qwen3VL", "<|image_pad|>"),
        ("Llama4", "<|patch|>"),
        ("Llama4", "<|image|>"),
    ],
)
@pytest.mark.parametrize("is_talk", [False, True], ids=["text", "talk"])
def test_a_text_that_spells_the_token_of_an_image_is_refused(
    kind: str, token: str, is_talk: bool, tmp_path: Path, processor_of: Callable[[str], Any]
) -> None:
    picture(0).save(tmp_path / "a.png")
    spelled = f"what does {token} mean"
    row = {"messages": [{"role": "user", "content": spelled}]} if is_talk else {"text": spelled}
    message = refusal(write(tmp_path, [row, {"images": ["a.png"], "text": "one"}]), processor_of(kind))
    assert f"a text holds {token}, a token of images, but no image there; remove it" in message


def test_a_text_without_images_that_holds_the_mark_of_one_is_left_as_it_is(processor_of: Callable[[str], Any]) -> None:
    processor = processor_of("Qwen3VL")
    run = ImageTokenizer(processor, "data").tokens("the tag <image> of a page")
    assert run.ids == processor.tokenizer("the tag <image> of a page")["input_ids"]
    assert run.images == ()


def test_predictions_of_image_tokens_are_not_scored_and_a_split_moves_behind_an_image() -> None:
    images = SequenceImages(20, {}, ((4, 9), (9, 12), (15, 18)))
    (batch,) = batches(torch.arange(24)[None], 64, offsets="small", seed=0, images=[images])
    assert batch.input_ids.shape == batch.position_ids.shape == (1, 20)
    plan = ReadPlan.of("decode", 24)
    assert plan.split == 6
    assert batch.own_plan(plan).split == 9
    # 9, 10 stand before tokens of the second image, 14 to 16 before those of the third; 11 and 17 end one.
    assert batch.scored_places(plan).tolist() == [11, 12, 13, 17, 18, 19]
    values = torch.arange(20)[None]
    assert batch.scored(values, plan).tolist() == [[11, 12, 13, 17, 18, 19]]
    assert batch.scored(values[:, 9:], plan).tolist() == [[11, 12, 13, 17, 18, 19]]
    assert batch.own_plan(ReadPlan.of("cache", 24)).split == 0


def test_hashes_tell_images_apart(
    tmp_path: Path, processor_of: Callable[[str], Any], sentences: Callable[..., list[str]]
) -> None:
    processor, texts = processor_of("Gemma3"), sentences(20, seed=3)
    found = []
    for first in (0, 100):
        for number in range(20):
            picture(number + (first if number == 0 else 0)).save(tmp_path / f"{number}.png")
        rows = [{"images": [f"{number}.png"], "text": text} for number, text in enumerate(texts)]
        data = CorpusSource(data=str(write(tmp_path, rows)), sequence_length=40, num_sequences=(4, 4, 4))
        found.append(load_corpus(data, processor.tokenizer, lambda: processor))
    assert all(torch.equal(found[0].splits[name], found[1].splits[name]) for name in SPLITS)
    assert sum(found[0].hashes()[name] != found[1].hashes()[name] for name in SPLITS) == 1


def test_one_image_in_two_splits_is_refused(tmp_path: Path, processor_of: Callable[[str], Any]) -> None:
    picture(0).resize((64, 64)).save(tmp_path / "a.png")
    rows = [{"images": ["a.png"] * 6, "text": f"number {number}"} for number in range(12)]
    message = refusal(write(tmp_path, rows), processor_of("Gemma3"), sequence_length=64)
    assert "windows of the" in message
    assert "fewer near-duplicates" in message


def test_an_image_that_no_sequence_can_hold_is_refused(tmp_path: Path, processor_of: Callable[[str], Any]) -> None:
    picture(0).save(tmp_path / "a.png")
    rows = [{"images": ["a.png"], "text": f"number {number}"} for number in range(40)]
    message = refusal(write(tmp_path, rows), processor_of("Gemma3"), sequence_length=8)
    assert "an image takes 10 tokens, but a sequence has 8; give a larger --sequence-length" in message


def test_marks_that_are_not_one_for_each_image_are_refused(tmp_path: Path, processor_of: Callable[[str], Any]) -> None:
    picture(0).save(tmp_path / "a.png")
    rows = [{"images": ["a.png", "a.png"], "text": "one <image> alone"}]
    message = refusal(write(tmp_path, rows), processor_of("Gemma3"))
    assert "a text with 2 images has 1 marks <image>" in message


def test_a_processor_that_does_not_tell_the_tokens_of_an_image_is_refused(
    tmp_path: Path, processor_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = processor_of("Gemma3")
    monkeypatch.setattr(type(processor), "get_text_with_replacements", lambda self, text, images, *_: (
        [text[0].replace("<start_of_image>", images[0])], [[]]
    ))  # fmt: skip
    picture(0).save(tmp_path / "a.png")
    message = refusal(write(tmp_path, [{"images": ["a.png"], "text": "one"}]), processor)
    assert "Gemma3Processor does not tell which tokens stand for an image" in message
