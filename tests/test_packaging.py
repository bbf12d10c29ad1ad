"""What people install: the wheel in an environment of its own, and what its compiled parts ask of it."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from support.folders import visible
from support.packages import ROOT, build, copy_of_sources

import fastlin as fl
from fastlin import _extension, cli
from fastlin.plots import layout, style

# What every Linux has; libgomp has a plain name, so that the loader takes the copy that torch brought.
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|libgomp|ld-linux[\w-]*)\.so\.\d+"
)
# Mangled names of torch::, at:: and c10::, and the C names of libtorch and torch's Python binding.
OF_TORCH = re.compile(r"^(_ZN[KVr]*(5torch|2at|3c10)|aoti_torch|THP|torch_)")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def compiled(name):
    module = _extension.extension(name)
    if module is None and name == _extension.CUDA:
        pytest.skip(_extension.why_missing(name))
    return Path(module.__file__)


@pytest.mark.parametrize("name", ["fastlin._C", _extension.CUDA])
def test_no_symbol_of_torch(name):
    """A torch upgrade cannot break what does not link torch."""
    with compiled(name).open("rb") as file:
        elf = ELFFile(file)
        needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
    undefined = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"}
    assert {library for library in needed if not SYSTEM_LIBRARIES.fullmatch(library)} == set()
    assert len(undefined) > 10
    assert {symbol for symbol in undefined if OF_TORCH.match(symbol)} == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel from the sdist, with the extension that this checkout has: to compile it again takes minutes."""
    work = tmp_path_factory.mktemp("wheel")
    sources, unpacked = work / "sources", work / "unpacked"
    sources.mkdir()
    copy_of_sources(sources)
    made = build("sdist", sources, FASTLIN_NO_CUDA="1")
    assert made.returncode == 0, made.stderr
    (sdist,) = (sources / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    for source in (ROOT / "csrc").rglob("*.*"):
        assert source.suffix == ".pyc" or (tree / source.relative_to(ROOT)).exists()
    library = compiled("fastlin._C")
    platform = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    (tree / "build" / platform / "fastlin").mkdir(parents=True)
    shutil.copy(library, tree / "build" / platform / "fastlin")
    made = build("wheel", tree, FASTLIN_NO_CUDA="1", CC="no-such-compiler", CXX="no-such-compiler")
    assert made.returncode == 0, made.stderr
    (raw,) = (tree / "dist").glob("*.whl")
    path = f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"
    repair = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", str(work), raw]
    repaired = subprocess.run(repair, env={"PATH": path}, capture_output=True, text=True, check=False)
    assert repaired.returncode == 0, repaired.stderr
    (found,) = work.glob("*.whl")
    return found


def test_wheel_is_manylinux_and_brings_no_library(wheel):
    assert re.fullmatch(rf"fastlin-{re.escape(fl.__version__)}-cp3\d+-cp3\d+-manylinux_\S+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if re.search(r"\.so[.\d]*$", name)] == [f"fastlin/{compiled('fastlin._C').name}"]
    assert {"fastlin/py.typed", "fastlin/settings/2c.toml"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_in_a_clean_environment(wheel, tmp_path):
    """A newcomer's first hour with what pip installed; other packages are lent by this environment."""
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    python = str(home / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run(pip, env={}, check=True, capture_output=True)
    # A path in a .pth file is searched, but .pth files there, such as that of an editable install, are not read.
    lent = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "lent.pth").write_text("\n".join(lent) + "\n")

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = json.loads(run(python, "-P", str(ROOT / "tests" / "support" / "smoke.py")))
    assert Path(found["file"]).is_relative_to(site)
    assert found["versions"]["fastlin"] == fl.__version__
    assert found["extension"]["available"], found["extension"]["reason"]
    assert found["wrong"] == []
    assert not found["draws"]
    made = run(python, "-P", str(ROOT / "tests" / "support" / "first_hour.py")).split()
    assert {f"{folder}/risk.{kind}" for folder in ("sweep", "lengths") for kind in ("csv", "md", "png")} <= set(made)
    command = str(home / "bin" / "fastlin")
    assert run(command, "--version") == f"fastlin {fl.__version__}\n"
    assert run(command, "theory", "2c", "--n", "10").splitlines()[0].startswith("Figure 2(c)")


def test_extras():
    extras = PYPROJECT["optional-dependencies"]
    assert {"plots", "triton", "cluster", "jax-bench", "dev"} <= set(extras)
    assert "fastlin[plots,triton,cluster]" in extras["dev"]
    assert not any(
        name.startswith(("matplotlib", "jax", "triton", "dask", "distributed", "bokeh"))
        for name in PYPROJECT["dependencies"]
    )


def test_one_version():
    assert importlib.metadata.version("fastlin") == fl.__version__
    assert f"\nversion: {fl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == fl.__version__


def test_citation_names_both_papers():
    text = (ROOT / "CITATION.cff").read_text()
    assert "arXiv:2503.02102" in text
    assert "arXiv:2602.23197" in text


@pytest.mark.parametrize("arguments", [["reproduce", "2c"], ["theory", "2c", "--out", "OUT"]])
def test_pictures_without_matplotlib_name_the_extra(arguments, monkeypatch, capsys, tmp_path):
    """And do so before anything is trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(style.importlib.util, "find_spec", lambda name: None)
    assert cli.main(arguments) == 1
    assert capsys.readouterr().err.strip().endswith("pip install 'fastlin[plots]' brings it")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModuleNotFoundError, match=r"fastlin\[plots\]"), layout.new_figure("screen", 1, 1):
        pass


def test_training_without_matplotlib_leaves_the_pictures_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(style.importlib.util, "find_spec", lambda name: None)
    sizes = ["--n", "2", "--steps", "2", "--batch", "16", "--trials", "1"]
    assert cli.main(["train", "2c", "--regime", "plain", *sizes, "--out", str(tmp_path / "run")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastlin: no pictures: pictures need matplotlib, which is not installed")
    assert visible(tmp_path / "run") == ["plain-n2", "risk.csv", "risk.json", "risk.md", "summary.json"]
