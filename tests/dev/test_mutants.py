"""Every planted fault applies to the sources, and the tool reports what pytest found."""

from collections import Counter

import pytest

from dev import mutants
from dev.fault import KINDS, LAYERS
from dev.faults import FAULTS
from dev.mutants import ROOT, Broken, first_failure, planted, read

SHORT = ["-m", "not long"]
PLAIN = FAULTS[0]
FAILED = (2, "F\nFAILED tests/a.py::test_a[x - y] - AssertionError\n!!! stopping after 1 failures !!!\n")
PASSED = (0, "10 passed\n")


def copy_of_one_file(tree):
    path = tree / PLAIN.file
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / PLAIN.file).read_text())


@pytest.fixture
def pytest_finds(monkeypatch):
    """Replace runs of pytest by their endings, in order; the copy of the tree has one file."""
    asked = []

    def install(*endings):
        left = list(endings)

        def run(command, tree, seconds):
            asked.append(list(command[len(mutants.PYTEST) :]))
            return left.pop(0)

        monkeypatch.setattr(mutants, "run", run)
        monkeypatch.setattr(mutants, "copy_tree", copy_of_one_file)
        return asked

    return install


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_applies(fault):
    text = (ROOT / fault.file).read_text()
    assert planted(fault, text) != text
    assert fault.layer in LAYERS
    assert fault.kind in KINDS
    assert fault.near.split()
    assert all((ROOT / path).exists() and path.startswith("tests/") for path in fault.near.split())


def test_table_is_complete():
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.layer for fault in FAULTS} == set(LAYERS)
    assert min(Counter(fault.kind for fault in FAULTS)[kind] for kind in KINDS) >= 2


def test_stale_faults_are_named(monkeypatch, capsys):
    assert mutants.main(["--check"]) == 0
    assert capsys.readouterr().out.startswith(f"{len(FAULTS)} faults\n")
    gone = PLAIN._replace(name="gone", old="no such text")
    broken = PLAIN._replace(name="broken", new="key = [")
    monkeypatch.setattr(mutants, "FAULTS", (gone, broken))
    assert mutants.main(["--check"]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"gone: {PLAIN.file}: has the old text 0 times, wants it once"
    assert second.startswith(f"broken: {PLAIN.file}: does not compile with the fault")


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("FAILED tests/a.py::test_a - AssertionError: 1 - 2\nFAILED tests/b.py::test_b\n", "tests/a.py::test_a"),
        ("ERROR tests/a.py::test_a\n", "tests/a.py::test_a"),
        ("E   FAILED x\n3 passed\n", None),
    ],
)
def test_first_failure(output, name):
    assert first_failure(output) == name


def test_a_fault_that_the_near_tests_find(pytest_finds, tmp_path, capsys):
    asked = pytest_finds(FAILED)
    out = tmp_path / "results.json"
    assert mutants.main(["--only", PLAIN.name, "--json", str(out)]) == 0
    assert asked == [[*SHORT, *PLAIN.near.split()]]
    result = read(out)[PLAIN.name]
    assert (result.found, result.by) == ("short", "tests/a.py::test_a[x - y]")
    assert capsys.readouterr().out.startswith(PLAIN.name)
    # With the results of another run the fault is skipped.
    assert mutants.main(["--only", PLAIN.name, "--resume", str(out)]) == 0
    assert len(asked) == 1


def test_a_hang_is_a_find(pytest_finds, tmp_path):
    pytest_finds(PASSED, (None, ""))
    out = tmp_path / "results.json"
    assert mutants.main(["--only", PLAIN.name, "--json", str(out)]) == 0
    assert read(out)[PLAIN.name].by == "timeout"


def test_survivors_meet_the_long_suite_later(pytest_finds, tmp_path, capsys):
    asked = pytest_finds(PASSED, (5, "no tests ran\n"), FAILED)
    out = tmp_path / "results.json"
    assert mutants.main(["--only", PLAIN.name, "--json", str(out)]) == 1
    assert asked[1] == [*SHORT, *(f"--ignore={path}" for path in PLAIN.near.split())]
    assert read(out)[PLAIN.name].found == "nobody"
    assert f"survivors: {PLAIN.name}" in capsys.readouterr().out
    assert mutants.main(["--only", PLAIN.name, "--resume", str(out), "--long"]) == 0
    assert asked[2:] == [["-m", "long"]]
    assert read(out)[PLAIN.name].found == "long"


def test_a_run_without_a_failing_test_is_no_find(pytest_finds, tmp_path):
    pytest_finds((4, "ERROR: no such option\n"))
    out = tmp_path / "results.json"
    assert mutants.main(["--only", PLAIN.name, "--json", str(out)]) == 1
    assert read(out)[PLAIN.name].found == "broken"


def test_the_file_is_restored(tmp_path, monkeypatch):
    compiled = next(fault for fault in FAULTS if fault.file.startswith("csrc/"))
    path, library = tmp_path / compiled.file, tmp_path / "fastlin" / "_C.x.so"
    for file, contents in ((path, (ROOT / compiled.file).read_bytes()), (library, b"before")):
        file.parent.mkdir(parents=True)
        file.write_bytes(contents)

    def build(command, tree, seconds):
        assert compiled.new in path.read_text()
        library.write_bytes(b"after")
        return 1, "error: expected ;\n"

    monkeypatch.setattr(mutants, "run", build)
    with pytest.raises(Broken, match="does not build: error: expected ;"), mutants.with_fault(compiled, tmp_path):
        pass
    assert path.read_bytes() == (ROOT / compiled.file).read_bytes()
    assert library.read_bytes() == b"before"


def test_a_cuda_kernel_is_left_to_the_tests_to_build(tmp_path, monkeypatch):
    fault = next(fault for fault in FAULTS if fault.file.startswith("csrc/cuda/"))
    path = tmp_path / fault.file
    path.parent.mkdir(parents=True)
    path.write_bytes((ROOT / fault.file).read_bytes())
    monkeypatch.setattr(mutants, "run", lambda *_: pytest.fail("the extension was built"))
    with mutants.with_fault(fault, tmp_path):
        assert fault.new in path.read_text()
    assert path.read_bytes() == (ROOT / fault.file).read_bytes()


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        mutants.main(["--only", "no-such-fault"])
    assert "no fault no-such-fault" in capsys.readouterr().err
