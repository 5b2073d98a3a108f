"""The trainer's side of the ``rc_gloo`` backend, made through vLLM's `WeightTransferTrainerFactory`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from math import prod
from typing import ClassVar, Final, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from rc.vllm_plugin import GLOO_BACKEND
from rc.vllm_plugin.gloo_group import GlooGroup
from rc.vllm_plugin.gloo_messages import GlooInitInfo, GlooUpdateInfo

__all__ = ("GlooTrainerInitInfo", "GlooTrainerWeightTransferEngine")

_LAST_WORDS_S: Final = 2.0
"""How long the workers' call may take to say why it failed, once our side has. A live worker needs milliseconds."""


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
    """Sends weights from rank 0 while the workers' update call receives them.

    Attributes:
        may_have_loaded: Whether the last payload can have reached a worker whole. Workers load nothing before they have
            everything, so False proves that no model was touched.
    """

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource | None, group: GlooGroup) -> None:
        super().__init__(client=client, source=source)
        self.may_have_loaded = False
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

        _beside(lambda: client.init_weight_transfer_engine(asdict(worker_info)), meet, group)
        return cls(client=client, source=source, group=group)

    def send_weights(self) -> None:
        """Send the source's tensors and drive start, update and finish.

        Raises:
            Exception: Whatever the client, the source or the group raised; the group is of no use afterwards.
        """
        source = self.source
        if source is None:
            raise RuntimeError("no source of weights was set")
        metadata = source.metadata()
        update_info = GlooUpdateInfo(
            names=[meta.name for meta in metadata],
            dtypes=[str(meta.dtype).removeprefix("torch.") for meta in metadata],
            shapes=[list(meta.shape) for meta in metadata],
        )
        to_send = sum(prod(meta.shape) > 0 for meta in metadata)
        self.may_have_loaded = to_send == 0

        def send(receiving: Future[None]) -> None:
            self._group.wait_for(self._group.begin_round(), lambda: _raise_if_failed(receiving))
            tensors = (tensor for _, tensor in source if tensor.numel())
            for sent, tensor in enumerate(tensors, start=1):
                _raise_if_failed(receiving)
                self.may_have_loaded = sent >= to_send
                self._group.broadcast(tensor.cpu().contiguous())

        self.client.start_weight_update()
        _beside(lambda: self.client.update_weights(asdict(update_info)), send, self._group)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group."""
        self._group.close()


def _beside(call: Callable[[], None], work: Callable[[Future[None]], None], group: GlooGroup) -> None:
    """Run ``work`` here while ``call`` runs in a thread; if either fails, close the group and say what both said."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rc-weight-update")
    future = executor.submit(call)
    executor.shutdown(wait=False)
    try:
        work(future)
    except Exception as error:
        call_failed_first = future.done()
        # The workers wait for us no longer, so that their call ends too.
        group.close()
        wait([future], timeout=_LAST_WORDS_S)
        if call_failed_first or not future.done():
            _raise_if_failed(future)
            raise
        raise RuntimeError(f"{error}; and the engine: {future.exception() or 'went on'}") from error
    try:
        future.result()
    except Exception:
        group.close()
        raise


def _raise_if_failed(future: Future[None]) -> None:
    if future.done():
        future.result()
