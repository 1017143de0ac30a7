"""What may import what, and what must not be there at all: read from the sources, and from what Python really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from shardrt.config import tomllib

ROOT = Path(__file__).parents[2]
CORE = sorted((ROOT / "shardrt").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").rglob("*.py"))
THIRD_PARTY = sorted((ROOT / "docs" / "tutorial").rglob("shardrt_*/*.py"))
PLUGIN_NAMES = {path.name for path in (ROOT / "plugins").iterdir() if (path / "__init__.py").exists()}
MOST_LINES = 450

PUBLIC = tuple(f"shardrt{part}" for part in ("", ".comm", ".errors", ".log", ".plan", ".protocols", ".registry"))
"""What a plugin may import: these, and the modules in them. docs/architecture.md lists the same."""

LAYERS = (
    ("errors",),
    ("plan",),
    ("protocols",),
    ("registry",),
    ("config", "log", "handshake", "timeline", "flight"),
    ("comm",),
    ("optim", "choosing"),
    ("opening",),
    ("state",),
    ("checkpoint",),
    ("interchange",),
    ("joining",),
    ("sharding",),
    ("loop", "state_calls", "keeping", "sharding_calls", "wiring"),
    ("runtime",),
    ("compat",),
    ("hearing", "torchrun"),
    ("launch", "testing"),
    ("demo",),
    ("bench",),
    ("cli",),
)
"""The core from the bottom up. A module imports from its own part and from layers below; only types may come from
above, since they are not imported at run time. ``shardrt`` itself, the façade, is for whoever is above the runtime."""


@attrs.frozen(kw_only=True)
class Import:
    """One import statement's target: ``from a.b import c`` is ``a.b`` with the name ``c``."""

    module: str
    names: tuple[str, ...]
    line: int
    for_types_only: bool


def imports_of(source: str) -> list[Import]:
    """Every import, at the top of a file or inside functions."""
    return list(_imports(ast.parse(source), for_types_only=False))


def _imports(node: ast.AST, *, for_types_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module=alias.name, names=(), line=child.lineno, for_types_only=for_types_only)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(alias.name for alias in child.names)
            module = "." * child.level + (child.module or "")
            yield Import(module=module, names=names, line=child.lineno, for_types_only=for_types_only)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.body:
                yield from _imports(ast.Module([statement], []), for_types_only=True)
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), for_types_only=for_types_only)
        else:
            yield from _imports(child, for_types_only=for_types_only)


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def package_of(module: str) -> str:
    return module.partition(".")[0]


def test_the_reader_finds_imports_wherever_they_are() -> None:
    source = """
import a.b
if TYPE_CHECKING:
    from c import d
def f():
    from e.f import g, h
"""
    found = [(one.module, one.names, one.for_types_only) for one in imports_of(source)]
    assert found == [("a.b", (), False), ("c", ("d",), True), ("e.f", ("g", "h"), False)]


def test_the_core_imports_no_plugin() -> None:
    assert len(CORE) > 80 and len(PLUGIN_NAMES) >= 9
    found = [
        f"{place(path, one.line)} imports {one.module}"
        for path in CORE
        for one in imports_of(path.read_text(encoding="utf-8"))
        if package_of(one.module).startswith("shardrt_")
    ]
    assert found == []


