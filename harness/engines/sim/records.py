"""The layouts of the simulator's records: for each record, the type, unit and meaning of every field.

Times are points on the simulated clock in seconds, unless a field's line describes a duration. Infinity and -1 mean
"none". Codes are the constants of `state.py`.
"""

from __future__ import annotations

from harness.engines.costs.layout import record

GPU = record(
    """A GPU; behind all GPUs, the hosts. Lanes compete in pools: a GPU's row is also that of the pool named after it.

    end            f8  s         when the first of the pool's lanes ends its step or span; infinite: none is busy
    busy_s         f8  s         for which some lane was busy, up to `busy_since` if one is
    busy_since     f8  s         when it last became busy
    hbm_s          f8  s         at full memory bandwidth that its steps took
    flop_s         f8  s         at full compute that its steps took
    kv_byte_s      f8  bytes*s   of KV held, up to `kv_since`
    kv_since       f8  s         when its KV last changed
    held_s         f8  s         for which weights were on it or on their way, up to `held_since` if some are
    held_since     f8  s         when the first of these came
    round_s        f8  s         in which each lane or process that is busy on it has a turn, while these are taken
    lent_most      f8  ratio     of its time that attention for one lane elsewhere gets, while rates are shared out
    own            f8  ratio     of its time that is left to its own lanes, while rates are shared out
    head           i8  row       of LANE: the first busy in the pool
    lane           i8  row       of LANE: whose step ends first in the pool
    touched        i8  flag      the pool's rates are to be shared out again
    lanes          i8  count     busy lanes of the pool
    cap            i8  bytes     of memory
    used           i8  bytes     of memory in use: weights, processes and KV
    kv_bytes       i8  bytes     of memory in use by KV, without the accounts' reserves
    waiting        i8  bytes     that loads and moves wait for
    sms            i8  SMs       of the GPU
    pool           i8  row       of GPU: the pool in which its lanes compete
    node           i8  number    of the node that it is in
    active         i8  count     busy lanes with a demand of this GPU
    insts          i8  count     instances whose weights are on it or on their way
    barred         i8  flag      a load or move waits for its memory, and those issued later wait behind it
    """
)

LINK = record(
    """A link. Each GPU has four: from its host, to it, to GPUs of its node, to other nodes.

    Behind those, each host has four rows as well; the first is its disk's.

    bytes_per_s    f8  bytes/s   bandwidth; 0: there is no such link
    end            f8  s         when it ends the part that it moves, or stops within it; infinite: it is idle
    busy_s         f8  s         for which it moved something
    began          f8  s         when it began, or went on, with that part
    stop           f8  bytes     that it moves of the part before it looks again
    current        i8  row       of TRANSFER: the part that it moves
    kv_head        i8  row       of TRANSFER: the first part of KV
    kv_tail        i8  row       of TRANSFER: the last part of KV
    weights_head   i8  row       of TRANSFER: the first part of weights
    weights_tail   i8  row       of TRANSFER: the last part of weights
    weights_parts  i8  count     parts of weights
    """
)

INST = record(
    """An instance: a model at a place, which is a group of GPUs or a host; also the KV account of that model there.

    left_s         f8   s        of the last order to leave
    model          i8   row      of MODEL
    gpu_count      i8   count    GPUs that it is on; a host counts as one
    state          i8   code     of its weights: OUT ... LEAVING
    footprint      i8   bytes    on each GPU that come and go with its weights: they, its process and its reserve
    weight_bytes   i8   bytes    of weights on each GPU
    cost           i8   row      of COST
    members        i8   count    requests in its batches
    busy           i8   count    its lanes that are busy
    limit          i8   bytes    of KV on each GPU, at most; -1: no limit
    blocks         i8   blocks   of KV that the account holds
    held           i8   bytes    of KV on each GPU, without the reserve
    block_bytes    i8   bytes    of a block on each GPU
    granule        i8   bytes    in which an account takes memory: a block, or a page of several
    granule_blocks i8   blocks   of a granule
    pages          i8   count    pages in which some blocks are; of other blocks it is not known yet
    open           i8   row      of PAGE: that which last got a free block; -1: all are full
    reserve        i8   bytes    on each GPU that an elastic account keeps while its weights are in
    kept           i8   bytes    of that reserve that it has now
    holders        i8   count    requests with KV in the account
    entries        i8   row      of ENTRY: the first of the account's ids; -1: it caches nothing
    nodes          i8   row      of NODE: the one before the account's node 1; -1: its KV is paged
    leaves         i8   blocks   of its node 1: a power of two
    cached         i8   blocks   that no request holds and that are still there, in free memory
    oldest         i8   row      of ENTRY: of those, the first that was released
    youngest       i8   row      of ENTRY: the last
    unbegun        i8   blocks   that spans hold for steps not begun, when the account was last looked at
    gone           i8   blocks   of preempted requests, on their way to host memory
    evict          i8   row      of ACTION: the eviction that is under way
    host           i8   row      of INST: the model's account on the node's host; -1: this is one
    is_host        i8   flag     it is an account on a host
    kin            i8   row      of INST: the next of the model's places on GPUs, in a ring
    gpus           8i8  row      of GPU: those that it is on, in order
    """
)

