"""What an installed package is asked, by the Python it is installed for; prints one JSON object.

Every module is imported, every public name looked up, every data file read by the code that needs it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import dspark


def modules() -> list[str]:
    """Every module, imported, with every name it says it has."""
    found = []
    for info in pkgutil.walk_packages(dspark.__path__, "dspark.", onerror=_raise):
        if not info.name.endswith("__main__"):
            module = importlib.import_module(info.name)
            found.append(info.name)
            for name in getattr(module, "__all__", ()):
                getattr(module, name)
    return found


def _raise(name: str) -> None:
    raise ImportError(name)


def data(target: Path, drafter: Path, out: Path) -> dict[str, Any]:
    """What comes of prompt sets, curve, card template, pushed code and the files of a trace page."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dspark.cards import write_card
    from dspark.cli.common import GPU, demo_drafter, load_curve
    from dspark.evaluation.prompt_sets import SETS, sample_prompts
    from dspark.publishing import code_files, plan_push
    from dspark.trace import build_trace, render_page

    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    drafts = dspark.DSparkDrafter.from_pretrained(drafter)
    ids = tokenizer("w1 w2 w3", return_tensors="pt").input_ids
    plain = model.generate(ids, do_sample=False, max_new_tokens=12)
    text = model.generate(ids, do_sample=False, max_new_tokens=12, assistant_model=drafts, record_trace=True)
    trace = build_trace(drafts.last_stats, tokenizer, ids[0].tolist(), target="t", drafter="d")
    write_card(drafter, out / "README.md", license="mit")
    try:
        demo = str(demo_drafter())
    except ValueError as error:
        demo = str(error)
    return {
        "demo": demo,
        "is_exact": bool((plain == text).all()),
        "rounds": drafts.last_stats.num_rounds,
        "prompts": {name: len(sample_prompts(name)) for name in SETS},
        "curve": float(load_curve(GPU)(1)),
        "card": (out / "README.md").read_text(encoding="utf-8"),
        "page": len(render_page([trace])),
        "code": sorted(code_files()),
        "planned": [file.path for file in plan_push(drafter).files],
    }


if __name__ == "__main__":
    import dspark.conversion

    from dspark.training.saving import environment

    print(json.dumps({
        "file": dspark.__file__, "conversion": dspark.conversion.__file__, "path": sys.path,
        "versions": [dspark.__version__, importlib.metadata.version("dspark")], "modules": modules(),
        "commit": environment()["git_commit"], "data": data(*map(Path, sys.argv[1:])),
    }))  # fmt: skip
