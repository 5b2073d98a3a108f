"""One demo run from beginning to end, or from where it was cut off."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from rc.controller import Controller
from rc.demo.checkpoint import load_checkpoint
from rc.demo.display import Display, display_for
from rc.demo.engine import DemoEngine
from rc.demo.grpo import GrpoTrainer
from rc.demo.policy import Policy, build_small_policy, load_policy
from rc.demo.report import Report, make_report, print_report
from rc.demo.run import run_name, train
from rc.demo.run_directory import DemoSettings, RunDirectory
from rc.demo.task import built_in_prompts, load_prompts
from rc.effects.vllm_http import VllmHttpEngine
from rc.errors import EngineLost, EngineTainted, EngineUnreachable, EngineUnsuitable
from rc.exit_codes import ExitCode
from rc.lifecycle import Phase
from rc.versions import WeightIdentity

__all__ = ("DemoRun", "run")

_ENGINE = "engine"
"""The server's name in the journal: its address may change when it is replaced, its part in the run does not."""

_MAX_MODEL_LEN = 1024
"""Context of the demo's engine; its prompts and completions are far below."""


def run(
    settings: DemoSettings, directory: RunDirectory, *, port: int, keep: bool, measure_restart: bool, as_json: bool
) -> ExitCode:
    """Run it and print the report."""
    report = anyio.run(_run, settings, directory, port, keep, measure_restart, as_json)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print_report(report, directory)
    return ExitCode.OK


async def _run(
    settings: DemoSettings, directory: RunDirectory, port: int, keep: bool, measure_restart: bool, as_json: bool
) -> Report:
    display = display_for(steps=settings.steps, live=not as_json)
    with display:
        display.say(f"{'Going on with' if directory.begun else 'Beginning'} the run in {directory.path}")
        run = DemoRun(settings, directory, port, display)
        try:
            await run.prepare()
            digest = await run.train()
            restart_s = await run.measure_restart() if measure_restart else None
        except BaseException:
            await run.stop()
            raise
        pid = run.engine.process.pid
        if keep:
            display.say(f"The server (pid {pid}) keeps running at {run.engine.url}; end it with: kill -- -{pid}")
        else:
            await run.stop()
        return await make_report(settings, directory, digest=digest, pid=pid, restart_s=restart_s)


class DemoRun:
    """The parts of a run: policy, trainer, server, and the controller that connects them."""

    def __init__(self, settings: DemoSettings, directory: RunDirectory, port: int, display: Display) -> None:
        self.settings = settings
        self.directory = directory
        self.port = port
        self.display = display
        self._engine: DemoEngine | None = None

    @property
    def engine(self) -> DemoEngine:
        """The server, once `prepare` has found or started it."""
        if self._engine is None:
            raise EngineLost("the demo's server has not been started")
        return self._engine

    async def prepare(self) -> None:
        """Load the policy and the trainer, and find or start the server meanwhile."""
        self.policy = await anyio.to_thread.run_sync(_policy, self.settings, self.directory)
        self.prompts = load_prompts(Path(self.settings.prompts)) if self.settings.prompts else built_in_prompts()
        # One thread, as the engine has: two sides that each take every core wait for each other more than they compute.
        self.trainer = GrpoTrainer(self.policy.model, learning_rate=self.settings.learning_rate, threads=1)
        if self.directory.checkpoint.exists():
            await anyio.to_thread.run_sync(load_checkpoint, self.directory.checkpoint, self.trainer)
            self.display.say(f"The trainer goes on after step {self.trainer.steps_done}")
        self._engine = await DemoEngine.find(self.directory)
        if self._engine is None:
            await self._start_engine()
        else:
            self.display.say(f"Found the server that this run left running (pid {self.engine.process.pid})")

    async def _start_engine(self) -> None:
        self.display.say("Starting a vLLM server: half a minute on two cores")
        self._engine = await DemoEngine.start(
            self.directory, self.policy.directory, port=self.port, max_model_len=_max_model_len(self.policy)
        )
        pid, start_s = self.engine.process.pid, self.engine.start_s
        self.display.say(f"vLLM is up after {start_s:.1f} s (pid {pid}); its log: {self.directory.engine_log}")

    async def train(self) -> str:
        """Take the steps that are left; give the digest of the state at the end.

        A server that a killed run left tainted, or that is no use for another reason, is replaced once.
        """
        replaced = False
        while True:
            try:
                async with self._controller() as control:
                    self.display.watch(lambda: len(control.state.rollouts.active))
                    tainted = control.state.engine(_ENGINE).phase is Phase.TAINTED
                    if not tainted:
                        await train(
                            control,
                            self.policy,
                            self.trainer,
                            self.prompts,
                            self.settings,
                            self.directory,
                            self.display,
                        )
                if not tainted:
                    self.display.say(f"State digest at shutdown: {control.digest}")
                    return control.digest
                reason = control.state.engine(_ENGINE).taint
            except (EngineUnsuitable, EngineUnreachable) as error:
                if replaced or self.engine.start_s is not None:
                    raise
                reason = str(error)
            if replaced:
                raise EngineTainted(_ENGINE, reason or "reason unknown")
            replaced = True
            self.display.say(f"The server is no longer fit for use ({reason}); starting another one")
            await self.engine.stop()
            await self._start_engine()

    def _controller(self) -> AbstractAsyncContextManager[Controller]:
        return Controller.open(
            self.directory.journal,
            engine=VllmHttpEngine(self.engine.url, name=_ENGINE),
            identity=WeightIdentity(run=run_name(self.settings), step=0, checkpoint=str(self.policy.directory)),
        )

    async def measure_restart(self) -> float:
        """Start a second server in the same way, beside the first that idles; give the seconds until it is healthy."""
        self.display.say("Measuring what a restart would have taken: starting a second server beside the first")
        twin = RunDirectory(self.directory.path / "restart")
        twin.path.mkdir(exist_ok=True)
        server = await DemoEngine.start(twin, self.policy.directory, port=0, max_model_len=_max_model_len(self.policy))
        await server.stop()
        return server.start_s or 0.0

    async def stop(self) -> None:
        """End the server."""
        if self._engine is not None:
            await self._engine.stop()


def _policy(settings: DemoSettings, directory: RunDirectory) -> Policy:
    if settings.model is not None:
        return load_policy(Path(settings.model))
    if not directory.policy.exists():
        build_small_policy(directory.policy, settings.seed)
    return load_policy(directory.policy)


def _max_model_len(policy: Policy) -> int:
    return min(_MAX_MODEL_LEN, policy.max_model_len)
