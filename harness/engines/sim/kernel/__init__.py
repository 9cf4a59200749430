"""The compiled functions of the simulator: they model steps, memory and time.

docs/semantics.md defines what they compute. `loop.advance` runs from event to event. `compose.compose` chooses a lane's
next step, `price.price` computes the seconds of that step, and `rates.share` sets the speeds of competing lanes.

A span is a sequence of decode steps that is computed at once, until something could change its batch. The span takes
the KV blocks of its later steps in advance. It frees them when another lane runs short, so that memory is exact at
every step.

`sim/world.py` and `sim/records.py` explain every field of the records. All modules import all names of `sim/state.py`:
codes, and functions that find rows.

Short names mean the same in every function. In a pair, the capital letter is the record and the small letter its row:

    S         the world's address, from which `state.gpu_at(S, g)` and similar functions find rows
    W         the world: the record of the run's scalars and of all arrays' addresses
    G g, P p  a GPU; a pool of GPUs whose lanes may compete (in loops over an instance's GPUs, g is the GPU's record)
    K k       a link
    I i, J j  instances: each is a model at a place, and the KV account of that model there
    M         a model
    B b       a batch; lst one of its four lists
    n lane    a lane, in which a batch's steps run one after another; n is its record
    q r       a request, q its record
    X x, Q p  a transfer; a transfer's part on one link
    E x       an entry of the prefix cache, or an extent of a request's blocks
    F f       a batch's entry for a KV account, its own or a remote one
    P p       a page of an account's KV (in functions without pools and parts)
    N x       a node of the tree of an account's contiguous memory
    A a       an action
    k c       cost coefficients of a model; c is their row
    nxt prev  the rows after and before a row in a list
    t         a time

In all other uses, i, j, n, x and y are counters.

The modules in order; each imports only modules that come before it in this list:

    walks; waits < lists; events; cost; buddy < memory; lent < lanes < reuse; far < price; rates; pages < links
    < weights < blocks < members < orders < growth < compose < steps, turns < loop; peek

numba's cache does not detect edits of the other modules from which a module imports functions. `jit.py` therefore names
the cache's folder by a hash of all sources.
"""

from harness.engines.sim.kernel.buddy import lay_out as lay_out
from harness.engines.sim.kernel.events import forget as forget
from harness.engines.sim.kernel.events import note as note
from harness.engines.sim.kernel.loop import advance as advance
from harness.engines.sim.kernel.memory import never as never
from harness.engines.sim.kernel.orders import members as members
from harness.engines.sim.kernel.orders import movables as movables
from harness.engines.sim.kernel.orders import move as move
from harness.engines.sim.kernel.orders import move_batch as move_batch
from harness.engines.sim.kernel.orders import next_member as next_member
from harness.engines.sim.kernel.orders import on_request as on_request
from harness.engines.sim.kernel.orders import withdraw as withdraw
from harness.engines.sim.kernel.peek import peek_batch as peek_batch
from harness.engines.sim.kernel.peek import peek_free as peek_free
from harness.engines.sim.kernel.peek import peek_request as peek_request
from harness.engines.sim.kernel.peek import peek_used as peek_used
from harness.engines.sim.kernel.peek import settle as settle
from harness.engines.sim.kernel.peek import settle_requests as settle_requests
from harness.engines.sim.kernel.peek import tie as tie
from harness.engines.sim.kernel.steps import evict as evict
from harness.engines.sim.kernel.turns import limit as limit
from harness.engines.sim.kernel.turns import run_lane as run_lane
from harness.engines.sim.kernel.weights import load as load
from harness.engines.sim.kernel.weights import place as place
from harness.engines.sim.kernel.weights import set_weights as set_weights
