"""What all tests share: one thread (every problem is tiny) and reproducible examples."""

import os

# Also for the programs that tests start, one for each core at a time. Before torch, which reads it when imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where there is no GPU the Triton kernels run in their interpreter, on the CPU: read by triton when it is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("sinkformer", deadline=None, derandomize=True, max_examples=15)
hypothesis.settings.load_profile("sinkformer")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
