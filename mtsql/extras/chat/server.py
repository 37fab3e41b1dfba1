"""The dialogue as one page in a browser: standard library only, at 127.0.0.1 alone.

A request counts only with this server's own Host (so that no foreign name can be pointed at it) and, if it
has one, Origin (so that no other page can ask in the user's name).
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from mtsql.errors import UserError
from mtsql.extras.chat.conversation import Answer, Conversation, value_text
from mtsql.extras.http_client import read_object

ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 100_000
SENT_ROWS = 200  # of a result


def serve(conversation: Conversation, port: int) -> None:
    """Answer requests until Ctrl-C. Raises UserError if the port cannot be had."""
    with Server(conversation, port) as server:
        print(f"http://{ADDRESS}:{server.server_port} shows the dialogue; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


class Server(ThreadingHTTPServer):
    """The server of one dialogue. Raises UserError if the port cannot be had; `port` 0 is any free one."""

    def __init__(self, conversation: Conversation, port: int) -> None:
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port} cannot be had ({error}); choose another") from None
        self.conversation = conversation
        self.page = (files("mtsql.extras.chat") / "page.html").read_bytes()
        self.busy = threading.Lock()  # one question at a time

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser may leave at any time: that is no fault, and shown to nobody."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /dialogue what was said, POST /ask and /undo go on with it."""

    server: Server
    timeout = 10.0  # seconds to send the next piece of a request, or to take that of an answer

    def log_message(self, *_: object) -> None:
        """Nothing: a dialogue is private."""

    def trusted(self) -> bool:
        port = self.server.server_port
        ends = (f":{port}", "") if port == 80 else (f":{port}",)  # browsers leave out 80
        own = [name + end for name in (ADDRESS, "localhost") for end in ends]
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        named = len(hosts) == 1 and hosts[0].lower() in own
        return named and all(origin in [f"http://{name}" for name in own] for origin in origins)

    def send(self, content: bytes | dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        """Answer with the page, or with an object as JSON."""
        is_page = isinstance(content, bytes)
        sent = content if is_page else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{'text/html' if is_page else 'application/json'}; charset=utf-8")
        self.send_header("Content-Length", str(len(sent)))
        policy = "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
        self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(sent)

    def refuse(self, status: HTTPStatus, problem: str) -> None:
        self.send({"problem": problem}, status)

    def do_GET(self) -> None:
        if not self.trusted():
            self.refuse(HTTPStatus.FORBIDDEN, "another host or origin than this page's own")
        elif self.path == "/":
            self.send(self.server.page)
        elif self.path == "/dialogue":
            self.send(described_dialogue(self.server.conversation))
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self.trusted() or self.headers.get_content_type() != "application/json":
            self.refuse(HTTPStatus.FORBIDDEN, "another host, origin or type of content than the page's own")
        elif not (length.isdecimal() and len(length) < 10 and int(length) <= MAX_BODY_BYTES):
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the question is too long")
        elif self.path not in ("/ask", "/undo"):
            self.refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            question = read_question(self.rfile.read(int(length)))
            if self.path == "/ask" and not question:
                self.refuse(HTTPStatus.BAD_REQUEST, "the question is empty or cut")
            elif not self.server.busy.acquire(blocking=False):
                self.refuse(HTTPStatus.CONFLICT, "the agent is still answering")
            else:
                try:
                    self.answer(question) if self.path == "/ask" else self.server.conversation.undo()
                finally:
                    self.server.busy.release()
                if self.path == "/undo":  # after the release: who reads it may ask at once
                    self.send(described_dialogue(self.server.conversation))

    def answer(self, question: str) -> None:
        """Send each event as a line, then the answer or the problem; the end is that of the connection.

        A reader who goes away ends the answer, and the question is forgotten.
        """
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        try:
            answer = self.server.conversation.ask(question, lambda event: self.tell({"event": asdict(event)}))
            self.tell({"answer": described_answer(answer)})
        except UserError as error:
            self.tell({"problem": str(error)})

    def tell(self, content: dict[str, Any]) -> None:
        """Send one line."""
        self.wfile.write(json.dumps(content).encode() + b"\n")


def read_question(body: bytes) -> str:
    """The text of {"question": text}, "" for anything else."""
    question = read_object(body).get("question")
    try:
        question.encode()  # a lone surrogate cannot be tokenised
    except (ValueError, AttributeError):
        return ""
    return question.strip()


def described_dialogue(conversation: Conversation) -> dict[str, Any]:
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
            "rows": [[None if v is None else value_text(v) for v in row] for row in rows[:SENT_ROWS]],
            "count": len(rows),
            "truncated": answer.result.truncated,
        }
    return told
