import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_worker():
    """Tests run in as many processes as there are cores; more threads would only wait for each other."""
    torch.set_num_threads(1)
