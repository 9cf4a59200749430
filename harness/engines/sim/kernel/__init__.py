"""The jitted functions of the simulator: steps, memory and time.

Semantics: docs/semantics.md. `loop.advance` runs from event to event. `compose.compose` chooses a lane's next step,
`price.price` computes its seconds, and `rates.share` sets how fast competing lanes run. A decode span covers many steps
in closed form, until something could change its batch. KV blocks of a span's later steps are taken in advance, and
given back when another lane runs short, so that memory is exact at every step. `sim/world.py` and `sim/records.py`
explain every field of the records. All modules import all names of `sim/state.py`: codes, and functions that find rows.

Short names mean the same in every function. In a pair, the capital letter is the record and the small letter its row:

    S         the world's address, by which `state.gpu_at(S, g)` and its like find rows
    W         the world
    G g, P p  a GPU; a pool of GPUs (in loops over an instance's GPUs, g is the record)
    K k       a link
    I i, J j  instances
    M         a model
    B b       a batch; lst one of its four lists
    n lane    a lane, n its record
    q r       a request, q its record
    X x, Q p  a transfer; a part of one on a link
    E x       an entry of the prefix cache, or an extent of a request's blocks
    F f       KV of a batch in an account, its own or elsewhere
    P p       a page of an account's KV, where there is no pool or part
    N x       a node of the tree of an account's contiguous memory
    A a       an action
    k c       coefficients, c their row
    nxt prev  neighbours in a list
    t         a time; elsewhere i, j, n, x and y only count

Modules in order, each of which imports only modules before it:

    walks; waits < lists; events; cost; buddy < memory; lent < lanes < reuse; far < price; rates; pages < links
    < weights < blocks < members < orders < growth < compose < steps, turns < loop; peek

Numba's cache does not notice edits in the modules that a function calls: `jit.py` keys it by a hash of all sources.
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
