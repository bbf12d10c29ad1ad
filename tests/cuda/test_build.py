"""What is built where: with and without nvcc, for which architectures; what an installation without it says."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from csrc.cuda import nvcc
from fastlin import _extension, _info, cli

ROOT = Path(__file__).parents[2]
KNOWN = ("sm_75", "sm_80", "sm_87", "sm_90", "sm_120")
TOOLKIT = nvcc.Toolkit("nvcc", "13.0", KNOWN, ())
TELLING = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
  --list-gpu-code) echo sm_80; echo sm_90 ;;
  --dryrun) echo '#$ LIBRARIES=  "-L/toolkit/lib/stubs" "-L/toolkit/lib"' >&2 ;;
  *) echo "a kernel that does not compile" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def toolkit(tmp_path):
    """A CUDA_HOME whose nvcc answers, and compiles nothing."""
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)
    path = home / "bin" / "nvcc"
    path.write_text(TELLING)
    path.chmod(0o755)
    return home


@pytest.fixture
def sources(tmp_path):
    """A copy of what an installation is made of."""
    copy = tmp_path / "sources"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("csrc", "fastlin"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


def without_nvcc():
    """The PATH without the folders that have an nvcc; g++ is reached by links."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not (Path(folder) / "nvcc").exists())


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FASTLIN_", "CUDA_"))}
    return kept | {"PATH": without_nvcc()} | {name: str(value) for name, value in changes.items()}


def run(command, folder, **changes):
    return subprocess.run(command, cwd=folder, env=environment(**changes), capture_output=True, text=True, check=False)


EXTENSIONS = """
import setuptools
from distutils.core import run_setup
print(*(e.name for e in run_setup("setup.py", ["--quiet"], stop_after="config").ext_modules or ()))
"""


def extensions(folder, **changes):
    """Names of the extensions that an installation would build."""
    done = run([sys.executable, "-c", EXTENSIONS], folder, **changes)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_cuda_is_built_where_nvcc_is(sources, toolkit):
    assert extensions(sources) == ["fastlin._C"]
    assert extensions(sources, CUDA_HOME=toolkit) == ["fastlin._C", "fastlin._cuda"]
    assert extensions(sources, CUDA_HOME=toolkit, FASTLIN_NO_CUDA=1) == ["fastlin._C"]
    assert extensions(sources, CUDA_HOME=toolkit, FASTLIN_NO_EXTENSION=1) == []
    with_path = os.pathsep.join([str(toolkit / "bin"), without_nvcc()])
    assert extensions(sources, PATH=with_path) == ["fastlin._C", "fastlin._cuda"]


def test_a_kernel_that_does_not_compile_stops_the_installation(sources, toolkit):
    # `true` passes for the C++ compiler, to get to nvcc at once.
    done = run([sys.executable, "setup.py", "build_ext"], sources, CUDA_HOME=toolkit, CC="true", CXX="true")
    assert done.returncode != 0
    assert "a kernel that does not compile" in done.stderr
    assert "fastlin._cuda needs a CUDA toolkit that works; FASTLIN_NO_CUDA=1 installs without it" in done.stderr


def test_the_sdist_has_all_sources(sources):
    command = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    done = run([sys.executable, "-c", command], sources)
    assert done.returncode == 0, done.stderr
    with tarfile.open(sources / "dist" / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/cuda/launch.cu", "csrc/cuda/nvcc.py", "csrc/kernels.h", "setup.py"} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*h")} <= names


def test_an_installation_without_nvcc_works_and_says_why_cuda_is_off(sources):
    for extension in (ROOT / "fastlin").glob("_C.*.so"):
        shutil.copy(extension, sources / "fastlin")
    # Without site (-S) an editable install does not lend its own _cuda.
    path = os.pathsep.join([str(sources), sysconfig.get_path("purelib")])
    script = (
        "import torch, fastlin as fl\n"
        "z, q, W = torch.ones(4, 3, 2), torch.ones(4, 2), torch.ones(2, 2)\n"
        "print(fl.predict(z, q, None, None, W, torch.ones(1, 2)).tolist())\n"
        "from fastlin import cli\ncli.main(['info'])"
    )
    done = run([sys.executable, "-S", "-c", script], sources, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    first, *shown = done.stdout.splitlines()
    assert first == "[24.0, 24.0, 24.0, 24.0]"  # W'q = (2, 2), G v = (6, 6)
    reason = "fastlin._cuda is not built (nvcc was not found when fastlin was installed"
    assert any(line.startswith(f"cuda            no: {reason}") for line in shown)
    assert any(line.startswith(f"  cuda          no: {reason}") for line in shown)


def test_the_toolkit_says_where_it_is(toolkit):
    found = nvcc.find({"CUDA_HOME": str(toolkit), "PATH": os.environ["PATH"]})
    assert found == (str(toolkit / "bin" / "nvcc"), "13.0", ("sm_80", "sm_90"), ("/toolkit/lib/stubs", "/toolkit/lib"))
    assert nvcc.find({"PATH": str(toolkit / "bin")}) == found
    assert nvcc.find({"CUDA_HOME": str(toolkit.parent), "PATH": without_nvcc()}) is None
    (toolkit / "bin" / "nvcc").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(RuntimeError, match="nvcc --version fails"):
        nvcc.find({"CUDA_HOME": str(toolkit)})


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, ("sm_80",)),
        ("", ("sm_80",)),
        ("all", ("sm_75", "sm_80", "sm_90", "sm_120")),
        ("90", ("sm_90",)),
        ("sm_75, 90,90", ("sm_75", "sm_90")),
    ],
)
def test_architectures_are_chosen(wanted, names):
    assert nvcc.architectures(wanted, TOOLKIT) == names


