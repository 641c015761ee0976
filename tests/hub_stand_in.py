"""A small stand-in for the Hugging Face hub: the part of its HTTP interface that pushes and pulls.

Repositories are in memory, as lists of commits. Large files take the path of Git LFS, as there.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

TOKEN = "hf_standinwrite"


class Repository:
    """The commits of a repository by their hash, and the last one of each branch."""

    def __init__(self, private: bool) -> None:
        self.private = private
        first = hashlib.sha1(b"").hexdigest()
        self.commits: dict[str, dict[str, bytes]] = {first: {}}
        self.branches = {"main": first}

    def commit(self, branch: str, changes: dict[str, bytes]) -> str:
        files = {**self.commits[self.branches[branch]], **changes}
        text = json.dumps([len(self.commits), *sorted(files)]).encode()
        name = hashlib.sha1(text).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        return name

    def find(self, revision: str) -> str | None:
        name = self.branches.get(revision, revision)
        return name if name in self.commits else None

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.branches["main"]]


class StandIn:
    """The hub. It is asked at `url`, and has `repositories` by name."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.url = ""


class Handler(BaseHTTPRequestHandler):
    hub: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.answer_request()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def answer_request(self) -> None:
        body = self.read_body()
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path))
        for command, pattern, action in ROUTES:
            if (self.command == command or (self.command, command) == ("HEAD", "GET")) and (
                match := re.fullmatch(pattern, path)
            ):
                action(self, *match.groups(), body=body)
                return
        self.send(404, {"error": f"no route for {self.command} {path}"})

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def send(self, status: int, content: Any, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def writes(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repository(self, name: str, *, write: bool = False) -> Repository | None:
        """Return a repository that the caller may see, or answer as the hub does."""
        found = self.hub.repositories.get(name)
        if write and not self.writes:
            self.send(401, {"error": "Invalid username or password."})
        elif found is None or (found.private and not self.writes):
            self.send(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        else:
            return found
        return None

    def create(self, *, body: bytes) -> None:
        wanted = json.loads(body)
        if not self.writes:
            self.send(401, {"error": "Invalid username or password."})
            return
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            self.send(409, {"error": "You already created this model repo", "url": url})
            return
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.repositories[name] = Repository(private)
        self.send(200, {"url": url, "name": name, "id": name})

    def validate(self, *, body: bytes) -> None:
        text = json.loads(body)["content"]
        table = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else {}
        errors = [] if isinstance(table, dict) else [{"message": "no table"}]
        self.send(400 if errors else 200, {"errors": errors, "warnings": []})

    def branch(self, name: str, branch: str, *, body: bytes) -> None:
        if (found := self.repository(name, write=True)) is not None:
            found.branches.setdefault(branch, found.branches["main"])
            self.send(200, {})

    def preupload(self, name: str, revision: str, *, body: bytes) -> None:
        if self.repository(name, write=True) is None:
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self.send(200, {"files": files})

    def batch(self, name: str, *, body: bytes) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        self.send(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str, *, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.large[oid] = body
        self.send(200, {})

    def commit(self, name: str, branch: str, *, body: bytes) -> None:
        if (found := self.repository(name, write=True)) is None:
            return
        changes = {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                changes[value["path"]] = self.hub.large[value["oid"]]
        oid = found.commit(branch, changes)
        url = f"{self.hub.url}/{name}/commit/{oid}"
        self.send(200, {"commitUrl": url, "commitOid": oid})

    def revision(self, name: str, revision: str, *, body: bytes) -> None:
        if (found := self.repository(name)) is None:
            return
        if (commit := found.find(revision)) is None:
            self.send(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            return
        files = found.commits[commit]
        siblings = [{"rfilename": path, "size": len(files[path])} for path in files]
        self.send(200, {"id": name, "sha": commit, "siblings": siblings, "tags": []})

    def main(self, name: str, *, body: bytes) -> None:
        self.revision(name, "main", body=body)

    def tree(self, name: str, revision: str, *, body: bytes) -> None:
        if (found := self.repository(name)) is None:
            return
        files = found.commits[found.find(revision) or ""]
        entries = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in files.items()
        ]
        self.send(200, entries)

    def resolve(self, name: str, revision: str, path: str, *, body: bytes) -> None:
        if (found := self.repository(name)) is None:
            return
        commit = found.find(revision)
        if commit is None:
            self.send(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        elif path not in found.commits[commit]:
            self.send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        else:
            data = found.commits[commit][path]
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            self.send(200, data, ETag=etag, X_Repo_Commit=commit)


NAME = r"([^/]+/[^/]+?)"
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", f"/api/models/{NAME}/branch/(.+)", Handler.branch),
    ("POST", f"/api/models/{NAME}/preupload/(.+)", Handler.preupload),
    ("POST", f"/{NAME}\\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/lfs/([0-9a-f]+)", Handler.store),
    ("POST", f"/api/models/{NAME}/commit/(.+)", Handler.commit),
    ("GET", f"/api/models/{NAME}/revision/(.+)", Handler.revision),
    ("GET", f"/api/models/{NAME}", Handler.main),
    ("GET", f"/api/models/{NAME}/tree/([^/]+)", Handler.tree),
    ("GET", f"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]


@contextmanager
def serve_hub() -> Iterator[StandIn]:
    """Serve a hub without repositories."""
    hub = StandIn()
    with serve(type("HubHandler", (Handler,), {"hub": hub})) as hub.url:
        yield hub


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve requests by a handler, and yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(hub: StandIn, patch: pytest.MonkeyPatch, cache: Any, token: str | None) -> None:
    """Let huggingface_hub ask a stand-in, as with HF_ENDPOINT, HF_HUB_CACHE and HF_TOKEN."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", hub.url)
    addresses = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    if token is None:
        patch.delenv("HF_TOKEN", raising=False)
    else:
        patch.setenv("HF_TOKEN", token)
