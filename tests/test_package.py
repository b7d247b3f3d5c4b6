"""The package as a whole: what importing it costs, what it offers, what `python -m otaro` says."""

from __future__ import annotations

import ast
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest

import otaro
from otaro import __main__ as module
from otaro import cli


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_quick_and_without_torch() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import otaro; seconds = time.perf_counter() - start; "
        "print(seconds, *(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    runs = [run_python(code).split() for _ in range(3)]
    assert [run[1:] for run in runs] == [["False"] * 3] * 3
    assert statistics.median(float(run[0]) for run in runs) < 0.3


def test_command_line_starts_without_torch() -> None:
    out = run_python("import sys; from otaro.cli import main; main(['pack', '--help']); print('torch' in sys.modules)")
    assert out.splitlines()[-1] == "False"


def test_the_engine_knows_nothing_of_transformers() -> None:
    assert run_python("import sys, otaro.generation.runner; print('transformers' in sys.modules)") == "False"
    assert not any(
        "otaro.generation" in other
        for name in MODULES
        if name.startswith("otaro.engine")
        for other in imported(MODULES[name], for_types=True)
    )


def test_looking_into_a_folder_needs_torch_alone(packed_llama: Path) -> None:
    heavy = ("transformers", "huggingface_hub", "torch._dynamo", "triton", "scipy")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy}))\n"  # None there makes importing one an error
        f"from otaro.cli import main; sys.exit(main(['info', {str(packed_llama)!r}]))"
    )
    assert packed_llama.name in run_python(code)


