"""What the user may set in `kv_connector_extra_config`, and the node that it leads to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from headstart.config import node_settings, node_socket
from headstart.errors import ConfigError
from headstart.node.launch import ensure_node
from headstart.settings import Nbytes, Seconds, Strict, explain

_log = logging.getLogger(__name__)


class Options(Strict):
    """Settings of the connector; anything else in `kv_connector_extra_config` is refused."""

    node: str = Field(
        default="auto",
        description='Socket of a running node; "auto" starts one when there is none.',
    )
    config: Path | None = Field(default=None, description="Settings file of the node.")
    tenant: str = Field(default="", description="Engines of other tenants never share blocks.")
    idle_exit: str = Field(
        default="10min", description="How long a node that was started here outlives its engines."
    )
    load: Literal["planned", "always", "never"] = Field(
        default="planned",
        description='"planned" loads what comes sooner than it is computed, "always" all that is '
        'held, "never" nothing, but stores.',
    )
    shadow: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Share of the requests that load nothing, to check what is predicted.",
    )
    lookup_budget: Seconds = Field(
        default=0.002,
        description="How long the look-up of a prompt may take, or a hundredth of the time to "
        "compute it where that is more; then it is a miss.",
    )
    stall: Seconds = Field(
        default=0.5, description="A request stops waiting for a read that has not moved so long."
    )
    max_wait: Seconds = Field(
        default=60.0, description="How long a request waits for a read that does move, at most."
    )
    async_load_nbytes: Nbytes = Field(
        default=256 << 20,
        description="Larger loads are copied between steps, a piece a step, and not before one.",
    )
    step_nbytes: Nbytes = Field(
        default=64 << 20, description="Bytes copied a step for such loads, and for stores at most."
    )

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Options:
        """Check what the user wrote. Raises ConfigError that names every wrong key."""
        try:
            return cls.model_validate(dict(extra))
        except ValidationError as error:
            lines = explain(error, lambda path: cls)
            raise ConfigError("kv_connector_extra_config: " + "; ".join(lines)) from error

    def node_path(self) -> Path:
        """The node's socket, whether it answers or not; with "auto" it is started if need be.

        Raises ConfigError for wrong settings only: an engine runs without a node, too.
        """
        if self.node != "auto":
            return Path(self.node)
        settings = node_settings(self.config)
        arguments = ["--idle-exit", self.idle_exit]
        if self.config is not None:
            arguments += ["--config", str(self.config.absolute())]
        try:
            return ensure_node(settings, arguments)
        except (ConfigError, OSError) as error:
            _log.error("Headstart runs without a cache: %s", error)
            return node_socket(settings)
