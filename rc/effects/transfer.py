"""Weight transfer through vLLM's own trainer side, one phase: the engine is paused while bytes travel.

`VllmWeightTransfer` makes a trainer through vLLM's ``WeightTransferTrainerFactory`` and gives it a client whose calls
go through the engine's adapter, so that every one has a deadline and an outcome. Backends differ in their init info
alone.

The trainer runs in a thread of this process and cannot be killed there. What bounds it: rendezvous and broadcasts of
``rc_gloo`` time out by themselves; a broadcast of ``nccl`` does not, so `install` returns at its deadline and leaves
that thread behind, barred from ever calling the engine again. Its calls that are under way are cancelled on our side;
what the engine makes of them is not known then, and reported so.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from rc.effects.protocol import EngineAdapter, Failed, Ok, Refused, WeightSource
from rc.effects.weight_client import WeightClient, WeightRoutes
from rc.errors import InvalidWeights
from rc.evidence import InstallReport

if TYPE_CHECKING:
    import torch

    from rc.versions import ParameterSpec

__all__ = ("BACKENDS", "TensorSource", "Trainer", "VllmWeightTransfer")

RENDEZVOUS_S: Final = 60.0
"""How long workers may take to join a group; they do it in milliseconds unless the engine is busy."""

INSTALL_DEADLINE_S: Final = 300.0
"""How long one install may take in all: tens of seconds for the largest models over a fast network."""

_LEAVE_S: Final = 1.0


class TensorSource(WeightSource, Protocol):
    """Weights whose tensors this transfer can send, e.g. `rc.ModuleWeights`."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of `manifest`, in its order."""
        ...


class Trainer(Protocol):
    """What vLLM's trainer factory makes; that of ``rc_gloo`` also has ``may_have_loaded``."""

    source: Any

    def send_weights(self) -> None:
        """Send the source's weights and drive start, update and finish; blocks."""
        ...

    def shutdown(self) -> None:
        """Leave the group."""
        ...


def _gloo_init_info(address: str, world_size: int, timeout_s: float) -> Any:
    from rc.vllm_plugin.gloo_trainer import GlooTrainerInitInfo

    return GlooTrainerInitInfo(address=address, world_size=world_size, timeout_s=timeout_s, rank=0)


def _nccl_init_info(address: str, world_size: int, timeout_s: float) -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    # vLLM's rendezvous has a bound of its own (300 s); the port must be free on the trainer and open to the workers.
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=world_size, rank=0)


BACKENDS: Final[dict[str, Callable[[str, int, float], Any]]] = {"rc_gloo": _gloo_init_info, "nccl": _nccl_init_info}
"""Backends that can be driven, each with the function that makes its init info."""


class _Group:
    """A trainer that has met one process of an engine, and its number of workers."""

    def __init__(self, trainer: Trainer, client: WeightClient, boot: str, workers: int) -> None:
        self.trainer = trainer
        self.client = client
        self.boot = boot
        self.workers = workers

    def untouched(self) -> bool:
        """Whether it is proved that the failed update left the engine as it was, ready for another.

        The worker said that the update failed, which ends its session, and it cannot have had everything, before which
        it loads nothing. With several workers that is not enough: vLLM leaves the failure of the second one in its
        queue and takes it for the answer to a later call.
        """
        may_have_loaded = getattr(self.trainer, "may_have_loaded", True)
        return not may_have_loaded and self.workers == 1 and isinstance(self.client.outcomes.get("update"), Failed)


