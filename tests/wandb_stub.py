"""A stand-in for wandb's server on this machine, for its client, and for the machine that has no account."""

import functools
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import ROOT

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
CONFIG = {
    "wandb": "offline", "wandb_project": "headcount", "wandb_group": "study", "wandb_run_name": None,
    "attention": "gqa", "n_kv_head": 2, "seed": 3
}
NOWHERE = "http://127.0.0.1:9"


class Server(ThreadingHTTPServer):
    """A stand-in for wandb's: keeps what it is sent, and from the operation `stalls_at` on never answers."""

    daemon_threads = True

    def __init__(self, stalls_at: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.stalls_at = stalls_at
        self.n_connections, self.stalled, self.over = 0, False, threading.Event()
        self.runs: list[dict] = []
        self.history: list[dict] = []
        self.views: list[dict] = []

    def verify_request(self, *args) -> bool:
        self.n_connections += 1
        return True

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()

    def answer(self, path: str, body: dict) -> dict:
        """What wandb's client goes on with, as JSON."""
        where = f"127.0.0.1:{self.server_port}"
        asked, values = body.get("query", ""), body.get("variables") or {}
        called = re.search(r"(?:query|mutation) (\w+)", asked)
        name = "file_stream" if path.endswith("/file_stream") else called[1] if called else path
        if self.stalled or name == self.stalls_at:
            self.stalled = True
            self.over.wait(60)
        if name == "file_stream":
            lines = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history += [json.loads(line) for line in lines]
            return {}
        if name in ("Viewer", "GetDefaultEntity"):
            me = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
            return {"data": {"viewer": me}}
        if name == "UpsertBucket":
            self.runs.append(values)
            project = {"id": "2", "name": values["project"], "entity": {"id": "3", "name": "me"}}
            run = {"id": "4", "name": values["name"], "displayName": values["displayName"], "config": "{}"}
            run |= {"description": None, "sweepName": None, "historyLineCount": 0, "project": project}
            return {"data": {"upsertBucket": {"inserted": True, "bucket": run}}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"http://{where}/upload/{file}"} for file in values["files"]]
            return {"data": {"createRunFiles": {"runID": "4", "uploadHeaders": [], "files": files}}}
        if name == "UpsertView2":
            self.views.append(values)
            view = {"id": "5", "name": values["name"]}
            return {"data": {"upsertView": {"view": view, "inserted": True}}}
        return {"data": {}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            upload = self.path.startswith("/upload/")
            text = b"{}" if upload else json.dumps(self.server.answer(self.path, json.loads(raw))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        except (OSError, ValueError):
            self.close_connection = True  # the client has gone

    do_PUT = do_POST

    def log_message(self, *args) -> None:
        pass


def environment(home: Path, url: str = NOWHERE, key: bool = False, **more: str) -> dict[str, str]:
    """A machine that knows no account but a made-up `key`, whose every way out leads to `url`."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("WANDB")}
    account = {"WANDB_API_KEY": "0" * 40} if key else {}
    return {
        **kept, "HOME": str(home), "USERPROFILE": str(home), "NETRC": str(home / "netrc"),
        "WANDB_BASE_URL": url, "HTTP_PROXY": url, "HTTPS_PROXY": url,
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **account, **more
    }


def start(folder: Path, code: str, *args: str, env: dict[str, str], **options) -> subprocess.Popen:
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"stdin": subprocess.DEVNULL} | options
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], cwd=folder, env=env, encoding="utf-8", **pipes
    )


def ended(process: subprocess.Popen, code: int = 0) -> list[str]:
    """Wait, at most a minute; the lines on stderr."""
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert ("done" in out or "saved" in out) or code, out
    return err.splitlines()


@functools.cache
def inspect(run: Path) -> list[dict]:
    """All records of a run, as wandb itself reads them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)]
    env = environment(run, WANDB_MODE="offline")
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def records(folder: Path, kind: str) -> list[dict]:
    """The records of a kind in the only run under `folder`/wandb."""
    (run,) = (folder / "wandb").glob("offline-run-*")
    return [found[kind] for found in inspect(run) if found["type"] == kind]


class FakeRun:
    """What a run of wandb was called with; raises at the calls named in `fails`."""

    url = "https://example.org/run"

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, []
        self.summary = types.SimpleNamespace(update=lambda found: self.call("summary", found))

    def call(self, name: str, what: object) -> None:
        self.calls.append((name, what))
        if name == self.fails and (name != "log" or self.count("log") == 3):
            raise RuntimeError("out of order\nand more")

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    def log(self, row, step=None):
        self.call(*(("table", row) if step is None else ("log", {"step": step, **row})))

    def define_metric(self, name, step_metric):
        self.call("define_metric", name)

    def finish(self, exit_code):
        self.call("finish", exit_code)


def put_fake(monkeypatch, fails: str = "") -> FakeRun:
    """Put a FakeRun in wandb's place."""
    run, module = FakeRun(fails), types.ModuleType("wandb")

    def init(**options):
        run.call("init", options)
        return run

    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.init, module.Settings = init, type("Settings", (), {"model_fields": {}})
    module.Table = lambda columns, data: {"columns": columns, "data": data}
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_MODE", "offline")  # and put back what the run leaves there
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return run
