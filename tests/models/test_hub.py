"""Configurations of the hub, which here answers on loopback: config.json is all that is asked for."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from typing import ClassVar

import pytest

pytest.importorskip("huggingface_hub")

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
ASK = """
import sys
from oomph.errors import UserError
from oomph.models.configuration import find
for name in sys.argv[1:]:
    try:
        print(find(name)["hidden_size"])
    except UserError as error:
        print(error)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self):
        self.asked.append(self.path)
        if self.path.endswith("known/resolve/main/config.json"):
            data = json.dumps(CONFIG).encode()
            etag = hashlib.sha1(data).hexdigest()
            self.answer(200, {"ETag": f'"{etag}"', "X-Repo-Commit": "a" * 40}, data)
        else:
            gated = "gated" in self.path
            self.answer(
                403 if gated else 404, {"X-Error-Code": "GatedRepo" if gated else "RepoNotFound"}, b""
            )

    do_HEAD = do_GET

    def answer(self, status, headers, data):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


def ask(tmp_path, endpoint, *names):
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_TOKEN": ""}
    asked = subprocess.run(
        [sys.executable, "-c", ASK, *names], env=environment, capture_output=True, text=True, timeout=60
    )
    assert asked.returncode == 0, asked.stderr
    return asked.stdout.splitlines()


def test_the_configuration_alone_is_fetched_and_kept(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        known, gated, missing = ask(tmp_path, endpoint, "org/known", "org/gated", "org/missing")
        server.shutdown()
    assert known == "64"
    assert "'org/gated' is gated" in gated
    assert "folder with its config.json" in gated
    assert "'org/missing' is not on the hub" in missing
    assert {path for path in Hub.asked if "known" in path} == {"/org/known/resolve/main/config.json"}
    kept, unreachable = ask(tmp_path, endpoint, "org/known", "org/other")  # nothing listens any more
    assert kept == "64"
    assert f"the hub at {endpoint} does not give it" in unreachable
