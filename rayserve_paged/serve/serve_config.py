"""The configuration of an endpoint: a deployment's, and a section `serve` of its own."""

import hashlib
from pathlib import Path

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from rayserve_paged.core.config import DeploymentConfig

_DIGEST_LENGTH = 8


class ServeSection(BaseModel):
    """The HTTP side of a deployment."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    num_ingress_replicas: int = Field(default=1, ge=1)
    """Processes that answer HTTP, on any node; each is one consumer of the deployment."""
    ingress_num_cpus: float = Field(default=0.0, ge=0)
    """Cores that each of them asks Ray for."""
    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    """What clients call the model; None for `model.model`."""
    keys_file: str | None = Field(default=None, min_length=1)
    """Tenants, their hashed API keys and quotas, on every node with an ingress; None to let
    everyone in. See docs/tenants.md."""
    max_body_bytes: ByteSize = Field(default=ByteSize(4 << 20), ge=1024)
    """Largest request body; longer ones are refused with status 413."""
    min_write_gap_s: float = Field(default=0.01, ge=0, le=1)
    """Tokens of one stream that follow each other more closely than this go in one write, the
    first and the last ones excepted."""
    max_writes_per_s: int = Field(default=2000, ge=1)
    """Of one ingress, over all of its streams: with many of them open each is written to less
    often, and with more at a time. A write costs far more than the tokens in it."""
    max_live_requests: int = Field(default=4096, ge=1)
    """Requests that one ingress has open at once; further ones are refused with status 503."""
    max_prompts: int = Field(default=128, ge=1)
    """Prompts of one completion request."""
    max_deadline_s: float | None = Field(default=None, gt=0)
    """Longest time that a request may take, and the deadline of those that name none; None for
    no limit."""
    drain_timeout_s: float = Field(default=600.0, ge=0)
    """Running streams have this long to end when an ingress is taken down or replaced; what is
    then left is cut off with an error."""


class EndpointConfig(DeploymentConfig):
    """All of one endpoint: the sections of a deployment, and `serve`."""

    serve: ServeSection = ServeSection()

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.serve.served_model_name or self.model.model

    def deployment(self) -> DeploymentConfig:
        """Return what is behind the endpoint.

        Its name ends with a digest of all that it is configured by. So an endpoint that starts
        again with the same configuration finds what runs already, and one whose configuration has
        changed starts a deployment of its own while the one before drains.
        """
        fields = self.model_dump(exclude={"serve"})
        config = DeploymentConfig.model_validate(fields)
        digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:_DIGEST_LENGTH]
        longest = 63 - len(digest) - 1
        return config.model_copy(update={"name": f"{self.name[:longest]}-{digest}"})

    def with_absolute_paths(self) -> "EndpointConfig":
        """Return the configuration with its keys file whole, since an ingress runs elsewhere."""
        if self.serve.keys_file is None:
            return self
        path = str(Path(self.serve.keys_file).expanduser().resolve())
        return self.model_copy(update={"serve": self.serve.model_copy(update={"keys_file": path})})
