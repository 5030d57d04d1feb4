"""What names a profile is read one way only, and never leaves its repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.sharing.reference import (
    CatalogueReference,
    FileReference,
    HubReference,
    check_digest,
    find_profiles,
    is_commit,
    parse_reference,
    parse_repo,
)

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("me/model", HubReference("me/model", "main")),
        ("me/model@v1", HubReference("me/model", "v1")),
        ("me/model@refs/pr/1", HubReference("me/model", "refs/pr/1")),
        ("me/model@feature/x:kv/a b.json", HubReference("me/model", "feature/x", "kv/a b.json")),
        ("me/model:profile-4bit.json", HubReference("me/model", "main", "profile-4bit.json")),
        (f"Me/Qwen2.5-7B_x@{'a' * 40}#{DIGEST}", HubReference("Me/Qwen2.5-7B_x", "a" * 40, digest=DIGEST)),
        ("profile.json", FileReference(Path("profile.json"))),
        ("runs/profile.json", FileReference(Path("runs/profile.json"))),
        ("./me/model", FileReference(Path("me/model"))),
        ("/me/model", FileReference(Path("/me/model"))),
        ("runs", FileReference(Path("runs"))),
        ("a/b/c", FileReference(Path("a/b/c"))),
        (f"p#x.json#{DIGEST}", FileReference(Path("p#x.json"), DIGEST)),
        (f"catalogue:demo-4bit#{DIGEST}", CatalogueReference("demo-4bit", DIGEST)),
        ("catalogue:demo-4bit", CatalogueReference("demo-4bit")),
    ],
)
def test_each_form_is_read(text: str, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_reference(text) == expected


def test_what_exists_here_is_meant_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ProfileError, match=r"there is no runs/typo, and runs is where run folders are; .* runs/typo@main"
    ):
        find_profiles("runs/typo")
    (tmp_path / "runs" / "demo-4bit").mkdir(parents=True)
    assert parse_reference("runs/demo-4bit") == FileReference(Path("runs/demo-4bit"))
    assert parse_reference(f"runs/demo-4bit#{DIGEST}") == FileReference(Path("runs/demo-4bit"), DIGEST)
    assert parse_reference("runs/typo") == FileReference(Path("runs/typo"))
    with pytest.raises(ProfileError, match=r"there is no runs/typo, and runs is a folder here; .* runs/typo@main"):
        find_profiles("runs/typo")
    for text in ("runs/typo.json", "nosuch/profile.json"):
        with pytest.raises(ProfileError, match=rf"^{text}: cannot be read \(No such file or directory\)"):
            find_profiles(text)
    for text in ("runs/typo@main", "runs/typo:profile.json", "others/demo-8bit"):
        assert isinstance(parse_reference(text), HubReference)
    assert parse_reference("~/x.json") == FileReference(Path.home() / "x.json")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        *(
            (text, "must name a file inside the repository$")
            for text in (
                "me/model@v1:../secret.json",
                "me/model:/etc/passwd",
                "me/model:a//b.json",
                "me/model:./a.json",
                "me/model:a\\b.json",
                "me/model:a\x1b.json",
            )
        ),
        ("profile.json#sha256:abc", "64 hexadecimal digits, not #sha256:abc; kvtuner validate"),
        (f"me/model#{DIGEST.upper()}", "64 hexadecimal digits, not #SHA256:0A0A"),
        (f"me/model#{DIGEST}0", "64 hexadecimal digits, not #sha256:0a0a"),
        ("me/model#sha256:", "64 hexadecimal digits, not #sha256:; kvtuner validate"),
        ("x" * 5000, "at most 4096 characters without NUL, not 'xxx"),
        ("a\0b", r"at most 4096 characters without NUL, not 'a.x00b'; name a file"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_printable_line(text: str, rule: str) -> None:
    with pytest.raises(ProfileError, match=rule) as refused:
        parse_reference(text)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400


def test_a_hub_reference_reads_back_as_it_is_written() -> None:
    for reference in (HubReference("me/m", "main"), HubReference("me/m", "v1", "kv/p.json")):
        assert parse_reference(str(reference)) == reference
    assert is_commit(HubReference("me/m", "main").at("b" * 40).revision) and not is_commit("b" * 39)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(st.text(alphabet="ab/.@:#~\\-_ \n0\u00e4", max_size=24))
def test_any_text_is_a_reference_inside_its_repository_or_refused(text: str) -> None:
    try:
        reference = parse_reference(text)
    except ProfileError:
        return
    if isinstance(reference, HubReference):
        assert parse_repo(reference.repo) == reference.repo
        parts = Path(reference.path).parts
        assert parts and ".." not in parts and not Path(reference.path).is_absolute()


@pytest.mark.parametrize("text", ["me", "me/m@v1", "me/m:x", "a/b/c", "-me/m", "me/", "/m", "me/m\n", ""])
def test_a_repository_is_owner_and_name(text: str) -> None:
    with pytest.raises(ProfileError, match="owner/name"):
        parse_repo(text)


def test_a_pin_accepts_its_own_digest_only() -> None:
    check_digest(DIGEST, None, "p")
    check_digest(DIGEST, DIGEST, "p")
    with pytest.raises(ProfileError, match="was asked for"):
        check_digest(DIGEST, DIGEST.replace("a", "b"), "p")