MODEL = record(
    """A model.

    out_s          f8  s         for which no place had its weights, before `since`
    since          f8  s         when its weights last came to a place or left one
    places         i8  count     places that have its weights
    layers         i8  layers    it has
    """
)

BATCH = record(
    """A batch. Its clocks run while their cause holds, and what a clock gains in a stay is what a member waited for it.

    clock_at       f8   s        the time up to which the first three clocks are brought
    clock_load     f8   s        for which its weights were not in
    clock_kv       f8   s        for which its weights were in and its prompts waited for memory
    clock_stall    f8   s        for which its weights were in and its decodes waited for memory
    clock_solo     f8   s        that its steps with decodes take on a GPU of their own
    clock_wall     f8   s        that its steps with decodes took
    clock_slice    f8   s        of those, in time slices of other processes
    busy_s         f8   s        that its lanes' steps took
    inst           i8   row      of INST
    tag            i8   number   that tells an instance's batches apart
    tick           i8   ticks    decode steps so far
    prefills       i8   steps    with prefill tokens so far
    root           i8   row      of REQUEST: the running member that finishes first, the root of a pairing heap
    context        i8   tokens   of its running members at `tick`, wherever their KV is
    blocked        i8   flag     its prompts wait for memory
    stalled        i8   flag     its decodes wait for memory
    pending        i8   count    actions on members that wait for a boundary
    started        i8   count    waiting members that hold KV blocks here
    swapped        i8   count    waiting members whose KV is in host memory
    asking         i8   count    members whose move waits for memory
    left           i8   tokens   that waiting members have still to prefill
    steps          i8   steps    of its lanes that are over
    seq_steps      i8   count    tokens that its decode steps made
    prefilled      i8   tokens   that its steps have prefilled
    parked_context i8   tokens   of its parked members
    near           i8   row      of REMOTE: its own account; behind it come those elsewhere whose KV it may attend
    far            i8   count    running members whose KV is elsewhere
    due            256i8 row     of REQUEST: the first of the running members by (length - tick) mod `block_tokens`
    filled         i8   ticks    whose steps' blocks are in pages
    ends           8i8  row      of REQUEST: head and tail of each list (WAITING ... ELSEWHERE)
    count          4i8  count    members in each list
    """
)

