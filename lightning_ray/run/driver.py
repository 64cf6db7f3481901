"""The training run: does what the state machine of `cycle.py` says, phase after phase.

Every phase is a method; between two phases nothing is held but the position, the policy version,
the groups in flight and the batch of the current step. Invariants: metrics of a step are written
once; after `kill -9` the same command goes on at the last checkpoint with the same weights (their
checksums are compared), and uses again what had finished since, if those weights sampled it.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from lightning_ray.config import RunConfig, dump, load
from lightning_ray.metrics import MetricsLog
from lightning_ray.placement import Bundles, Device, reserve, weight_sync_way
from lightning_ray.records import FinishedRollout, Outcome, PolicyVersion, RolloutState, Task
from lightning_ray.report.console import Console, View
from lightning_ray.rollouts.lifecycle import ControllerStatus
from lightning_ray.run import cluster, data, ending, telling
from lightning_ray.run.checkpoint import Checkpoints, State
from lightning_ray.run.collection import Collection, Harvest, check_faults
from lightning_ray.run.cycle import Phase, Plan, Position
from lightning_ray.run.ending import Results
from lightning_ray.run.stack import Stack, with_counts
from lightning_ray.run.sync import WeightSync
from lightning_ray.run.waiting import ProcessLost, RunError
from lightning_ray.samples import batch, dataset, staleness
from lightning_ray.samples.batch import Batch
from lightning_ray.trainer import advantages
from lightning_ray.trainer.trainer import Trainer, TrainerKilled


class Run:
    """One training run in `config.run_dir`, on the Ray cluster that the process is connected to.
    `lacks` is what `cluster.check_rollouts` told an earlier life, `device` what its bundles had:
    neither is asked again, since the only node with GPUs may be what was lost."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        console: Console,
        lacks: dict[str, str] | None = None,
        device: Device | None = None,
    ) -> None:
        self._config, self._model_dir, self._console = config, model_dir, console
        self.run_dir = config.run_dir
        self._train = data.load_tasks(config.task.train, "task.train")
        self._validation: list[Task] = []
        if config.task.validation:
            self._validation = data.load_tasks(config.task.validation, "task.validation")
        self._plan = Plan(
            config.run.steps,
            config.run.checkpoint_every,
            config.run.validate_every,
            bool(self._validation),
        )
        self._estimator = advantages.estimator(config.algorithm)
        self._hook = advantages.call_advantages(config.algorithm)
        self.lacks, self.device = lacks, device
        # Weights made by this process belong to a lineage of their own: after a rollback the same
        # step number names other weights than before.
        self._lineage = secrets.token_hex(3)
        self._version = PolicyVersion(self._lineage, 0)
        self._position = self._plan.first()
        self._ancestry: tuple[PolicyVersion, ...] = ()
        self._batch: Batch
        self._consumed: tuple[str, ...] = ()
        # When the gate closed, the engines were drained, a harvest was taken.
        self._closed_at = self._drained_at = self._taken_at = 0.0
        self._update_s = 0.0  # seconds of the last update
        self._checksum = ""
        self._view = View(0, config.run.steps, "starting")
        self._values: dict[str, float] = {}  # of this step, not logged yet
        self._spent = 0.0  # seconds of this step
        self._ended: Counter[Outcome] = Counter()  # attempts, as of the last step
        self._status: ControllerStatus
        self._step_seconds: list[float] = []
        self._trainer: Trainer
        self._weight_sync: WeightSync
        self._stack: Stack
        self._metrics: MetricsLog

    def execute(self, *, goes_on: bool = False) -> Results:
        """Runs to the end. `goes_on`: another `Run` follows the loss of a process, so rollouts in
        pods run on.

        Raises: ConfigError, RunError, TrainerDied, PlacementError, EngineStartError,
            GatewayStartError, StoreLocked: see there; the run directory is whole, and the same
            command or another `Run` goes on from it.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        bundles: Bundles | None = None
        lost = False
        self._stack = Stack(self._config, self._model_dir, self.run_dir, self._say)
        self._collection = Collection(
            self._config, self._train, self._stack, self._estimator, self._say
        )
        try:
            self._show("starting", note="store")
            self._stack.open_store()
            if self.lacks is None:
                self.lacks = cluster.check_rollouts(
                    self._config, self._say, self._train, self._validation
                )
            self._stack.know(self.lacks)
            self._remember_config()
            self._checkpoints = Checkpoints(
                self.run_dir, self._config.run.keep_checkpoints, self._config.run.storage
            )
            self._checkpoints.fetch(self._say)
            self._metrics = MetricsLog(self.run_dir, self._config)
            self._show("starting", note="placement group")
            bundles = reserve(self._config, self.device)
            self.device = bundles.device
            bundles.check_shared(self.run_dir, self._model_dir)
            self._start(bundles)
            while self._position.phase is not Phase.DONE:
                self._do(self._position)
            self._checkpoints.settle()
            return ending.keep_model(self.run_dir, self._checkpoints)
        except (ProcessLost, TrainerKilled):
            lost = True
            raise
        finally:
            self._show("stopping")
            self._stack.stop(leave=lost and goes_on)
            if bundles is not None:
                bundles.remove()

    def _start(self, bundles: Bundles) -> None:
        """Starts trainer, engines and gateway, and goes back to the last checkpoint."""
        with ThreadPoolExecutor(1) as background:
            serving = None
            if bundles.device is Device.CPU:
                serving = background.submit(self._stack.start, bundles, self._version)
            self._show("starting", note="trainer, engine and gateway")
            found = self._checkpoints.latest()
            self._trainer = Trainer(
                self._config,
                self._model_dir,
                bundles,
                self._config.run.steps,
                self._weights(*found) if found else None,
            )
            folder = self.run_dir / "policy"
            way = weight_sync_way(self._config, bundles.device)
            self._weight_sync = WeightSync(self._config, way, self._trainer, self._stack, folder)
            resumed = self._restore(found)
            self._trainer.sleep()
            # On a GPU the trainer first: vLLM measures the memory that is left when it starts.
            serving = serving or background.submit(self._stack.start, bundles, self._version)
            self._show("starting", note="engine and gateway")
            serving.result()
        if resumed:
            policy = self._weight_sync.policy(self._version)
            self._stack.remember(policy)
            self._stack.load(policy, self._checksum)
        else:
            self._stack.open()

    def _do(self, position: Position) -> None:
        started = time.monotonic()
        phases = {
            Phase.VALIDATE: self._validate,
            Phase.COLLECT: self._collect,
            Phase.DRAIN: self._drain,
            Phase.UPDATE: self._update,
            Phase.CHECKPOINT: self._checkpoint,
            Phase.SYNC: self._sync,
        }
        self._show(position.phase)
        phases[position.phase]()
        seconds = time.monotonic() - started
        self._values[f"seconds/{position.phase}"] = seconds
        self._spent += seconds
        self._position = self._plan.following(position)
        if self._position.phase in (Phase.COLLECT, Phase.DONE):
            self._log()
            self._step_seconds.append(self._spent)
            self._spent = 0.0

    def _log(self) -> None:
        self._metrics.log(self._position.step, self._values)
        self._values = {}

    # -- phases ---------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Collects the groups of an update, and makes its batch while others go on."""
        started = self._taken_at or time.monotonic()
        left = self._config.run.steps - self._position.step
        found = self._collection.collect(
            self._version, left, self._state().descends_from, self._progress
        )
        self._taken_at = time.monotonic()
        self._values |= self._rates(found, self._taken_at - started)
        self._values |= self._outcomes()
        self._check_faults([r for r in found.rollouts if r.spec.group_id not in found.stale])
        self._batch = batch.build(
            found.rollouts,
            found.calls,
            self._config,
            self._estimator,
            self._hook,
            found.silent,
            found.stale,
        )
        dataset.write(self._batch, self.run_dir, self._position.step + 1)
        self._consumed = tuple(sorted({r.spec.group_id for r in found.rollouts}))
        self._values |= self._batch.statistics
        if lack := telling.nothing_to_learn(self._position.step + 1, self._batch.statistics):
            self._say(lack)
        self._values |= staleness.statistics(self._batch.table, found.calls, self._version.step)
        self._values["async/groups_given_up"] = len(found.stale)

    def _drain(self) -> None:
        self._closed_at = time.monotonic()
        drained, status = self._stack.drain(self._config.run.drain_s)
        self._collection.note_births(status, self._version.step)
        busy = sum(one.busy_s for one in drained) / len(drained)
        now = time.monotonic()
        if self._drained_at:
            idle = now - self._drained_at - busy - self._update_s
            self._values["seconds/devices_idle"] = max(0.0, idle)
        self._drained_at = now
        self._values["seconds/engines_busy"] = busy
        self._values["async/calls_interrupted"] = sum(one.interrupted for one in drained)
        self._values["async/groups_carried_over"] = len(self._collection.pending)

    def _update(self) -> None:
        started = time.monotonic()
        self._trainer.wake()
        self._values |= self._trainer.update(dataset.of(self._batch.table))
        self._version = PolicyVersion(self._lineage, self._position.step + 1)
        self._update_s = time.monotonic() - started

    def _checkpoint(self) -> None:
        # First, since a run that resumes here does not come by again.
        self._log()
        self._checkpoints.write(self._position.step, self._fill_checkpoint)

    def _state(self) -> State:
        """What a run resumes from that is killed here."""
        return State(
            self._plan.after_sync(self._position.step),
            self._version,
            self._checksum,
            self._collection.next_place,
            self._consumed,
            self._collection.pending,
            self._ancestry,
            self._config.trainer.ranks,
        )

    def _fill_checkpoint(self, folder: Path) -> State:
        (folder / "trainer").mkdir()
        self._trainer.save(folder / "trainer")
        self._checksum = self._trainer.save_hf(folder / "hf")
        return self._state()

    def _sync(self) -> None:
        opened = self._weight_sync.hand_over(self._version)
        self._values["seconds/gate_closed"] = opened - self._closed_at

    def _validate(self) -> None:
        specs = data.validation_specs(self._validation, self._version)
        rollouts = self._stack.collect(specs, self._progress)
        self._check_faults(rollouts)
        calls = self._stack.calls(rollouts)
        score = ending.score(rollouts, calls)
        self._values |= ending.score_metrics(score)
        ending.write_transcripts(self.run_dir, self._model_dir, rollouts, calls)
        if self._position.step > 0:
            self._checkpoints.mark_best(self._position.step, score.solve_rate)
        self._say(f"validation at step {self._position.step}: {score.solve_rate:.1%} solved")

    # -- starting -------------------------------------------------------------------------------

    def _remember_config(self) -> None:
        path = self.run_dir / "config.yaml"
        if path.exists() and (before := load(path).model.path) != self._config.model.path:
            raise RunError(
                f"{self.run_dir} holds a run of model.path={before}, "
                f"not {self._config.model.path}; "
                "choose another run.name, or delete that directory"
            )
        path.write_text(dump(self._config))

    def _weights(self, checkpoint: Path, state: State) -> Path | None:
        """The model folder of a checkpoint that another number of ranks wrote, whose weights the
        trainer starts from; None: it loads the checkpoint itself.

        Raises:
            RunError: the base model is needed besides (for the KL term, or below LoRA's adapters).
        """
        now, before = self._config.trainer.ranks, state.ranks
        if now == before:
            return None
        if self._config.algorithm.kl or self._config.model.lora_rank:
            raise RunError(
                f"{checkpoint} was written with trainer.ranks={before}, not {now}, and with "
                "algorithm.kl or model.lora_rank that number cannot change"
            )
        self._say(
            f"{checkpoint} was written with trainer.ranks={before}: the weights go on with {now}, "
            "the optimizer's moments and its warm-up start anew"
        )
        return checkpoint / "hf"

    def _restore(self, found: tuple[Path, State] | None) -> bool:
        """Goes back to the last checkpoint; False if there is none."""
        if found is None:
            dataset.truncate(self.run_dir, 0)
            self._metrics.truncate(-1)
            return False
        folder, state = found
        if state.ranks == self._config.trainer.ranks:
            self._trainer.load(folder / "trainer")
        self._version, self._position = state.version, self._plan.resumed(state.position)
        self._consumed = state.consumed
        self._collection.resume(state.next_place, state.pending)
        # This process's own weights are not among them until it makes some.
        self._ancestry = (*state.ancestry, state.version)
        self._checksum = self._trainer.export(Path(self._weight_sync.policy(self._version).path))
        if self._checksum != state.checksum:
            raise RunError(
                f"the weights in {folder} have the checksum "
                f"{self._checksum}, but {state.checksum} was "
                "written; delete that checkpoint to go on from the one before it"
            )
        dataset.truncate(self.run_dir, self._version.step)
        self._metrics.truncate(self._version.step)
        self._say(f"resuming at step {self._version.step} from {folder}")
        return True

    # -- numbers --------------------------------------------------------------------------------

    def _check_faults(self, rollouts: Sequence[FinishedRollout]) -> None:
        self._values["rollouts/failed"] = sum(r.state is RolloutState.FAILED for r in rollouts)
        check_faults(rollouts, self._config.run.max_infrastructure_faults, self.run_dir)

    def _rates(self, found: Harvest, seconds: float) -> dict[str, float]:
        """Of what an update takes, over the time since the last one took."""
        calls = [call for some in found.calls.values() for call in some]
        count, sampled = len(found.rollouts), sum(len(call.tokens) for call in calls)
        finished = [r for r in found.rollouts if r.state is RolloutState.FINISHED]
        return {
            "rollouts/finished": len(finished),
            "rate/rollouts_per_s": len(finished) / seconds,
            "rate/groups_per_hour": 3600 * len(found.ages) / seconds,
            "rate/tokens_per_s": sampled / seconds,
            "length/sampled_tokens": sampled / count,
            "length/prompt_tokens": sum(len(call.prompt) for call in calls) / count,
        }

    def _outcomes(self) -> dict[str, float]:
        """How many attempts ended how since the last step, and how many nodes lack something."""
        ended = Counter(self._status.outcomes)
        new, self._ended = ended - self._ended, ended
        found = {f"outcomes/{outcome}": float(new[outcome]) for outcome in Outcome}
        return found | {"rollouts/unprotected_nodes": len(self._status.lacks)}

    # -- console --------------------------------------------------------------------------------

    def _progress(self, done: Sequence[FinishedRollout], status: ControllerStatus) -> None:
        self._view, self._status = with_counts(self._view, done, status), status
        self._show(self._position.phase)

    def _show(self, phase: str, note: str = "") -> None:
        left = None
        if self._step_seconds:
            recent = self._step_seconds[-3:]
            left = (self._config.run.steps - self._position.step) * sum(recent) / len(recent)
        self._view = replace(
            self._view,
            step=self._position.step,
            phase=phase,
            tokens_per_s=self._values.get("rate/tokens_per_s", self._view.tokens_per_s),
            seconds_left=left,
            note=note,
        )
        self._console.update(self._view)

    def _say(self, text: str) -> None:
        self._console.print(text)
