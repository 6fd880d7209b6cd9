"""What the quickstart reckons; that it runs is `make demo`."""

import pytest

from bert_core.errors import ConfigError
from pipelines.commands.quickstart import QuickstartConfig
from pipelines.commands.report import paired_difference


def test_the_gain_is_taken_seed_by_seed_with_its_standard_error() -> None:
    ours = [{"seed": seed, "accuracy": value} for seed, value in ((0, 0.5), (1, 0.6), (2, 0.7))]
    theirs = [{"seed": seed, "accuracy": value} for seed, value in ((2, 0.4), (0, 0.3), (1, 0.5))]
    gain, error = paired_difference(ours, theirs, "accuracy")  # differences 0.2, 0.1, 0.3
    assert gain == pytest.approx(0.2)
    assert error == pytest.approx(0.1 / 3**0.5)


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="port: wanted 1 to 65535, got 0"):
        QuickstartConfig(port=0)