LANE = record(
    """A lane of a batch b, where steps run: row 2 b (mixed or prefill) or row 2 b + 1 (decode).

    A busy lane runs a step, or a span of decode steps in closed form; solo seconds are those on a GPU of its own. Its
    anchor is the time since which its rate has been the same.

    first_s        f8  s         solo, of the first step
    slope_s        f8  s         solo, by which each step of a span takes more than the one before
    work           f8  s         solo, of the whole step or span
    anchor_work    f8  s         solo, done at the anchor
    anchor_s       f8  s         when the rate last changed
    rate           f8  ratio     solo seconds a second; 0: not shared out yet
    end            f8  s         when the step or span ends at this rate
    started_s      f8  s         when it began
    max_rate       f8  ratio     its rate without competition
    part           f8  ratio     of the time in which its process has its GPUs: 1, or its slice of a round
    part_since     f8  s         when `part` last changed
    off_s          f8  s         of the step in flight, in time slices of other processes, up to `part_since`
    slice_s        f8  s         solo, of a step without noise: what it asks of a round at `max_rate` 1
    slow           f8  ratio     of what other lanes slow its step down: 1 as turns tell
    duty           f8  ratio     of a step in which its kernels run, at `max_rate`
    fills          f8  ratio     of a GPU's time that its kernels keep from others
    turn_s         f8  s         of its kernels' turn, at `max_rate`
    round_s        f8  s         of a round that its turn takes on average, while turns are taken
    stretch        f8  ratio     of its kernels' time beside others', while turns are taken
    new_rate       f8  ratio     its rate once time is lent, in the making
    given          f8  ratio     its rate once all is shared out
    op_s           f8  s         of the order's kernels, at most: longer ones are cut; -1: others wait for whole steps
    kernel_s       16f8 s        of its step's kernels, as they are cut, without noise
    kernel_count   16i8 count    of kernels so long, in the step
    kernels        i8  count     entries of `kernel_s`: one, the whole step, of orders without `op_s`
    quota          f8  s         of a turn; infinite: it is a turn of steps
    turn_began     f8  s         when the turn's first step began
    turn_until     f8  s         when the quota is used up; infinite: never, or not begun
    open           i8  flag      an order stands
    kind           i8  code      MIXED or PREFILL, of the standing order; of decode lanes 0
    seqs           i8  count     sequences in a step that the order allows; -1: as many as the engine
    chunk          i8  tokens    of a step that the order allows; 0: whole prompts; -1: as the engine
    sms            i8  SMs       of the order's partition; -1: all
    partition      i8  number    of the SMs that the step in flight has, by their count and the phase; 0: all
    slice_layers   i8  layers    of a slice of a step with prompts, by the order; -1: it runs whole
    busy           i8  code      IDLE, STEP or SPAN
    was            i8  code      MIXED or PREFILL: the kind of the step in flight
    steps          i8  steps     of the step or span in flight; 0: a slice that is not its step's last
    decodes        i8  count     members that decode in it
    pieces         i8  row       of REQUEST: the first whose prompt has a piece in it
    layers_left    i8  layers    of a step with prompts behind its latest slice; 0: none, or no such step
    sliced         i8  flag      the step began in slices: what it fills can be found when it is over
    dirty          i8  flag      it is to be formed at this instant
    next_dirty     i8  row       of LANE: the next that is to be formed
    next           i8  row       of LANE: the next busy in the pool
    frozen         i8  flag      its rate is found, while rates are shared out
    resized        i8  flag      its partition changes at the next boundary
    turn           i8  code      NO_TURN, ORDERED or BEGUN
    turn_max       i8  steps     of the turn, at most
    turn_steps     i8  steps     of the turn that are over
    in_turn        i8  flag      the step in flight belongs to the turn
    next_turn      i8  row       of LANE: the next that has a turn
    ran            i8  steps     of the lane that are over
    own            i8  bits      BY_*: caps on a step that are the engine's own, not the order's
    bound          i8  bits      BY_*: the engine's own caps that bind the step in flight
    process        i8  number    of the process that runs it: the slices of a round are each process's
    demand         i8  row       of DEMAND: the first of its list: each GPU of its instance in order
    lent           i8  row       of DEMAND: the first GPU elsewhere on which its step attends to KV; -1: none
    layers         i8  count     of its model
    logged         i8  steps     of the step or span in flight: the ends that LOG has
    """
)

DEMAND = record(
    """What a lane demands of one GPU while its step or span is in flight, at rate 1.

    compute        f8  ratio     of the GPU's compute
    hbm            f8  ratio     of its memory bandwidth
    time           f8  ratio     of its time, which no other lane has meanwhile: of a lane's attention to KV there
    slack_s        f8  s         in each layer for which that attention may be late without a wait
    gpu            i8  row       of GPU
    next           i8  row       of DEMAND: the next of the lane
    """
)

REMOTE = record(
    """KV of a batch's members in an account: the batch's own, or one elsewhere where it is attended.

    link_s         f8   s        that queries and results of one member take on the links in a step; 0: its own
    inst           i8   row      of INST: the account
    next           i8   row      of REMOTE: the next of the batch, which is elsewhere
    demand         i8   row      of DEMAND: the first of the account's GPUs, in order; -1: its own
    count          i8   count    running members with KV there
    context        i8   tokens   of theirs, at the batch's tick
    brought        i8   blocks   for the next step that they brought when they joined
    ahead          i8   steps    for which a span in the making holds blocks
    residues       256i8 count    of them by (length - tick) mod `block_tokens`; at a tick, 1 - tick need a block
    """
)

TRANSFER = record(
    """A transfer of weights or KV, or its part on one link: a part has `bytes`, `next`, `link` and `transfer` alone.

    tail_s         f8  s         that it takes after its last part
    due            f8  s         when it is over; infinite: not known yet
    bytes          f8  bytes     of a part: left to move; of a transfer: memory that it asks for on each GPU
    kind           i8  code      LOAD ... SHIFT
    stage          i8  code      FREE, GRANT (waits for memory), LINK (has parts to move) or TAIL
    inst           i8  row       of INST: where it goes
    request        i8  row       of REQUEST: whose KV it is
    action         i8  row       of ACTION: of which it is a part
    parts          i8  count     parts that are not moved yet
    source         i8  row       of INST: where KV comes from
    blocks         i8  blocks    of KV
    node           i8  number    of the account's node that the KV takes where it goes; -1: none
    extents        i8  row       of EXTENT: the last of the KV's blocks where it goes; -1: none
    attend         i8  flag      the KV stays where it goes and is attended there
    first_part     i8  row       of TRANSFER: the first part that is not on a link yet
    next           i8  row       of TRANSFER: the next in whichever list it is in
    prev           i8  row       of TRANSFER: the one under way that was issued before it
    ends_next      i8  row       of TRANSFER: the next whose parts are all moved
    issued         i8  order     of issue
    link           i8  row       of LINK: that moves this part
    transfer       i8  row       of TRANSFER: whose part it is
    """
)

