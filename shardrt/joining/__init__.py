"""Ranks with uneven inputs train together: who has run out takes part in the others' updates until all have.

Note [Roll calls]: what ranks exchange follows from what their loops do, and a rank without inputs has no loop. So
inside the block each event that leads to collectives (a synchronised backward, a step, clipping, unscaling, a forward
of DDP's) is preceded by a *roll call*: ranks with inputs give the event, the others nothing, and everybody learns who
is active and what comes next. A rank that has run out answers roll calls and does what was called, without gradients:
it still updates its own shards from the others' gradients. When nobody is active any more, all leave together.
"""
