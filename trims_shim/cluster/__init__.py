"""Plans carried out on Ray: one actor for each device, requests routed by the plan's shares.

::

    service = deploy("cluster.toml", {"resnet18": load_resnet18, "resnet152": load_resnet152})
    scores = service.call("classify", image)

:func:`deploy` imports Ray (extra ``cluster``); this package does not.
"""

from trims_shim.cluster.actor import BatchFunction, Loader
from trims_shim.cluster.deploying import deploy
from trims_shim.cluster.service import DeviceStats, FamilyStats, Service, ServiceStats

__all__ = [
    "BatchFunction",
    "DeviceStats",
    "FamilyStats",
    "Loader",
    "Service",
    "ServiceStats",
    "deploy",
]