EVENT = record(
    """An event of this instant.

    ran_s          f8  s         from a turn's first step to its end
    kind           i8  code      E_DONE ... E_ARRIVED
    subject        i8  row       of ACTION (E_DONE) or of REQUEST; of E_TURN the steps that the turn took
    batch          i8  row       of BATCH
    detail         i8  code      E_FINISHED: the end's state; E_TURN: 4 * phase + reason; E_DONE: how many parts failed
    """
)

ACTION = record(
    """A load, eviction or move that is under way, or whose end is not read yet.

    left           i8  count     parts that are not over
    failed         i8  count     parts that failed
    never          i8  count     parts that failed and can never succeed
    heard          i8  flag      its end is reported even if nothing failed
    next           i8  row       of ACTION: the next that is free
    """
)

CHAIN = record(
    """A leading block of a prompt, in the blocks of the trace; those of a request lie in a row.

    entry          i8  number    of its id among those of its model, from 0: which of an account's entries it is
    """
)

ENTRY = record(
    """Cached KV of an account: the leading blocks of an id, or the private blocks that a request left.

    The first rows are of requests, in their order. No prompt finds private blocks, but they are forgotten in their
    turn, as an engine's own pool has it. Behind them each account has a row for each id of its model.

    inst           i8  row       of INST: the account
    blocks         i8  blocks    of it that are there, from the first on
    refs           i8  count     requests that hold it; while there are any it stays
    stamp          i8  order     of its release, if no request holds it; 0: it is held, or empty
    prev           i8  row       of ENTRY: the one of the account that was released before
    next           i8  row       of ENTRY: the one released after
    """
)

NODE = record(
    """A node of the tree in which a buddy allocator has an account's contiguous memory.

    free           i8  bits      sizes in blocks, powers of two, of free nodes at it or below, each in no larger one
    taken          i8  flag      a request's chunk is this very node
    """
)

PAGE = record(
    """A page of elastic KV: `granule_blocks` blocks of one account.

    blocks         i8  blocks    of it that are taken
    emptied        i8  count     `emptied` of the world when blocks of it were last freed
    prev           i8  row       of PAGE: of the account's with a free block, the one that got its own before
    next           i8  row       of PAGE: the one that got its own after; of a free row, the next that is free
    """
)

EXTENT = record(
    """Blocks that a request took one after the other and that are in one page.

    page           i8  row       of PAGE
    blocks         i8  blocks    of it
    next           i8  row       of EXTENT: the request's blocks before; of a free row, the next that is free
    """
)

LOG = record(
    """What token times are made of: a segment of a lane's steps, a request's stay among the running, or a lone token.

    A segment (request -1) has the ends of the steps behind `step_from`, up to `step_to`, of a span that began at
    `tick_from`. A stay lasts from `tick_from` to `tick_to`. A lone token (batch -1) ends a prefill, at `anchor_s`.
    Waits are those of a request up to the anchor, and clocks those of its batch then: what passed between two tokens.

    first_s        f8  s         solo, of the span's first step
    slope_s        f8  s         solo, by which each step takes more than the one before
    anchor_s       f8  s         when the segment's rate began, or the stay ended; of a lone token: when it came
    anchor_work    f8  s         solo, of the span, done by then
    rate           f8  ratio     solo seconds a second
    part           f8  ratio     of the time in which the segment's process had its GPUs
    clock_load     f8  s         `clock_load` of the batch at the anchor. So with the next four
    clock_stall    f8  s         `clock_stall` then
    clock_solo     f8  s         `clock_solo` then, the step or span in flight included. So with the next two
    clock_wall     f8  s         `clock_wall` then
    clock_slice    f8  s         `clock_slice` then, as if `part` had held since the anchor
    admission      f8  s         `admission` of the request at the anchor. So with the next seven
    load           f8  s         `load` then
    kv             f8  s         `kv` then
    transfer       f8  s         `transfer` then
    queue          f8  s         `queue` then
    compute        f8  s         `compute` then
    time_slice     f8  s         `time_slice` then
    contention     f8  s         `contention` then
    request        i8  row       of REQUEST
    batch          i8  row       of BATCH
    tick_from      i8  ticks     of the batch: where the span or the stay began
    tick_to        i8  ticks     of the batch: where the stay ended
    step_from      i8  steps     of the span that ended before the segment
    step_to        i8  steps     of the span that have ended with it
    """
)