SOURCE = Path(otaro.__file__).parent
MODULES = {
    ".".join(("otaro", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}


def imported(path: Path, *, for_types: bool) -> Iterator[str]:
    """The modules of the package that one of them imports, at its top or within a function."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in MODULES else node.module


def test_no_module_imports_itself_over_others() -> None:
    graph = {name: {*imported(path, for_types=False)} - {name} for name, path in MODULES.items() if name != "otaro"}
    TopologicalSorter(graph).prepare()  # a CycleError names the modules


def package_graph() -> dict[str, set[str]]:
    """What packages import of each other, for types too; a module of the first level is a package of its own here."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if name != "otaro":
            place = name.split(".")[1]
            found = {other.split(".")[1] for other in imported(path, for_types=True) if other != "otaro"}
            graph.setdefault(place, set()).update(found - {place})
    return graph


def test_no_package_imports_itself_over_others() -> None:
    graph = package_graph()
    assert {"cli", "engine", "tune"} <= graph.keys()
    TopologicalSorter(graph).prepare()


ROOT = Path(__file__).parents[1]


def test_the_map_is_in_the_order_of_imports() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    order = [
        place for line in text.partition("| place")[0].splitlines() if line[:4] == "    " for place in line.split()
    ]
    graph = package_graph()
    assert sorted(order) == sorted(place for place in graph if place[0] != "_")
    for place in order:
        allowed = {*order[: order.index(place)], "_lazy", "_register", "_version"}
        assert graph[place] <= allowed, f"{place} imports {', '.join(graph[place] - allowed)}"


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/untrusted.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_files_that_documents_name_are_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:src|tests|csrc|scripts|docs|experiments|bench)/[\w/.]*)`", text)
    assert paths
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


def test_names_of_planes_have_one_home() -> None:
    pattern = re.compile(r"""["'][^"'\n]*sefp_(base|bit|scale\b)""")
    assert [name for name, path in MODULES.items() if pattern.search(path.read_text("utf-8"))] == ["otaro.packing"]


def test_every_name_can_be_reached_and_is_listed() -> None:
    for name in otaro.__all__:
        assert getattr(otaro, name) is not None
        assert name in dir(otaro)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        otaro.quantise  # noqa: B018


def test_packages_offer_their_names_in_one_line_and_late() -> None:
    code = (
        "import sys, otaro; otaro.export, otaro.tune; "
        "print(*(name in sys.modules for name in ('otaro.export', 'otaro.tune', 'torch', 'transformers', 'gguf')))"
    )
    assert run_python(code).split() == ["True", "True", "False", "False", "False"]
    from otaro import Engine, export, tune
    from otaro.export import export_gguf
    from otaro.tune import OtaroTrainer, TuneArguments, load_blocks, report, settings

    assert otaro.Engine is Engine
    assert (otaro.export, export.export_gguf) == (export, export_gguf)
    assert (tune.OtaroTrainer, tune.load_blocks) == (OtaroTrainer, load_blocks)
    assert TuneArguments(output_dir="run", **settings("default")).method == otaro.tune.settings("default")["method"]
    assert report.__name__ == "otaro.tune.report"  # a module in a package is found as ever
    for package in (export, tune):
        assert {*package.__all__} <= {*dir(package)}
        assert not hasattr(package, "nothing")


def test_version_is_that_of_the_distribution() -> None:
    assert otaro.__version__ == version("otaro-llm")


def test_typing_marker_is_installed() -> None:
    assert (Path(otaro.__file__).parent / "py.typed").is_file()


REGISTERED = "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m; print('otaro' in m)"
HOOKED = (
    "import importlib, sys, otaro; importlib.reload(otaro); "
    "ours = lambda: sum(type(finder).__module__ == 'otaro._register' for finder in sys.meta_path); "
    "before = ours(); import transformers.quantizers.auto as auto; "
    "print(before, ours(), type(auto.__loader__).__name__, type(auto.__spec__.loader).__name__)"
)
ORDERS = {
    f"import otaro, transformers; {REGISTERED}": "True",
    f"import transformers.quantizers.auto, otaro; {REGISTERED}": "True",
    f"import otaro; from transformers import AutoModelForCausalLM; {REGISTERED}": "True",
    f"import otaro.hf; {REGISTERED}": "True",
    HOOKED: "1 0 SourceFileLoader SourceFileLoader",  # the hook is there once, and removes itself
}


@pytest.mark.skipif(sys.platform == "win32", reason="it has no fork")
def test_importing_otaro_registers_with_transformers_in_any_order() -> None:
    # Each in a process that has imported neither; torch, which takes long, is imported once for all of them.
    code = (
        "import os, sys, torch\n"
        f"for code in {list(ORDERS)!r}:\n"
        "    sys.stdout.flush()\n"
        "    process = os.fork()\n"
        "    if process == 0:\n"
        "        exec(code, {})\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(process, 0)[1] == 0, code\n"
    )
    assert dict(zip(ORDERS, run_python(code).splitlines(), strict=True)) == ORDERS


def test_without_transformers_the_hook_changes_nothing() -> None:
    assert (
        run_python("import otaro, json, email.message; print('transformers' in __import__('sys').modules)") == "False"
    )


def test_diagnostics_as_json() -> None:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "otaro", "--json"], capture_output=True, text=True, check=False)
    assert time.perf_counter() - start < 60
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["otaro"] == otaro.__version__
    assert report["versions"]["torch"].startswith("2.")
    assert report["threads"] >= 1
    assert report["memory_bytes"] > 2**28
    assert report["native_core"].startswith(("loaded, ", "not loaded: "))
    ops = {row["op"].split()[0] for row in report["backends"]}
    assert {"pack", "dequantize", "quantize", "linear", "embedding"} <= ops
    assert all(row["backend"] in ("native", "reference") and row["why"] for row in report["backends"])


def test_diagnostics_for_people() -> None:
    done = subprocess.run([sys.executable, "-m", "otaro"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("otaro", "torch", "CPU features", "threads", "memory", "GPU", "native core", "op", "backend", "why"):
        assert word in done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["tune", "--help"], ["info", "missing"]])
def test_with_a_command_the_module_is_the_command_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    codes, printed = set(), set()
    for run in (module.main, cli.main):
        codes.add(run(arguments))
        printed.add(tuple(capsys.readouterr()))
    assert len(codes) == len(printed) == 1
