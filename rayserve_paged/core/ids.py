"""Identifier types. Each counter has a type of its own, so that no two can be mixed up."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""Names a request; unique among the live requests of a deployment."""

ConsumerId = NewType("ConsumerId", str)
"""Names who reads streams: a driver or an ingress process."""

ReplicaId = NewType("ReplicaId", str)
"""Names one tensor-parallel group; outlives its incarnations."""

Incarnation = NewType("Incarnation", int)
"""Counts the lives of one replica; a message from an older life is fenced."""

Attempt = NewType("Attempt", int)
"""Counts the submissions of one request; a consumer accepts one attempt."""

Term = NewType("Term", int)
"""Counts the lives of a deployment's controller; what an older one says is fenced."""

StepId = NewType("StepId", int)
"""Counts the steps of one replica incarnation, from 0."""

Row = NewType("Row", int)
"""Place of a running sequence in the arrays of the batch, on every rank."""

BlockId = NewType("BlockId", int)
"""Index of a physical block in one pool."""

BlockKey = NewType("BlockKey", bytes)
"""SHA-256 identity of a sealed block's content (see `block_identity`)."""

PinId = NewType("PinId", str)
"""Names a cached prefix that is kept until it is unpinned."""
