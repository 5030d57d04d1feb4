"""What a profile costs and was measured to do, as figures and as text, one way for every look at it. Knows no files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.evaluation.statistics import Interval
from kvtuner.report.formatting import NOT_MEASURED, interval

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.evidence import QualityRecord
    from kvtuner.exported_configs.profile.layer_storage import KeyDefaults, ValueDefaults
    from kvtuner.exported_configs.profile.profile import Profile


def ratio_to_bf16(profile: Profile) -> float:
    """How many times more tokens fit than in bf16."""
    return profile.to_geometry().bf16_bytes_per_token() / profile.bytes_per_token()


def measured_kl(quality: QualityRecord) -> Interval:
    """The mean and its interval, nats per token."""
    kl = quality.measured_kl
    return Interval(kl.mean, kl.low, kl.high)


def kl_text(quality: QualityRecord | None) -> str:
    """The same as text."""
    return NOT_MEASURED if quality is None else interval(measured_kl(quality))


def grid_text(defaults: KeyDefaults | ValueDefaults) -> str:
    """How quantized keys or values share scales."""
    unit = "tokens per scale of a channel" if defaults.granularity == "per_channel" else "channels per scale"
    words = f"{defaults.granularity.replace('_', ' ')}, {defaults.group_size} {unit}"
    return words + ", symmetric" * defaults.symmetric
