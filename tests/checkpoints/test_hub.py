"""Hub ids, against a server on this machine that speaks the part of the hub's API in use."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.small import weights, write

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"

OPEN = """
import json, sys
from mergekit_iso.checkpoints.checkpoint import open_checkpoint
from mergekit_iso.errors import CheckpointError
results = []
for reference in sys.argv[2:]:
    try:
        found = open_checkpoint(reference, allow_pickle=sys.argv[1] == "allow")
    except CheckpointError as error:
        results.append({"error": str(error), "hint": error.hint})
        continue
    files = sorted(str(p.relative_to(found.folder)) for p in found.folder.rglob("*") if p.is_file())
    norm = found.read("model.norm.weight").tolist()
    results.append({"commit": found.commit, "label": found.label, "files": files, "norm": norm})
print(json.dumps(results))
"""


class Hub(BaseHTTPRequestHandler):
    """Model info, tree listing and file downloads of the repositories in ``repositories``."""

    protocol_version = "HTTP/1.1"
    repositories: dict[str, dict[str, Path]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        for repository, revisions in self.repositories.items():
            if path.startswith(f"/api/models/{repository}"):
                self._api(repository, revisions, path.removeprefix(f"/api/models/{repository}"))
                return
            if path.startswith(f"/{repository}/resolve/"):
                revision, _, name = path.removeprefix(f"/{repository}/resolve/").partition("/")
                self._file(revisions[revision] / name, revision)
                return
        if "gated" in path:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _api(self, repository: str, revisions: dict[str, Path], rest: str) -> None:
        parts = rest.strip("/").split("/")
        revision = "main" if parts == [""] else parts[1]
        if revision not in revisions:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        sha = {"main": COMMIT, "v2": OTHER}.get(revision, revision)
        if parts[0] == "tree":
            folder = revisions[revision]
            files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            content: Any = [
                {
                    "type": "file",
                    "path": p.relative_to(folder).as_posix(),
                    "size": p.stat().st_size,
                    "oid": _etag(p),
                }
                for p in files
            ]
        else:
            content = {"id": repository, "sha": sha, "siblings": []}
        self._send(200, json.dumps(content).encode())

    def _file(self, path: Path, revision: str) -> None:
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": revision}
        lost = path.parent.name == "lost" and self.command == "GET"
        self._send(410 if lost else 200, b"{}" if lost else path.read_bytes(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    first = write(tmp_path / "server" / "main", weights(1), shards=2)
    for name in (
        "tokenizer.json",
        "README.md",
        "pytorch_model.bin",
        "model.gguf",
        "onnx/model.onnx",
    ):
        (first / name).parent.mkdir(exist_ok=True)
        (first / name).write_text("{}")
    (first / "consolidated.safetensors").write_bytes(b"a second copy")
    second = write(tmp_path / "server" / "v2", weights(2))
    pickled = tmp_path / "server" / "pickled"
    pickled.mkdir()
    torch.save(weights(3), pickled / "pytorch_model.bin")
    lost = write(tmp_path / "server" / "lost", weights(4))
    revisions = {"main": first, COMMIT: first, "v2": second, OTHER: second}
    repositories = {
        "org/name": revisions,
        "org/pickled": {"main": pickled, COMMIT: pickled},
        "org/lost": {"main": lost, COMMIT: lost},
    }
    handler = type("Local", (Hub,), {"repositories": repositories})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def opened(
    tmp_path: Path, *references: str, pickles: str = "refuse", **environment: str
) -> list[dict[str, Any]]:
    """Open checkpoints in a process of its own, whose hub is set up by the environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    own = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", OPEN, pickles, *references],
        env={**clean, **own, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results: list[dict[str, Any]] = json.loads(run.stdout)
    return results


def norm(seed: int) -> list[float]:
    values: list[float] = weights(seed)["model.norm.weight"].tolist()
    return values


def test_a_snapshot_is_fetched_once_and_then_read_offline(tmp_path: Path, hub: str) -> None:
    (found,) = opened(tmp_path, "org/name", HF_ENDPOINT=hub)
    assert found == {
        "commit": COMMIT,
        "label": "org/name",
        "norm": norm(1),
        "files": [
            "README.md",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ],
    }
    again, other = opened(tmp_path, "org/name", "org/pickled", HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    assert again == found
    assert "local hub cache" in other["error"]


def test_a_revision_is_a_branch_or_a_commit(tmp_path: Path, hub: str) -> None:
    for found in opened(tmp_path, "org/name@v2", f"org/name@{OTHER}", HF_ENDPOINT=hub):
        assert found["commit"] == OTHER
        assert found["norm"] == norm(2)


def test_pickled_weights_are_fetched_only_when_allowed(tmp_path: Path, hub: str) -> None:
    (refused,) = opened(tmp_path, "org/pickled", HF_ENDPOINT=hub)
    assert "--allow-pickle" in refused["hint"]
    assert not list((tmp_path / "cache").rglob("pytorch_model.bin"))
    (found,) = opened(tmp_path, "org/pickled", pickles="allow", HF_ENDPOINT=hub)
    assert found["norm"] == norm(3)


def test_what_the_hub_refuses_is_said_in_one_sentence(tmp_path: Path, hub: str) -> None:
    words = {
        "org/none": "no model 'org/none'",
        "org/gated": "'org/gated' is gated",
        "org/name@v9": "no revision 'v9'",
        "org/lost": "could not be downloaded (status 410)",
        "org/na me": "neither a path that exists nor a hub id",
    }
    for found, word in zip(opened(tmp_path, *words, HF_ENDPOINT=hub), words.values(), strict=True):
        assert word in found["error"]
        assert "\n" not in found["error"]
        assert found["hint"]


def test_paths_are_never_asked_of_the_hub(tmp_path: Path, hub: str) -> None:
    references = ("./org/name", "org/name/", "org/sub/name", "org/name.safetensors", "/org/name")
    for found in opened(tmp_path, *references, HF_ENDPOINT=hub):
        assert "does not exist" in found["error"]
    assert not (tmp_path / "cache").exists()


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    (found,) = opened(tmp_path, "org/name", HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be reached" in found["error"]
