"""Collocated async RL against synchronous RL on the same devices.

    python benchmarks/async_vs_sync.py [--seeds 3] [--updates 10] [--modes sync,drain,interrupt]
        [--long] [--picture FILE.png] [--keep FOLDER]

Real engine, real trainer, the tiny model, and `sleepy.py`: an agent of four turns whose tools sleep
(log-normal, median 1 s, 99th percentile 12 s). Four rollouts a group, eight groups an update; async
has sixteen in flight. Groups per hour are counted from the first update to the last, so that no
start-up is in them; the reward is the mean of the last three updates. `--long` takes a model that
hardly ever stops, so that its generations are long: drain against interrupt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_ray import metrics

HERE = Path(__file__).parent
GROUPS = 8
MODES = {
    "sync": [],
    "drain": ["run.groups_in_flight=16"],
    "interrupt": ["run.groups_in_flight=16", "run.drain_s=0"],
}
RECIPE = """\
name: sleepy
command: [{python}, -S, {here}/sleepy.py, agent]
env:
  BASE_URL: "{{base_url}}"
  KEY: "{{api_key}}"
  ATTEMPT: "{{attempt}}"
  SEED: "{seed}"
  SLEEPY_MEDIAN_S: "{median}"
"""
SETTINGS = [
    f"run.groups_per_step={GROUPS}", "run.checkpoint_every=1000", "model.path=tiny",
    "model.max_model_len=1024", "model.dtype=float32", "engine.threads=1", "engine.max_num_seqs=64",
    "harness.args=[]", "rollout.n=4", "rollout.concurrency=64", "rollout.cpus=0.01",
    "rollout.timeout_s=600", "task.train=sleepy:train", "task.validation=null",
    "task.prepare=null", "task.collect=null", "task.grader=null", "trainer.lr=1e-3",
    "trainer.micro_batch_tokens=4096", "trainer.gradient_checkpointing=false",
    "trainer.warmup_steps=0", "gateway.port=0", "tracking.backends=[]",
]  # fmt: skip


def train(folder: Path, mode: str, seed: int, updates: int, long: bool) -> Path:
    """One run; returns its directory."""
    run_dir = folder / f"{mode}-{seed}"
    recipe = folder / f"sleepy-{seed}.yaml"
    median = 0.3 if long else 1
    recipe.write_text(RECIPE.format(python=sys.executable, here=HERE, seed=seed, median=median))
    grader = f"[{sys.executable}, -S, {HERE / 'sleepy.py'}, grade]"
    more = [f"model.path={talker(folder)}", "trainer.lr=1e-9"] if long else []
    command = [
        sys.executable, "jobs/train_swe.py", *SETTINGS, f"run.dir={run_dir}", f"run.seed={seed}",
        f"run.steps={updates}", f"sampling.max_tokens={200 if long else 32}",
        f"harness.recipe={recipe}", f"task.grader_command={grader}", *MODES[mode], *more,
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    with (folder / f"{mode}-{seed}.log").open("w") as log:
        done = subprocess.run(command, cwd=HERE.parent, env=env, stdout=log, stderr=log)
    if done.returncode:
        sys.exit((folder / f"{mode}-{seed}.log").read_text()[-3000:])
    return run_dir


def talker(folder: Path) -> Path:
    """The tiny model with random weights: it ends a turn by chance only."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from lightning_ray.tasks import models

    made = folder / "talker"
    if not made.exists():
        base = models.resolve("tiny")
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).save_pretrained(made)
        AutoTokenizer.from_pretrained(base).save_pretrained(made)
    return made


def numbers(run_dir: Path) -> dict[str, float]:
    """What the table says of a run."""
    rows = metrics.read(run_dir)
    took = rows[-1]["time"] - rows[0]["time"]
    mean = {
        name: statistics.fmean(row.get(name, 0.0) for row in rows[1:])
        for name in ("seconds/collect", "seconds/drain", "seconds/update", "seconds/sync",
                     "seconds/gate_closed", "async/age_mean", "async/calls_of_several_versions")
    }  # fmt: skip
    return mean | {
        "groups/h": 3600 * GROUPS * (len(rows) - 1) / took,
        "age max": max(row.get("async/age_max", 0.0) for row in rows),
        "reward": statistics.fmean(row["reward/mean"] for row in rows[-3:]),
    }


def picture(runs: dict[str, Path], file: Path) -> None:
    """When the engine, the trainer and the gate of each run were busy or closed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(runs), 1, figsize=(9, 1.6 * len(runs)), sharex=True, squeeze=False
    )
    for ax, (mode, run_dir) in zip(axes[:, 0], runs.items(), strict=True):
        rows = metrics.read(run_dir)[1:]
        start = metrics.read(run_dir)[0]["time"]
        for row in rows:
            at = row["time"] - start
            phases = ("sync", "checkpoint", "update", "drain", "collect")
            for lane, names, colour in (
                (2, ("collect",), "tab:green"),
                (1, ("update",), "tab:blue"),
                (0, ("drain", "update", "checkpoint", "sync"), "tab:red"),
            ):
                end = at
                for phase in phases:
                    seconds = row.get(f"seconds/{phase}", 0.0)
                    if phase in names:
                        ax.broken_barh([(end - seconds, seconds)], (lane - 0.4, 0.8), color=colour)
                    end -= seconds
        ax.set_yticks([0, 1, 2], ["gate closed", "trainer", "collecting"])
        ax.set_title(mode, loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("seconds since the first update")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--modes", default="sync,drain,interrupt")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the run directories")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="lr-async-"))
    folder.mkdir(parents=True, exist_ok=True)
    modes = options.modes.split(",")
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    runs: dict[str, Path] = {}
    for seed in range(options.seeds):
        for mode in modes:
            runs[mode] = train(folder, mode, seed, options.updates, options.long)
            found[mode].append(numbers(runs[mode]))
            print(mode, seed, {k: round(v, 2) for k, v in found[mode][-1].items()}, flush=True)
    table = Table(title=f"{options.seeds} seeds, {options.updates} updates: medians")
    for column in (
        "schedule", "groups/h", "ratio", "collect", "drain", "update", "sync", "gate closed",
        "age", "several versions", "reward (spread)",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    base = statistics.median(one["groups/h"] for one in found[modes[0]])
    phases = ("collect", "drain", "update", "sync", "gate_closed")
    for mode, every in found.items():
        middle = {name: statistics.median(one[name] for one in every) for name in every[0]}
        rewards = [one["reward"] for one in every]
        table.add_row(
            mode, f"{middle['groups/h']:.0f}", f"{middle['groups/h'] / base:.2f}",
            *(f"{middle[f'seconds/{name}']:.1f}" for name in phases),
            f"{middle['async/age_mean']:.2f} (max {middle['age max']:.0f})",
            f"{middle['async/calls_of_several_versions']:.1%}",
            f"{statistics.median(rewards):.3f} ({min(rewards):.3f}-{max(rewards):.3f})",
        )  # fmt: skip
    Console(width=150).print(table)
    if options.picture:
        picture(runs, options.picture)


if __name__ == "__main__":
    main()
