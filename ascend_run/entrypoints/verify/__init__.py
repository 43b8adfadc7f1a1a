"""``ascend-run verify``: does a run compute what it computes without its plugins, on one rank?

For campaigns, on ranks that are there already::

    from ascend_run.entrypoints.verify.questions import Question
    from ascend_run.entrypoints.verify.ranks import PoolRanks
    from ascend_run.entrypoints.verify.verifier import Verifier

    with GlooPool() as pool:
        verify = Verifier(PoolRanks(pool))
        verdict = verify(Question(enable=("ulysses",), layout={"cp": 2}))
        broken = verify(
            Question(enable=("ulysses",), layout={"cp": 2}), fault="my_faults:drop_a_message"
        )

``fault`` names a function that can be imported on the ranks (or is such a function). It is called
on every rank of the candidate before its probes, never on a reference's, and may return a function
that undoes it, which is called afterwards. References are kept by what they were asked, so the
second verdict above costs the candidate alone: about a second on two ranks. A rank that raises is a
``PoolError``; ranks that hang are ended after ``PoolRanks.timeout`` seconds, likewise.
"""
