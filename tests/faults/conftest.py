import pytest
from faults.sweeps import Server, table


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("said"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    """The table of a sweep that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed")
    code, said = server.start(out).wait()
    assert code == 0, said
    return table(out)


class Ledger:
    """Faults of a kind that a test has injected, and what came of them."""

    def __init__(self, kind):
        self.row = [kind, 0, 0, 0]

    def same_bits(self, faults=1):
        """After so many faults, the result is that of an undisturbed run."""
        self.row[1] += faults
        self.row[2] += faults

    def clear_error(self):
        """A fault that was told, and nothing was lost."""
        self.row[1] += 1
        self.row[3] += 1


@pytest.fixture
def ledger(request, record_property):
    made = Ledger(request.node.originalname.removeprefix("test_").replace("_", " "))
    record_property("faults", made.row)
    return made


@pytest.fixture
def times(request):
    """How many times as many faults as in CI."""
    return request.config.getoption("--faults")
