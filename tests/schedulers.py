"""Schedulers whose queue refuses nobody."""

from openjev_fast_plugin.metrics import Metrics
from openjev_fast_plugin.scheduler import Device, Scheduler


def scheduler_of(device: Device, share_rows: int = 1024, max_rows: int = 65_536) -> Scheduler:
    """share_rows, max_rows: as for `Scheduler`, the latter as a number."""
    return Scheduler(
        device,
        Metrics(),
        max_rows=lambda: max_rows,
        share_rows=share_rows,
        most_requests=1000,
        most_rows=10**9,
    )
