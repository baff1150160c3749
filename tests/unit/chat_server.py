"""A server of chat completions, as OpenAI's API has them; it completes with a digit of the seed of a request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def chat_server(
    status: int = 200,
    first: int = 0,
    meet_seconds: float = 0.0,
    complete: Callable[[dict[str, Any]], Any] = lambda request: str(request["seed"] % 10),
    reason: str = "stop",
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the URL of a server and the list of its requests. It responds with `status`, to the `first` requests with
    503. `complete`: returns the completion of a request, as text, as a message or as the bytes of the whole
    reply; `reason`: why it ended.

    With `meet_seconds`, a request is completed when another has come, or after that time; `request["met"]` tells which.
    """
    requests: list[dict[str, Any]] = []
    meeting, lock = threading.Barrier(2), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append({**body, "key": self.headers["Authorization"], "met": False})
                code = 503 if len(requests) <= first else status if self.path == "/v1/chat/completions" else 404
            if meet_seconds:
                request = next(each for each in requests if each["seed"] == body["seed"])
                try:
                    meeting.wait(meet_seconds)
                    request["met"] = True
                except threading.BrokenBarrierError:
                    meeting.reset()
            said = complete(body)
            message = {"role": "assistant", **(said if isinstance(said, dict) else {"content": str(said)})}
            ending = "tool_calls" if "tool_calls" in message else reason
            choice = {"index": 0, "finish_reason": ending, "message": message}
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            reply["usage"] = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
            content = json.dumps(reply if code == 200 else {"error": {"message": "no such model"}}).encode()
            content = said if isinstance(said, bytes) else content
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{running.server_port}/v1", requests
        finally:
            running.shutdown()