@pytest.mark.parametrize("wanted", ["60", "80,", "natives"])
def test_an_architecture_that_nvcc_does_not_know_is_named(wanted):
    with pytest.raises(ValueError, match=rf"FASTLIN_CUDA_ARCHS={wanted}: nvcc 13.0 does not know sm_.*; wants"):
        nvcc.architectures(wanted, TOOLKIT)


def test_all_architectures_are_made_of_the_ptx_of_the_oldest():
    command = nvcc.command(TOOLKIT, Path("a.cu"), Path("a.o"), ("sm_75", "sm_90"), werror=True)
    assert "-gencode=arch=compute_75,code=[sm_75,sm_90,compute_75]" in command
    assert {"--fmad=false", "-std=c++17", "-Werror=all-warnings"} <= set(command)
    assert nvcc.describe(("sm_90", "sm_100")) == "sm_90, sm_100, PTX of compute_90"


@pytest.mark.skipif(_info._DRIVER.exists(), reason="there is an NVIDIA driver")
@pytest.mark.skipif(_extension.extension(_extension.CUDA) is None, reason="fastlin._cuda is not built")
def test_without_a_driver_the_module_loads_and_says_so(capsys):
    module = _extension.loaded(_extension.CUDA)
    assert module.why_not().startswith("there is no NVIDIA driver, or it is too old: ")
    built = module.build_info()
    assert "sm_" in built["architectures"]
    assert cli.main(["info"]) == 0
    needs = f"which needs driver {_info.needed_driver(built['cuda'])} or newer"
    said = f"no: {module.why_not()}; built for {built['architectures']} by CUDA {built['cuda']}, {needs}\n"
    assert f"cuda            {said}" in capsys.readouterr().out


def test_info_has_a_line_for_a_gpu(tmp_path, monkeypatch):
    version = tmp_path / "version"
    monkeypatch.setattr(_info, "_DRIVER", version)
    assert _info._driver() is None
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:00:00 UTC 2026\n")
    assert _info._driver() == "580.65.06"
    built = {"architectures": "sm_80, PTX of compute_80", "cuda": "13.0", "needs_driver": "580"}
    devices = {"devices": ["A100 (sm_80)"], "runs": ["machine code of sm_80"]}
    there = {"available": True, "reason": None, **built, "driver": "580.65.06", **devices}
    of_build = "built for sm_80, PTX of compute_80 by CUDA 13.0, which needs driver 580 or newer"
    assert cli.cuda_state(there) == f"yes: A100 (sm_80) runs machine code of sm_80; driver 580.65.06; {of_build}"
    gone = {**there, "available": False, "reason": "no device"}
    assert cli.cuda_state(gone) == f"no: no device; {of_build}"


@pytest.mark.parametrize(
    ("capability", "code"),
    [
        ((8, 0), "machine code of sm_80"),
        ((8, 9), "machine code of sm_86"),
        ((9, 0), "PTX of compute_80, which the driver compiles at the first call; that may take about a minute and"),
        ((12, 1), "machine code of sm_120"),
        ((7, 5), "nothing: FASTLIN_CUDA_ARCHS=native builds machine code"),
    ],
)
def test_the_code_that_a_gpu_runs(capability, code):
    """That of the same generation, the latest that is not newer; else PTX that is not newer."""
    found = _info.code_for(capability, "sm_80, sm_86, sm_120, PTX of compute_80")
    assert found.startswith(code)
    assert ("CUDA_CACHE_PATH" in found) == found.startswith("PTX")


def test_the_driver_that_a_build_needs():
    assert [_info.needed_driver(version) for version in ("12.8", "13.0", "13.2", "99.0")] == ["525", "580", "580", None]


@pytest.fixture
def machine_of(tmp_path, monkeypatch):
    """A function that puts an nvidia-smi on the PATH, by what it prints and returns."""

    def make(printed, status=0):
        path = tmp_path / "nvidia-smi"
        asked = '[ "$*" = "--query-gpu=compute_cap --format=csv,noheader" ] || exit 9'
        path.write_text(f"#!/bin/sh\n{asked}\nprintf '{printed}'\nexit {status}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_native_is_what_the_gpus_of_this_machine_are(machine_of):
    machine_of(r"9.0\n9.0\n7.5\n")
    assert nvcc.architectures("native", TOOLKIT) == ("sm_90", "sm_75")
    assert nvcc.describe(nvcc.architectures("native", TOOLKIT)) == "sm_90, sm_75, PTX of compute_75"


@pytest.mark.parametrize(("printed", "status"), [("", 0), ("No devices were found\\n", 0), ("[N/A]\\n", 0), ("8.0", 6)])
def test_native_without_a_gpu_is_an_error(printed, status, machine_of):
    machine_of(printed, status)
    with pytest.raises(ValueError, match=r'FASTLIN_CUDA_ARCHS=native: got no GPU from "nvidia-smi .*, wants a machine'):
        nvcc.architectures("native", TOOLKIT)


def test_native_without_nvidia_smi_or_with_a_gpu_that_nvcc_does_not_know(machine_of, monkeypatch, tmp_path):
    machine_of(r"7.0\n")
    with pytest.raises(ValueError, match=r"FASTLIN_CUDA_ARCHS=native: nvcc 13.0 does not know sm_70"):
        nvcc.architectures("native", TOOLKIT)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="got no GPU"):
        nvcc.architectures("native", TOOLKIT)
