"""Loading and saving: what is read, what is refused and how it is told, what a failed save leaves behind.

Catches: a foreign or damaged checkpoint that loads, or fails without naming file or tensors; weights from a pickle;
code of a repository that runs; loading arguments that do not reach the Hub; a half-written folder; stale weights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, BertConfig, LlamaConfig

from dspark import DSparkConfig, DSparkDrafter
from dspark.hub import read_config, register

from . import small

load = DSparkDrafter.from_pretrained


@pytest.fixture
def folder(tmp_path) -> Path:
    small.drafter().save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def edit_config(folder: Path, **changes) -> None:
    """Change fields of config.json; `...` removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- what does not fit ----------------------------------------------------------------------------------------------


def test_missing_unexpected_and_wrong_tensors_are_all_named(folder) -> None:
    def change(tensors) -> None:
        del tensors["fc.weight"], tensors["layers.1.mlp.up_proj.weight"]
        tensors["extra.weight"] = torch.zeros(2)
        tensors["norm.weight"] = torch.zeros(31)

    edit_tensors(folder, change)
    with pytest.raises(ValueError, match="does not fit its config") as error:
        load(folder)
    message = str(error.value)
    assert str(folder) in message
    for part in (
        "missing tensors: fc.weight, layers.1.mlp.up_proj.weight",
        "unexpected tensors: extra.weight",
        "norm.weight is (31,), the config wants (32,)",
        "nothing was loaded",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 3}, "missing tensors: layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "unexpected tensors: layers.1.input_layernorm.weight"),
        ({"attention_bias": True}, r"missing tensors: layers\.0\.self_attn\.k_proj\.bias"),
        ({"markov_head_type": "rnn"}, r"missing tensors: markov_head\.joint_proj\.bias"),
        (
            {"markov_rank": 0, "markov_head_type": "none", "confidence_head_with_markov": False},
            "unexpected .*markov_w1",
        ),
        ({"share_embedding": False}, r"missing tensors: embed_tokens\.weight"),
        ({"draft_vocab_size": 9, "share_lm_head": False}, r"missing tensors: draft_token_ids, lm_head\.weight"),
        ({"target_layer_ids": [0, 2]}, r"fc\.weight is \(32, 96\), the config wants \(32, 64\)"),
        ({"family": "llama"}, r"unexpected tensors: layers\.0\.self_attn\.k_norm\.weight"),
        ({"family": "gemma4", "attention_k_eq_v": True}, r"missing tensors: layers\.0\.layer_scalar"),
    ],
)
def test_config_of_another_drafter_is_refused(folder, changes, named) -> None:
    edit_config(folder, **changes)
    for cls in (DSparkDrafter, AutoModel):
        with pytest.raises(ValueError, match=named):
            cls.from_pretrained(folder)


def test_mismatched_sizes_can_be_allowed(folder) -> None:
    edit_config(folder, num_target_layers=9, target_layer_ids=[0, 4])
    model = load(folder, ignore_mismatched_sizes=True)
    assert model.fc.weight.shape == (32, 64)


@pytest.mark.parametrize(
    "ids", [[0, 5, 5, *range(6, 21)], [0, 9, 4, *range(10, 25)], [*range(17), 64], [-1, *range(17)]]
)
def test_damaged_draft_vocabulary_is_refused(tmp_path, ids) -> None:
    model = small.drafter(draft_vocab_size=len(small.DRAFT_IDS))
    model.draft_token_ids.copy_(torch.tensor(ids))
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=rf"`draft_token_ids` of .* strictly increasing and lie in 0\.\.63, got \[{ids[0]}"
    ):
        load(tmp_path)


def test_a_target_is_not_a_drafter(tmp_path) -> None:
    small.target().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"is not a DSpark drafter .*model_type='qwen3' .*\['Qwen3ForCausalLM'\].* target"
    ):
        load(tmp_path)