def dynamic_imports(source: str) -> list[str]:
    """Modules that are imported by a call with their name as text."""
    return [
        argument.value.replace(":", ".")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__", "find_spec", "resolve")
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def test_the_core_imports_no_plugin_by_a_call_either() -> None:
    assert dynamic_imports("importlib.import_module('shardrt_gloo')") == ["shardrt_gloo"]
    found = {
        str(path.relative_to(ROOT)): name
        for path in CORE
        for name in dynamic_imports(path.read_text(encoding="utf-8"))
        if package_of(name).startswith("shardrt_")
    }
    assert found == {}


@pytest.mark.parametrize("path", PLUGINS + THIRD_PARTY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_plugins_import_public_modules_only_and_never_each_other(path: Path) -> None:
    own = path.relative_to(ROOT / "plugins").parts[0] if path in PLUGINS else path.parent.name
    for one in imports_of(path.read_text(encoding="utf-8")):
        where = f"{place(path, one.line)} imports {one.module}"
        assert not one.module.startswith("."), f"{where}: absolute imports only"
        if package_of(one.module).startswith("shardrt_"):
            assert package_of(one.module) == own, f"{where}, which is another plugin"
        if package_of(one.module) == "shardrt":
            public = one.module in PUBLIC or one.module.rpartition(".")[0] in PUBLIC[1:]
            assert public, f"{where}; plugins may import {', '.join(PUBLIC)}"
            hidden = [name for name in (*one.module.split("."), *one.names) if name.startswith("_")]
            assert hidden == [], f"{where}: {hidden} is private"


def test_architecture_lists_what_plugins_may_import() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert ", ".join(f"`{module}`" for module in PUBLIC) in page.replace("\n", " ")


def layer_of(part: str) -> int:
    [found] = [index for index, layer in enumerate(LAYERS) if part in layer]
    return found


def test_every_part_of_the_core_has_a_layer() -> None:
    parts = {path.relative_to(ROOT / "shardrt").parts[0].removesuffix(".py") for path in CORE} - {"__init__"}
    assert parts == {part for layer in LAYERS for part in layer}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_is_layered_one_way(path: Path) -> None:
    part = path.relative_to(ROOT / "shardrt").parts[0].removesuffix(".py")
    if part == "__init__":
        return  # the façade brings names together from everywhere below it
    own = layer_of(part)
    for one in imports_of(path.read_text(encoding="utf-8")):
        if one.for_types_only or package_of(one.module) != "shardrt":
            continue
        if one.module == "shardrt":
            assert own >= layer_of("runtime"), f"{place(path, one.line)} imports the façade from below it"
            continue
        target = one.module.split(".")[1]
        below = target == part or layer_of(target) < own
        assert below, f"{place(path, one.line)}: {part} (layer {own}) imports {target} (layer {layer_of(target)})"


@pytest.mark.parametrize(
    "code",
    [
        "import shardrt",
        "import shardrt; shardrt.load_registry()",
        "import shardrt; from shardrt.cli.plugins import describe_plugins; describe_plugins(shardrt.load_registry())",
        "import shardrt.plan, shardrt.comm, shardrt.protocols, shardrt.testing, shardrt.cli",
    ],
)
def test_looking_around_does_not_import_torch(code: str) -> None:
    check = f"{code}; import sys; assert not {{'torch', 'numpy'}} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", CORE + PLUGINS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, f"{path.relative_to(ROOT)} has {lines} lines; a file past {MOST_LINES} is two ideas"


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "torch.multiprocessing"}
FORBIDDEN_NAMES = {"load_state_dict_from_url", "allow_pickle"}
SERIALISER = ROOT / "shardrt" / "interchange" / "torch_serial.py"
"""The one file that may read and write torch's own files; how it reads them is checked below."""
WRITES_AS_TORCH_DOES = {ROOT / "shardrt" / "bench" / "state_ways.py"}
"""Where torch's own way of writing files is measured. Writing executes nothing; reading is allowed nowhere."""


def executable_data(source: str) -> list[str]:
    """Whatever turns bytes into running code: pickle in all its shapes, and collectives that use it underneath."""
    tree = ast.parse(source)
    found = [
        f"line {one.line}: imports {one.module}"
        for one in imports_of(source)
        if package_of(one.module) in FORBIDDEN_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_CALLS:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        name = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name", ast.keyword: "arg"}.get(type(node))
        text = getattr(node, name) if name else None
        if text and (text.endswith(("_object", "_object_list")) or text in FORBIDDEN_NAMES):
            found.append(f"line {getattr(node, 'lineno', '?')}: {text}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "def f():\n    from dill import loads",
        "import torch\ntorch.load('x')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_the_detector_finds_executable_data(source: str) -> None:
    assert executable_data(source) != []


@pytest.mark.parametrize("path", CORE + PLUGINS + THIRD_PARTY, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_data_is_ever_executed(path: Path) -> None:
    found = executable_data(path.read_text(encoding="utf-8"))
    if path == SERIALISER:
        found = [one for one in found if not one.endswith((": torch.load", ": torch.save"))]
    if path in WRITES_AS_TORCH_DOES:
        found = [one for one in found if not one.endswith(": torch.save")]
    assert found == []


def careless_loads(source: str) -> list[int]:
    """Lines on which ``torch.load`` is named other than in a call that says ``weights_only=True``."""
    tree = ast.parse(source)
    careful = [
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(
            keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            for keyword in node.keywords
        )
    ]
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"]
    return [node.lineno for node in named if node not in careful]


def test_the_one_reader_of_torch_files_admits_weights_only() -> None:
    source = SERIALISER.read_text(encoding="utf-8")
    assert careless_loads(source) == []
    assert source.count("weights_only=True") >= 2
    assert executable_data(source) != [], "the detector must see it, or it would not see it elsewhere"
    assert not any(one.module == "torch" and one.names for one in imports_of(source)), "torch.load by another name"


@pytest.mark.parametrize(
    "source",
    [
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "torch.load('x', weights_only=safe)",
        "torch.load('x', **{'weights_only': True})",
        "read = torch.load",
    ],
)
def test_a_careless_load_is_found(source: str) -> None:
    assert careless_loads(source) == [1]
    assert careless_loads("torch.load('x', weights_only=True)") == []


def test_every_package_is_typed() -> None:
    packages = [ROOT / "shardrt", *(ROOT / "plugins" / name for name in sorted(PLUGIN_NAMES))]
    packages += sorted({path.parent for path in THIRD_PARTY})
    assert [str(package) for package in packages if not (package / "py.typed").exists()] == []


def test_every_plugin_package_has_an_entry_point_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["shardrt"]
    assert sorted(package_of(value) for value in points.values()) == sorted(PLUGIN_NAMES)
    assert {name: package_of(value).removeprefix("shardrt_").replace("_", "-") for name, value in points.items()} == {
        name: name for name in points
    }