class VllmWeightTransfer:
    """Sends weights to an engine by one of vLLM's weight-transfer backends.

    Args:
        backend: ``"rc_gloo"`` (CPU, any machine) or ``"nccl"``; the engine must have been started with the same one.
        address: Address of this host that the engine's workers can reach.
        rendezvous_s: Bound on the workers' joining, and on each single broadcast of ``rc_gloo``.
        deadline_s: Bound on one install, but for the look at the engine after it.
    """

    def __init__(
        self,
        backend: str = "rc_gloo",
        *,
        address: str = "127.0.0.1",
        rendezvous_s: float = RENDEZVOUS_S,
        deadline_s: float = INSTALL_DEADLINE_S,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"no weight-transfer backend {backend!r}; there are {', '.join(BACKENDS)}")
        self._backend = backend
        self._address = address
        self._rendezvous_s = rendezvous_s
        self._deadline_s = deadline_s
        self._groups: dict[str, _Group] = {}

    @property
    def backend(self) -> str:
        """Name of vLLM's weight-transfer backend."""
        return self._backend

    async def ready(self, engine: EngineAdapter) -> str | None:
        """Meet the engine's workers, unless this process of it was met before; say what is wrong, or None.

        Nothing mutates here: a group that cannot form leaves the engine as it is.
        """
        boot = (await engine.observe()).boot
        if boot is None:
            return "the engine cannot be read"
        group = self._groups.get(engine.name)
        if group is not None and group.boot == boot:
            return None
        await self._leave(engine.name)
        routes = cast(WeightRoutes, engine)
        size = await routes.world_size()
        if not isinstance(size, Ok):
            return f"the engine's number of workers is not known: {size.message}"
        client = WeightClient(routes, anyio.lowlevel.current_token())
        trainer: Trainer | None = None
        try:
            # The first import of vLLM takes seconds, which are not the workers' fault.
            await anyio.to_thread.run_sync(_load_trainer_side, abandon_on_cancel=True)
            # Forming a group waits for the workers' slowest; give it the rendezvous and as much again to report.
            trainer = await client.work(2 * self._rendezvous_s, self._meet, 1 + size.value, client)
        except ImportError as error:
            return f"the trainer's side needs vLLM in this environment too (pip install 'rolloutcore[engine]'): {error}"
        except Exception as error:  # noqa: BLE001 - whatever vLLM or torch raises, nothing has mutated
            return f"no transfer group ({_backend_hint(self._backend)}): {str(error) or type(error).__name__}"
        finally:
            if trainer is None:
                client.bar()
        self._groups[engine.name] = _Group(trainer, client, boot, size.value)
        return None

    async def _leave(self, engine: str) -> None:
        """Leave the group of an earlier process of an engine, if there is one."""
        group = self._groups.pop(engine, None)
        if group is not None:
            group.client.bar()
            with anyio.move_on_after(_LEAVE_S):
                await anyio.to_thread.run_sync(group.trainer.shutdown, abandon_on_cancel=True)

    def _meet(self, world_size: int, client: WeightClient) -> Trainer:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        init_info = BACKENDS[self._backend](self._address, world_size, self._rendezvous_s)
        trainer = WeightTransferTrainerFactory.trainer_init(
            init_info, client=cast(Any, client), source=_vllm_source(None)
        )
        return cast(Trainer, trainer)

    async def install(self, engine: EngineAdapter, weights: WeightSource, label: str) -> InstallReport:
        """Send and apply; `ready` must have succeeded for this process of the engine."""
        started = anyio.current_time()
        group = self._groups.get(engine.name)
        if group is None:
            unmet = "no transfer group was formed"
            return InstallReport(observed=await engine.observe(), problem=unmet, mutation="none")
        group.client.label = label
        problem: str | None = "cancelled"
        try:
            problem = await self._send(group, cast(TensorSource, weights))
        finally:
            if problem is not None:
                # A trainer that failed is of no use: the next update forms a new group. It is not shut down from here,
                # which would wait for a broadcast that it may still be in.
                group.client.bar()
                self._groups.pop(engine.name, None)
        took_s = anyio.current_time() - started
        mutation = _mutation(group, problem)
        return InstallReport(
            observed=await engine.observe(),
            took_s=took_s,
            problem=problem,
            mutation=mutation,
            sent_bytes=weights.manifest().nbytes if mutation == "complete" else 0,
        )

    async def _send(self, group: _Group, weights: TensorSource) -> str | None:
        group.trainer.source = _vllm_source(weights)
        try:
            await group.client.work(self._deadline_s, group.trainer.send_weights)
        except Exception as error:  # noqa: BLE001 - whatever is raised, the outcomes say how far it got
            return str(error) or type(error).__name__
        finally:
            group.trainer.source = None
        return None


def _load_trainer_side() -> None:
    from rc.vllm_plugin import register

    register()


def _mutation(group: _Group, problem: str | None) -> Literal["none", "possible", "complete"]:
    outcomes = group.client.outcomes
    start = outcomes.get("start")
    if start is None or isinstance(start, Refused):
        return "none"
    if problem is None and isinstance(outcomes.get("finish"), Ok):
        return "complete"
    return "none" if group.untouched() else "possible"


def _backend_hint(backend: str) -> str:
    return f"""was the engine started with --weight-transfer-config '{{"backend": "{backend}"}}'?"""


def _vllm_source(weights: TensorSource | None) -> Any:
    """Wrap weights as vLLM's ``WeightSource``."""
    import torch
    from vllm.distributed.weight_transfer.base import ParamMeta
    from vllm.distributed.weight_transfer.base import WeightSource as VllmSource

    specs = () if weights is None else weights.manifest().parameters

    class Source(VllmSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(spec.name, getattr(torch, spec.dtype), spec.shape) for spec in specs]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(()) if weights is None else _as_announced(specs, weights.tensors())

    return Source()


def _as_announced(
    specs: Iterable[ParameterSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, holding them to the manifest that the engine is told.

    A tensor goes out when the one after it is known to fit, so that weights that differ are never sent whole.
    """
    held: tuple[str, torch.Tensor] | None = None
    for spec, named in zip_longest(specs, tensors):
        announced = None if spec is None else (spec.name, spec.dtype, spec.shape)
        found = None if named is None else (named[0], str(named[1].dtype).removeprefix("torch."), tuple(named[1].shape))
        if found != announced:
            raise InvalidWeights(
                f"the weights have {found or 'no more'} where their manifest has {announced or 'no more'}"
            )
        if held is not None:
            yield held
        held = named
    if held is not None:
        yield held
