"""The dialogue as one page in a browser: standard library only, at 127.0.0.1 alone.

A request counts only with this server's own Host (so that no foreign name can be pointed at it) and, if it
has one, Origin (so that no other page can ask in the user's name).
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from mtsql.errors import UserError
from mtsql.extras.chat.conversation import Answer, Conversation
from mtsql.extras.http_client import read_object

ADDRESS = "127.0.0.1"
MAX_BODY_BYTES = 100_000
SECONDS, CONNECTIONS = 10.0, 64  # to send a request, or to take the next piece of an answer; open at once
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
    """The server of one dialogue. Raises UserError if the port cannot be had; `port` 0 is any free one.

    A browser may leave at any time: that is no fault, and shown to nobody. A connection that has not sent its
    request after SECONDS is read no further, and of more than CONNECTIONS the last are closed: each is a
    thread.
    """

    def __init__(self, conversation: Conversation, port: int) -> None:
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port} cannot be had ({error}); choose another") from None
        self.conversation = conversation
        self.page = (files("mtsql.extras.chat") / "page.html").read_bytes()
        self.busy = threading.Lock()  # one question at a time
        self.opened: dict[Any, float] = {}  # when, by connection

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.opened) >= CONNECTIONS:
            self.shutdown_request(request)
            return
        self.opened[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        for request, began in list(self.opened.items()):
            if time.monotonic() - began > SECONDS:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RD)

    def shutdown_request(self, request: Any) -> None:
        self.opened.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /dialogue what was said, POST /ask and /undo go on with it."""

    server: Server
    timeout = SECONDS  # for a reader to take what is sent
    gone = False  # whether the reader of an answer went away

    def log_message(self, *_: object) -> None:
        """Nothing: a dialogue is private."""

    def trusted(self) -> bool:
        port = self.server.server_port
        own = {f"{name}:{port}" for name in (ADDRESS, "localhost")}
        own |= {ADDRESS, "localhost"} if port == 80 else set()  # which browsers leave out
        hosts, origins = (self.headers.get_all(name, []) for name in ("Host", "Origin"))
        named = len(hosts) == 1 and hosts[0].lower() in own
        return named and set(origins) <= {f"http://{name}" for name in own}

    def send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        policy = "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
        self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(content)

    def send_dialogue(self) -> None:
        described = json.dumps(described_dialogue(self.server.conversation))
        self.send(HTTPStatus.OK, described.encode(), "application/json")

    def refuse(self, status: HTTPStatus, problem: str) -> None:
        self.send(status, json.dumps({"problem": problem}).encode(), "application/json")

    def do_GET(self) -> None:
        if not self.trusted():
            self.refuse(HTTPStatus.FORBIDDEN, "another host or origin than this page's own")
        elif self.path == "/":
            self.send(HTTPStatus.OK, self.server.page, "text/html")
        elif self.path == "/dialogue":
            self.send_dialogue()
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def do_POST(self) -> None:
        length = ",".join(self.headers.get_all("Content-Length", []))
        if not self.trusted() or self.headers.get_content_type() != "application/json":
            self.refuse(HTTPStatus.FORBIDDEN, "another host, origin or type of content than the page's own")
        elif not re.fullmatch("[0-9]{1,9}", length) or int(length) > MAX_BODY_BYTES:
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the question is too long")
        elif self.path not in ("/ask", "/undo"):
            self.refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            body = self.rfile.read(int(length))
            question = read_question(body) if self.path == "/ask" else None
            if question == "" or len(body) < int(length):
                self.refuse(HTTPStatus.BAD_REQUEST, "the question is empty or cut")
            elif not self.server.busy.acquire(blocking=False):
                self.refuse(HTTPStatus.CONFLICT, "the agent is still answering")
            else:
                self.go_on(question)

    def go_on(self, question: str | None) -> None:
        """Answer a question, or take the last one back."""
        try:
            if question is not None:
                self.answer(question)
                return
            self.server.conversation.undo()
        finally:
            self.server.busy.release()
        self.send_dialogue()  # after the release: who reads it may ask at once

    def answer(self, question: str) -> None:
        """Send each event as a line, then the answer or the problem; the end is that of the connection."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        try:
            answer = self.server.conversation.ask(question, lambda event: self.tell({"event": asdict(event)}))
            self.tell({"answer": described_answer(answer)})
        except UserError as error:
            self.tell({"problem": str(error)})

    def tell(self, content: dict[str, Any]) -> None:
        """Send one line; a reader who went away does not stop the answer."""
        if self.gone:
            return
        try:
            self.wfile.write(json.dumps(content).encode() + b"\n")
            self.wfile.flush()
        except OSError:
            self.gone = True


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
            "rows": [[None if v is None else str(v) for v in row] for row in rows[:SENT_ROWS]],
            "count": len(rows),
            "truncated": answer.result.truncated,
        }
    return told
