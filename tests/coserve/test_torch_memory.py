import pytest
import torch

from benchmarks.coserve.pool.torch_components import most_held

pytestmark = pytest.mark.slow


CPU = torch.device("cpu")
MIB = 2**20


def test_what_is_held_at_the_same_time_counts_and_what_is_freed_before_does_not() -> None:
    def work() -> None:
        for _ in range(3):
            torch.empty(4 * MIB, dtype=torch.uint8)
        kept = [torch.empty(MIB, dtype=torch.uint8) for _ in range(3)]
        del kept

    assert most_held(CPU, work) == pytest.approx(4 * MIB, rel=0.01)


def test_what_was_there_before_does_not_count() -> None:
    before = torch.empty(8 * MIB, dtype=torch.uint8)
    assert most_held(CPU, before[:MIB].clone) == pytest.approx(MIB, rel=0.01)


def test_what_an_operation_takes_and_gives_back_counts() -> None:
    image, kernel = (
        torch.zeros(1, 16, 64, 64, dtype=torch.float64),
        torch.zeros(16, 16, 3, 3, dtype=torch.float64),
    )
    held = most_held(CPU, lambda: torch.nn.functional.conv2d(image, kernel, padding=1))
    output_bytes = 16 * 64 * 64 * 8
    assert held > 5 * output_bytes, "the unfolded image is nine times as large"
