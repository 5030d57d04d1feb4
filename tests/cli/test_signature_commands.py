"""``kvtuner sign`` and ``kvtuner verify`` with real keys, and in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile

if TYPE_CHECKING:
    from fixture_types import ProfileOf, RunCommand


ROOT = Path(__file__).resolve().parents[2]
PASSWORD = b"not on the command line"


@pytest.fixture
def folder(tmp_path: Path, profile_of: ProfileOf) -> Path:
    """A profile beside a key, the same key locked, and another one's public key."""
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    (tmp_path / "profile.json").write_bytes(dump_profile(profile_of(config, [LayerQuantization(4, 2)] * 2)))
    key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    for name, encryption in (("key", NoEncryption()), ("locked", BestAvailableEncryption(PASSWORD))):
        (tmp_path / f"{name}.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    for name, owner in (("public", key), ("stranger", other)):
        public = owner.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pem").write_bytes(public)
    return tmp_path


def test_sign_then_verify(run: RunCommand, folder: Path) -> None:
    profile = folder / "profile.json"
    status, out, err = run("sign", profile, "--private-key", folder / "key.pem")
    assert (status, err) == (0, "")
    assert out.startswith(f"{profile}.sig: signed by key ")
    status, out, err = run("verify", profile, "--identity", f"key:{folder / 'public.pem'}")
    assert (status, err) == (0, "")
    assert out.startswith(f"{profile}: signed by key ") and ", sha256:" in out and out.endswith(", for tiny\n")
    facts = json.loads(run("verify", profile, "--identity", f"key:{folder / 'public.pem'}", "--json")[1])
    assert facts["verified"] is True and facts["signed_by"] in out and facts["digest"] in out
    signed = json.loads(run("sign", profile, "--private-key", folder / "key.pem", "--json")[1])
    assert signed == [{"file": str(profile), "signature": f"{profile}.sig", "signed_by": facts["signed_by"]}]


def test_verification_fails_in_one_line_with_status_2(run: RunCommand, folder: Path) -> None:
    profile = folder / "profile.json"
    identity, stranger = f"key:{folder / 'public.pem'}", f"key:{folder / 'stranger.pem'}"
    for prepare, named_identity, message in (
        (lambda: None, identity, "profile.json.sig: there is no such signature; fetch it with the profile, or sign"),
        (lambda: run("sign", profile, "--private-key", folder / "key.pem"), stranger, "Key mismatch"),
        (lambda: None, "me@example.org", "an identity is key:PUBLIC.pem, chain:"),
        (lambda: profile.write_bytes(profile.read_bytes() + b" "), identity, "was changed after it was signed"),
    ):
        prepare()
        status, out, err = run("verify", profile, "--identity", named_identity)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("kvtuner verify: error: ") and message in err


def test_pin_is_checked_beside_the_signature(run: RunCommand, folder: Path) -> None:
    profile, identity = folder / "profile.json", f"key:{folder / 'public.pem'}"
    run("sign", profile, "--private-key", folder / "key.pem")
    digest = json.loads(profile.read_bytes())["digest"]
    assert run("verify", f"{profile}#{digest}", "--identity", identity)[0] == 0
    status, _, err = run("verify", f"{profile}#sha256:{'0' * 64}", "--identity", identity)
    assert status == 2 and "was asked for" in err


def test_password_comes_from_the_environment(run: RunCommand, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("sign", folder / "profile.json", "--private-key", folder / "locked.pem")
    assert "name its password's variable with --password-env" in run(*command)[2]
    status, _, err = run(*command, "--password-env", "NO_SUCH_PASSWORD")
    assert status == 2 and "the environment variable 'NO_SUCH_PASSWORD', which is not set" in err
    monkeypatch.setenv("KEY_PASSWORD", PASSWORD.decode())
    assert run(*command, "--password-env", "KEY_PASSWORD")[0] == 0
    monkeypatch.setenv("KEY_PASSWORD", "wrong")
    status, _, err = run(*command, "--password-env", "KEY_PASSWORD")
    assert status == 2 and "locked.pem cannot sign" in err and "the right password if it has one" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --private-key FILE (alone, or with --certificate), or --sigstore; one of the two"),
        (("--sigstore", "--private-key", "k"), "one of the two"),
        (("--sigstore", "--certificate", "c"), "--sigstore does not take --certificate; leave it out"),
        (("--sigstore", "--password-env", "P"), "--sigstore does not take --password-env"),
        (("--sigstore", "--identity-token-env", "NO_TOKEN"), "'NO_TOKEN', which is not set"),
        (("--private-key", "k", "--identity-token-env", "T"), "--private-key does not take --identity-token-env"),
        (("--private-key", "k", "--certificate-chain", "c"), "without --certificate does not take --certificate-chain"),
        (("--private-key", "k", "--certificate", "c", "--password-env", "P"), "no encrypted key beside a certificate"),
        (("--private-key", "absent.pem"), "absent.pem: there is no such PEM file; give its path"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(run: RunCommand, folder: Path, flags: Any, message: str) -> None:
    status, out, err = run("sign", folder / "profile.json", *flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (folder / "profile.json.sig").exists()


def test_only_files_of_this_machine_are_signed(run: RunCommand, folder: Path) -> None:
    status, _, err = run("sign", "owner/name", "--private-key", folder / "key.pem")
    assert status == 2 and "a file of this machine can be signed, not owner/name" in err


def test_run_folder_has_all_its_profiles_signed(run: RunCommand, folder: Path) -> None:
    (folder / "profile-3bit.json").write_bytes((folder / "profile.json").read_bytes())
    status, out, _ = run("sign", folder, "--private-key", folder / "key.pem")
    assert status == 0 and out.count("signed by") == 2
    for name in ("profile.json", "profile-3bit.json"):
        assert run("verify", folder / name, "--identity", f"key:{folder / 'public.pem'}")[0] == 0


@pytest.mark.slow
def test_command_of_its_own_process_prints_nothing_else(folder: Path) -> None:
    for arguments, message in (
        (("sign", "profile.json", "--private-key", "key.pem"), "profile.json.sig: signed by key "),
        (("verify", "profile.json", "--identity", "key:public.pem"), "profile.json: signed by key "),
    ):
        command = [sys.executable, "-W", "error", "-c", "from kvtuner.cli import main; raise SystemExit(main())"]
        done = subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(message) and done.stdout.count("\n") == 1
