"""A hostile hub: a local server whose answers are damaged, and `predict hf://` that asks it.

Every answer must be an error of one line, and no file may be written outside of the cache.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from calls import command
from children import BrokenPromiseError, Case
from corpus import Corpus
from damaged_files import run_files
from mutations import damage

DOWNLOADS = 200
SECONDS = 60.0
SHA = "a" * 40
NAMES = (
    "folds/../../../../evil/fold.json",
    "folds/..\\evil/fold.json",
    "/evil",
    "folds//fold.json",
)
NAMES += ("folds/evil/../../../../x/fold.json", "folds/./fold.json", "folds/e\0vil/fold.json")
NAMES += (f"folds/{'e' * 300}/fold.json", "folds/\ud800/fold.json", "folds/a\nb/fold.json")
TAGS = ('"x"', '"../../evil"', '"/evil"', "", '"' + "e" * 3000 + '"', "W/", '"e/vil"')
LENGTHS = ("0", "1", "-1", "99999999", "x", "9" * 30)
STATUSES = (200, 204, 301, 400, 401, 403, 404, 416, 418)


def cases(corpus: Corpus, _: Path, scale: float) -> Iterator[Case]:
    """Yield downloads from a hub of which some answers are damaged."""
    for number in range(max(2, round(DOWNLOADS * scale))):
        yield Case(f"hub/download/{number}", _download(corpus, number), SECONDS)


def _download(corpus: Corpus, number: int) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        from huggingface_hub import constants

        hub = HostileHub(corpus, Random(f"hub/{number}"))
        cache = folder / "in" / "the" / "cache"
        with (
            hub.serve() as url,
            mock.patch.multiple(
                constants,
                ENDPOINT=url,
                HUGGINGFACE_CO_URL_TEMPLATE=f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
                HF_HUB_CACHE=str(cache),
                HF_HUB_OFFLINE=False,
                HF_HUB_DISABLE_XET=True,
            ),
        ):
            bag = corpus.features / "slide_001.h5"
            command("predict", "hf://lab/run", bag, "--device", "cpu", "--out", "answers.csv")
        out = [p for p in folder.rglob("*") if p.is_file() and not p.is_relative_to(cache)]
        if [path.name for path in out if path.name != "answers.csv"]:
            raise BrokenPromiseError(f"written outside of the cache: {out}")

    return run


class HostileHub:
    """The files of a run, and answers of which one kind is damaged."""

    def __init__(self, corpus: Corpus, random: Random) -> None:
        self.random = random
        self.files = {
            str(path.relative_to(corpus.run)): path.read_bytes() for path in run_files(corpus.run)
        }
        self.names = list(self.files)
        self.sizes = {name: len(data) for name, data in self.files.items()}
        self.what = random.choice(("info", "names", "sizes", "headers", "cut", "status", "file"))
        self.sha: Any = SHA
        if self.what == "names":
            self.names.append(random.choice(NAMES))
        if self.what == "sizes":
            sizes = (None, -1, 10**15, 2**80, "x", 0.5)
            self.sizes[random.choice(self.names)] = random.choice(sizes)
        if self.what == "file":
            name = random.choice(self.names)
            self.files[name] = damage(self.files[name], Path(name).suffix, random)

    def info(self) -> bytes:
        siblings = [{"rfilename": n, "size": self.sizes.get(n, 2)} for n in self.names]
        return self._damaged({"id": "lab/run", "sha": self.sha, "siblings": siblings, "tags": []})

    def tree(self) -> bytes:
        entries = [
            {"type": "file", "path": n, "size": self.sizes.get(n, 2), "oid": "b" * 40}
            for n in self.names
        ]
        return self._damaged(entries)

    def _damaged(self, content: Any) -> bytes:
        data = json.dumps(content).encode()
        return damage(data, ".json", self.random) if self.what == "info" else data

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve the answers in threads of this process, and yield the address."""
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HostileHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        hub, random, path = self.hub, self.hub.random, self.path.partition("?")[0]
        headers = {"ETag": f'"{abs(hash(path)):040x}"', "X-Repo-Commit": SHA}
        if path.startswith("/api/"):
            data = hub.tree() if "/tree/" in path else hub.info()
            headers = {"Content-Type": "application/json"}
        else:
            data = hub.files.get(path.partition(f"/resolve/{SHA}/")[2], b"{}")
            if hub.what == "headers":
                headers["ETag"] = random.choice(TAGS)
                headers["X-Repo-Commit"] = random.choice((SHA, "", "../../evil", "b" * 40))
                headers["Content-Length"] = random.choice((str(len(data)), *LENGTHS))
        status = random.choice(STATUSES) if hub.what == "status" else 200
        if status == 301:
            headers["Location"] = random.choice(
                (self.path, "//evil.invalid/", "file:///etc/passwd")
            )
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            cut = hub.what == "cut" and random.random() < 0.2
            self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = hub.what in ("cut", "headers", "status")

    do_HEAD = do_GET  # noqa: N815
