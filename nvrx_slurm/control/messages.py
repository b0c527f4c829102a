"""What a stream between agent and coordinator carries, by direction."""

from nvrx_slurm import types as t
from nvrx_slurm.codec import Wire

FROM_AGENTS = Wire[t.AgentMessage | t.Hello](t.AgentMessage | t.Hello)
FROM_COORDINATOR = Wire[t.CoordinatorMessage](t.CoordinatorMessage)
