"""Metrics of answers, and what is fitted to scores by them."""

from typing import Literal

Calibration = Literal["none", "temperature", "per_label"]
"""What is fitted to a model's scores: nothing; one scale for all labels; or also a shift per label,
and with several labels per row a scale per label."""
