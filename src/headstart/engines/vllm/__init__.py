"""Headstart in vLLM.

    --kv-transfer-config '{"kv_connector":"HeadstartConnector","kv_role":"kv_both"}'

vLLM finds the connector through the plug-in `register`, or by the module path of this package. Both
import next to nothing: vLLM loads plug-ins in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.engines.vllm.connector import HeadstartConnector

__all__ = ["HeadstartConnector", "register"]

_NAME = "HeadstartConnector"


def register() -> None:
    """Tell vLLM where the connector is. It is called in each of its processes, maybe twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "headstart.engines.vllm.connector", _NAME)


def __getattr__(name: str) -> Any:
    if name == _NAME:
        from headstart.engines.vllm.connector import HeadstartConnector

        return HeadstartConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
