"""The coordinator of a job: theory of operation.

States. `states.Stage` names them, and one part owns each: its table has the rows, its module tells that part of the
story. `coordinator` puts the parts together and handles what may come at any time.

Votes, leases and fences keep each rank at one writer:

- Vote. A registration with a candidate is the vote of that node, one for each agent and term. A candidate acts only
  once `Quorum.enough` holds. A proof of death takes a node out of the count. Silence is no proof.
- Lease. The ranks of a node may run for `lease_s` after its agent last heard its coordinator. Then its monitors kill
  them.
- Fence. A node that is missing may run ranks until its lease is over. No plan leaves before that
  (`Gathering._is_fenced`), unless the node's death is proven.
- Resignation. A coordinator without a quorum plans nothing, and emits `Lapsed` after `prove_s`.

Who may write what: a class writes its own fields, and no others. `tests/core/test_owners.py` reads that in the source.

- `JobState`: the last plan. `planning` and `takeover` call its methods.
- `Quorum`: votes and fences. `electing` and `roster` tell it what they have seen.
- `Ledger` and `Budget`: what happened, and what may still happen.
- `Stopping`: what a failed cycle says about the next one. `gathering` and `planning` read it.
- `Exclusion`: the node that leaves before the next plan. `Ending`: the end.

Duties of the shell that runs this core, in order:

1. Have a receiver for each type of command before the first event.
2. Hand over events one at a time, with monotonic seconds that never go back.
3. Log the event and its commands before any of them is carried out.
4. Carry out commands in their order. A message to a node without a stream is lost; `Lost` has told of that node.
5. Post a `Tick` at `deadline()`. Ask for the deadline anew after each event.
6. Answer what is asked (`AskTimeLeft`, `ReadProgress`, `ReadReached`) with an event. It may be late or missing.
7. Post `ProvenDead` for a `Probe` only where the host of that very address refuses connections. Name the members that
   are not heard.
8. Carry out nothing more after `Lapsed` has led to the retirement of this coordinator.
9. End with `JobOver`. No event follows it.
"""
