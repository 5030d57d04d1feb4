"""The part of the Hub's protocol that huggingface_hub speaks for models of small files, over real HTTP on loopback.

Loaded by the fixture `hub` in conftest.py. Repositories live in memory; every request is recorded; faults are injected
by a rule for a method and a path. Errors carry the codes that the Hub sends.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Files = dict[str, bytes]


@dataclass
class Repo:
    """Commits by id, and what branches and tags mean now."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make a branch hold these files, and no others."""
        text = f"{branch}{len(self.commits)}{sorted((k, hashlib.sha1(v).hexdigest()) for k, v in files.items())}"
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid] = dict(files)
        self.refs[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        oid = self.refs.get(revision, revision)
        return oid if oid in self.commits else None


@dataclass
class Fault:
    """What is answered in place of the truth.

    Attributes:
        status: The status, with these headers; None for the true answer, changed by the others.
        cut: bytes of the body after which the connection breaks.
        wait: seconds before an answer.
        body: The body in place of the true one, with its own length.
        times: how often; then the truth again.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    wait: float = 0
    body: bytes | None = None
    times: int = 10**9


class LoopbackHub:
    """A server on a port of its own; use as a context manager."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.token = "hf_" + "s3cr3t" * 5
        self.may_write = True
        self.rules: list[tuple[str, re.Pattern[str], Fault]] = []
        self.large: dict[str, bytes] = {}
        self.ignored: set[str] = set()
        self.elsewhere: str | None = None
        self.before_commit: Callable[[], None] | None = None
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[LoopbackHub]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def repo(self, name: str, files: Mapping[str, bytes] | None = None, **kind: Any) -> Repo:
        made = self.repos[name] = Repo(**kind)
        made.commit({".gitattributes": b"*.png filter=lfs\n", **(files or {})})
        return made

    def fail(self, method: str, path: str, **fault: Any) -> Fault:
        made = Fault(**fault)
        self.rules.append((method, re.compile(path), made))
        return made

    def fault_of(self, method: str, path: str) -> Fault | None:
        for wanted, pattern, fault in self.rules:
            if wanted == method and pattern.search(path) and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    def asked(self, method: str, pattern: str) -> list[str]:
        """Paths that were asked for."""
        return [path for verb, path, _ in self.requests if verb == method and re.search(pattern, path)]


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that hung up is what some tests are about."""


class _Answer(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        super().__init__(status)
        self.status, self.body = status, json.dumps({"error": message or code}).encode()
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, **headers}


def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer("HEAD")

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def do_PUT(self) -> None:
            self._answer("PUT")

        def _answer(self, method: str) -> None:
            path = urllib.parse.unquote(self.path.partition("?")[0])
            data = self._body()
            hub.requests.append((method, path, self.headers.get("Authorization")))
            fault = hub.fault_of(method, path)
            if fault is not None:
                threading.Event().wait(fault.wait)
            try:
                if fault is not None and fault.status is not None:
                    raise _Answer(fault.status, **dict(fault.headers))
                status, headers, body = self._route(method, path, data)
            except _Answer as answer:
                status, headers, body = answer.status, answer.headers, answer.body
            if fault is not None and fault.body is not None:
                body = fault.body
            self._send(method, status, headers, body, fault)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = b""
                while size := int(self.rfile.readline(), 16):
                    parts += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return parts
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _send(self, method: str, status: int, headers: Mapping[str, str], body: bytes, fault: Fault | None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            if method == "HEAD":
                return
            if fault is not None and fault.cut is not None:
                self.wfile.write(body[: fault.cut])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
                return
            self.wfile.write(body)

        def _route(self, method: str, path: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
            if method in ("HEAD", "GET") and (match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+?)/(.+)", path)):
                return self._file(method, *match.groups())
            if method == "PUT" and (match := re.fullmatch(r"/large/([0-9a-f]{64})", path)):
                assert hashlib.sha256(data).hexdigest() == match[1]
                hub.large[match[1]] = data
                return 200, {}, b""
            if path == "/api/repos/create":
                return self._create(json.loads(data))
            if path == "/api/validate-yaml":
                errors = _card_errors(json.loads(data)["content"])
                status, headers, body = self._json({"errors": errors, "warnings": []})
                return 400 if errors else status, headers, body
            if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
                return self._large(json.loads(data))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([a-z-]+)/(.+))?", path):
                return self._api(match[1], match[2], match[3] or "main", data)
            raise _Answer(404, "", "no such route")

        def _json(self, value: Any) -> tuple[int, dict[str, str], bytes]:
            return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

        def _repo(self, name: str) -> Repo:
            repo = hub.repos.get(name)
            token = self.headers.get("Authorization")
            if token not in (None, f"Bearer {hub.token}"):
                raise _Answer(401, "", "Invalid credentials in Authorization header")
            if repo is None or (repo.private and token is None):
                raise _Answer(
                    401 if token is None else 404, "" if token is None else "RepoNotFound", "Repository not found"
                )
            if repo.gated:
                raise _Answer(403, "GatedRepo", "Access to this model is restricted")
            return repo

        def _commit_of(self, repo: Repo, revision: str) -> str:
            oid = repo.resolve(revision)
            if oid is None:
                raise _Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return oid

        def _file(self, method: str, name: str, revision: str, path: str) -> tuple[int, dict[str, str], bytes]:
            repo = self._repo(name)
            oid = self._commit_of(repo, revision)
            data = repo.commits[oid].get(path)
            if data is None:
                raise _Answer(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": oid})
            headers = {"X-Repo-Commit": oid, "ETag": f'"{_git_hash(data)}"', "Accept-Ranges": "bytes"}
            if hub.elsewhere is not None:  # as large files are: at another host
                location = f"{hub.elsewhere}/{name}/resolve/{oid}/{path}"
                return 302, {**headers, "Location": location, "X-Linked-Size": str(len(data))}, b""
            span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if span and method == "GET":
                start = int(span[1])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                return 206, headers, data[start:]
            return 200, headers, data

        def _create(self, asked: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
            self._may_write()
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in hub.repos:
                raise _Answer(409, "", "You already created this model repo")
            hub.repo(name, private=asked.get("private") or asked.get("visibility") == "private")
            return self._json({"url": f"{hub.url}/{name}"})

        def _may_write(self) -> None:
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                raise _Answer(401, "", "Invalid username or password.")
            if not hub.may_write:
                raise _Answer(403, "", "this token cannot write")

        def _large(self, asked: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
            self._may_write()
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/large/{each['oid']}"}}} for each in asked["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})

        def _api(self, name: str, verb: str | None, revision: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
            repo = self._repo(name)
            if verb == "commit":
                return self._commit(name, repo, revision, data)
            oid = self._commit_of(repo, revision)
            files = repo.commits[oid]
            if verb == "preupload":
                self._may_write()
                modes = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(".png") else "regular",
                        "shouldIgnore": file["path"] in hub.ignored,
                        "oid": _oid(file["path"], files[file["path"]]) if file["path"] in files else None,
                    }
                    for file in json.loads(data)["files"]
                ]
                return self._json({"files": modes})
            if verb == "paths-info":
                wanted = urllib.parse.parse_qs(data.decode())["paths"]
                found = [path for path in wanted if path in files]
                return self._json(
                    [
                        {"type": "file", "path": path, "size": len(files[path]), "oid": _git_hash(files[path])}
                        for path in found
                    ]
                )
            siblings = [
                {"rfilename": path, "size": len(content), "blobId": _git_hash(content)}
                for path, content in sorted(files.items())
            ]
            return self._json({"id": name, "modelId": name, "sha": oid, "private": repo.private, "siblings": siblings})

        def _commit(self, name: str, repo: Repo, branch: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
            self._may_write()
            if hub.before_commit is not None:
                hub.before_commit()
            lines = [json.loads(line) for line in data.splitlines()]
            header, operations = lines[0]["value"], lines[1:]
            if header.get("parentCommit") not in (None, repo.refs[branch]):
                raise _Answer(412, "", "A commit has happened since. Please refresh and try again.")
            files = dict(repo.commits[repo.refs[branch]])
            for operation in operations:
                value = operation["value"]
                if operation["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
                else:
                    assert operation["key"] == "deletedFile", operation
                    del files[value["path"]]
            is_pr = "create_pr=1" in self.path
            oid = repo.commit(files, f"refs/pr/{len(repo.refs)}" if is_pr else branch)
            answer = {"commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"}
            return self._json({**answer, "pullRequestUrl": f"{hub.url}/{name}/discussions/1"} if is_pr else answer)

    return Handler


def _oid(path: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if path.endswith(".png") else _git_hash(data)


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _card_errors(card: str) -> list[dict[str, str]]:
    """What the Hub finds wrong with a card: metadata is a mapping, with a license and tags of the right kinds."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    metadata = yaml.safe_load(match[1]) if match else None
    if not isinstance(metadata, dict):
        return [{"message": "no metadata"}]
    if metadata.get("license") not in (None, "cc0-1.0", "apache-2.0", "mit"):
        return [{"message": f"license {metadata['license']} is none"}]
    kinds = {"license": str, "tags": list, "library_name": str, "base_model": str}
    return [
        {"message": f"{key} must be {kind.__name__}"}
        for key, kind in kinds.items()
        if key in metadata and not isinstance(metadata[key], kind)
    ]
