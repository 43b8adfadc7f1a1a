"""``ascend-run verify``: compare a run with the same run without its plugins, and on one rank.

For campaigns, on the ranks of a pool::

    from ascend_run.tools.verify.questions import Question
    from ascend_run.tools.verify.ranks import PoolRanks
    from ascend_run.tools.verify.verifier import Verifier

    with GlooPool() as pool:
        verify = Verifier(PoolRanks(pool))
        verdict = verify(Question(enable=("ulysses",), layout={"cp": 2}))
        broken = verify(
            Question(enable=("ulysses",), layout={"cp": 2}), fault="my_faults:drop_a_message"
        )

``fault`` is a function that can be imported on the ranks, or its name. It is called on every rank
of the candidate before its probes, never on a reference's, and may return a function that undoes
it, which is called afterwards. References are cached, so the second verdict above only runs the
candidate: about a second on two ranks. A rank that raises, or that hangs for longer than
``PoolRanks.timeout`` seconds, is reported as a ``PoolError``.
"""

from typing import Final

SUMMARY: Final = "Compare a run with the same run without its plugins, and with one rank."
