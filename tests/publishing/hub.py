"""A Hub in this process: what huggingface_hub's client asks of the real one to make a repository, push and download.

Contents are kept by repository and branch; large files come by LFS and are held against their SHA-256.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "t" * 30


class Hub(ThreadingHTTPServer):
    """The server and what it holds: `repositories[owner/name][branch][path]` in bytes, and every request's path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.commits: list[dict[str, Any]] = []
        self.large: dict[str, bytes] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class Handler(BaseHTTPRequestHandler):
    """One request; its method is found by the first route that fits."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        routes = {
            r"/api/repos/create": self.create, r"/api/validate-yaml": lambda _: self.answer({}),
            r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<branch>.+)": self.branch,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<branch>.+)": self.preupload,
            r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch": self.batch,
            r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<branch>.+)": self.commit,
        }  # fmt: skip
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid token"}, 401)
            return
        self.route(routes, self.body())

    def do_PUT(self) -> None:
        content, name = self.body(), self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == name
        self.server.large[name] = content
        self.answer({})

    def do_GET(self) -> None:
        self.route({
            r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<branch>[^/]+)": self.tree,
            r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<branch>[^/]+))?": self.info,
            r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<branch>[^/]+)/(?P<path>.+)": self.resolve,
        }, b"")  # fmt: skip

    do_HEAD = do_GET

    def route(self, routes: dict[str, Any], body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        for pattern, method in routes.items():
            if found := re.fullmatch(pattern, path):
                groups = {key: value or "main" for key, value in found.groupdict().items()}
                repo = groups.get("repo")
                if repo is not None and repo not in self.server.repositories:
                    self.answer({}, 404, {"X-Error-Code": "RepoNotFound"})
                else:
                    method(body, **groups)
                return
        self.answer({"error": f"no route for {path}"}, 404)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # --- what the routes do -----------------------------------------------------------------------------------------

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        is_new = name not in self.server.repositories
        self.server.repositories.setdefault(name, {"main": {}})
        self.answer({"url": f"{self.server.endpoint}/{name}", "name": name}, 200 if is_new else 409)

    def branch(self, _: bytes, repo: str, branch: str) -> None:
        branches = self.server.repositories[repo]
        branches.setdefault(branch, dict(branches["main"]))
        self.answer({})

    def preupload(self, body: bytes, repo: str, branch: str) -> None:
        self.answer({"files": [
            {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
             "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]})  # fmt: skip

    def batch(self, body: bytes, repo: str) -> None:
        href = f"{self.server.endpoint}/large/"
        wanted = json.loads(body)["objects"]
        actions = [{**one, "actions": {"upload": {"href": href + one["oid"]}}} for one in wanted]
        self.answer({"transfer": "basic", "objects": actions})

    def commit(self, body: bytes, repo: str, branch: str) -> None:
        files = self.server.repositories[repo][branch]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.server.commits.append({"repo": repo, "branch": branch, **value})
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        oid = self.oid(repo, branch)
        self.answer({"commitUrl": f"{self.server.endpoint}/{repo}/commit/{oid}", "commitOid": oid, "success": True})

    def oid(self, repo: str, branch: str) -> str:
        files = self.server.repositories[repo][branch]
        return hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()

    def tree(self, _: bytes, repo: str, branch: str) -> None:
        files = self.at(repo, branch)
        self.answer([
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ])  # fmt: skip

    def info(self, _: bytes, repo: str, branch: str) -> None:
        names = [{"rfilename": path} for path in self.at(repo, branch)]
        self.answer({"id": repo, "modelId": repo, "sha": self.oid(repo, "main"), "siblings": names, "tags": []})

    def at(self, repo: str, branch: str) -> dict[str, bytes]:
        """Contents of a branch, or of the commit that is its head."""
        branches = self.server.repositories[repo]
        return branches.get(branch) or branches["main"]

    def resolve(self, _: bytes, repo: str, branch: str, path: str) -> None:
        content = self.at(repo, branch).get(path)
        if content is None:
            self.answer({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.oid(repo, "main")})
            return
        tag = hashlib.sha1(content).hexdigest()
        self.answer(content, 200, {"ETag": f'"{tag}"', "X-Repo-Commit": self.oid(repo, "main")})
