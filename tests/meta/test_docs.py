"""What the documentation shows is run: pages block by block, examples in docstrings, and links are followed."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest

from shardrt.testing import RankPool

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "writing-a-plugin.md"
DISTRIBUTION = ROOT / "docs" / "tutorial" / "shardrt-stripes"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_NOT_RUN = 3
"""Blocks that need what no test machine has. Every other one must run."""

FENCED = re.compile(
    r"^(?P<fence>```+)(?P<kind>[\w-]*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S[^\n]*?) -->\n\Z")
FILE = re.compile(r"<!-- file: (?P<name>[\w.-]+) -->\n\Z")
SIGNATURE = re.compile(r"def \w+\([^\n]*\) -> [^\n:]+\n\Z")
LINK = re.compile(r"(?<!\!)\[[^\]\n]*(?:\n[^\]\n]*)?\]\((?P<target>[^)\s]+)\)")


@attrs.frozen(kw_only=True)
class Block:
    """A fenced block of a page."""

    kind: str
    code: str
    line: int
    reason_not_run: str | None
    file: str | None
    """The name of the file that it shows, which is there when the blocks after it run."""

    @property
    def is_session(self) -> bool:
        """Whether it shows a session at the prompt, with what comes out."""
        return self.code.lstrip().startswith(">>>")


def blocks_of(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for found in FENCED.finditer(text):
        before = text[: found.start()]
        mark, file = NOT_RUN.search(before), FILE.search(before)
        yield Block(
            kind=found["kind"],
            code=found["code"],
            line=text.count("\n", 0, found.start("code")) + 1,
            reason_not_run=mark["reason"] if mark else None,
            file=file["name"] if file else None,
        )


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks_of(page.read_text(encoding="utf-8")) if block.kind in ("python", "pycon")]


def to_run(page: Path) -> list[Block]:
    """Those that are not marked. A signature without a body, as the reference of hooks shows them, is no code."""
    return [b for b in python_blocks(page) if b.reason_not_run is None and not SIGNATURE.match(b.code)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_page(page: str, shared: str | None = None) -> int:
    """On a worker: run the blocks of a page in order, in one namespace; how many ran.

    In an empty directory, or in one that several ranks share.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    flags = 0
    blocks = to_run(Path(page))
    without_arguments = mock.patch.object(sys, "argv", [page])  # some pages are whole scripts
    with without_arguments, working_in(Path(shared)) if shared else empty_directory() as directory:
        for shown in blocks_of(Path(page).read_text(encoding="utf-8")):
            if shown.file is not None:
                (directory / shown.file).write_text(shown.code, encoding="utf-8")
        for block in blocks:
            if block.is_session:
                run_session(block, namespace, page)
                continue
            if "from __future__ import annotations" in block.code:  # holds for the rest of the page, as in a file
                flags = annotations.compiler_flag
            # Blank lines in front, so that tracebacks show the lines of the page.
            code = compile("\n" * (block.line - 1) + block.code, page, "exec", flags=flags, dont_inherit=True)
            exec(code, namespace)
    return len(blocks)


@contextmanager
def empty_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory, working_in(Path(directory)):
        yield Path(directory)


@contextmanager
def working_in(directory: Path) -> Iterator[Path]:
    os.chdir(directory)
    try:
        yield directory
    finally:
        os.chdir(ROOT)


def run_session(block: Block, namespace: dict[str, Any], page: str) -> None:
    test = doctest.DocTestParser().get_doctest(block.code, namespace, page, page, block.line - 1)
    run_doctest(test)
    namespace.update(test.globs)


def run_doctest(test: doctest.DocTest) -> int:
    """Run one and return how many examples it had; the error tells what came out instead."""
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    result = runner.run(test, out=said.append, clear_globs=False)
    if result.failed:
        raise AssertionError("".join(said))
    return result.attempted


def run_doctests(module: str) -> int:
    """On a worker: run the examples in the docstrings of a module; how many there were."""
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module))
    with empty_directory():
        return sum(run_doctest(test) for test in found)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name_of)
def test_the_python_blocks_of_a_page_run(ranks: RankPool, page: Path) -> None:
    [ran] = ranks.run(run_page, ranks=1, init=None, launcher=False, timeout=180, page=str(page))
    assert ran == len(to_run(page))


