"""A logged metric is on disk, in Ray and in the tracking back ends, and each step is there once."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from lightning_ray import config, metrics
from lightning_ray.config import ConfigError, RunConfig
from lightning_ray.metrics import MetricsLog


@pytest.fixture
def plain() -> RunConfig:
    return config.load(None, ["tracking.backends=[]", "run.name=test"])


def test_what_was_logged_is_read_back_one_row_per_step(tmp_path: Path, plain: RunConfig) -> None:
    log = MetricsLog(tmp_path, plain)
    log.log(1, {"reward/mean": 0.25})
    log.log(0, {"validation/solve_rate": 0.5})
    log.log(1, {"validation/solve_rate": 0.75})
    rows = [{k: v for k, v in row.items() if k != "time"} for row in metrics.read(tmp_path)]
    assert rows == [
        {"step": 0, "validation/solve_rate": 0.5},
        {"step": 1, "reward/mean": 0.25, "validation/solve_rate": 0.75},
    ]


def test_a_run_without_metrics_reads_as_empty(tmp_path: Path) -> None:
    assert metrics.read(tmp_path) == []


def test_a_number_that_is_not_finite_is_kept_as_such(tmp_path: Path, plain: RunConfig) -> None:
    MetricsLog(tmp_path, plain).log(1, {"optim/grad_norm": math.nan, "policy/kl": math.inf})
    row = metrics.read(tmp_path)[0]
    assert math.isnan(row["optim/grad_norm"])
    assert math.isnan(row["policy/kl"])
    assert "NaN" not in (tmp_path / metrics.FILE_NAME).read_text()  # it stays JSON


def test_a_resumed_run_logs_each_step_once(tmp_path: Path, plain: RunConfig) -> None:
    first = MetricsLog(tmp_path, plain)
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": 0.1 * step})
    second = MetricsLog(tmp_path, plain)
    second.truncate(after_step=1)
    second.log(2, {"reward/mean": 0.9})
    assert [(row["step"], row["reward/mean"]) for row in metrics.read(tmp_path)] == [
        (1, 0.1),
        (2, 0.9),
    ]


def test_a_line_torn_by_a_crash_is_dropped_and_logging_goes_on(
    tmp_path: Path, plain: RunConfig
) -> None:
    MetricsLog(tmp_path, plain).log(1, {"reward/mean": 0.1})
    with (tmp_path / metrics.FILE_NAME).open("a") as file:
        file.write('{"step": 2, "rew')
    assert [row["step"] for row in metrics.read(tmp_path)] == [1]
    MetricsLog(tmp_path, plain).log(2, {"reward/mean": 0.2})
    assert [row["step"] for row in metrics.read(tmp_path)] == [1, 2]


def test_a_missing_tracking_package_is_an_error_that_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])  # nothing can be found, whatever this machine has
    wanted = config.load(None, ["tracking.backends=[swanlab]"])
    with pytest.raises(ConfigError, match=r"tracking\.backends: swanlab needs the package swanlab"):
        MetricsLog(tmp_path, wanted)


@pytest.mark.slow
def test_tensorboard_finds_the_values_in_the_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, config.load(None, ["run.name=test"]))
    log.log(1, {"reward/mean": 0.5})
    log.log(2, {"reward/mean": 1.0})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0)]
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_prometheus_finds_the_values_at_the_ray_node(tmp_path: Path, plain: RunConfig) -> None:
    import socket
    import tempfile
    import time
    import urllib.request

    import ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            _metrics_export_port=port,
        )
        try:
            MetricsLog(tmp_path, plain).log(3, {"reward/mean": 0.5})
            found: list[str] = []
            deadline = time.monotonic() + 60
            while not found and time.monotonic() < deadline:
                time.sleep(1)
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                    lines = page.read().decode().splitlines()
                found = [line for line in lines if line.startswith("ray_lightning_ray_reward_mean")]
            assert found, "the gauge did not appear within 60 s"
            assert 'run="test"' in found[0]
            assert float(found[0].split()[-1]) == 0.5
        finally:
            ray.shutdown()
