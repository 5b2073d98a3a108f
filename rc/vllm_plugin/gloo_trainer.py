"""The trainer's side of the ``rc_gloo`` backend, made through vLLM's `WeightTransferTrainerFactory`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from rc.vllm_plugin import GLOO_BACKEND
from rc.vllm_plugin.gloo_engine import GlooInitInfo, GlooUpdateInfo
from rc.vllm_plugin.gloo_group import GlooGroup

__all__ = ("GlooTrainerInitInfo", "GlooTrainerWeightTransferEngine")


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """How to open the group.

    Attributes:
        address: Address of this host that the workers can reach.
        world_size: Trainer and all workers.
        timeout_s: Bound on the rendezvous and on each broadcast.
    """

    backend: ClassVar[str] = GLOO_BACKEND

    address: str
    world_size: int
    timeout_s: float


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """Sends weights from rank 0 while the workers' update call receives them."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource | None, group: GlooGroup) -> None:
        super().__init__(client=client, source=source)
        self._group = group

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Open the group and have every worker join it.

        Raises:
            StillMissing: A rank did not come in time.
        """
        group, port = GlooGroup.host(init_info.address, init_info.world_size, init_info.timeout_s)
        worker_info = GlooInitInfo(
            address=init_info.address,
            port=port,
            rank_offset=1,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )

        def meet(joining: Future[None]) -> None:
            group.wait_for("joined", lambda: _raise_if_failed(joining))
            group.connect(init_info.address)

        try:
            _beside(lambda: client.init_weight_transfer_engine(asdict(worker_info)), meet)
        except BaseException:
            group.close()
            raise
        return cls(client=client, source=source, group=group)

    def send_weights(self) -> None:
        """Send the source's tensors and drive start, update and finish.

        Raises:
            Exception: Whatever the client or the group raised first; the group is of no use afterwards.
        """
        assert self.source is not None, "the source is set before each send"
        tensors = list(self.source)
        update_info = GlooUpdateInfo(
            names=[name for name, _ in tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
        )

        def send(receiving: Future[None]) -> None:
            self._group.wait_for(self._group.begin_round(), lambda: _raise_if_failed(receiving))
            for _, tensor in tensors:
                _raise_if_failed(receiving)
                if tensor.numel():
                    self._group.broadcast(tensor.cpu().contiguous())

        self.client.start_weight_update()
        _beside(lambda: self.client.update_weights(asdict(update_info)), send)
        self.client.finish_weight_update()

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def _beside(call: Callable[[], None], work: Callable[[Future[None]], None]) -> None:
    """Run ``work`` here while ``call`` runs in a thread; a failure of the call is the one that is raised."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rc-weight-update")
    future = executor.submit(call)
    try:
        work(future)
    except Exception:
        # The call usually knows why: give it a moment to say so, but never wait for a worker that hangs.
        _raise_if_failed(future, wait_s=1.0)
        raise
    else:
        future.result()
    finally:
        executor.shutdown(wait=False)


def _raise_if_failed(future: Future[None], wait_s: float = 0.0) -> None:
    try:
        future.result(timeout=wait_s)
    except TimeoutError:
        if future.done():
            raise
