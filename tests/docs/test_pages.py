"""Every code block of README and docs runs, every link leads somewhere, and the site builds without a warning."""

import argparse
import contextlib
import functools
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import torch
import torch.distributed.run
from support.pages import PAGES, ROOT, anchors, blocks, links

import fastlin as fl
from fastlin import backends, cli, settings
from fastlin.figures import names
from fastlin.training import table

LANGUAGES = {"python", "console", "toml", "text", "math"}
COLUMNS = 88  # what a page shows at its width without a scroll bar
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)


def name(page):
    return str(page.relative_to(ROOT))


def of(language):
    return [page for page in PAGES if any(block.language == language for block in blocks(page.read_text()))]


@pytest.fixture
def left_as_it_was(tmp_path, monkeypatch):
    """Pages write into their folder, compile without a compiler, and may add a backend."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setitem(backends.ORDER, "cpu", backends.ORDER["cpu"])
    modules, threads = set(sys.modules), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for module in set(sys.modules) - modules:
        if module.startswith("fastlin.backends."):
            del sys.modules[module]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_what_they_are(page):
    assert {block.language for block in blocks(page.read_text())} <= LANGUAGES


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=name)
def test_blocks_are_narrow(page):
    assert [line for block in blocks(page.read_text()) for line in block.text.splitlines() if len(line) > COLUMNS] == []


@pytest.mark.usefixtures("left_as_it_was")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("page", of("python"), ids=name)
def test_python_runs(page):
    """The blocks of a page in their order, in one namespace."""
    torch.manual_seed(0)
    namespace = {"__name__": "page"}
    for block in blocks(page.read_text()):
        if block.language == "python":
            # Line numbers of errors are those of the page.
            code = compile("\n" * block.line + block.text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)


@pytest.mark.parametrize("page", of("toml"), ids=name)
def test_settings_load(page, tmp_path):
    for block in blocks(page.read_text()):
        if block.language == "toml":
            path = tmp_path / "mine.toml"
            path.write_text(block.text)
            assert settings.load(path).mixture.K >= 1


def commands(page):
    """Command lines of a page, without prompts, comments and what they print."""
    for block in blocks(page.read_text()):
        if block.language == "console":
            lines = block.text.replace("\\\n", "").splitlines()
            marked = any(line.startswith("$ ") for line in lines)
            for line in lines:
                if line.strip() and (line.startswith("$ ") or not marked):
                    yield shlex.split(line.removeprefix("$ "), comments=True)


COMMANDS = [(name(page), command) for page in of("console") for command in commands(page)]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {' '.join(c)}" for page, c in COMMANDS])
def test_commands_are_right(page, command, monkeypatch):
    """Their arguments are parsed, and what they name is there."""
    program, *arguments = launched(command)
    if program == "make":
        assert set(arguments) <= set(TARGETS)
    elif program == "pip":
        assert arguments[0] == "install"
        assert {extra for extra in re.findall(r"\[(.*)\]", " ".join(arguments))} <= set(EXTRAS)
    elif program == "python":
        where = arguments[1].replace(".", "/") + ".py" if arguments[0] == "-m" else arguments[0]
        assert (ROOT / where).exists()
    else:
        assert program == "fastlin"
        check_fastlin(arguments, monkeypatch)


def launched(command):
    """The command that torchrun or sbatch starts, or that follows a variable; others as they are."""
    if re.fullmatch(r"[A-Z_]+=\w+", command[0]):
        return launched(command[1:])
    if command[0] == "sbatch":
        return shlex.split(command[command.index("--wrap") + 1])
    if command[0] == "torchrun":
        # It reads all arguments, and refuses those of the program that it takes for a part of a name of its own.
        options = torch.distributed.run.get_args_parser().parse_args(command[1:])
        assert options.module
        return [options.training_script, *options.training_script_args]
    return command


def check_fastlin(arguments, monkeypatch):
    given = []
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, arguments=None, namespace=None):
        options = parse(self, arguments, namespace)
        given.append(argparse.Namespace(**vars(options)))
        options.run = lambda options: None
        return options

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    assert cli.main(arguments) == 0
    (options,) = given
    if "figure" in options:
        assert names.named(options.figure) or options.figure in names.CLAIMS
    if "regime" in options:
        assert table.regimes(options.regime)
    if "config" in options and not options.config.endswith(".toml"):
        assert settings.load(options.config).mixture.K >= 1


SHORT = {"info": [], "theory": [], "train": ["--steps", "2", "--batch", "64"]}


def short(page):
    """The commands of a page that need seconds, or few steps to need seconds."""
    return [
        [*arguments, *SHORT[arguments[0]]]
        for program, *arguments in commands(page)
        if program == "fastlin" and arguments[0] in SHORT
    ]


@pytest.mark.usefixtures("left_as_it_was")
@pytest.mark.parametrize("page", [page for page in of("console") if short(page)], ids=name)
def test_short_commands_run(page, tmp_path, capsys):
    """In their order, in one folder, with the setting that the page has; `train` with two steps."""
    for block in blocks(page.read_text()):
        if block.language == "toml":
            (tmp_path / "mine.toml").write_text(block.text)
    for arguments in short(page):
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in links(page.read_text()):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} is not there"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{link} has no such heading"


def test_pages_document_every_public_name():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    for module, prefix in (
        (fl, ""),
        (fl.theory, "theory."),
        (fl.theory.forgetting, "theory.forgetting."),
        (fl.models, "models."),
    ):
        for public in module.__all__:
            if isinstance(getattr(module, public), type) or callable(getattr(module, public)):
                assert f"::: fastlin.{prefix}{public}\n" in text, public


def test_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    site = tmp_path / "site"
    assert "Tensor, shape (B, n, m)" in (site / "api" / "ops.html").read_text()
    pages = {path.name: path.read_text() for path in site.rglob("*.html")}
    assert "<math" in pages["mathematics.html"]
    # Formulas need no script, and nothing that a browser loads by itself comes from the network.
    assert "arithmatex" not in "".join(pages.values())
    loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*", "".join(pages.values()))
    assert [tag for tag in loaded if re.search(r"(?:src|href)=.?(?:https?:)?//", tag)] == []
    (font,) = re.findall(r'url\("(.*?)"\)', (site / "pages.css").read_text())
    assert (site / font).exists()


def test_formulas_that_are_not_understood(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    formulas = importlib.import_module("formulas")
    assert "<msup>" in formulas.mathml("span", r"a^2 &lt; \hat y", "page.md")
    for tex in (r"\nothing x", r"a &amp; b"):
        with pytest.raises(formulas.PluginError, match=r"^page\.md: got '.*', wants commands that latex2mathml knows"):
            formulas.mathml("div", tex, "page.md")
