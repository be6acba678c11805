"""What a worker's settings become on the node of a Ray cluster."""

import pytest

from shell_router.batch.pool import PoolWorker
from shell_router.batch.workers.node import list_gpus, place_on_node
from shell_router.config import PairLaunch, PairSettings
from shell_router.standins.embedded.settings import EmbeddedSection

PAIR = PairSettings(
    "http://127.0.0.1:30000",
    "http://127.0.0.1:30001",
    bootstrap_host="127.0.0.1",
    launch=PairLaunch(prefill_gpus=(4,), decode_gpus=(2, 5), flags="--mem-fraction-static 0.8"),
)


def test_a_pair_gets_the_gpus_that_were_reserved_one_for_each_that_it_names() -> None:
    assert list_gpus(PoolWorker(pair=PAIR)) == (4, 2, 5)
    placed = place_on_node(PoolWorker(pair=PAIR), "10.0.0.2", ["0", "3", "7"]).pair
    assert placed is not None
    assert placed.launch == PairLaunch((0,), (3, 7), flags="--mem-fraction-static 0.8")


def test_engines_that_share_a_gpu_share_the_reserved_one() -> None:
    shared = PairSettings(
        PAIR.prefill, PAIR.decode, launch=PairLaunch(prefill_gpus=(1,), decode_gpus=(1,))
    )
    assert list_gpus(PoolWorker(pair=shared)) == (1,)
    placed = place_on_node(PoolWorker(pair=shared), "10.0.0.2", ["6"]).pair
    assert placed is not None
    assert placed.launch == PairLaunch((6,), (6,))


def test_a_pair_listens_on_its_node_at_its_own_ports() -> None:
    placed = place_on_node(PoolWorker(pair=PAIR), "10.0.0.2", ["0", "1", "2"]).pair
    assert placed is not None
    assert (placed.prefill, placed.decode) == ("http://10.0.0.2:30000", "http://10.0.0.2:30001")
    assert placed.bootstrap_host == "10.0.0.2"


@pytest.mark.parametrize(
    ("device", "gpus", "there"), [("cpu", 0, "cpu"), ("cuda", 1, "cuda"), ("cuda:3", 1, "cuda")]
)
def test_an_embedded_pair_sees_only_the_gpu_that_was_reserved(
    device: str, gpus: int, there: str
) -> None:
    worker = PoolWorker(embedded=EmbeddedSection(device=device, threads=2))
    assert len(list_gpus(worker)) == gpus
    assert place_on_node(worker, "10.0.0.2", ["5"] * gpus).embedded == EmbeddedSection(
        device=there, threads=2
    )
