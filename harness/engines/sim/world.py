"""The simulator's world record: the scalars of a run, and the addresses of all other records (`records.py`)."""

from __future__ import annotations

from harness.engines.costs.layout import record

WORLD = record(
    """The scalars of a run, and where its arrays lie.

    now              f8   s         the clock
    end              f8   s         the end of the run; infinite: when nothing can happen any more
    quiet_s          f8   s         nothing happens before it, unless an action is taken; -infinite: not known
    formed_s         f8   s         the latest instant at which lanes were formed
    watermark        f8   ratio     of an account's KV blocks: kept free when a prompt is let in beside others
    sigma            f8   ratio     standard deviation of the noise on a step's time
    poll_s           f8   s         of a look for others' attention, after each kernel of an order with `op_s`
    quantum_s        f8   s         of a process's slice in a round, at least, while others of its GPU are busy
    switching        f8   ratio     of a process's slice that a switch between processes takes in addition
    co_run           f8   ratio     of what lanes of a GPU slow each other down: 1 as the cost tables tell
    piece_bytes      f8   bytes     what a link moves of weights before it looks for something more urgent
    round_trip_s     f8   s         from a request's end to the arrival of its client's next one, without `think`
    gpus             i8   address   GPU
    links            i8   address   LINK
    insts            i8   address   INST
    models           i8   address   MODEL
    batches          i8   address   BATCH
    lanes            i8   address   LANE
    demands          i8   address   DEMAND
    requests         i8   address   REQUEST
    events           i8   address   EVENT
    transfers        i8   address   TRANSFER
    actions          i8   address   ACTION
    log              i8   address   LOG
    chains           i8   address   CHAIN
    entries          i8   address   ENTRY
    remotes          i8   address   REMOTE
    nodes            i8   address   NODE
    pages            i8   address   PAGE
    extents          i8   address   EXTENT
    n_gpus           i8   count     rows of GPU
    n_links          i8   count     rows of LINK
    n_insts          i8   count     rows of INST
    n_models         i8   count     rows of MODEL
    n_batches        i8   count     rows of BATCH
    n_lanes          i8   count     rows of LANE
    n_events         i8   count     rows of EVENT
    n_log            i8   count     rows of LOG
    n_remotes        i8   count     rows of REMOTE
    first_host       i8   row       of GPU: the first that is a host; those before it are GPUs
    arrived          i8   row       of REQUEST: the next that arrives by itself
    opened           i8   count     requests that arrive by themselves, the first rows; a client sends each other one
    to_come          i8   count     requests behind those, of a long workload, whose rows are not filled in yet
    sent_head        i8   row       of REQUEST: the first that a client has sent and that has not arrived
    sent_tail        i8   row       of REQUEST: the last of those
    seq              i8   order     the latest place given in the order of Admit
    heard            i8   bits      1 << code of each kind of event that policies hear
    log_tokens       i8   flag      token times are asked for
    unlimited        i8   flag      memory never runs short
    alone            i8   flag      lanes of a GPU do not slow each other down
    sliced           i8   flag      processes of a GPU run one at a time, a slice each in a round; else all at once
    swap             i8   flag      a preempted request's KV goes to host memory, if there is room
    elastic          i8   flag      KV memory is mapped in pages that the models of a GPU share
    paged            i8   flag      it is known of each block in which page it is
    reserves         i8   flag      a request's KV is reserved when it is let in; nothing grows
    piecewise        i8   flag      a prompt takes the blocks of each of its pieces as this is computed
    block_tokens     i8   tokens    of a KV block
    reuse            i8   flag      prompts find what earlier ones left in the prefix cache
    id_blocks        i8   blocks    of KV that an id of a prompt stands for
    released         i8   order     of the latest release of cached blocks
    batch_cap        i8   count     sequences in a step, at most
    chunk_tokens     i8   tokens    of a step with pieces of prompts, at most; 0: prompts go whole, without decodes
    prefill_tokens   i8   tokens    of a step of whole prompts, at most; a longer prompt goes alone
    seed             i8   number    of the noise
    blocked          i8   count     batches whose prompts or decodes wait for memory
    grants           i8   flag      loads and moves that wait for memory are to be looked at
    dirty_head       i8   row       of LANE: the first that is to be formed at this instant
    events_read      i8   count     events of this instant that the engine has read
    events_told      i8   count     events of this instant
    left             i8   count     requests that have not ended
    lookahead_steps  i8   steps     that are scheduled ahead: a prompt joins that many after the one that is under way
    cost             i8   address   COST, a row for each model and degree at which it is served
    grid             i8   address   token counts at which `gemm` and `head` are given
    gemm             i8   address   seconds, by row of COST and point of the grid
    head             i8   address   seconds, by row of COST and point of the grid
    share            i8   address   shares of the SMs at which speeds are given
    seqs             i8   address   batch sizes at which speeds of decode steps are given
    dec_rate         i8   address   speeds of decode steps, by row of COST, share and batch size
    pre_rate         i8   address   speeds of steps with prefill tokens, by row of COST and share
    kernels          i8   address   parts of a layer's seconds, by row of COST, point of the grid and kernel
    route            i8   address   row of BATCH that takes a model's arrivals, by model; -1: none
    n_rows           i8   count     rows of COST
    n_points         i8   count     points of `grid`
    n_shares         i8   count     points of `share`
    n_batch_sizes    i8   count     points of `seqs`
    n_kernels        i8   count     kernels of a layer beside attention
    page_free        i8   row       of PAGE: the first that is free of those that were in use
    page_used        i8   count     rows of PAGE that are, or were, in use
    extent_free      i8   row       of EXTENT: the first that is free of those that were in use
    extent_used      i8   count     rows of EXTENT that are, or were, in use
    emptied          i8   count     times so far that a request's blocks were freed
    transfer_free    i8   row       of TRANSFER: the first that is free
    transfer_spare   i8   count     free rows of TRANSFER
    action_free      i8   row       of ACTION: the first that is free
    action_spare     i8   count     free rows of ACTION
    transfer_head    i8   row       of TRANSFER: the first under way, in order of issue
    transfer_tail    i8   row       of TRANSFER: the last under way
    ending_head      i8   row       of TRANSFER: the first whose parts are all moved, in order of issue
    issued           i8   count     transfers so far
    turn_head        i8   row       of LANE: the first that has a turn
    due              i8   flag      a span was cut at a boundary that is now
    formed_lane      i8   row       of LANE: the last formed at `formed_s`; the number of lanes: all are
    links_busy       i8   count     links that move something
    rivals           i8   count     links on which several loads wait
    log_used         i8   count     rows of LOG that are written
    steps            i8   count     steps and spans begun so far
    preempts         i8   count     preemptions so far
    loads            i8   count     loads of weights done so far
    evicts           i8   count     instances whose weights left so far
    migrations       i8   count     weights that left one place for another so far
    moves            i8   count     moves of a request's KV done so far
    by_cap           i8   count     steps so far that `batch_cap` bound
    by_chunk         i8   count     steps so far that `chunk_tokens` bound
    by_prefill       i8   count     steps so far that `prefill_tokens` bound
    walk             4i8  row       of REQUEST: the next member to visit in each list of a batch
    """
)
