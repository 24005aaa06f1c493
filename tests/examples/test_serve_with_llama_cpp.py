"""`examples/serve_with_llama_cpp.py`: its reading of a server's answers, and, where there is one, a real server.

Catches: a server that does not start and is waited for, counts taken from the wrong side, a changed text that passes,
a drafter that llama.cpp drafts otherwise with than this package. Set LLAMA_SERVER to the program for the last one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SERVER = os.environ.get("LLAMA_SERVER", "")
# Answers as llama.cpp's server does: the prompt's ids backwards, as many as asked for, and counts if it has a drafter.
STUB = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"status": "ok"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        timings = {{"draft_n": 8, "draft_n_accepted": 2}} if "-md" in sys.argv else {{}}
        self.answer({{"tokens": body["prompt"][::-1][: body["n_predict"]], "timings": timings}})

    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("serving", ROOT / "examples" / "serve_with_llama_cpp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(folder: Path, text: str) -> str:
    path = folder / "llama-server"
    path.write_text(text.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def options(server: str) -> SimpleNamespace:
    return SimpleNamespace(server=server, target="t.gguf", cache_type="f16", threads=1, new_tokens=2)


def test_answers_of_a_server(example: Any, tmp_path: Path) -> None:
    args = options(program(tmp_path, STUB))
    plain = example.served(args, [[1, 2, 3], [4, 5, 6]], [])
    speculative = example.served(args, [[1, 2, 3], [4, 5, 6]], ["-md", "d.gguf"])
    assert [answer["tokens"] for answer in plain] == [[3, 2], [6, 5]]
    assert all(map(example.same, plain, speculative))
    assert example.acceptance(plain) == 0.0
    assert example.acceptance(speculative) == 0.25


def test_a_server_that_does_not_start_shows_why(example: Any, tmp_path: Path) -> None:
    broken = program(tmp_path, "#!{python}\nraise SystemExit('no such model')\n")
    with pytest.raises(SystemExit, match=r"does not start:\n.*no such model"):
        example.served(options(broken), [[1]], [])


def test_an_end_token_does_not_count_and_another_text_does(example: Any) -> None:
    def told(*tokens: int) -> dict[str, list[int]]:
        return {"tokens": list(tokens)}

    assert example.same(told(1, 2), told(1, 2))
    assert example.same(told(1, 2), told(1, 2, 0))
    assert not example.same(told(1, 2), told(1, 3))
    assert not example.same(told(1, 2, 3), told(1))


def dequantised(source: Path, path: Path) -> Path:
    """The model of a GGUF file in float32: a quantised one has other activations there than here."""
    reader = gguf.GGUFReader(source)
    fields = {name: part for name, part in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture").contents())
    for name, part in fields.items():
        is_array = part.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, part.contents(), part.types[0], part.types[-1] if is_array else None)
    for part in reader.tensors:
        shape = [int(extent) for extent in reversed(part.shape)]
        writer.add_tensor_info(part.name, shape, np.dtype(np.float32), 4 * int(part.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for part in reader.tensors:
        writer.write_tensor_data(gguf.quants.dequantize(part.data, part.tensor_type).astype(np.float32))
    writer.close()
    return path


@pytest.mark.skipif(shutil.which(SERVER) is None, reason="LLAMA_SERVER is not llama.cpp's server")
def test_llama_cpp_drafts_as_this_package(example: Any, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    from dspark.cli.common import demo_drafter, demo_target

    target = dequantised(Path(*demo_target()), tmp_path / "target.gguf")
    words = ["--server", SERVER, "--target", str(target), "--drafter", str(demo_drafter()), "--cache-type", "f32"]
    monkeypatch.setattr(sys, "argv", ["it", *words, "--prompts", "2", "--new-tokens", "32", "--threads", "1"])
    assert example.main() == 0
    found = re.search(r"Accepted there / here: ([\d.]+)", capsys.readouterr().out)
    assert found is not None
    assert 0.97 < float(found[1]) < 1.03
