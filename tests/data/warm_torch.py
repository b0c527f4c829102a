"""What torch does in a worker, as JSON."""

import json
import os
import sys

FORKED = "torch" in getattr(sys.meta_path[0], "parked", ())

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


def squares(number):
    return number * number, os.getppid() == PID


PID = os.getpid()
facts = {"seed": torch.initial_seed(), "random": torch.rand(3).tolist(), "threads": torch.get_num_threads()}
facts["numpy"] = numpy.random.rand(2).tolist()
facts["cuda"] = [torch.cuda.is_initialized(), torch.cuda.is_available()]
loader = DataLoader(list(range(8)), num_workers=2, collate_fn=lambda batch: [squares(one) for one in batch])
facts["loader"] = [batch for batch in loader]
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
facts["sum"] = total.item()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
torch.compile(model, backend="aot_eager")(torch.ones(2, 4)).sum().backward()
optimizer.step()
facts["weights"] = list(model.weight.shape)
dist.destroy_process_group()
print(json.dumps({"forked": FORKED, "facts": facts}))
