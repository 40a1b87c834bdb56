"""Uploads to a server on loopback that speaks what huggingface_hub asks of the hub; and the ways in which they fail."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fleetune.hub.upload import by_hand, files_of
from tests.conftest import TinyData, fleetune, read_json

TOKEN = "hf_notarealtoken0123456789"


class Hub:
    """A hub with one user, ann, whose repositories are folders in memory."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.messages: list[str] = []
        self.refuses = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hub.tokens.add(self.headers["Authorization"])
                if hub.refuses:
                    return self.answer({"error": "no room"}, 507)
                return self.answer(*hub.post(self.path, body))

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.tokens.add(self.headers["Authorization"])
                _, owner, name, _, _, file = self.path.split("?")[0].split("/", 5)
                content = hub.files.get(f"{owner}/{name}", {}).get(file)
                if content is None:
                    return self.answer({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
                headers = {"ETag": f'"{len(content)}"', "X-Repo-Commit": "c" * 40, "Content-Type": "text/plain"}
                return self.answer(content, 200, headers)

            def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def post(self, path: str, body: bytes) -> tuple[Any, int]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.created.append(asked)
            name = f"{asked.get('organization') or 'ann'}/{asked['name']}"
            exists = name in self.files
            self.files.setdefault(name, {})
            return {"url": f"{self.url}/{name}", "name": name, "id": name}, 409 if exists else 200
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}, 200
        parts = path.split("?")[0].split("/")
        name = f"{parts[3]}/{parts[4]}"
        if parts[5] == "preupload":
            files = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}, 200
        assert parts[5] == "commit", path
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.messages.append(entry["value"]["summary"])
            else:
                assert entry["value"]["encoding"] == "base64"
                self.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        return {"commitUrl": f"{self.url}/{name}/commit/{'c' * 40}", "commitOid": "c" * 40}, 200

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """And the environment of a user who is logged in to it."""
    hub = Hub()
    environ = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN,
               "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    yield hub
    hub.close()


def settings_of(model: Path, data: TinyData, cache_dir: Path, output: Path, **more: object) -> list[str]:
    settings = {"model": model, "train_file": data.train, "validation_file": data.validation, "cache_dir": cache_dir,
                "output_dir": output, "max_steps": 1, "report_to": "none", "threads": 1, "push_to_hub": True,
                **more}  # fmt: skip
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@pytest.mark.slow
def test_a_run_on_two_ranks_uploads_the_model_once(
    hub: Hub, tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "my-model"
    settings = settings_of(tiny_model, tiny_data, cache_dir, output, hub_private_repo=True, processes=2)
    result = fleetune("train", *settings)
    assert f"files to {hub.url}/ann/my-model\n" in result.stdout
    assert [(asked["name"], asked["visibility"]) for asked in hub.created] == [("my-model", "private")]
    assert hub.messages == ["fine-tuned by fleetune for custom"]
    files = hub.files["ann/my-model"]
    assert set(files) == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                          "all_results.json", "eval_results.json", "train_results.json"}  # fmt: skip
    assert all((output / name).read_bytes() == content for name, content in files.items())
    # The token is sent, and told to nobody.
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in result.stdout + result.stderr
    assert not [path for path in output.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert "upload" in read_json(output / "record.json")["seconds"]


@pytest.mark.slow
def test_a_card_of_the_users_on_the_hub_is_left_alone(
    hub: Hub, tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path
) -> None:
    hub.files["lab/their-name"] = {"README.md": b"# By hand\n"}
    settings = settings_of(tiny_model, tiny_data, cache_dir, tmp_path / "out", hub_model_id="lab/their-name")
    told = fleetune("train", *settings).stdout
    assert "the repository has a README.md that is not fleetune's, which was left as it is" in told
    assert hub.files["lab/their-name"]["README.md"] == b"# By hand\n"
    assert "model.safetensors" in hub.files["lab/their-name"]


@pytest.mark.slow
def test_a_hub_that_refuses_ends_nothing(
    hub: Hub, tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path
) -> None:
    hub.refuses = True
    output = tmp_path / "out"
    told = fleetune("train", *settings_of(tiny_model, tiny_data, cache_dir, output)).stdout
    (line,) = [line for line in told.splitlines() if line.startswith("not uploaded to out: ")]
    assert f"later, hf upload out {output} . --include README.md" in line
    record = read_json(output / "record.json")
    assert record["status"] == "finished"
    assert line in record["notices"]
    assert (output / "README.md").is_file()


@pytest.mark.slow
def test_offline_the_card_is_written_and_the_way_to_upload_told(
    tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    settings = settings_of(tiny_model, tiny_data, cache_dir, output, hub_private_repo=True)
    told = fleetune("train", *settings, HF_HUB_OFFLINE="1").stdout
    (line,) = [line for line in told.splitlines() if line.startswith("not uploaded, HF_HUB_OFFLINE is set: later, ")]
    assert line.endswith("--include train_results.json --private")
    assert "# out" in (output / "README.md").read_text()


def test_without_a_login_nothing_is_started(
    hub: Hub, tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    settings = settings_of(tiny_model, tiny_data, cache_dir, tmp_path / "out")
    result = fleetune("train", *settings, check=False)
    assert result.returncode == 2
    assert (
        result.stderr == "error: --push_to_hub: nobody is logged in to the hub: say `hf auth login`, or set HF_TOKEN\n"
    )
    assert not hub.created


def test_a_token_on_the_command_line_is_refused_and_not_repeated(tmp_path: Path) -> None:
    result = fleetune("train", "--hub_token", TOKEN, "--output_dir", tmp_path, check=False)
    assert result.returncode == 2
    assert "--hub_token (not shown): everyone on the host sees a command line" in result.stderr
    assert TOKEN not in result.stdout + result.stderr


def test_what_is_uploaded_and_what_stays(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "README.md", "tokenizer.json", "record.json", "trainer_state.json",
                 "predictions_test.jsonl", ".lock", "notes.txt"):  # fmt: skip
        (tmp_path / name).write_text("")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "config.json").write_text("")
    files = files_of(tmp_path)
    assert files == ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    line = by_hand(Path("a b"), "me/x", ["README.md"], private=None)
    assert line == "hf upload me/x 'a b' . --include README.md"
