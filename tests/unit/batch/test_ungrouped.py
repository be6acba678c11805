import pytest

from shell_router.batch.sessions import unwrap_errors
from shell_router.errors import ConfigError, EngineError


async def fails(error: BaseException) -> None:
    raise error


async def test_the_first_of_several_errors_of_ours_is_raised_as_it_is() -> None:
    first = ConfigError("first")
    group = ExceptionGroup(
        "", [ExceptionGroup("", [first, EngineError("second")]), ConfigError("third")]
    )
    with pytest.raises(ConfigError) as raised:
        await unwrap_errors(fails(group))
    assert raised.value is first


async def test_an_unexpected_error_is_not_hidden_behind_another() -> None:
    group = ExceptionGroup("", [ConfigError("ours"), ExceptionGroup("", [ZeroDivisionError()])])
    with pytest.raises(ExceptionGroup) as raised:
        await unwrap_errors(fails(group))
    assert raised.value is group


async def test_an_error_alone_and_a_result_pass_through() -> None:
    async def works() -> int:
        return 5

    with pytest.raises(KeyError):
        await unwrap_errors(fails(KeyError()))
    assert await unwrap_errors(works()) == 5
