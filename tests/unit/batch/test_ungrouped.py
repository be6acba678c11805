import pytest

from shell_router.batch.sessions import unwrap_errors
from shell_router.errors import ConfigError


async def fails(error: BaseException) -> None:
    raise error


async def test_an_unexpected_error_is_not_hidden_behind_another() -> None:
    group = ExceptionGroup("", [ConfigError("ours"), ExceptionGroup("", [ZeroDivisionError()])])
    with pytest.raises(ExceptionGroup) as raised:
        await unwrap_errors(fails(group))
    assert raised.value is group
