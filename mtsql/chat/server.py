"""The dialogue as one page in a browser: standard library only, at 127.0.0.1 alone.

A request counts only with this server's own Host (so that no foreign name can be pointed at it) and, if it
has one, Origin (so that no other page can ask in the user's name).
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from mtsql.chat.conversation import Answer, Conversation, Event
from mtsql.errors import UserError

ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 100_000
SENT_ROWS = 200  # of a result


def serve(conversation: Conversation, port: int) -> None:
    """Answer requests until Ctrl-C. Raises UserError if the port cannot be had."""
    with make_server(conversation, port) as server:
        print(f"http://{ADDRESS}:{server.server_port} shows the dialogue; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


class Server(ThreadingHTTPServer):
    """A browser may leave at any time: that is no fault, and shown to nobody."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def make_server(conversation: Conversation, port: int) -> ThreadingHTTPServer:
    """The server of one dialogue, not yet running; `port` 0 is any free one.

    Raises UserError if the port cannot be had.
    """
    page = (files("mtsql.chat") / "page.html").read_bytes()
    busy = threading.Lock()  # one question at a time

    class Handler(BaseHTTPRequestHandler):
        """GET / is the page, GET /dialogue what was said, POST /ask and /undo go on with it."""

        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing: a dialogue is private."""

        def trusted(self) -> bool:
            own = {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
            origin = self.headers.get("Origin")
            return self.headers.get("Host") in own and origin in (None, *(f"http://{name}" for name in own))

        def send(self, status: HTTPStatus, content: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            policy = "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
            self.send_header("Content-Security-Policy", policy)
            self.end_headers()
            self.wfile.write(content)

        def refuse(self, status: HTTPStatus, problem: str) -> None:
            self.close_connection = True  # what was sent along is not read
            self.send(status, json.dumps({"problem": problem}).encode())

        def do_GET(self) -> None:
            if not self.trusted():
                self.refuse(HTTPStatus.FORBIDDEN, "another host or origin than this page's own")
            elif self.path == "/":
                self.send(HTTPStatus.OK, page, "text/html")
            elif self.path == "/dialogue":
                self.send(HTTPStatus.OK, json.dumps(described(conversation)).encode())
            else:
                self.refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not self.trusted() or self.headers.get_content_type() != "application/json":
                self.refuse(
                    HTTPStatus.FORBIDDEN, "another host, origin or type of content than the page's own"
                )
            elif not length.isdecimal() or int(length) > MAX_BODY_BYTES:
                self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the question is too long")
            elif self.path not in ("/ask", "/undo"):
                self.refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
            else:
                self.go_on(self.rfile.read(int(length)))

        def go_on(self, body: bytes) -> None:
            question = read_question(body) if self.path == "/ask" else None
            if question == "":
                self.refuse(HTTPStatus.BAD_REQUEST, "the question is empty")
            elif not busy.acquire(blocking=False):
                self.refuse(HTTPStatus.CONFLICT, "the agent is still answering")
            else:
                try:
                    if question is None:
                        conversation.undo()
                    else:
                        self.answer(question)
                finally:
                    busy.release()
                if question is None:  # told after the release: who reads it may ask at once
                    self.send(HTTPStatus.OK, json.dumps(described(conversation)).encode())

        def answer(self, question: str) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/x-ndjson")
            self.send_header("Connection", "close")  # the end of the answer is the end of the connection
            self.end_headers()
            self.close_connection = True
            stream_answer(conversation, question, self.write_line)

        def write_line(self, content: dict[str, Any]) -> None:
            self.wfile.write(json.dumps(content).encode() + b"\n")
            self.wfile.flush()

    try:
        return Server((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port} cannot be had ({error}); choose another") from None


def read_question(body: bytes) -> str:
    """The text of {"question": text}, "" for anything else."""
    try:
        question = json.loads(body)["question"]
        question.encode()  # a lone surrogate cannot be tokenised
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return question.strip()


def stream_answer(conversation: Conversation, question: str, write: Callable[[dict[str, Any]], None]) -> None:
    """Write each event, then the answer or the problem; a reader who went away does not stop the answer."""
    gone = False

    def tell(content: dict[str, Any]) -> None:
        nonlocal gone
        try:
            if not gone:
                write(content)
        except OSError:
            gone = True

    def show(event: Event) -> None:
        tell({"event": asdict(event)})

    try:
        tell({"answer": described_answer(conversation.ask(question, show))})
    except UserError as error:
        tell({"problem": str(error)})


def described(conversation: Conversation) -> dict[str, Any]:
    """The dialogue so far, for the page."""
    schema = conversation.schema
    return {
        "database": schema.path.name,
        "schema": schema.text(compact=False),
        "answers": [described_answer(answer) for answer in conversation.answers],
    }


def described_answer(answer: Answer) -> dict[str, Any]:
    """An answer with the first rows of its result, every cell as text or null."""
    told: dict[str, Any] = {"question": answer.question, "sql": answer.sql, "problem": answer.problem}
    if answer.result is not None:
        rows = answer.result.rows
        told |= {
            "failed": None if answer.result.ok else answer.result.message,
            "columns": answer.result.columns,
            "rows": [[None if v is None else str(v) for v in row] for row in rows[:SENT_ROWS]],
            "count": len(rows),
            "truncated": answer.result.truncated,
        }
    return told
