import gc

import pytest

from shell_router.lab.simulation.virtual_time import uncollected


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_and_is_then_as_before_however_it_ends(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="enough"), uncollected():
            assert not gc.isenabled()
            raise ValueError("enough")
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