@pytest.mark.parametrize("config", [BertConfig(), LlamaConfig()])
def test_a_foreign_config_is_refused(tmp_path, config) -> None:
    config.save_pretrained(tmp_path)
    message = (
        f"is not a DSpark drafter that can be read.*model_type='{config.model_type}'.*Expected model_type 'dspark'"
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("place", ["./no-such", "/no/such/folder", "../x", "a/b/c", "no such", "", Path("/no/such")])
def test_a_place_that_is_not_there_is_told_so(place) -> None:
    for read in (load, read_config):
        with pytest.raises(FileNotFoundError) as error:
            read(place)
        assert str(error.value) == f"There is no folder {place}. Name a local folder or a Hub id (owner/name)."


def test_a_home_folder_is_to_be_written_out(folder, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    with pytest.raises(FileNotFoundError, match=rf"Its `~` is not written out: {folder}\."):
        load("~/drafter")


@pytest.mark.parametrize("place", ["no-such-drafter", "owner/no-such-drafter"])
def test_what_may_be_a_hub_id_is_named_when_it_cannot_be_read(place, tmp_path) -> None:
    with pytest.raises(OSError, match=f"{place}") as error:
        load(place, local_files_only=True, cache_dir=tmp_path)
    assert str(error.value).startswith(f"There is no folder {place}, and on the Hub it could not be read.")


def test_invalid_config_names_the_folder_and_the_rule(folder) -> None:
    edit_config(folder, mask_token_id=...)
    for read in (load, read_config):
        with pytest.raises(ValueError, match=rf"config.json of {folder} is not valid. `mask_token_id` is missing"):
            read(folder)


def test_mask_token_outside_the_embedding_is_refused(tmp_path) -> None:
    small.drafter(**small.STORAGE["own"]).save_pretrained(tmp_path)
    edit_config(tmp_path, mask_token_id=64)
    with pytest.raises(ValueError, match=r"`mask_token_id` must be an id of the target's vocabulary, 0\.\.63, got 64"):
        load(tmp_path)


def test_unknown_field_is_named_and_ignored(folder, caplog) -> None:
    edit_config(folder, draft_window=128)
    with caplog.at_level("WARNING", logger="dspark"):
        model = load(folder)
    assert "draft_window" in caplog.text
    model.save_pretrained(folder)
    assert "draft_window" not in (folder / "config.json").read_text()


# --- what is not there or broken ------------------------------------------------------------------------------------


def cut(size: int):
    return lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:size])


@pytest.mark.parametrize(
    "spoil", [cut(-1000), cut(50), cut(0), lambda f: (f / "model.safetensors").write_bytes(b"garbage" * 99)]
)
def test_damaged_weights_are_named(folder, spoil) -> None:
    spoil(folder)
    for cls in (DSparkDrafter, AutoModel):
        with pytest.raises(OSError, match=rf"weights of {folder} cannot be read .*damaged or was cut short"):
            cls.from_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: [path.unlink() for path in f.iterdir()], "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not a valid JSON file"),
        (lambda f: (f / "config.json").write_text("[1]"), "is not a JSON object"),
        (lambda f: (f / "config.json").write_text("null"), "is not a JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
        (lambda f: shutil.rmtree(f), "drafter"),
    ],
)
def test_missing_files_are_named(folder, spoil, message) -> None:
    spoil(folder)
    with pytest.raises(OSError, match=message):
        load(folder)


def test_adapter_without_a_drafter_says_how_to_load_it(tmp_path) -> None:
    pytest.importorskip("peft")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"does not say which drafter .* `drafter\.load_adapter\(folder\)`"):
        load(tmp_path)


