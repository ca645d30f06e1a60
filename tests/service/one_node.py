"""A stand-in for a Ray cluster of one node: its job API over HTTP, real processes behind it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "a-token-of-the-tests-0123456789abcdef"


class OneNode:
    """Runs what is submitted, under the names that are given; `close` is the end of cluster and jobs."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: set[str] = set()
        self.drop_answers = 0
        """So many submissions are taken and not answered."""
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                node.answer(self)

            def do_POST(self) -> None:
                node.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        words = request.path.strip("/").split("/")
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._say(request, 401, "no")
        if request.command == "POST" and words == ["api", "jobs"]:
            return self._submit(request, json.loads(body))
        process = self.processes.get(words[2])
        if process is None:
            return self._say(request, 404, f"job {words[2]} does not exist")
        if words[-1] == "stop":
            self.stopped.add(words[2])
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return self._say(request, 200, {"stopped": True})
        return self._say(request, 200, self._status(words[2], process))

    def _submit(self, request: BaseHTTPRequestHandler, asked: dict) -> None:
        name = asked["submission_id"]
        if name in self.processes:
            return self._say(request, 500, f"Job with submission_id {name} already exists")
        self.processes[name] = subprocess.Popen(asked["entrypoint"], shell=True, start_new_session=True)
        if self.drop_answers:
            self.drop_answers -= 1
            request.connection.close()
            return None
        return self._say(request, 200, {"submission_id": name})

    def _status(self, name: str, process: subprocess.Popen[bytes]) -> dict:
        code = process.poll()
        if code is None:
            return {"status": "RUNNING", "driver_exit_code": None}
        if name in self.stopped:
            return {"status": "STOPPED", "driver_exit_code": code}
        return {"status": "FAILED" if code else "SUCCEEDED", "driver_exit_code": code}

    @staticmethod
    def _say(request: BaseHTTPRequestHandler, code: int, what: object) -> None:
        request.send_response(code)
        request.end_headers()
        request.wfile.write(json.dumps(what).encode())

    def hang_up(self) -> None:
        """Answer nobody any more; jobs go on."""
        self.server.shutdown()
        self.server.server_close()

    def close(self) -> None:
        self.hang_up()
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
