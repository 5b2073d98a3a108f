"""RolloutCore: live weight updates for vLLM engines, version-pure and on the record.

::

    async with rc.Controller.open("run.db", engine="http://127.0.0.1:8000") as control:
        async with control.rollout() as rollout:
            sample = await rollout.generate(prompt_ids, max_tokens=256)
        commit = await control.update(rc.WeightIdentity(run="r1", step=100), rc.ModuleWeights(model))

Errors are in `rc.errors`; the journal can be read without a controller, see `rc.events` and ``rc --help``.
"""

from rc.controller import Controller
from rc.events.types import Span, Turn
from rc.rollout import Rollout
from rc.update_watch import Commit
from rc.versions import Manifest, ParameterSpec, WeightIdentity
from rc.weights import ModuleWeights

__all__ = (
    "Commit",
    "Controller",
    "Manifest",
    "ModuleWeights",
    "ParameterSpec",
    "Rollout",
    "Span",
    "Turn",
    "WeightIdentity",
)