def test_missing_shard_is_named(tmp_path) -> None:
    small.drafter().save_pretrained(tmp_path, max_shard_size="8KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(OSError, match=lost.name):
        load(tmp_path)


def test_pickled_weights_are_refused(folder) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for cls in (DSparkDrafter, AutoModel):
        with pytest.raises(OSError, match=r"model\.safetensors"):
            cls.from_pretrained(folder)
        with pytest.raises(ValueError, match=r"safetensors only, got use_safetensors=False\..*convert"):
            cls.from_pretrained(folder, use_safetensors=False)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def test_no_code_of_a_repository_runs(folder, monkeypatch) -> None:
    """Neither modeling files that config.json points to, nor a `custom_generate` folder, nor a pickle."""
    monkeypatch.chdir(folder.parent)
    code = "from pathlib import Path\nPath('executed').touch()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    torch.save(Bomb(), folder / "pytorch_model.bin")
    torch.save(Bomb(), folder / "training_args.bin")
    auto_map = {"AutoModel": "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"}
    edit_config(folder, auto_map=auto_map, custom_pipelines={"text-generation": {"impl": "modeling_evil.Evil"}})
    for cls in (DSparkDrafter, AutoModel):
        assert type(cls.from_pretrained(folder)) is DSparkDrafter
    assert type(AutoConfig.from_pretrained(folder)) is DSparkConfig
    assert not Path("executed").exists()


# --- arguments ------------------------------------------------------------------------------------------------------


def test_config_fields_can_be_overridden(folder) -> None:
    model = load(folder, block_size=6, attention_dropout=0.25, confidence_temperatures=[1.0] * 6)
    assert (model.config.block_size, model.config.attention_dropout) == (6, 0.25)
    model.share_with(small.target())
    assert model.draft(torch.tensor([1]), small.states(1)).token_ids.shape == (1, 6)
    with pytest.raises(ValueError, match=r"`mask_token_id` must be an id .* got 640"):
        load(folder, mask_token_id=640)
    with pytest.raises(TypeError, match="unexpected keyword argument 'blok_size'"):
        load(folder, blok_size=6)
    assert load(folder).config.block_size == 4


def test_config_object_or_path(folder) -> None:
    config = DSparkConfig.from_pretrained(folder)
    config.block_size = 5
    assert load(folder, config=config).config.block_size == 5
    assert load(folder, config=str(folder)).config.block_size == 4
    with pytest.raises(ValueError, match=r"`config` must be a DSparkConfig, .* got a LlamaConfig"):
        load(folder, config=LlamaConfig())


def test_dtype_attention_and_loading_info(folder) -> None:
    assert load(folder).dtype is load(folder, dtype="auto").dtype is torch.float32
    half = load(folder, dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16
    half.save_pretrained(folder)
    assert load(folder).dtype is load(folder, dtype="auto").dtype is torch.bfloat16
    assert load(folder, dtype="float32").dtype is torch.float32
    assert load(folder, attn_implementation="eager").config._attn_implementation == "eager"
    model, info = load(folder, output_loading_info=True)
    assert isinstance(model, DSparkDrafter)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_subfolder(folder) -> None:
    for cls in (DSparkDrafter, AutoModel):
        assert cls.from_pretrained(folder.parent, subfolder="drafter").config.block_size == 4
    with pytest.raises(OSError, match=r"has no config\.json"):
        load(folder.parent)


def test_registered_with_the_auto_classes(folder) -> None:
    register()  # again: harmless
    assert type(AutoConfig.from_pretrained(folder)) is DSparkConfig
    assert type(AutoModel.from_config(AutoConfig.from_pretrained(folder))) is DSparkDrafter
    assert AutoConfig.for_model("dspark", mask_token_id=1, target_layer_ids=[0], num_target_layers=2).block_size == 7


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """The part of the Hub's HTTP interface that a download uses: HEAD and GET of `resolve` addresses."""

    root: Path
    requests: list[tuple[str, str, str | None]]

    def do_HEAD(self) -> None:
        path = self.path.split("?")[0]
        self.requests.append((self.command, path, self.headers.get("authorization")))
        file = self.root / path.removeprefix("/tiny/drafter/resolve/")
        if path.startswith("/tiny/drafter/resolve/") and file.is_file():
            self.send_response(200)
            self.send_header("ETag", f'"{file.name}-{file.stat().st_size}"')
            self.send_header("Content-Length", str(file.stat().st_size))
        else:
            file = None
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET" and file is not None:
            self.wfile.write(file.read_bytes())

    do_GET = do_HEAD

    def log_message(self, *_) -> None:
        pass


DOWNLOAD = """
import dspark
load = dspark.DSparkDrafter.from_pretrained
how = {"subfolder": "inner", "revision": "v2", "token": "hf_x", "cache_dir": "cache"}
assert load("tiny/drafter", **how).config.block_size == 4
print("loaded", flush=True)
assert load("tiny/drafter", **how, local_files_only=True).config.block_size == 4
"""


@pytest.mark.slow
def test_download_with_revision_subfolder_and_token(folder, tmp_path) -> None:
    """Slow: a process of its own, as the endpoint is read on import. Its second half must work without the server."""
    shutil.copytree(folder, tmp_path / "served" / "v2" / "inner")
    FakeHub.root, FakeHub.requests = tmp_path / "served", []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    run = subprocess.Popen([sys.executable, "-c", DOWNLOAD], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == b"loaded\n"
    server.shutdown()
    server.server_close()
    assert run.wait(timeout=300) == 0
    seen = [request for request in FakeHub.requests if "/resolve/" in request[1]]
    fetched = {path.rsplit("/", 1)[1] for command, path, _ in seen if command == "GET"}
    assert fetched >= {"config.json", "model.safetensors"}
    ours = [path for _, path, _ in seen if "adapter_config" not in path]  # transformers 5.15 looks for one on main
    assert all(re.match(rf"/tiny/drafter/resolve/(v2|{COMMIT})/inner/", path) for path in ours)
    assert {token for _, _, token in seen} == {"Bearer hf_x"}


def test_cached_revisions_load_offline(tmp_path) -> None:
    """A download cache as huggingface_hub lays it out: branch `v2` in a subfolder, nothing on `main`."""
    repo = tmp_path / "cache" / "models--tiny--drafter"
    small.drafter(block_size=5).save_pretrained(repo / "snapshots" / COMMIT / "inner")
    (repo / "refs").mkdir()
    (repo / "refs" / "v2").write_text(COMMIT)
    how = {"revision": "v2", "subfolder": "inner", "cache_dir": tmp_path / "cache", "local_files_only": True}
    for read in (load, AutoModel.from_pretrained):
        assert read("tiny/drafter", **how).config.block_size == 5
    assert read_config("tiny/drafter", **how).block_size == 5
    for lost in ({"revision": "v1"}, {"revision": None}, {"subfolder": ""}, {"cache_dir": tmp_path / "empty"}):
        with pytest.raises(OSError, match=r"tiny/drafter|in the cached files"):
            load("tiny/drafter", **{**how, **lost})


# --- saving ---------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_save_that_fails_changes_nothing(folder, monkeypatch) -> None:
    before = contents(folder)
    model = small.drafter(block_size=6)

    def full_disk(tensors, file, **_):
        Path(file).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(folder)
    assert contents(folder) == before
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(folder.parent / "new")
    assert contents(folder.parent / "new") == {}


def test_later_save_leaves_no_weights_of_the_earlier(folder) -> None:
    """Else loading would take `model.safetensors` of the first save, beside the shards of the second."""
    (folder / "README.md").write_text("kept")
    for changes, shards in (({"block_size": 5}, "8KB"), ({"block_size": 6}, "50GB"), ({"block_size": 7}, "20KB")):
        model = small.drafter(**changes)
        with torch.no_grad():
            model.fc.weight.fill_(changes["block_size"])
        model.save_pretrained(folder, max_shard_size=shards)
        again = load(folder)
        assert again.config.block_size == changes["block_size"]
        assert (again.fc.weight == changes["block_size"]).all()
        names = {path.name for path in folder.iterdir()}
        assert ("model.safetensors" in names) == (shards == "50GB")
        assert {"README.md", "config.json"} <= names
        assert not any(name.startswith(".") for name in names)


def test_variants_live_side_by_side(folder) -> None:
    small.drafter().half().save_pretrained(folder, variant="fp16")
    assert load(folder, variant="fp16").dtype is torch.float16
    assert (folder / "model.safetensors").exists()


def test_other_processes_write_nothing(tmp_path) -> None:
    small.drafter().save_pretrained(tmp_path / "rank1", is_main_process=False)
    assert not list((tmp_path / "rank1").glob("*.safetensors"))


def test_a_file_in_the_way_is_an_error(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        small.drafter().save_pretrained(tmp_path / "file")
