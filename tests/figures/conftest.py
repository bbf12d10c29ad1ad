import pytest
from support.claims import SIZES

from fastlin.figures import claims


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A whole report of short training: claims by name, the record, what was reported, and the folder."""
    out, reported = tmp_path_factory.mktemp("report"), []
    record = claims.compute(out, **SIZES, report=reported.append)
    found = {
        entry["name"]: claims.Claim(**{**entry, "numbers": [claims.Number(**number) for number in entry["numbers"]]})
        for entry in record["claims"]
    }
    return found, record, reported, out
