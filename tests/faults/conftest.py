import pytest
from support.fault_sweeps import Server, table


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("said"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    """The table of an undisturbed sweep."""
    out = tmp_path_factory.mktemp("undisturbed")
    code, said = server.start(out).wait()
    assert code == 0, said
    return table(out)


class Ledger:
    """Faults of one kind that a test injects, and their outcomes."""

    def __init__(self, kind):
        self.row = [kind, 0, 0, 0]

    def same_bits(self, faults=1):
        """After `faults` faults the result is that of an undisturbed run."""
        self.row[1] += faults
        self.row[2] += faults

    def clear_error(self):
        """A fault that raised a clear error and lost nothing."""
        self.row[1] += 1
        self.row[3] += 1


@pytest.fixture
def ledger(request, record_property):
    made = Ledger(request.node.originalname.removeprefix("test_").replace("_", " "))
    record_property("faults", made.row)
    return made


@pytest.fixture
def times(request):
    """Multiple of the number of faults in CI."""
    return request.config.getoption("--faults")
