import pytest

from dspark.errors import CacheError, CheckpointError, ConfigError, DataError, DsparkError, RequestError


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, DataError, CacheError, RequestError])
def test_every_error_is_one_line_with_exit_code_2(kind: type[DsparkError]) -> None:
    error = kind("first line\n  second line\tend")
    assert isinstance(error, DsparkError)
    assert str(error) == "first line second line end"
    assert error.exit_code == 2