@pytest.mark.parametrize("name", ["embedding", "checkpoints", "join", "trainer"])
def test_guides_run_on_two_ranks(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """As under torchrun: these pages say that they run either way."""
    page = ROOT / "docs" / f"{name}.md"
    assert ranks.run(run_page, ranks=2, init=None, page=str(page), shared=str(tmp_path)) == [len(to_run(page))] * 2


def test_the_elastic_guide_runs_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Under torchrun its trainer is started again and again, with checkpoints in a directory that all ranks share."""
    page = ROOT / "docs" / "elastic.md"
    shared = {"RUN_DIR": str(tmp_path)}
    assert ranks.run(run_page, ranks=2, init=None, env=shared, page=str(page)) == [len(to_run(page))] * 2


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    skipped = [
        f"{name_of(page)}:{block.line}: {block.reason_not_run}"
        for page in PAGES
        for block in python_blocks(page)
        if block.reason_not_run is not None
    ]
    assert len(skipped) <= MOST_NOT_RUN, "\n".join(skipped)
    marks = sum(page.read_text(encoding="utf-8").count("<!-- not run") for page in PAGES)
    assert marks == len(skipped), "a mark must stand directly before a python block, as <!-- not run: reason -->"


def test_the_reader_finds_blocks_marks_and_sessions() -> None:
    page = (
        "a\n```python\nx = 1\n```\n<!-- not run: no GPU -->\n```python\ny\n```\n```pycon\n>>> x\n1\n```\n```toml\n```\n"
    )
    found = [(block.kind, block.line, block.reason_not_run, block.is_session) for block in blocks_of(page)]
    assert found == [
        ("python", 3, None, False),
        ("python", 7, "no GPU", False),
        ("pycon", 10, None, True),
        ("toml", 14, None, False),
    ]


def test_a_page_that_is_wrong_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```pycon\n>>> x + 1\n3\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        run_page(str(page))
    page.write_text("```python\n\n1 / 0\n```\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(str(page))
    assert caught.traceback[-1].lineno + 1 == 3


def modules() -> dict[str, Path]:
    """Every module of the project and of the tutorial's distribution, by name."""
    found = {}
    for top in (ROOT, ROOT / "plugins", DISTRIBUTION):
        for path in sorted(top.glob("shardrt*/**/*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.mark.parametrize(("module", "path"), modules().items(), ids=modules())
def test_the_examples_of_a_module_run(ranks: RankPool, module: str, path: Path) -> None:
    [examples] = ranks.run(run_doctests, ranks=1, init=None, launcher=False, timeout=180, module=module)
    assert (examples > 0) == (">>> " in path.read_text(encoding="utf-8"))


PUBLIC_MODULES = [
    "shardrt",
    "shardrt.plan",
    "shardrt.comm",
    "shardrt.compat",
    "shardrt.interchange",
    "shardrt.testing",
    "shardrt.flight",
    "shardrt.timeline",
    "shardrt.registry",
    "shardrt.optim",
]


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_name_is_shown_by_an_example(module: str) -> None:
    public = importlib.import_module(module)
    without = []
    for name in getattr(public, "__all__", ()):
        thing = getattr(public, name)
        # Constants and markers have no docstring of their own to hold an example.
        if (inspect.isclass(thing) or inspect.isroutine(thing)) and ">>>" not in (inspect.getdoc(thing) or ""):
            without.append(name)
    assert without == [], f"{module}: add an example to the docstring of {', '.join(without)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    lost = []
    for found in LINK.finditer(prose):
        target, _, anchor = found["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            lost.append(f"{found['target']}: no such file")
        elif anchor and anchor not in anchors(file):
            lost.append(f"{found['target']}: {name_of(file)} has no such heading")
    assert lost == []


def anchors(page: Path) -> set[str]:
    """What headings are called in links, by GitHub's rule."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_every_block_of_the_tutorial_is_in_the_distribution() -> None:
    files = [path for path in DISTRIBUTION.rglob("*") if path.suffix in (".py", ".toml") and "build" not in path.parts]
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in files}
    shown = [block for block in blocks_of(TUTORIAL.read_text(encoding="utf-8")) if block.kind in ("python", "toml")]
    assert len(shown) >= 8
    for block in shown:
        assert any(block.code in text for text in texts.values()), (
            f"{name_of(TUTORIAL)}:{block.line} is in no file of the distribution:\n{block.code}"
        )


def test_the_tutorial_shows_the_distribution_whole() -> None:
    """Every line of code of the package and of its metadata is in some block."""
    page = TUTORIAL.read_text(encoding="utf-8")
    shown = "\n".join(block.code for block in blocks_of(page) if block.kind in ("python", "toml"))
    for path in (DISTRIBUTION / "pyproject.toml", *sorted((DISTRIBUTION / "shardrt_stripes").glob("*.py"))):
        missing = [line for line in path.read_text(encoding="utf-8").splitlines() if line and line not in shown]
        assert missing == [], f"{name_of(path)}: not shown in {name_of(TUTORIAL)}"