REQUEST = record(
    """A request. What it waited for is booked when its state changes: marks are the clocks as it last was.

    arrival        f8  s         when the engine sees it
    think          f8  s         that its client takes from the answer before to this one
    first          f8  s         its first token; NaN: none yet. So with the next two
    done           f8  s         its end
    admit          f8  s         first made a member of a batch
    admission      f8  s         in no batch, while its weights were in somewhere
    load           f8  s         for weights
    kv             f8  s         for KV memory; named as the column of requests.parquet, as are all waits
    transfer       f8  s         for its KV to move, or away from it
    queue          f8  s         for a step that takes it
    compute        f8  s         in steps: what they take on a GPU of their own
    time_slice     f8  s         in steps: while other processes had the GPU
    contention     f8  s         in steps: what was added by work that runs on the GPU at the same time
    ttft_admission f8  s         `admission` when its first token was made; 0: none yet. So with the next seven
    ttft_load      f8  s         `load` then
    ttft_kv        f8  s         `kv` then
    ttft_transfer  f8  s         `transfer` then
    ttft_queue     f8  s         `queue` then
    ttft_compute   f8  s         `compute` then
    ttft_time_slice f8 s         `time_slice` then
    ttft_contention f8 s         `contention` then
    mark_at        f8  s         when it was last booked
    mark_load      f8  s         clock_load then; in no batch, the model's seconds without weights
    mark_kv        f8  s         clock_kv then
    mark_stall     f8  s         clock_stall then
    mark_solo      f8  s         clock_solo then
    mark_wall      f8  s         clock_wall then
    mark_slice     f8  s         clock_slice then
    seq            i8  order     of Admit
    length         i8  tokens    of prompt and output, when its last prefill ended or it last left the running members
    joined_tick    i8  ticks     of its batch when it joined the running members
    last_tick      i8  ticks     of its batch with which it finishes
    model          i8  row       of MODEL
    prompt         i8  tokens    of its prompt
    ids            i8  count     of its prompt's leading blocks whose content is known
    chain          i8  row       of CHAIN: the id of the first of them
    shared         i8  blocks    of its KV, from the start, that belong to entries of the cache, as do others'
    found          i8  tokens    of its prompt that the cache had when it was first let in; -1: not yet
    output         i8  tokens    that it asks for
    heir           i8  row       of REQUEST: which its client sends next
    made           i8  tokens    of output that are made; those of decode steps once it leaves the running members
    state          i8  code      FUTURE ... FAILED
    batch          i8  row       of BATCH
    blocks         i8  blocks    of KV that it has; those that decode steps take once it leaves the running members
    prefilled      i8  tokens    of its prompt, and of what a recompute repeats, that are in its KV
    piece          i8  tokens    that the step in flight prefills
    prev           i8  row       of REQUEST: the one before it in its batch's list, or among those sent
    next           i8  row       of REQUEST: the one behind it
    next_piece     i8  row       of REQUEST: the next with a piece in the same step
    heap_child     i8  row       of REQUEST: its first child in the heap
    heap_next      i8  row       of REQUEST: its next sibling in the heap
    heap_prev      i8  row       of REQUEST: its sibling before, or its parent if it is the first child
    home           i8  row       of INST: the account that has its KV
    extents        i8  row       of EXTENT: of its last blocks at home; -1: none
    due_prev       i8  row       of REQUEST: the one before it, in a ring, of those that need a block at the same ticks
    due_next       i8  row       of REQUEST: the one behind it
    chunk          i8  blocks    that it reserves when it is let in; 0: it takes them as it grows
    node           i8  number    of the account's node that is its chunk; -1: none
    attend         i8  flag      it is attended there if that is not its batch's
    pending        i8  code      P_*: what waits for the boundary of the step it is in
    pending_arg    i8  row       of TRANSFER (P_MOVE) or ACTION (P_DISCARD)
    pending_batch  i8  row       of BATCH: to which it will be admitted at that boundary
    pending_seq    i8  order     of that Admit
    preemptions    i8  count     of it so far
    first_inst     i8  row       of INST: where its first prefill ended
    last_inst      i8  row       of INST: where its latest prefill ended
    joins_step     i8  steps     of its batch's lane that run before it can join
    """
)
